// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// opens reports whether a thread of a process is in the middle of opening a file.
func opens(pid int) bool {
	calls, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/syscall", pid))
	for _, c := range calls {
		text, _ := os.ReadFile(c)
		if strings.HasPrefix(string(text), fmt.Sprintf("%d ", unix.SYS_OPENAT)) {
			return true
		}
	}
	return false
}

// TestInterruptedWhileAFileOpens: a pipe that nothing is at the other end of keeps no command
// from being interrupted.
func TestInterruptedWhileAFileOpens(t *testing.T) {
	a := startAgent(t, "--plaintext", "--region", "kv=4KiB")
	pipe := filepath.Join(t.TempDir(), "pipe")
	require.NoError(t, unix.Mkfifo(pipe, 0o600))
	for _, args := range [][]string{
		{"put", "kv", "--plaintext", "--peer", a.at, "--input", pipe},
		{"get", "kv", "--plaintext", "--peer", a.at, "--output", pipe},
		{"replay", "--trace", pipe},
	} {
		c, stdout, stderr := command(t, args...)
		require.NoError(t, c.Start())
		t.Cleanup(func() { _ = c.Process.Kill() })
		require.Eventually(t, func() bool {
			return opens(c.Process.Pid)
		}, 20*time.Second, time.Millisecond, "%v", args)
		require.NoError(t, c.Process.Signal(syscall.SIGINT))
		require.Equal(t, statusInterrupted, status(t, c.Wait()), "%v: %s", args, stderr)
		require.Contains(t, stderr.String(), "interrupted")
		require.Empty(t, stdout.String())
	}
}

// TestInterruptedPutSaysHowFarItCame: a pipe brings four bytes, four more, and then nothing. Once
// the second four are there, the first have been counted.
func TestInterruptedPutSaysHowFarItCame(t *testing.T) {
	a := startAgent(t, "--plaintext", "--region", "kv=4KiB")
	c, _, stderr := command(t, "put", "kv", "--plaintext", "--peer", a.at)
	in, err := c.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	t.Cleanup(func() { _ = c.Process.Kill() })
	for _, text := range []string{"four", "fourmore"} {
		_, err = in.Write([]byte(text[len(text)-4:]))
		require.NoError(t, err)
		require.Eventually(t, func() bool {
			return sluice(t, "get", "kv", "--plaintext", "--peer", a.at, "--length",
				strconv.Itoa(len(text))).stdout == text
		}, 20*time.Second, time.Millisecond)
	}
	require.NoError(t, c.Process.Signal(syscall.SIGINT))
	require.Equal(t, statusInterrupted, status(t, c.Wait()), stderr)
	require.Regexp(t, `interrupted after [48] bytes`, stderr.String())
}
