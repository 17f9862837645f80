// SPDX-License-Identifier: Apache-2.0

package copy

import (
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/standin"
)

// TestFaults copies both ways into and out of memory of which the last page is protected,
// and then behind a fault in the same threads.
func TestFaults(t *testing.T) {
	const n = 1 << 20
	page := os.Getpagesize()
	bad, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANON)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Munmap(bad)) }()
	require.NoError(t, unix.Mprotect(bad[n-page:], unix.PROT_NONE))
	good := make([]byte, n)
	all := []driver.Desc{{Len: 100}, {Local: 4096, Remote: 4096, Len: n - 4096}}
	plain := driver.Pattern{Count: n / 256, Run: 200, Local: driver.Side{Stride: 256},
		Remote: driver.Side{Stride: 256}}
	nest := plain
	nest.Count, nest.Loops = n/512, []driver.Loop{{N: 2, Local: 256, Remote: 256}}
	nest.Local.Stride, nest.Remote.Stride = 512, 512
	for _, w := range []Way{0, Plain} {
		for _, op := range []driver.Op{driver.Read, driver.Write} {
			require.ErrorIs(t, Descs(op, bad, good, all, w), driver.ErrFault)
			require.ErrorIs(t, Descs(op, good, bad, all, w), driver.ErrFault)
			require.ErrorIs(t, Runs(op, good, bad, &plain, 0, plain.Count, w), driver.ErrFault)
			require.ErrorIs(t, Runs(op, bad, good, &nest, 0, 2*nest.Count, w), driver.ErrFault)
			require.NoError(t, Descs(op, bad, good, all[:1], w))
		}
		one := func(dst, src []byte) (err error) {
			defer hostmem.CatchFault(&err, hostmem.PanicOnFault())
			w.Copy(dst, src)
			return nil
		}
		require.ErrorIs(t, one(good, bad), driver.ErrFault)
		require.ErrorIs(t, one(bad, good), driver.ErrFault)
		require.NoError(t, one(bad[:n-page], good[page:]))
	}
}

// TestHandlers has a program in C that had handlers before the first guard.
func TestHandlers(t *testing.T) {
	program := filepath.Join(t.TempDir(), "handlers")
	standin.Compile(t, "-O2", "-Wall", "-Wextra", "-Werror", "-o", program, "testdata/handlers.c",
		"guard.c", "-lpthread")
	for _, how := range []string{"none", "ignored", "once", "always"} {
		cmd := exec.Command(program, how)
		out, err := cmd.Output()
		if how == "always" {
			require.NoError(t, err, "%s: %s", how, out)
			continue
		}
		status := cmd.ProcessState.Sys().(syscall.WaitStatus)
		require.True(t, status.Signaled() && status.Signal() == unix.SIGSEGV &&
			string(out) == "end", "%s: %v, %s", how, err, out)
	}
}
