// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// refusedVariable has the test binary work without one of io_uring's calls, as it would in a
// container: the call's number, and its name.
const refusedVariable = "SLUICE_TEST_POSIX_REFUSED"

func TestMain(m *testing.M) {
	if call := os.Getenv(refusedVariable); call != "" {
		if err := workRefused(call); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	drivertest.Main(m)
}

// workRefused opens backends in a process whose kernel refuses a call.
func workRefused(call string) error {
	var number uint32
	var name string
	if _, err := fmt.Sscan(call, &number, &name); err != nil {
		return err
	}
	if err := refuseRing(number); err != nil {
		return err
	}
	var missing *driver.UnavailableError
	if _, err := New(Config{Path: PathRing}); !errors.As(err, &missing) ||
		!strings.Contains(missing.Reason, "not permitted") || missing.Fix == "" {
		return fmt.Errorf("PathRing without io_uring: %w", err)
	}
	b, err := New(Config{})
	if err != nil {
		return err
	}
	if c := b.Choice(); !strings.Contains(c, "threads") ||
		!strings.Contains(c, name+": operation not permitted") {
		return fmt.Errorf("the choice is explained as %q", c)
	}
	return b.Close()
}

func TestRingRefused(t *testing.T) {
	exe, err := os.Executable()
	require.NoError(t, err)
	for name, number := range map[string]int{"io_uring_setup": unix.SYS_IO_URING_SETUP,
		"io_uring_enter":    unix.SYS_IO_URING_ENTER,
		"io_uring_register": unix.SYS_IO_URING_REGISTER} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // which only a hang meets
		cmd := exec.CommandContext(ctx, exe)
		cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %s", refusedVariable, number, name))
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", name, err, out)
		}
		cancel()
	}
}

// refuseRing has the kernel answer EPERM to a call, in all threads.
func refuseRing(number uint32) error {
	const load, jump, ret = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, unix.BPF_JMP | unix.BPF_JEQ |
		unix.BPF_K, unix.BPF_RET | unix.BPF_K
	const allow, refuse = 0x7fff0000, 0x00050000 | uint32(unix.EPERM)
	program := []unix.SockFilter{
		{Code: load, K: 0}, // the number of the call
		{Code: jump, K: number, Jf: 1},
		{Code: ret, K: refuse},
		{Code: ret, K: allow},
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no new privileges: %w", err)
	}
	return installFilter(program)
}

func TestConfigRefuses(t *testing.T) {
	for _, cfg := range []Config{{Path: 9}, {Threads: -1}, {Threads: 5000}, {Depth: -1},
		{Depth: 1 << 20}, {PieceMax: 5000}, {JobsMax: -1}, {KeysMax: -1}} {
		if b, err := New(cfg); !errors.Is(err, driver.ErrBounds) {
			t.Errorf("%+v: %v, want %v", cfg, err, driver.ErrBounds)
			_ = b.Close()
		}
	}
}
