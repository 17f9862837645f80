// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"context"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// TestWhileTheProgramCapturesAGraph: the driver then refuses calls that wait to threads that have
// not said otherwise.
func TestWhileTheProgramCapturesAGraph(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	d := r.memory(hbm, 1<<20)
	for _, kind := range []drivertest.Allocator{drivertest.HostMemory, drivertest.ForeignMemory} {
		l := r.memory(kind, 1<<20)
		for _, op := range []driver.Op{driver.Write, driver.Read} {
			libcuda.Set(t, "capture", 1)
			r.move(op, l, d, driver.Desc{Len: 1 << 20})
			libcuda.Put("capture", 0)
			r.same("beside a capture", r.content(d), r.content(l))
		}
	}
}

// TestAnEventOfACapturedStream: our stream would be part of the capture, and what is put on it
// would be recorded into the program's graph. Nothing is told as moved that was not.
func TestAnEventOfACapturedStream(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	l, d, other := r.memory(drivertest.HostMemory, 4096), r.memory(hbm, 4096), r.memory(hbm, 4096)
	p := newProducer(t)
	defer p.close()
	libcuda.Set(t, "capture", 3)
	require.NoError(t, r.b.StartAfter(d.space.Segment, p.event))
	b := driver.Batch{Op: driver.Write, Descs: []driver.Desc{{Len: 4096, LocalKey: l.key,
		RemoteKey: d.key}}}
	for range 3 { // also without another event, as long as the capture lasts
		require.ErrorContains(t, r.p.Submit(77, &b), "907")
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	require.NoError(t, d.m.Revoke(ctx), "nothing is under way")
	libcuda.Put("capture", 0)
	r.move(driver.Write, l, other, driver.Desc{Len: 4096})
	r.same("behind the capture", r.content(other), r.content(l))
}

// TestAWaitThatFailsEndsNoBatch: the copy goes on, and a revoke does not prove otherwise.
func TestAWaitThatFailsEndsNoBatch(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	l, d := r.memory(drivertest.HostMemory, 4096), r.memory(hbm, 4096)
	libcuda.Set(t, "hold", 1)
	libcuda.Set(t, "capture", 2)
	tag := r.submit(driver.Write, l, d, driver.Desc{Len: 13})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, d.m.Revoke(ctx), driver.ErrTimeout)
	libcuda.Put("hold", 0)
	libcuda.Put("capture", 0)
	require.NoError(t, r.end(tag))
	require.NoError(t, d.m.Revoke(context.Background()))
	r.same("after a wait that failed", r.content(d)[:13], r.content(l)[:13])
}

// TestPagesStayUnderCopies into memory that is pinned, or could not be: another backend's revoke
// may not put other pages there.
func TestPagesStayUnderCopies(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	for _, result := range []uint32{0, 2} {
		libcuda.Set(t, "pin_result", result)
		l := r.memory(drivertest.HostMemory, 1<<20)
		require.Equal(t, result == 0, l.m.pin.pinned())
		seg := l.space.Segment
		require.ErrorIs(t, seg.Shared.Renew(t.Context(), seg.SharedOff, 4096), driver.ErrBusy)
		require.NoError(t, l.m.Revoke(t.Context()))
		require.NoError(t, seg.Shared.Renew(t.Context(), seg.SharedOff, 4096))
	}
}

// TestASecondCloseWaitsForTheFirst of a backend whose copy is under way.
func TestASecondCloseWaitsForTheFirst(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	l, d := r.memory(drivertest.HostMemory, 4096), r.memory(hbm, 4096)
	libcuda.Set(t, "hold", 1)
	r.submit(driver.Read, l, d, driver.Desc{Len: 13})
	closed := make(chan error, 2)
	for range 2 {
		go func() { closed <- r.b.Close() }()
	}
	select {
	case err := <-closed:
		t.Errorf("closed (%v) while a copy was under way", err)
		closed <- err
	case <-time.After(50 * time.Millisecond):
	}
	libcuda.Put("hold", 0)
	require.NoError(t, <-closed)
	require.NoError(t, <-closed)
	r.same("after Close", l.space.Segment.Mem[:13], r.content(d)[:13])
}

// TestAClosedBackendFindsNoProof: it knows nothing of other processes any more, so that what it
// could not prove stays without proof.
func TestAClosedBackendFindsNoProof(t *testing.T) {
	onStandIn(t)
	cfg := peersConfig()
	theirs := newRig(t, cfg) // as of another process
	owner, err := New(cfg)
	require.NoError(t, err)
	r := &rig{t: t, b: owner}
	p, err := theirs.b.connectFar(t.Context(), owner.Addr())
	require.NoError(t, err)
	silent := p
	d, _ := r.shared(silent, 1<<20)
	stuck := silent.remote(d.key)
	require.True(t, stuck.enter())
	libcuda.Set(t, "refuse_result", 2)
	libcuda.Put("refuse_after", 1)
	require.ErrorIs(t, r.b.Close(), driver.ErrUnproven)
	for range 2 {
		require.ErrorIs(t, d.m.Revoke(t.Context()), driver.ErrUnproven)
		require.ErrorIs(t, r.b.Close(), driver.ErrUnproven)
	}
	stuck.leave()
}

// TestABlockIsFreedBehindARenew that outlived its Revoke.
func TestABlockIsFreedBehindARenew(t *testing.T) {
	onStandIn(t)
	r, silent := newFarRig(t, testConfig())
	space, err := sharedHBM(1 << 20)
	require.NoError(t, err)
	m := r.register(space.Segment)
	was := m.block.id
	stuck := silent.remote(r.farKey(silent, m))
	require.True(t, stuck.enter())
	busy := newProducer(t)
	defer busy.close()
	r.hold(busy)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	revoked := make(chan error, 1)
	go func() { revoked <- m.Revoke(ctx) }()
	require.Eventually(t, m.block.moving.Load, limit, time.Millisecond, "it does not begin")
	cancel()
	require.ErrorIs(t, <-revoked, context.Canceled)
	require.True(t, m.block.moving.Load())
	stuck.leave()
	require.NoError(t, m.Revoke(context.Background()))
	freed := make(chan error, 1)
	go func() { freed <- space.Free() }()
	select {
	case err := <-freed:
		t.Errorf("freed (%v) while other memory was put there", err)
		freed <- err
	case <-time.After(50 * time.Millisecond):
	}
	r.release()
	require.NoError(t, <-freed)
	require.NotEqual(t, was, m.block.id, "freed before other memory was there")
}

// TestLostConnectionsKeepNoPlace though their process lives, and may have been given memory. One
// that has a batch under way keeps its place until that has ended.
func TestLostConnectionsKeepNoPlace(t *testing.T) {
	onStandIn(t)
	cfg := testConfig()
	cfg.Peers, cfg.PeersMax = true, 2
	r := newRig(t, cfg)
	token, err := r.local(sharedHBM, 8192).m.AppendToken(nil)
	require.NoError(t, err)
	// connect may be given memory, under its first slot; count is what it says of that.
	connect := func(asks bool) (w *wire, count *atomic.Uint64, err error) {
		page, users, err := hostmem.NewSealed("lost", pageBytes, true)
		require.NoError(t, err)
		defer closeDescriptor(page)
		t.Cleanup(func() { require.NoError(t, unix.Munmap(users)) })
		w = r.silent()
		if err = w.join(page); err == nil && asks {
			_, err = w.ask(token)
			require.NoError(t, err)
		}
		return w, hostmem.SharedWord(users, 0), err
	}
	again := func(asks bool) (w *wire, count *atomic.Uint64) {
		require.Eventually(t, func() bool {
			w, count, err = connect(asks)
			return err == nil
		}, limit, time.Millisecond)
		return w, count
	}
	for i := range 6 * cfg.PeersMax {
		w, _ := again(i%2 == 0)
		require.NoError(t, w.conn.Close())
	}
	var busy []*atomic.Uint64
	for range cfg.PeersMax {
		w, count := again(true)
		count.Store(1) // a batch is under way
		require.NoError(t, w.conn.Close())
		busy = append(busy, count)
	}
	for range 20 {
		_, _, err := connect(false)
		require.Error(t, err, "a process whose batch is under way has lost its place")
		time.Sleep(10 * time.Millisecond)
	}
	for _, count := range busy {
		count.Store(0)
	}
	w, count := again(true)
	count.Store(1)
	require.NoError(t, w.send(&head{Kind: sayDrop}, nil, limit))
	w.wantHungUp(t, "a slot is given back in use")
	count.Store(0)
}

// TestAnOwnerClosesBesideASubmit that has seen it open and not yet begun: Close waits for no Poll
// of the other backend. It comes to the two that write to it in any order.
func TestAnOwnerClosesBesideASubmit(t *testing.T) {
	onStandIn(t)
	for range 8 {
		t.Run("", closeBesideASubmit)
	}
}

func closeBesideASubmit(t *testing.T) {
	owner := newRig(t, testConfig())
	beside := func() *rig {
		b, err := New(testConfig())
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, b.Close()) })
		return &rig{t: t, b: b}
	}
	near, other := beside(), beside()
	d := owner.local(hbm, 8192)
	submit := func(r *rig, p *peer, n uint64) error {
		token, err := d.m.AppendToken(nil)
		require.NoError(t, err)
		key, _, err := p.Import(token)
		require.NoError(t, err)
		l := r.local(drivertest.HostMemory, 4096)
		return p.Submit(1, &driver.Batch{Op: driver.Write, Descs: []driver.Desc{{Len: n,
			LocalKey: l.m.key, RemoteKey: key}}})
	}
	dial := func(r *rig) *peer {
		p, err := r.b.Connect(t.Context(), owner.b.Addr())
		require.NoError(t, err)
		return p.(*peer)
	}
	libcuda.Set(t, "hold", 1)
	require.NoError(t, submit(other, dial(other), 13)) // Close waits for it
	busy := newProducer(t)
	defer busy.close()
	gate := near.local(hbm, 4096)
	require.NoError(t, near.b.StartAfter(gate.space.Segment, busy.event))
	p := dial(near)
	near.b.gates.mu.Lock()
	submitted, closed := make(chan error, 1), make(chan error, 1)
	go func() { submitted <- submit(near, p, 64) }()
	for near.b.done.Taken() == 0 {
		runtime.Gosched()
	}
	go func() { closed <- owner.b.Close() }()
	for !owner.b.closed.Load() {
		runtime.Gosched()
	}
	select {
	case <-p.Lost():
	case <-time.After(20 * time.Millisecond): // the other comes first
	}
	near.b.gates.mu.Unlock()
	require.ErrorIs(t, <-submitted, driver.ErrPeerLost)
	libcuda.Put("hold", 0)
	require.NoError(t, <-closed)
	require.NoError(t, near.b.StartAfter(gate.space.Segment, 0))
}
