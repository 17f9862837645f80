// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

// TestSentences: an error ends with what is wrong, not with a name of Go's, and speaks of options.
func TestSentences(t *testing.T) {
	gone := &os.PathError{Op: "open", Path: "x", Err: syscall.ENOENT}
	for want, err := range map[string]error{
		"dial: there is no such thing": fmt.Errorf("dial: %w",
			fmt.Errorf("there is no such thing: %w", driver.ErrNoRoute)),
		"connect peer x with shm: no route": &engine.OpError{Op: "connect", Peer: "x",
			Backend: "shm", Err: driver.ErrNoRoute},
		"one is not a number\ntwo is not one either": errors.Join(
			fmt.Errorf("one is not a number: %w", driver.ErrReadOnly),
			fmt.Errorf("two is not one either: %w", os.ErrPermission)),
		"open x: no such file or directory": gone,
		"write: 5 bytes at 6 of 7": fmt.Errorf("write: 5 bytes at 6 of 7: %w",
			driver.ErrBounds),
		"batch 0, want 1 to 262144": &usageError{
			(&bench.Shape{Op: bench.OpRead, Size: 1}).Check()},
		"raise option peers_max, see Config.Odd": errors.New("raise Config.PeersMax, see " +
			"Config.Odd"),
	} {
		require.Equal(t, want, sentence(err))
	}
}
