// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package rdma

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"time"

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

// TestKeysOfAPeerThatLeft: memory keeps nothing of a peer that has closed its connection.
func TestKeysOfAPeerThatLeft(t *testing.T) {
	p := openPair(t, Config{})
	r := register(t, p.far, 4096)
	p.imports(t, r)
	holders := func() int {
		r.mu.Lock()
		defer r.mu.Unlock()
		return len(r.peersWithKey)
	}
	require.Equal(t, 1, holders())
	require.NoError(t, p.peer.Close())
	eventually(t, "the owner forgets the peer", func() bool { return holders() == 0 })
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
	p.fabric.Device(1).Set("deregister_busy", 4) // two for each call
	for range 2 {
		if err := r.Revoke(t.Context()); !errors.Is(err, driver.ErrBusy) {
			t.Errorf("revoke without proof: %v", err)
		}
	}
	if _, err := r.AppendToken(nil); !errors.Is(err, driver.ErrClosed) {
		t.Errorf("token of memory without a proof: %v", err)
	}
	if err := r.Revoke(context.Background()); err != nil {
		t.Errorf("revoke again: %v", err)
	}
}

// TestCloseBehindARevokeThatFailed: the backend's Close looks for the proof that the memory's had
// not, and says so where there is none. The key is used for no other memory until then.
func TestCloseBehindARevokeThatFailed(t *testing.T) {
	f, _ := standIn(t, 2)
	testkit.CheckLeaks(t, f.InUse)
	for busy, want := range map[uint32]error{0: nil, 1: driver.ErrBusy} {
		far, err := newFake(t, Config{KeysMax: 1})
		require.NoError(t, err)
		m := register(t, far, 4096)
		f.Device(0).Set("deregister_busy", 1)
		require.ErrorIs(t, m.Revoke(over(t)), driver.ErrBusy)
		_, err = far.Register(driver.Segment{Kind: driver.DRAM, Len: 1, Mem: make([]byte, 1)})
		require.ErrorIs(t, err, driver.ErrFull)
		f.Device(0).Set("deregister_busy", busy)
		require.ErrorIs(t, far.Close(), want)
		require.ErrorIs(t, m.Revoke(context.Background()), want)
	}
}

// over is a context that is over.
func over(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx
}

// TestRevokeWithoutTime has a context that is over: the epoch ends all the same, and the next
// call brings the proof.
func TestRevokeWithoutTime(t *testing.T) {
	p := openPair(t, Config{})
	l, r := register(t, p.near, 100), register(t, p.far, 100)
	key := p.imports(t, r)
	old, err := r.AppendToken(nil)
	require.NoError(t, err)
	fake := fakeOf(p.far)
	p.fabric.Device(1).Set("deregister_busy", 1)
	require.ErrorIs(t, r.Revoke(over(t)), context.Canceled)
	_, _, err = p.peer.Import(old)
	require.ErrorIs(t, err, driver.ErrRevoked)
	eventually(t, "the news that it is revoked", func() bool {
		err := p.peer.Submit(1000, writeOf(driver.Desc{Len: 100, LocalKey: l.key, RemoteKey: key}))
		return errors.Is(err, driver.ErrRevoked)
	})
	require.Equal(t, 1, fake.revokes, "no queue pair ends")
	require.NoError(t, r.Revoke(over(t)), "the proof needs no time")
	require.Equal(t, 2, fake.revokes)
}

// TestRevokeGivenUp has revokes run out of time while a grant has its turn: the keys that the NICs
// know are void all the same once the grant is over, and the import fails. Any number of revokes
// leaves one goroutine at most.
func TestRevokeGivenUp(t *testing.T) {
	p := openPair(t, Config{})
	r := register(t, p.far, 100)
	p.imports(t, r)
	require.NoError(t, r.revokeLock.Lock(t.Context())) // as a grant does
	before := runtime.NumGoroutine()
	for range 50 {
		require.ErrorIs(t, r.Revoke(over(t)), context.Canceled)
	}
	left := runtime.NumGoroutine() - before
	require.Zero(t, fakeOf(p.far).revokes)
	r.revokeLock.Unlock()
	require.Less(t, left, 10)
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

// TestRevokeOfMemoryInUse has a batch of ours read into ten memories from a peer that stands still.
// A Revoke of one of them ends its epoch, and has no proof before the batch is over; one of other
// memory has its proof at once.
func TestRevokeOfMemoryInUse(t *testing.T) {
	f, c, p, _, _, remote := openOneRail(t)
	var mine []*memory
	b := &driver.Batch{Op: driver.Read}
	for range 10 {
		m := register(t, p.near, 4096)
		mine = append(mine, m)
		b.Descs = append(b.Descs, driver.Desc{Len: 4096, LocalKey: m.key, RemoteKey: remote})
	}
	other := register(t, p.near, 4096)
	f.Device(0).Set("frozen", 1)
	defer f.Device(0).Set("frozen", 0)
	require.NoError(t, p.peer.Submit(1, b))
	require.NoError(t, other.Revoke(over(t)))
	for _, m := range mine {
		err := m.Revoke(over(t))
		require.ErrorIs(t, err, driver.ErrBusy)
		require.ErrorIs(t, err, context.Canceled)
		_, err = m.AppendToken(nil)
		require.ErrorIs(t, err, driver.ErrClosed)
	}
	revoked := make(chan error, 1)
	go func() { revoked <- mine[9].Revoke(context.Background()) }()
	granted := make(chan session.Status, 20)
	go func() {
		for range cap(granted) { // imports that were let in before
			_, _, status := mine[9].grant()
			granted <- status
			time.Sleep(time.Millisecond) // the Revoke looks once more
		}
	}()
	eventually(t, "grants beside a Revoke that waits", func() bool {
		return len(granted) == cap(granted)
	})
	require.Equal(t, session.StatusRevoked, <-granted)
	f.Device(0).Set("frozen", 0)
	require.NoError(t, c.await(t, p, 1))
	require.NoError(t, <-revoked)
	for _, m := range mine {
		require.NoError(t, m.Revoke(over(t)))
	}
}

// TestRevokeBesideClose: a Close that waits holds up no Revoke beyond its context, ends a Revoke
// that waits for a batch, and fails that of one memory alone where the NIC keeps one.
func TestRevokeBesideClose(t *testing.T) {
	f, _ := standIn(t, 2)
	testkit.CheckLeaks(t, f.InUse)
	cfg := brisk()
	cfg.Devices, cfg.Grace = "fake0", graceMin
	near, err := newFake(t, cfg)
	require.NoError(t, err)
	cfg.Devices = "fake1"
	p := &pair{near: near, far: openFakeBackend(t, cfg), outcomes: map[uint64]error{}}
	p.use(t, p.connect(t))
	l, remote := register(t, near, 1<<20), p.imports(t, register(t, p.far, 1<<20))
	first, stuck, early := register(t, p.near, 4096), register(t, p.near, 4096),
		register(t, p.near, 4096)
	require.NoError(t, early.Revoke(over(t)))
	fakeOf(near).stuckKey = &stuck.key
	f.Device(0).Set("frozen", 1)
	p.write(t, l, remote, nil)
	inUse := make(chan error, 1)
	go func() { inUse <- l.Revoke(context.Background()) }()
	closed := make(chan error, 1)
	go func() { closed <- p.near.Close() }()
	eventually(t, "Close begins", p.near.gate.IsShut)
	require.NoError(t, early.Revoke(over(t)))
	require.ErrorIs(t, first.Revoke(over(t)), context.Canceled)
	_, err = first.AppendToken(nil)
	require.ErrorIs(t, err, driver.ErrClosed)
	require.ErrorIs(t, <-closed, errStuck)
	require.NoError(t, <-inUse)
	for _, m := range []*memory{l, first, early} {
		require.NoError(t, m.Revoke(over(t)))
	}
	require.ErrorIs(t, stuck.Revoke(t.Context()), errStuck)
}

// TestCloseEndsAllEpochsFirst: the proof of one memory holds up the epoch of no other.
func TestCloseEndsAllEpochsFirst(t *testing.T) {
	p := openPair(t, Config{})
	first, second := register(t, p.far, 100), register(t, p.far, 100)
	p.imports(t, second)
	require.NoError(t, first.revokeLock.Lock(t.Context()))
	require.NoError(t, second.revokeLock.Lock(t.Context()))
	closed := make(chan error, 1)
	go func() { closed <- p.far.Close() }()
	for _, m := range []*memory{first, second} {
		eventually(t, "the end of an epoch", func() bool {
			_, err := m.AppendToken(nil)
			return errors.Is(err, driver.ErrClosed)
		})
	}
	first.revokeLock.Unlock()
	second.revokeLock.Unlock()
	require.NoError(t, <-closed)
}
