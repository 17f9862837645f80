// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// readProc returns a file of a process, "" when it is gone.
func readProc(pid int, name string) string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
	return string(b)
}

// running reports whether a process is there and no zombie.
func running(pid int) bool {
	_, state, ok := strings.Cut(readProc(pid, "stat"), ") ")
	return ok && !strings.HasPrefix(state, "Z")
}

// terminal opens a pseudo-terminal: what the master reads is what a person sees.
func terminal(t *testing.T) (master, slave *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	t.Cleanup(func() { master.Close() })
	require.NoError(t, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	return master, slave
}

// TestProgressOnATerminalAlone: the other tests check that a pipe gets none.
func TestProgressOnATerminalAlone(t *testing.T) {
	for _, args := range [][]string{
		{"replay", "--model", smallModel, "--requests", "8", "--trace", smallTrace(t, 8), "--json"},
		{"load", "--json", shardFile(t, t.TempDir(), "a.safetensors", 4096, 1<<20)},
		{"bench", "--backend", "mem", "--seconds", "0.01", "--size", "4096", "--json"},
	} {
		master, slave := terminal(t)
		c, stdout, _ := command(t, args...)
		c.Stderr = slave
		seen := make(chan string)
		go func() {
			b, _ := io.ReadAll(master) // ends with EIO once nobody has the slave
			seen <- string(b)
		}()
		err := c.Run()
		slave.Close()
		text := <-seen
		if status(t, err) != 0 {
			t.Fatalf("%v: %v\n%s", args, err, text)
		}
		if !strings.Contains(text, args[0]) || !strings.Contains(text, "%") {
			t.Errorf("%v: no progress on a terminal: %q", args, text)
		}
		decode(t, stdout.String())
	}
}
