// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestFewOpenFiles: a limit that is too low is named before anything begins.
func TestFewOpenFiles(t *testing.T) {
	for _, args := range [][]string{
		{"bench"}, {"replay"}, {"explain"},
	} {
		c, stdout, stderr := command(t, append([]string{"-c", "ulimit -n 32; exec \"$0\" \"$@\"",
			binary}, args...)...)
		c.Path, c.Args = "/bin/sh", append([]string{"sh"}, c.Args[1:]...)
		require.Equal(t, statusFailed, status(t, c.Run()), "%v: %s", args, stderr)
		require.Contains(t, stderr.String(), "this process may open 32 files, and needs 64: "+
			"raise the limit (ulimit -n 1024")
		require.Empty(t, stdout.String())
	}
	c, _, stderr := command(t, "-c", "ulimit -n 32; exec \"$0\" version", binary)
	c.Path, c.Args = "/bin/sh", append([]string{"sh"}, c.Args[1:]...)
	require.Zero(t, status(t, c.Run()), stderr)
}

// TestDoctorWithFewOpenFiles: doctor names the limit, and neither tries nor blames a backend: UCX
// ends a process that has too few.
func TestDoctorWithFewOpenFiles(t *testing.T) {
	for _, n := range []string{"8", "12", "24"} {
		c, stdout, stderr := command(t, "-c", "ulimit -n "+n+"; exec \"$0\" doctor", binary)
		c.Path, c.Args = "/bin/sh", append([]string{"sh"}, c.Args[1:]...)
		require.Zero(t, status(t, c.Run()), "%s: %s", n, stderr)
		require.Contains(t, stdout.String(), n+", and 64 are the least: no backend was tried")
		require.NotRegexp(t, "open-(shm|tcp|posix|ucx)|ucx-transports|tcp-privacy", stdout.String())
	}
}
