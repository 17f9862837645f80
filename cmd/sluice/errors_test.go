// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

// TestSentences: an error ends with what is wrong, not with a name of Go's, and speaks of flags.
func TestSentences(t *testing.T) {
	c := &cobra.Command{Use: "x"}
	var m memberFlags
	m.registerIdentity(c)
	gone := &os.PathError{Op: "open", Path: "x", Err: syscall.ENOENT}
	for want, err := range map[string]error{
		"dial: no such thing": fmt.Errorf("dial: %w",
			fmt.Errorf("no such thing: %w", driver.ErrNoRoute)),
		"connect peer x: no route": &engine.OpError{Op: "connect", Peer: "x",
			Err: driver.ErrNoRoute},
		"one\ntwo": errors.Join(fmt.Errorf("one: %w",
			driver.ErrReadOnly), fmt.Errorf("two: %w", os.ErrPermission)),
		"open x: no such file or directory": gone,
		"write: 5 bytes at 6 of 7: out of bounds": fmt.Errorf("write: 5 bytes at 6 of 7: %w",
			driver.ErrBounds),
		"host \"\": want a name": &usageError{
			fmt.Errorf("host \"\": want a name: %w", driver.ErrBounds)},
		"set --cert, --key and --ca, or --plaintext": errors.New("set Config.Identity, or " +
			"Config.Plaintext"),
		"batch 0, want 1 to 262144": &usageError{
			(&bench.Shape{Op: driver.Read, Size: 1, Threads: 1}).Check()},
		"raise Config.PeersMax, see Config.Listen": errors.New("raise Config.PeersMax, see " +
			"Config.Listen"),
	} {
		require.Equal(t, want, sentence(c, err))
	}
}

// TestErrorsNameFlags: what the user reads is in the tool's own words.
func TestErrorsNameFlags(t *testing.T) {
	dir := cluster(t, "agent")
	a := startAgent(t, append(as(dir, "agent"), "--region", "kv=4KiB")...)
	o := sluice(t, "ls", "--plaintext", "--peer", a.at)
	require.Equal(t, statusFailed, o.status)
	require.Contains(t, o.stderr, "it may ask for TLS, set --cert, --key and --ca\n")
	o = sluice(t, append([]string{"get", "nothing", "--peer", a.at}, as(dir, "agent")...)...)
	require.Equal(t, statusFailed, o.status)
	require.True(t, strings.HasSuffix(o.stderr, "the peer describes no such region; it "+
		"describes [\"kv\"]\n"), o.stderr)
}

// TestKeysHint: the command that keys issue prints works as it is pasted.
func TestKeysHint(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "our 'ca'")
	ok(t, sluice(t, "keys", "init", dir))
	for host, listen := range map[string]string{"127.0.0.1": "127.0.0.1:7000",
		"node.test": "0.0.0.0:7000"} {
		o := ok(t, sluice(t, "keys", "issue", dir, host, "--host", host))
		_, hint, found := strings.Cut(o.stdout, "use: sluice agent ")
		require.True(t, found, o.stdout)
		require.Contains(t, hint, "--listen "+listen+" ")
		shell := "exec " + binary + " agent " + strings.Replace(hint, ":7000", ":0", 1)
		c, _, _ := command(t)
		c.Path, c.Args = "/bin/sh", []string{"sh", "-c", shell}
		c.Stdout = nil
		serve(t, c)
	}
}
