// SPDX-License-Identifier: Apache-2.0

package proc_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// TestTimedThreadsFrozenByACgroup freezes a process that makes one call after the other. It is out
// of each, also of the one that /proc names.
func TestTimedThreadsFrozenByACgroup(t *testing.T) {
	for _, c := range []struct{ root, file, frozen, thawed, shown, state string }{
		{"/sys/fs/cgroup", "cgroup.freeze", "1", "0", "cgroup.events", "frozen 1"},
		{"/sys/fs/cgroup/unified", "cgroup.freeze", "1", "0", "cgroup.events", "frozen 1"},
		{"/sys/fs/cgroup/freezer", "freezer.state", "FROZEN", "THAWED", "freezer.state", "FROZEN"},
	} {
		group, err := os.MkdirTemp(c.root, "sluice-test-")
		if err != nil {
			t.Logf("%s: not on this machine: %v", c.root, err)
			continue
		}
		t.Cleanup(func() { _ = os.Remove(group) })
		if _, err := os.Stat(filepath.Join(group, c.file)); err != nil {
			t.Logf("%s: no freezer: %v", c.root, err)
			continue
		}
		write := func(file, text string) {
			t.Helper()
			require.NoError(t, os.WriteFile(filepath.Join(group, file), []byte(text), 0o600))
		}
		p := exec.Command("dd", "if=/dev/zero", "of=/dev/null", "bs=1M")
		require.NoError(t, p.Start())
		defer func() {
			_ = p.Process.Kill()
			_ = os.WriteFile(filepath.Join(group, c.file), []byte(c.thawed), 0o600)
			_ = p.Wait()
		}()
		write("cgroup.procs", fmt.Sprint(p.Process.Pid))
		for range 10 {
			write(c.file, c.frozen)
			require.Eventually(t, func() bool {
				text, err := os.ReadFile(filepath.Join(group, c.shown))
				return err == nil && strings.Contains(string(text), c.state)
			}, time.Minute, time.Millisecond)
			for _, call := range []uintptr{unix.SYS_READ, unix.SYS_WRITE} {
				threads, err := proc.ThreadsOf(p.Process.Pid, call)
				require.NoError(t, err)
				require.Eventually(t, threads.Out, 10*time.Second, time.Millisecond,
					"%s: said to be in call %d", c.root, call)
			}
			write(c.file, c.thawed)
		}
	}
}

// TestTimedThreads looks at a process that sleeps in a call, at the same one stopped, and at
// one that is no more.
func TestTimedThreads(t *testing.T) {
	c := exec.Command("sleep", "60")
	require.NoError(t, c.Start())
	defer func() { _ = c.Process.Kill(); _ = c.Wait() }()
	list := func(call uintptr) *proc.Threads {
		t.Helper()
		threads, err := proc.ThreadsOf(c.Process.Pid, call)
		require.NoError(t, err)
		return threads
	}
	out := func(threads *proc.Threads, limit time.Duration) bool {
		for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(time.Millisecond) {
			if threads.Out() {
				return true
			}
		}
		return false
	}
	if !out(list(unix.SYS_PROCESS_VM_WRITEV), 10*time.Second) { // once it sleeps
		t.Error("a process that sleeps is said to be in another call")
	}
	require.Eventually(t, func() bool { // it may still be on the way there
		call, err := os.ReadFile(fmt.Sprintf("/proc/%d/syscall", c.Process.Pid))
		require.NoError(t, err)
		return strings.HasPrefix(string(call), fmt.Sprintf("%d ", unix.SYS_CLOCK_NANOSLEEP))
	}, time.Minute, time.Millisecond, "it does not sleep")
	if inside := list(unix.SYS_CLOCK_NANOSLEEP); out(inside, 50*time.Millisecond) {
		t.Error("a process is said to be out of the call that it sleeps in")
	} else if err := testkit.Freeze(c.Process); err != nil {
		t.Fatal(err)
	} else if !inside.Out() {
		t.Error("a stopped process is said to be in a call")
	}
	_ = c.Process.Kill()
	_ = c.Wait()
	for _, pid := range []int{0, c.Process.Pid} { // of another namespace, or of nothing
		_, err := proc.ThreadsOf(pid, unix.SYS_PROCESS_VM_WRITEV)
		require.ErrorIs(t, err, driver.ErrUnproven)
	}
	if self, err := proc.ThreadsOf(os.Getpid(), unix.SYS_PROCESS_VM_WRITEV); err != nil ||
		!out(self, 10*time.Second) {
		t.Errorf("of ourselves: %v, or in a call that none makes", err)
	}
}
