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
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// Neither kind of memory needs the hand of an owner that is frozen.
func TestTimedFrozenOwnerTakesWrites(t *testing.T) {
	for _, kind := range []string{"foreign", "shared"} {
		o := startOwner(t, kind, 0)
		b := open(t, Config{})
		m, mem := share(t, b, drivertest.HostMemory, ownerBytes)
		p := dial(t, b, o.addr)
		key, size, err := p.Import(o.token)
		require.NoError(t, err)
		o.freeze(t)
		fill(mem, 0xEE)
		d := []driver.Desc{{Len: size, LocalKey: m.Key(), RemoteKey: key}}
		require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Write, Descs: d}))
		if err := await(t, b, 1); err != nil {
			t.Errorf("%s: write to a frozen owner: %v", kind, err)
		}
		fill(mem, 0)
		require.NoError(t, p.Submit(2, &driver.Batch{Op: driver.Read, Descs: d}))
		if err := await(t, b, 2); err != nil {
			t.Errorf("%s: read of a frozen owner: %v", kind, err)
		} else if bytes.Count(mem, []byte{0xEE}) != len(mem) {
			testkit.ErrorBroken(t,
				"%s: read of a frozen owner: other bytes than were written", kind)
		}
		o.thaw(t)
	}
}

func TestTimedFrozenOwnerDoesNotHoldUpClose(t *testing.T) {
	for _, kind := range []string{"foreign", "shared"} {
		o := startOwner(t, kind, 0)
		b := open(t, Config{})
		m, _ := share(t, b, drivertest.HostMemory, ownerBytes)
		p := dial(t, b, o.addr)
		key, size, err := p.Import(o.token)
		require.NoError(t, err)
		o.freeze(t)
		require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Write,
			Descs: []driver.Desc{{Len: size, LocalKey: m.Key(), RemoteKey: key}}}))
		begin := time.Now()
		if err := p.Close(); err != nil {
			t.Errorf("%s: close: %v", kind, err)
		}
		if took := time.Since(begin); took > limit {
			t.Errorf("%s: close against a frozen owner took %v", kind, took)
		}
		if err := await(t, b, 1); err != nil {
			wantError(t, kind+": outstanding write", err, driver.ErrClosed)
		}
	}
}

func TestTimedFrozenOwnerDoesNotHoldUpImport(t *testing.T) {
	o := startOwner(t, "shared", 0)
	b := open(t, Config{DialTimeout: time.Second})
	p := dial(t, b, o.addr)
	o.freeze(t)
	_, _, err := p.Import(o.token)
	wantError(t, "import from a frozen owner", err, driver.ErrTimeout)
	o.thaw(t)
	take(t, p, o.token)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	o.freeze(t)
	_, err = b.Connect(ctx, o.addr)
	wantError(t, "connect to a frozen owner", err, context.DeadlineExceeded)
}

// A write that needs the owner's fresh pages ends when a frozen owner does not give them,
// and later writes find them once it goes on.
func TestTimedFrozenOwnerDoesNotHoldUpAWriteIntoFreshPages(t *testing.T) {
	o := startOwner(t, "shared", 0)
	b := open(t, Config{DialTimeout: 200 * time.Millisecond})
	m, _ := share(t, b, drivertest.HostMemory, ownerBytes)
	p := dial(t, b, o.addr)
	key, _ := take(t, p, o.token)
	o.renew(t)
	o.freeze(t)
	batch := &driver.Batch{Op: driver.Write,
		Descs: []driver.Desc{{Len: 4096, LocalKey: m.Key(), RemoteKey: key}}}
	require.NoError(t, p.Submit(1, batch))
	require.ErrorIs(t, await(t, b, 1), driver.ErrTimeout)
	o.thaw(t)
	soon(t, "writes find the fresh pages", func() bool {
		require.NoError(t, p.Submit(2, batch))
		return await(t, b, 2) == nil
	})
}

func TestTimedKilledOwnerEndsItsTransfers(t *testing.T) {
	o := startOwner(t, "foreign", 0)
	b := open(t, Config{})
	m, _ := share(t, b, drivertest.HostMemory, ownerBytes)
	p := dial(t, b, o.addr)
	key, size, err := p.Import(o.token)
	require.NoError(t, err)
	o.freeze(t)
	d := []driver.Desc{{Len: size, LocalKey: m.Key(), RemoteKey: key}}
	require.NoError(t, o.cmd.Process.Kill())
	for tag, end := uint64(1), time.Now().Add(limit); err == nil; tag++ {
		if err = p.Submit(tag, &driver.Batch{Op: driver.Write, Descs: d}); err == nil {
			err = await(t, b, tag)
		}
		if time.Now().After(end) {
			t.Fatal("writes to a killed owner go on")
		}
	}
	wantError(t, "write to a killed owner", err, driver.ErrPeerLost)
	<-p.Lost()
	wantError(t, "submit afterwards", p.Submit(1, &driver.Batch{Op: driver.Write, Descs: d}),
		driver.ErrPeerLost)
}

// A Connect whose time Config.DialTimeout limits says so, as one that its caller limits.
func TestTimedConnectEndsByDialTimeout(t *testing.T) {
	o := startOwner(t, "shared", 0)
	o.freeze(t)
	_, err := open(t, Config{DialTimeout: 50 * time.Millisecond}).Connect(t.Context(), o.addr)
	require.ErrorIs(t, err, driver.ErrTimeout)
}

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
	cmd, in, out := startSelf(t, "writer", 0)
	defer time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() }).Stop()
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
