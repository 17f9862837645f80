// SPDX-License-Identifier: Apache-2.0

package testkit

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestTimedFreeze: the kernel calls a frozen process stopped (T) as soon as we are back,
// and no longer when it was thawed.
func TestTimedFreeze(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	require.NoError(t, cmd.Start())
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	for range 3 {
		require.NoError(t, Freeze(cmd.Process))
		require.Equal(t, "T", state(t, cmd.Process.Pid), "a frozen process is in state")
		require.NoError(t, Thaw(cmd.Process))
		for end := time.Now().Add(10 * time.Second); state(t, cmd.Process.Pid) == "T"; time.Sleep(
			time.Millisecond) {
			require.False(t, time.Now().After(end), "a thawed process does not go on")
		}
	}
}

// state is the letter of /proc/PID/stat behind the name.
func state(t *testing.T, pid int) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	require.NoError(t, err)
	_, rest, _ := strings.Cut(string(b), ") ")
	return rest[:1]
}
