// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package rdma

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// TestRevokeOfUntold costs nothing where no peer could know of the memory.
func TestRevokeOfUntold(t *testing.T) {
	p := openPair(t, Config{})
	for round := range 3 {
		m, told := register(t, p.far, 4096), register(t, p.far, 4096)
		require.NoError(t, m.Revoke(t.Context()))
		require.Equal(t, round, fakeOf(p.far).revokes, "keys of memory without an import")
		p.imports(t, told)
		p.imports(t, told)
		require.NoError(t, told.Revoke(t.Context()))
	}
}

// TestConnectionsForgetMemory has a peer import memory after memory, as leases of requests do: the
// connection keeps no memory that the owner has revoked.
func TestConnectionsForgetMemory(t *testing.T) {
	p := openPair(t, Config{})
	for range 20 {
		m := register(t, p.far, 4096)
		key := p.imports(t, m)
		p.peer.Drop(key)
		require.NoError(t, m.Revoke(context.Background()))
	}
	p.far.mu.Lock()
	defer p.far.mu.Unlock()
	require.Len(t, p.far.accepted, 1)
	for c := range p.far.accepted {
		c.knowing.Lock()
		require.Empty(t, c.knows)
		c.knowing.Unlock()
	}
}

// TestRevokeTells has a peer that knows the key stop by itself: no queue pair fails.
func TestRevokeTells(t *testing.T) {
	p := openPair(t, Config{})
	l, r := register(t, p.near, 100), register(t, p.far, 100)
	key := p.imports(t, r)
	require.NoError(t, r.Revoke(t.Context()))
	d := writeOf(driver.Desc{Len: 100, LocalKey: l.key, RemoteKey: key})
	eventually(t, "the news that it is revoked", func() bool {
		p.tag++
		err := p.peer.Submit(p.tag, d)
		if err == nil {
			err = p.await(t, p.tag)
		}
		if !errors.Is(err, driver.ErrRevoked) {
			t.Fatalf("a write to revoked memory: %v", err)
		}
		return p.peer.Submit(1000, d) != nil
	})
	if err := p.await(t, p.write(t, l, p.imports(t, register(t, p.far, 100)), nil)); err != nil {
		t.Errorf("other memory: %v", err)
	}
}

// TestRevokeStuck has a NIC that does not let go of a key until the queue pairs that use it
// are gone; the connection bears it.
func TestRevokeStuck(t *testing.T) {
	p := openPair(t, Config{})
	l, r := register(t, p.near, 1<<20), register(t, p.far, 1<<20)
	p.imports(t, r)
	fake := fakeOf(p.far)
	used := fake.pairs()
	fake.mu.Lock()
	fake.inUse = used
	fake.mu.Unlock()
	if err := r.Revoke(t.Context()); len(used) != 2 || err != nil {
		t.Errorf("revoke of a key in use by %d queue pairs: %v", len(used), err)
	}
	r = register(t, p.far, 1<<20)
	if err := p.await(t, p.write(t, l, p.imports(t, r), nil)); err != nil {
		t.Errorf("a write after queue pairs were ended for a revoke: %v", err)
	}
	fake.mu.Lock()
	fake.stuck = 4
	fake.mu.Unlock()
	for range 2 {
		if err := r.Revoke(t.Context()); !errors.Is(err, errStuck) {
			t.Errorf("revoke without proof: %v", err)
		}
	}
	if _, err := r.AppendToken(nil); !errors.Is(err, driver.ErrClosed) {
		t.Errorf("token of memory without a proof: %v", err)
	}
	if err := r.Revoke(context.Background()); err != nil {
		t.Errorf("revoke again: %v", err)
	}
	if fake.memory(r.Key()) != nil {
		t.Error("the memory is still known")
	}
}

// TestUnmapStuck has a NIC keep memory that it was told to forget: revoking it again does it,
// and its key is not used for other memory until then.
func TestUnmapStuck(t *testing.T) {
	p := openPair(t, Config{KeysMax: 1})
	m, fake := register(t, p.far, 4096), fakeOf(p.far)
	fake.mu.Lock()
	fake.stuckMaps = 1
	fake.mu.Unlock()
	require.ErrorIs(t, m.Revoke(context.Background()), errStuck)
	_, err := p.far.Register(driver.Segment{Kind: driver.DRAM, Len: 1, Mem: make([]byte, 1)})
	require.ErrorIs(t, err, driver.ErrFull)
	require.NoError(t, m.Revoke(context.Background()))
	register(t, p.far, 4096)
}

// TestCloseBehindARevokeThatFailed: the backend's Close looks for the proof that the memory's had
// not, and says so where there is none.
func TestCloseBehindARevokeThatFailed(t *testing.T) {
	testkit.CheckLeaks(t)
	for stuck, want := range map[int]error{1: nil, 2: errStuck} {
		far, err := newFake(t, Config{})
		require.NoError(t, err)
		m, fake := register(t, far, 4096), fakeOf(far)
		fake.mu.Lock()
		fake.stuckMaps = stuck
		fake.mu.Unlock()
		require.ErrorIs(t, m.Revoke(context.Background()), errStuck)
		require.ErrorIs(t, far.Close(), want)
		require.ErrorIs(t, m.Revoke(context.Background()), want)
	}
}

// TestRevokeWithoutTime has a context that is over: the epoch ends all the same, and the next
// call brings the proof.
func TestRevokeWithoutTime(t *testing.T) {
	p := openPair(t, Config{})
	l, r := register(t, p.near, 100), register(t, p.far, 100)
	key := p.imports(t, r)
	old, err := r.AppendToken(nil)
	require.NoError(t, err)
	over, cancel := context.WithCancel(t.Context())
	cancel()
	fake := fakeOf(p.far)
	fake.mu.Lock()
	fake.stuck = 1
	fake.mu.Unlock()
	require.ErrorIs(t, r.Revoke(over), context.Canceled)
	_, _, err = p.peer.Import(old)
	require.ErrorIs(t, err, driver.ErrRevoked)
	eventually(t, "the news that it is revoked", func() bool {
		err := p.peer.Submit(1000, writeOf(driver.Desc{Len: 100, LocalKey: l.key, RemoteKey: key}))
		return errors.Is(err, driver.ErrRevoked)
	})
	require.Equal(t, 1, fake.revokes, "no queue pair ends")
	require.NoError(t, r.Revoke(over), "the proof needs no time")
	require.Equal(t, 2, fake.revokes)
}

// TestRevokeGivenUp has a revoke run out of time while a grant has its turn: the keys that the NICs
// know are void all the same once the grant is over, and the import fails.
func TestRevokeGivenUp(t *testing.T) {
	p := openPair(t, Config{})
	r := register(t, p.far, 100)
	p.imports(t, r)
	over, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, r.turn.Take(t.Context())) // as a grant does
	require.ErrorIs(t, r.Revoke(over), context.Canceled)
	require.Zero(t, fakeOf(p.far).revokes)
	r.turn.Give()
	eventually(t, "the end of the keys", func() bool {
		fakeOf(p.far).mu.Lock()
		defer fakeOf(p.far).mu.Unlock()
		return fakeOf(p.far).revokes == 1
	})
	require.NoError(t, r.Revoke(t.Context()))
	require.Equal(t, 1, fakeOf(p.far).revokes)
	_, _, status := r.grant()
	require.Equal(t, session.StatusRevoked, status)
}
