// SPDX-License-Identifier: Apache-2.0

// Package hack has tests of the scripts beside it.
package hack

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

func have(t *testing.T, name, fix string) {
	t.Helper()
	if _, err := exec.LookPath(name); err != nil {
		drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: name, Reason: err.Error(),
			Fix: fix})
	}
}

func script(t *testing.T, status int, env []string, path string, args ...string) string {
	t.Helper()
	cmd := exec.Command(path, args...)
	cmd.Env = append(os.Environ(), env...)
	out, _ := cmd.CombinedOutput()
	if got := cmd.ProcessState.ExitCode(); got != status {
		t.Fatalf("%s %v: status %d, want %d\n%s", path, args, got, status, out)
	}
	return string(out)
}

// program writes an executable of a shell.
func program(t *testing.T, path, text string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\n"+text+"\n"), 0o755))
}

// TestGuestDies gives hack/guest/run a size of memory that QEMU refuses. It ends before what copies
// the guest's output has begun: the script says what QEMU said, and ends.
func TestGuestDies(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: "guest",
			Reason: "it is a machine of amd64", Fix: "run it on one"})
	}
	have(t, "bash", "apt-get install bash")
	have(t, "flock", "apt-get install util-linux")
	dir := t.TempDir()
	cache, late := filepath.Join(dir, "sluice", "guest"), filepath.Join(dir, "late")
	// Names that hack/guest/fetch looks for where this machine lacks them; they come last in PATH.
	for _, name := range strings.Fields("busybox kmod cpio ip tc dmsetup rdma ibv_devinfo " +
		"ib_write_bw") {
		program(t, filepath.Join(cache, "root/usr/bin", name), "exit 0")
	}
	program(t, filepath.Join(cache, "root/usr/bin/qemu-system-x86_64"),
		"echo qemu-system-x86_64: -m much >&2; exit 1")
	program(t, filepath.Join(cache, "root/etc/libibverbs.d/rxe.driver"), "")
	program(t, filepath.Join(cache, "kernel-3/vmlinuz"), "")
	program(t, filepath.Join(cache, "kernel-3/base.cpio"), "")
	program(t, filepath.Join(late, "cat"), `sleep 1; exec /bin/cat "$@"`)

	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "guest/run", "-m", "much", "true")
	cmd.Env = append(os.Environ(), "XDG_CACHE_HOME="+dir, "PATH="+late+":"+os.Getenv("PATH"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	out, _ := cmd.CombinedOutput()
	require.NoError(t, ctx.Err(), "it does not end: %s", out)
	require.Equal(t, 126, cmd.ProcessState.ExitCode(), "%s", out)
	require.Contains(t, string(out), "qemu-system-x86_64: -m much")
	require.Contains(t, string(out), "guest: died (status of QEMU: 1)")
}

// TestGuestWithoutTests: a pattern that no test matches is a failure, which names it, before any
// machine is started.
func TestGuestWithoutTests(t *testing.T) {
	have(t, "bash", "apt-get install bash")
	said := script(t, 1, nil, "guest/test", "-r", "^TestRealCut$", ".")
	require.Contains(t, said, "guest: no test of . matches ^TestRealCut$")
}
