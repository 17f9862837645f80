// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// TestHugePatternsOverRangesAreBounded: a frame of a hundred bytes that names the same few bytes
// very often does not keep the owner busy for hours, whether it is refused or not.
func TestHugePatternsOverRangesAreBounded(t *testing.T) {
	seg := driver.Segment{Kind: driver.DRAM, Len: 64, Mem: make([]byte, 64),
		Only: driver.Ranges{{Off: 0, Len: 8}, {Off: 16, Len: 8}}}
	f := fragment{bytes: 64, pattern: driver.Pattern{Run: 1, Count: math.MaxInt32,
		Loops: []driver.Loop{{N: 2, Remote: 16}, {N: 1 << 29}}}}
	in := receiver{h: header{flags: flagPattern}, body: f.append(nil), chunk: new(chunk)}
	ended := make(chan session.Status, 1)
	go func() {
		_, status := in.named(&seg)
		ended <- status
	}()
	select {
	case <-ended:
	case <-time.After(limit):
		require.Fail(t, "one frame keeps the owner busy")
	}
}
