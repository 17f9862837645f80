// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// writeAndFreeze is a writer that stands between its last look at the epoch and its
// copy. It reads address and token, and says how the write ended.
func writeAndFreeze() int {
	var addr, token string
	if _, err := fmt.Scanf("%s %s\n", &addr, &token); err != nil {
		fmt.Println(err)
		return 1
	}
	err := parkedWrite(addr, token)
	fmt.Println(errors.Is(err, driver.ErrRevoked), err)
	return 0
}

func parkedWrite(addr, token string) error {
	to, _ := hex.DecodeString(addr)
	with, _ := hex.DecodeString(token)
	b, err := New(Config{})
	if err != nil {
		return err
	}
	defer b.Close()
	space, err := drivertest.ForeignMemory(4096)
	if err != nil {
		return err
	}
	fill(space.Segment.Mem, 0xEE)
	m, err := b.Register(space.Segment)
	if err != nil {
		return err
	}
	p, err := b.Connect(context.Background(), to)
	if err != nil {
		return err
	}
	key, size, err := p.Import(with)
	if err != nil {
		return err
	}
	in := bufio.NewReader(os.Stdin)
	testpoint.First("shm: passing", func() {
		fmt.Println("passing")
		_, _ = in.ReadString('\n') // until the owner has revoked
	})
	if err := p.Submit(1, &driver.Batch{Op: driver.Write,
		Descs: []driver.Desc{{Len: size, LocalKey: m.Key(), RemoteKey: key}}}); err != nil {
		return err
	}
	var done [1]driver.Completion
	for n := 0; n == 0; {
		if n, err = b.Poll(done[:]); err != nil {
			return err
		}
	}
	return done[0].Err
}

// TestTimedFrozenWriterIsKeptOutOfForeignMemory has a process look at everything, be stopped
// there, and go on after the revoke, or after the backend has closed.
func TestTimedFrozenWriterIsKeptOutOfForeignMemory(t *testing.T) {
	t.Run("revoke", func(t *testing.T) {
		keepOut(t, func(ctx context.Context, b *Backend, m *memory) error {
			return m.Revoke(ctx)
		})
	})
	t.Run("revoke, at first without mprotect", func(t *testing.T) {
		keepOut(t, func(ctx context.Context, b *Backend, m *memory) error {
			back := away(t, b.gate.page)
			for range 2 {
				require.ErrorIs(t, m.Revoke(ctx), unix.ENOMEM)
			}
			back()
			return m.Revoke(ctx)
		})
	})
	t.Run("close without mprotect", func(t *testing.T) {
		keepOut(t, func(_ context.Context, b *Backend, m *memory) error {
			page := b.gate.page
			back := away(t, page)
			require.ErrorIs(t, b.Close(), unix.ENOMEM)
			for range 2 {
				require.ErrorIs(t, m.Revoke(t.Context()), driver.ErrTimeout)
			}
			back()
			return pageCall("mprotect", unix.SYS_MPROTECT, page, unix.PROT_NONE)
		})
	})
	t.Run("close", func(t *testing.T) {
		keepOut(t, func(_ context.Context, b *Backend, _ *memory) error { return b.Close() })
	})
}

func keepOut(t *testing.T, shut func(context.Context, *Backend, *memory) error) {
	b, err := New(Config{})
	require.NoError(t, err)
	m, mem := share(t, b, drivertest.ForeignMemory, 4096)
	token, err := m.AppendToken(nil)
	require.NoError(t, err)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), ownerVariable+"=writer", "GORACE="+os.Getenv("GORACE")+
		" atexit_sleep_ms=0")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	pipe, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	defer time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() }).Stop()
	out := bufio.NewReader(pipe)
	fmt.Fprintf(in, "%x %x\n", b.Addr(), token)
	line, _ := out.ReadString('\n')
	require.Equal(t, "passing\n", line)
	require.NoError(t, testkit.Freeze(cmd.Process))
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	require.NoError(t, shut(ctx, b, m), "against a frozen writer")
	require.NoError(t, testkit.Thaw(cmd.Process))
	fmt.Fprintln(in)
	line, _ = out.ReadString('\n')
	if want := fmt.Sprintln(true, driver.ErrRevoked); line != want {
		t.Errorf("the writer says %q, want %q", line, want)
	}
	if bytes.IndexByte(mem, 0xEE) >= 0 {
		testkit.ErrorBroken(t, "bytes of a frozen writer landed after the revoke")
	}
	if len(b.gate.old) == 0 {
		t.Error("the writer was not frozen in the middle: nothing was tried")
	}
}
