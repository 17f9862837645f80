// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
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
	pipe := filepath.Join(t.TempDir(), "pipe")
	require.NoError(t, unix.Mkfifo(pipe, 0o600))
	c, stdout, stderr := command(t, "replay", "--trace", pipe)
	require.NoError(t, c.Start())
	t.Cleanup(func() { _ = c.Process.Kill() })
	require.Eventually(t, func() bool { return opens(c.Process.Pid) }, 20*time.Second,
		time.Millisecond)
	require.NoError(t, c.Process.Signal(syscall.SIGINT))
	require.Equal(t, statusInterrupted, status(t, c.Wait()), stderr)
	require.Contains(t, stderr.String(), "interrupted")
	require.Empty(t, stdout.String())
}
