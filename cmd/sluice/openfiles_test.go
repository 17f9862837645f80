// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/hostmem"
)

// TestFewOpenFiles: a limit that is too low is named before anything begins.
func TestFewOpenFiles(t *testing.T) {
	for _, args := range [][]string{
		{"agent", "--listen", "127.0.0.1:0", "--plaintext", "--region", "kv=4KiB"},
		{"ls", "--plaintext", "--peer", "127.0.0.1:1"},
		{"bench", "posix", "--dir", t.TempDir()},
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
		require.NotRegexp(t, "open-(shm|tcp|posix|ucx)|ucx-near|tcp-privacy", stdout.String())
	}
}

// TestAgentWithoutRoom: regions that the machine, or the container, has no memory for are refused.
func TestAgentWithoutRoom(t *testing.T) {
	small := hostmem.Machine{Total: 512 << 20, Available: 480 << 20}
	a := agent{specs: []regionSpec{{name: "kv", size: 1 << 30}, {name: "file", path: "x",
		n: 1 << 40}}}
	require.EqualError(t, a.roomFor(small), "the regions need 1 GiB of memory, and 480 MiB of "+
		"512 MiB are available: "+
		"serve less, or raise the limit of the container or service (memory.max of its cgroup)")
	a.specs[0].size = 400 << 20
	require.NoError(t, a.roomFor(small))
	require.NoError(t, a.roomFor(hostmem.Machine{}), "where nothing is known")
	o := sluice(t, "agent", "--listen", "127.0.0.1:0", "--plaintext", "--region", "kv=900TiB")
	require.Equal(t, statusFailed, o.status)
	require.Contains(t, o.stderr, "the regions need")
}
