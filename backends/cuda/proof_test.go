// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/sealed"
	"github.com/sluicehq/sluice/internal/testing/fakecuda"
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
			libcuda.Set(t, fakecuda.Capture, 1)
			r.move(op, l, d, driver.Desc{Len: 1 << 20})
			libcuda.Put(fakecuda.Capture, 0)
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
	libcuda.Set(t, fakecuda.Capture, 3)
	require.NoError(t, r.b.StartAfter(d.space.Segment, p.event))
	b := driver.Batch{Op: driver.Write, Descs: []driver.Desc{{Len: 4096, LocalKey: l.key,
		RemoteKey: d.key}}}
	for range 3 { // also without another event, as long as the capture lasts
		require.ErrorContains(t, r.p.Submit(77, &b), "907")
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	require.NoError(t, d.m.Revoke(ctx), "nothing is under way")
	libcuda.Put(fakecuda.Capture, 0)
	r.move(driver.Write, l, other, driver.Desc{Len: 4096})
	r.same("behind the capture", r.content(other), r.content(l))
}

// TestAWaitThatFailsEndsNoBatch: the copy goes on, and a fence does not prove otherwise.
func TestAWaitThatFailsEndsNoBatch(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	l, d := r.memory(drivertest.HostMemory, 4096), r.memory(hbm, 4096)
	libcuda.Set(t, fakecuda.Hold, 1)
	libcuda.Set(t, fakecuda.Capture, 2)
	tag := r.submit(driver.Write, l, d, driver.Desc{Len: 13})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, d.m.Revoke(ctx), driver.ErrTimeout)
	libcuda.Put(fakecuda.Hold, 0)
	libcuda.Put(fakecuda.Capture, 0)
	require.NoError(t, r.end(tag))
	require.NoError(t, d.m.Revoke(context.Background()))
	r.same("after a wait that failed", r.content(d)[:13], r.content(l)[:13])
}

// TestPagesStayUnderCopies into memory that could not be pinned: another backend's fence may not
// put other pages there.
func TestPagesStayUnderCopies(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	libcuda.Set(t, fakecuda.PinResult, 2)
	l := r.memory(drivertest.HostMemory, 1<<20)
	require.False(t, l.m.pin.pinned())
	shared := l.space.Segment.Shared
	require.ErrorIs(t, shared.Renew(t.Context(), l.space.Segment.SharedOff, 4096), driver.ErrBusy)
	require.NoError(t, l.m.Revoke(context.Background()))
	require.NoError(t, shared.Renew(t.Context(), l.space.Segment.SharedOff, 4096))
}

// TestASecondCloseWaitsForTheFirst of a backend whose copy is under way.
func TestASecondCloseWaitsForTheFirst(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	l, d := r.memory(drivertest.HostMemory, 4096), r.memory(hbm, 4096)
	libcuda.Set(t, fakecuda.Hold, 1)
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
	libcuda.Put(fakecuda.Hold, 0)
	require.NoError(t, <-closed)
	require.NoError(t, <-closed)
	r.same("after Close", l.space.Segment.Mem[:13], r.content(d)[:13])
}

// TestACloseWithoutProofIsNoProofTheSecondTime: what a frozen process still writes lands in memory
// whose Close has said that it could not be taken away.
func TestACloseWithoutProofIsNoProofTheSecondTime(t *testing.T) {
	onStandIn(t)
	r, silent := newFarRig(t, testConfig())
	d, _ := r.shared(silent, 1<<20)
	stuck := silent.p.remote(d.key)
	require.True(t, stuck.enter())
	libcuda.Set(t, fakecuda.RefuseResult, 2)
	for range 2 {
		libcuda.Put(fakecuda.RefuseAfter, 1)
		require.ErrorContains(t, d.m.Revoke(context.Background()),
			"take memory away from a frozen process")
	}
	want := r.content(d)
	require.NoError(t, d.m.Revoke(context.Background())) // the driver gives memory again
	writeCard(t, driver.Segment{Addr: stuck.m.base}, make([]byte, 1<<20))
	r.same("after Close", r.content(d), want)
	stuck.leave()
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
	silent := p.(farPeer)
	d, _ := r.shared(silent, 1<<20)
	stuck := silent.p.remote(d.key)
	require.True(t, stuck.enter())
	libcuda.Set(t, fakecuda.RefuseResult, 2)
	libcuda.Put(fakecuda.RefuseAfter, 1)
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
	stuck := silent.p.remote(r.farKey(silent, m))
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

// TestConnectsThatWereGivenUpKeepNoPlace though their process lives: they were given nothing.
func TestConnectsThatWereGivenUpKeepNoPlace(t *testing.T) {
	onStandIn(t)
	cfg := testConfig()
	cfg.Peers, cfg.PeersMax = true, 4
	r := newRig(t, cfg)
	for range 2 * cfg.PeersMax {
		fd, page, err := sealed.New("given up", pageBytes, true)
		require.NoError(t, err)
		require.Eventually(t, func() bool {
			w := r.silent()
			defer w.conn.Close()
			require.NoError(t, w.send(&head{Kind: sayHello}, nil, limit, fd))
			h, tail, theirs, err := w.receive()
			closeDescriptor(theirs)
			return err == nil && h.outcome(tail) == nil
		}, limit, time.Millisecond)
		closeDescriptor(fd)
		require.NoError(t, unix.Munmap(page))
	}
}

// TestLostConnectionsKeepNoPlace though their process lives and was given memory. One that has a
// batch under way keeps its place until that has ended.
func TestLostConnectionsKeepNoPlace(t *testing.T) {
	onStandIn(t)
	cfg := testConfig()
	cfg.Peers, cfg.PeersMax = true, 2
	r := newRig(t, cfg)
	seg, owner, err := r.b.AllocDevice(0, 8192)
	require.NoError(t, err)
	defer owner.Close()
	m, err := r.b.Register(seg)
	require.NoError(t, err)
	token, err := m.AppendToken(nil)
	require.NoError(t, err)
	connect := func() (w *wire, users []byte, ok bool) {
		fd, users, err := sealed.New("lost", pageBytes, true)
		require.NoError(t, err)
		defer closeDescriptor(fd)
		w = r.silent()
		require.NoError(t, w.send(&head{Kind: sayHello}, nil, limit, fd))
		h, tail, theirs, err := w.receive()
		closeDescriptor(theirs)
		if err != nil || h.outcome(tail) != nil {
			require.NoError(t, w.conn.Close())
			require.NoError(t, unix.Munmap(users))
			return w, nil, false
		}
		require.NoError(t, w.send(&head{Kind: sayAsk, ID: 1}, token, limit))
		h, tail, block, err := w.receive()
		closeDescriptor(block)
		require.NoError(t, err)
		require.NoError(t, h.outcome(tail))
		require.Zero(t, h.Slot)
		return w, users, true
	}
	again := func() (w *wire, users []byte) {
		require.Eventually(t, func() (ok bool) {
			w, users, ok = connect()
			return ok
		}, limit, time.Millisecond)
		return w, users
	}
	for range 3 * cfg.PeersMax {
		w, users := again()
		require.NoError(t, w.conn.Close())
		require.NoError(t, unix.Munmap(users))
	}
	var busy [][]byte
	for range cfg.PeersMax {
		w, users := again()
		sealed.Word(users, 0).Store(1) // a batch is under way
		require.NoError(t, w.conn.Close())
		busy = append(busy, users)
	}
	for range 20 {
		_, _, ok := connect()
		require.False(t, ok, "a process whose batch is under way has lost its place")
		time.Sleep(10 * time.Millisecond)
	}
	for _, users := range busy {
		sealed.Word(users, 0).Store(0)
		defer func() { require.NoError(t, unix.Munmap(users)) }()
	}
	w, users := again()
	require.NoError(t, w.conn.Close())
	require.NoError(t, unix.Munmap(users))
	require.NoError(t, m.Revoke(context.Background()))
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
	libcuda.Set(t, fakecuda.Hold, 1)
	require.NoError(t, submit(other, dial(other), 13)) // Close waits for it
	busy := newProducer(t)
	defer busy.close()
	gate := near.local(hbm, 4096)
	require.NoError(t, near.b.StartAfter(gate.space.Segment, busy.event))
	p := dial(near)
	near.b.gates.mu.Lock()
	submitted, closed := make(chan error, 1), make(chan error, 1)
	go func() { submitted <- submit(near, p, 64) }()
	for near.b.taken.Load() == 0 {
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
	libcuda.Put(fakecuda.Hold, 0)
	require.NoError(t, <-closed)
	require.NoError(t, near.b.StartAfter(gate.space.Segment, 0))
}
