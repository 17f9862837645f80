// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"bytes"
	"context"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// TestGate writes through a gate, through one that another replaced, and through one
// that is shut.
func TestGate(t *testing.T) {
	_, table, err := newTable(1)
	require.NoError(t, err)
	var g writeGate
	none := func() []announcement { return nil }
	pass := func(at uint64) error {
		b := []byte{1}
		local := []unix.Iovec{{Base: &b[0], Len: 1}}
		_, err := unix.ProcessVMWritev(os.Getpid(), local,
			[]unix.RemoteIovec{{Base: uintptr(at), Len: 1}}, 0)
		return err
	}
	var places []uint64
	for range 3 {
		require.NoError(t, g.renew(&table, none))
		places = append(places, table.gate().Load())
		require.NoError(t, pass(places[len(places)-1]), "through an open gate")
		for _, old := range places[:len(places)-1] {
			wantError(t, "through a gate that was replaced", pass(old), unix.EFAULT)
		}
	}
	if err := g.close(&table, none); err != nil || table.gate().Load() != 0 {
		t.Errorf("close: %v, the table says %#x", err, table.gate().Load())
	}
	wantError(t, "through a gate that is shut", pass(places[2]), unix.EFAULT)
	wantError(t, "another one afterwards", g.renew(&table, none), driver.ErrClosed)
	if err := g.release(); err != nil || len(g.old) != 0 {
		t.Errorf("release: %v, %d places are left", err, len(g.old))
	}
	if places[0] == places[1] || places[1] == places[2] {
		t.Errorf("gates at %#x: want a new place each time", places)
	}
}

// away puts a page elsewhere, so that a call that names its place fails; back undoes that.
func away(t *testing.T, page uintptr) (back func()) {
	t.Helper()
	move := func(from, to, flags uintptr) uintptr {
		at, _, errno := unix.Syscall6(unix.SYS_MREMAP, from, pageBytes, pageBytes, flags, to, 0)
		require.Zero(t, errno)
		return at
	}
	spare, err := mapGate()
	require.NoError(t, err)
	const flags = unix.MREMAP_MAYMOVE | unix.MREMAP_FIXED
	at := move(page, spare, flags)
	return func() { move(at, page, flags) }
}

// TestGateThatCouldNotBeShut has the kernel refuse to shut a gate. No Revoke may say that a silent
// writer is kept out before that gate is shut, whichever gate is shown by then.
func TestGateThatCouldNotBeShut(t *testing.T) {
	owner, b := hasty(t), open(t, Config{})
	far, _ := share(t, owner, drivertest.ForeignMemory, 4096)
	_, err := far.AppendToken(nil)
	require.NoError(t, err)
	line := dial(t, b, owner.Addr()).announce(far.Key(), driver.Write, 7)
	back := away(t, owner.gate.page)
	for range 3 {
		require.ErrorIs(t, far.Revoke(t.Context()), unix.ENOMEM)
	}
	require.Len(t, owner.gate.old, 1, "each try told of one more")
	back()
	require.NoError(t, far.Revoke(t.Context()))
	for _, o := range owner.gate.old {
		require.True(t, o.shut)
	}
	line.Store(0)
}

// TestCloseThatCannotShutTheGate: neither Close nor a Revoke afterwards says that a silent writer
// is kept out while the gate that it may have taken stands open.
func TestCloseThatCannotShutTheGate(t *testing.T) {
	owner, err := New(Config{})
	require.NoError(t, err)
	far, _ := share(t, owner, drivertest.ForeignMemory, 4096)
	_, err = far.AppendToken(nil)
	require.NoError(t, err)
	line := dial(t, open(t, Config{}), owner.Addr()).announce(far.Key(), driver.Write, 7)
	back := away(t, owner.gate.page)
	require.ErrorIs(t, owner.Close(), unix.ENOMEM)
	require.ErrorIs(t, far.Revoke(t.Context()), driver.ErrTimeout)
	back()
	line.Store(0)
}

// TestGatesAreGivenBack has a peer be silent in one write after the other, each of which leaves
// later: no more gates are kept than writers are under way.
func TestGatesAreGivenBack(t *testing.T) {
	owner, b := hasty(t), open(t, Config{})
	far, _ := share(t, owner, drivertest.ForeignMemory, 4096)
	p := dial(t, b, owner.Addr())
	for range 100 {
		_, err := far.AppendToken(nil)
		require.NoError(t, err)
		line := p.announce(far.Key(), driver.Write, 7)
		require.NoError(t, far.Revoke(t.Context()))
		far = again(t, far)
		line.Store(0) // the writer goes on, and leaves
		require.LessOrEqual(t, len(owner.gate.old), 1)
	}
	var lines []*atomic.Uint64
	for range 3 {
		_, err := far.AppendToken(nil)
		require.NoError(t, err)
		lines = append(lines, p.announce(far.Key(), driver.Write, 7))
		require.NoError(t, far.Revoke(t.Context()))
		far = again(t, far)
	}
	require.Len(t, owner.gate.old, 3, "a writer may be about to pass each")
	lines[1].Store(0)
	require.NoError(t, owner.gate.renew(&owner.table, owner.passers))
	require.Len(t, owner.gate.old, 3, "the first and third, and the newest")
	lines[0].Store(0)
	lines[2].Store(0)
}

// atPassing has every mover call f between its last look at the epoch and its call.
func atPassing(t *testing.T, f func()) {
	testpoint.Set(func(s string) {
		if s == "shm: passing" {
			f()
		}
	})
	t.Cleanup(func() { testpoint.Set(nil) })
}

// TestWritesGoOnThroughOtherGates has gates be replaced under writes into memory that
// is not revoked.
func TestWritesGoOnThroughOtherGates(t *testing.T) {
	owner, b := open(t, Config{}), open(t, Config{})
	far, there := share(t, owner, drivertest.ForeignMemory, 1<<20)
	near, here := share(t, b, drivertest.ForeignMemory, 1<<20)
	p := dial(t, b, owner.Addr())
	token, _ := far.AppendToken(nil)
	key, _, err := p.Import(token)
	require.NoError(t, err)
	var met atomic.Int32
	atPassing(t, func() {
		if met.Add(1)%3 == 1 {
			if err := owner.gate.renew(&owner.table, owner.passers); err != nil {
				t.Error(err)
			}
		}
	})
	for i := range uint64(100) {
		fill(here, byte(i+1))
		d := []driver.Desc{{Local: 3, Remote: 5, Len: 5000, LocalKey: near.Key(), RemoteKey: key},
			{Local: 9000, Remote: 8000, Len: 100, LocalKey: near.Key(), RemoteKey: key}}
		require.NoError(t, p.Submit(i, &driver.Batch{Op: driver.Write, Descs: d}))
		require.NoError(t, await(t, b, i), "write %d", i)
		if there[5] != byte(i+1) || there[5004] != byte(i+1) || there[5005] != 0 ||
			there[8099] != byte(i+1) || there[8100] != 0 {
			t.Fatalf("write %d landed in part, or elsewhere", i)
		}
	}
	if met.Load() <= 100 {
		t.Errorf("%d calls for 100 writes: no gate was shut before one", met.Load())
	}
}

// A process that has nothing at the place of the gate is not the owner, though it has the owner's
// number, and memory where the owner's was: nothing is read from it or written there.
func TestNoCopyWithoutTheGate(t *testing.T) {
	owner, b := open(t, Config{}), open(t, Config{})
	far, there := share(t, owner, drivertest.ForeignMemory, 4096)
	near, here := share(t, b, drivertest.ForeignMemory, 4096)
	fill(there, 0x11)
	fill(here, 0x22)
	p := dial(t, b, owner.Addr())
	d := driver.Desc{Len: 4096, LocalKey: near.Key(), RemoteKey: importOf(t, p, far)}
	gate := owner.table.gate().Swap(pageBytes) // below what the kernel maps
	defer owner.table.gate().Store(gate)
	for tag, op := range []driver.Op{driver.Read, driver.Write} {
		require.NoError(t, p.Submit(uint64(tag), &driver.Batch{Op: op, Descs: []driver.Desc{d}}))
		wantError(t, op.String(), await(t, b, uint64(tag)), driver.ErrFault)
	}
	require.Equal(t, bytes.Repeat([]byte{0x11}, 4096), there)
	require.Equal(t, bytes.Repeat([]byte{0x22}, 4096), here)
}

// An owner that shuts every gate does not keep a writer for ever.
func TestGatesAreTriedSoOften(t *testing.T) {
	owner, b := open(t, Config{}), open(t, Config{})
	far, _ := share(t, owner, drivertest.ForeignMemory, 4096)
	near, _ := share(t, b, drivertest.ForeignMemory, 4096)
	p := dial(t, b, owner.Addr())
	token, _ := far.AppendToken(nil)
	key, size, err := p.Import(token)
	require.NoError(t, err)
	tried := 0
	atPassing(t, func() {
		tried++
		if err := owner.gate.renew(&owner.table, owner.passers); err != nil {
			t.Error(err)
		}
	})
	require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Write,
		Descs: []driver.Desc{{Len: size, LocalKey: near.Key(), RemoteKey: key}}}))
	wantError(t, "a write of which every gate is shut", await(t, b, 1), driver.ErrPeerLost)
	require.EqualValues(t, gatesMax, tried, "gates")
}

// TestRevokeWaitsForACopyInTheKernel holds a writer's call up after it has passed the
// gate: its source has a page that is not there yet. No gate ends that call, so no Revoke
// may say that nothing lands.
func TestRevokeWaitsForACopyInTheKernel(t *testing.T) {
	owner, b := hasty(t), open(t, Config{})
	far, there := share(t, owner, drivertest.ForeignMemory, heldBytes)
	fill(there, 0x11)
	token, err := far.AppendToken(nil)
	require.NoError(t, err)
	source, ended := heldUp(t, b, owner.Addr(), token)
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	wantError(t, "revoke of a copy that is held up", far.Revoke(ctx),
		context.DeadlineExceeded)
	source.Supply(t)
	require.NoError(t, far.Revoke(context.Background()))
	after := append([]byte(nil), there...)
	require.NoError(t, ended())
	if !bytes.Equal(there, after) {
		testkit.FatalBroken(t, "bytes landed after the revoke")
	}
	require.Zero(t, there[0], "no bytes landed before it")
}
