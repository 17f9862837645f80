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
	"github.com/sluicehq/sluice/internal/testing/promise"
)

// TestGate writes through a gate, through one that another replaced, and through one
// that is shut.
func TestGate(t *testing.T) {
	_, table, err := newTable(1)
	require.NoError(t, err)
	var g writeGate
	pass := func(at uint64) error {
		b := []byte{1}
		local := []unix.Iovec{{Base: &b[0], Len: 1}}
		_, err := unix.ProcessVMWritev(os.Getpid(), local,
			[]unix.RemoteIovec{{Base: uintptr(at), Len: 1}}, 0)
		return err
	}
	var places []uint64
	for range 3 {
		require.NoError(t, g.renew(&table))
		places = append(places, table.gate().Load())
		require.NoError(t, pass(places[len(places)-1]), "through an open gate")
		for _, old := range places[:len(places)-1] {
			wantError(t, "through a gate that was replaced", pass(old), unix.EFAULT)
		}
	}
	if err := g.close(&table); err != nil || table.gate().Load() != 0 {
		t.Errorf("close: %v, the table says %#x", err, table.gate().Load())
	}
	wantError(t, "through a gate that is shut", pass(places[2]), unix.EFAULT)
	wantError(t, "another one afterwards", g.renew(&table), driver.ErrClosed)
	if err := g.release(); err != nil || len(g.shut) != 0 {
		t.Errorf("release: %v, %d places are left", err, len(g.shut))
	}
	if places[0] == places[1] || places[1] == places[2] {
		t.Errorf("gates at %#x: want a new place each time", places)
	}
}

// atPassing has every mover call f between its last look at the epoch and its call.
func atPassing(t *testing.T, f func()) {
	parked.Set(func(s spot) {
		if s == spotPassing {
			f()
		}
	})
	t.Cleanup(func() { parked.Set(nil) })
}

// TestWritesGoOnThroughOtherGates has gates be replaced under writes into memory that
// is not fenced.
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
			if err := owner.gate.renew(&owner.table); err != nil {
				t.Error(err)
			}
		}
	})
	for i := range uint64(100) {
		fill(here, byte(i+1))
		d := []driver.Desc{{Local: 3, Remote: 5, Len: 5000, LocalKey: near.Key(), RemoteKey: key},
			{Local: 9000, Remote: 8000, Len: 100, LocalKey: near.Key(), RemoteKey: key}}
		require.NoError(t, p.Submit(i, &driver.Batch{Op: driver.Write, Descs: d}))
		if err := await(t, b, i); err != nil {
			t.Fatalf("write %d: %v", i, err)
		}
		if there[5] != byte(i+1) || there[5004] != byte(i+1) || there[5005] != 0 ||
			there[8099] != byte(i+1) || there[8100] != 0 {
			t.Fatalf("write %d landed in part, or elsewhere", i)
		}
	}
	if met.Load() <= 100 {
		t.Errorf("%d calls for 100 writes: no gate was shut before one", met.Load())
	}
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
		if err := owner.gate.renew(&owner.table); err != nil {
			t.Error(err)
		}
	})
	require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Write,
		Descs: []driver.Desc{{Len: size, LocalKey: near.Key(), RemoteKey: key}}}))
	wantError(t, "a write of which every gate is shut", await(t, b, 1), driver.ErrPeerLost)
	if tried != gatesMax {
		t.Errorf("%d gates were tried, want %d", tried, gatesMax)
	}
}

// TestFenceWaitsForACopyInTheKernel holds a writer's call up after it has passed the
// gate: its source has a page that is not there yet. No gate ends that call, so no fence
// may say that nothing lands.
func TestFenceWaitsForACopyInTheKernel(t *testing.T) {
	owner, b := hasty(t), open(t, Config{})
	far, there := share(t, owner, drivertest.ForeignMemory, heldBytes)
	fill(there, 0x11)
	token, err := far.AppendToken(nil)
	require.NoError(t, err)
	source, ended := heldUp(t, b, owner.Addr(), token)
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	wantError(t, "fence of a copy that is held up", owner.Fence(ctx, far.Key()),
		context.DeadlineExceeded)
	source.Supply(t)
	require.NoError(t, owner.Fence(context.Background(), far.Key()))
	after := append([]byte(nil), there...)
	require.NoError(t, ended())
	if !bytes.Equal(there, after) {
		promise.Broken(t, "bytes landed after the fence")
	}
	require.Zero(t, there[0], "no bytes landed before it")
}
