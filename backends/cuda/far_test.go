// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"bytes"
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// newFarRig connects a backend to itself as to one of another process: over the socket, by
// mappings.
func newFarRig(t *testing.T, cfg Config) (r *rig, far *peer) {
	t.Helper()
	cfg.Peers = true
	r = newRig(t, cfg)
	return r, r.dialFar()
}

func (r *rig) dialFar() *peer {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	p, err := r.b.connectFar(ctx, r.b.Addr())
	require.NoError(r.t, err)
	far := p
	r.p = far
	return far
}

// shared is a place that the peer reaches as memory of another process.
func (r *rig) shared(far *peer, n uint64) (*place, *ownBlock) {
	r.t.Helper()
	space, err := sharedHBM(n)
	require.NoError(r.t, err)
	r.t.Cleanup(func() {
		_ = r.b.Close()
		if err := space.Free(); err != nil {
			r.t.Error(err)
		}
	})
	m := r.register(space.Segment)
	p := &place{space: space, m: m, key: r.farKey(far, m)}
	r.fill(p)
	return p, m.block
}

func (r *rig) farKey(far *peer, m *memory) uint32 {
	r.t.Helper()
	token, err := m.AppendToken(nil)
	require.NoError(r.t, err)
	key, size, err := far.Import(token)
	if err != nil || size != m.seg.Len {
		r.t.Fatalf("import: %d bytes, %v", size, err)
	}
	return key
}

// TestFarRefusals imports memory that no other process reaches.
func TestFarRefusals(t *testing.T) {
	r, far := newFarRig(t, testConfig())
	d, _ := r.shared(far, 1<<20)
	token, err := d.m.AppendToken(nil)
	require.NoError(t, err)
	for what, alloc := range map[string]drivertest.Allocator{"AllocDevice": hbm,
		"host memory": drivertest.HostMemory} {
		space, err := alloc(1 << 20)
		require.NoError(t, err)
		m := r.register(space.Segment)
		token, err := m.AppendToken(nil)
		require.NoError(t, err)
		_, _, err = far.Import(token)
		if !errors.Is(err, driver.ErrNotSupported) || !strings.Contains(err.Error(), what) {
			t.Errorf("import of what no other process reaches: %v, want %q and %v", err, what,
				driver.ErrNotSupported)
		}
		if err := errors.Join(m.Revoke(context.Background()), space.Free()); err != nil {
			t.Error(err)
		}
	}
	if err := far.Close(); err != nil {
		t.Error(err)
	}
	_, _, err = far.Import(token)
	sameError(t, "import after Close", err, driver.ErrClosed)
}

// TestAnImportWithoutAnAnswerClosesNothing: there is no descriptor with it, and 0 is the program's.
func TestAnImportWithoutAnAnswerClosesNothing(t *testing.T) {
	r, far := newFarRig(t, testConfig())
	d, _ := r.shared(far, 4096)
	token, err := d.m.AppendToken(nil)
	require.NoError(t, err)
	is := func() (s unix.Stat_t) {
		require.NoError(t, unix.Fstat(0, &s), "descriptor 0 is closed")
		return s
	}
	before := is()
	require.NoError(t, far.far.wire.conn.Close())
	_, err = far.far.open(token) // Import would see that the peer is lost
	require.ErrorIs(t, err, driver.ErrPeerLost)
	require.Equal(t, before.Ino, is().Ino)
}

// TestSilentProcess has a process announce a batch and say no more: a revoke takes the memory away,
// what the process writes is lost, and a process that is well goes on in the other part of the
// block.
func TestSilentProcess(t *testing.T) {
	r, silent := newFarRig(t, testConfig())
	d, block := r.shared(silent, 4<<20)
	l := r.local(drivertest.HostMemory, 1<<20)
	seg, err := d.m.seg.Slice(2<<20, 1<<20, [16]byte{7})
	require.NoError(t, err)
	part := r.register(seg)
	well := r.dialFar()
	beside := &place{space: &drivertest.Space{Segment: seg,
		Bytes: drivertest.CardBytes{Card: d.space.Bytes.(drivertest.CardBytes).Card, At: seg.Addr,
			Len: seg.Len}}, m: part,
		key: r.farKey(well, part)}
	stuck := silent.remote(d.key)
	if !stuck.enter() {
		t.Fatal("an import that was not ended is not good")
	}
	_ = silent.far.wire.conn.Close() // and the process lives
	want, before := r.content(d), block.id
	require.NoError(t, d.m.Revoke(context.Background()))
	r.same("the content after a revoke", r.content(d), want)
	if block.id == before {
		t.Error("a process may be writing, and the memory is the same")
	}
	writeCard(t, driver.Segment{Addr: stuck.m.base}, make([]byte, 4<<20))
	r.same("what a process wrote to memory that was taken away", r.content(d), want)
	r.moveSoon(driver.Write, l, beside, driver.Desc{Len: 1 << 20})
	r.same("what another process wrote beside", r.content(beside), r.content(l))
	require.NoError(t, r.register(d.space.Segment).Revoke(context.Background()))
	if block.id != before+1 {
		t.Error("another revoke has taken the memory away again from a process that was shut out")
	}
	stuck.leave()
}

// TestEndIsJudged has the owner end an import between the end of the copies and what is told of
// them: where other memory has come, or may come, the bytes may be lost.
func TestEndIsJudged(t *testing.T) {
	onStandIn(t)
	r, far := newFarRig(t, testConfig())
	d, _ := r.shared(far, 4096)
	l := r.local(drivertest.HostMemory, 4096)
	defer testpoint.First("cuda: ended", nil)
	for state, want := range []error{importGood: nil, importRevoked: driver.ErrRevoked,
		importMoving: nil, importMoved: driver.ErrRevoked} {
		turn := func(to int) {
			for _, g := range r.b.clients() {
				g.eachExport(d.m.isExportedAs, func(slot uint32, _ *export) {
					g.stateOf(slot).Store(uint64(to))
				})
			}
		}
		testpoint.First("cuda: ended", func() { turn(state) })
		require.ErrorIs(t, r.end(r.submit(driver.Write, l, d, driver.Desc{Len: 4096})), want)
		turn(importGood)
	}
}

// TestMemoryThatStays has the driver refuse to replace memory: then there is no proof, however
// often it is asked for, until the driver does. What a frozen process still writes lands elsewhere.
func TestMemoryThatStays(t *testing.T) {
	onStandIn(t)
	r, silent := newFarRig(t, testConfig())
	d, block := r.shared(silent, 1<<20)
	want, before := r.content(d), block.id
	stuck := silent.remote(d.key)
	require.True(t, stuck.enter())
	defer stuck.leave()
	libcuda.Set(t, "refuse_result", 2)
	var said *gpu.Error
	for range 2 {
		libcuda.Put("refuse_after", 1)
		require.ErrorAs(t, d.m.Revoke(t.Context()), &said)
		require.Equal(t, before, block.id)
	}
	r.same("the content after a failure", r.content(d), want)
	ctx, cancel := context.WithTimeout(t.Context(), time.Microsecond)
	defer cancel()
	require.ErrorIs(t, d.m.Revoke(ctx), context.DeadlineExceeded)
	require.NoError(t, d.m.Revoke(t.Context()))
	require.Equal(t, before+1, block.id)
	writeCard(t, driver.Segment{Addr: stuck.m.base}, make([]byte, 1<<20))
	r.same("the content after a revoke", r.content(d), want)
}

// moveSoon repeats what is answered with driver.ErrFull.
func (r *rig) moveSoon(op driver.Op, l, remote *place, d driver.Desc) {
	r.t.Helper()
	d.LocalKey, d.RemoteKey = l.m.key, remote.key
	for deadline := time.Now().Add(limit); ; time.Sleep(time.Millisecond) {
		r.tag++
		err := r.p.Submit(r.tag, &driver.Batch{Op: op, Descs: []driver.Desc{d}})
		if err == nil {
			break
		}
		if !errors.Is(err, driver.ErrFull) || time.Now().After(deadline) {
			r.t.Fatalf("submit: %v", err)
		}
	}
	require.NoError(r.t, r.end(r.tag))
}

// TestFarDrop drops imports, before and after the end of batches, until nothing is mapped any more.
func TestFarDrop(t *testing.T) {
	r, far := newFarRig(t, testConfig())
	d, _ := r.shared(far, 1<<20)
	l := r.local(drivertest.HostMemory, 1<<20)
	for range 3 * slotsMax / 2 { // more than there are slots
		far.Drop(r.farKey(far, d.m))
	}
	r.move(driver.Write, l, d, driver.Desc{Len: 1 << 20})
	tag := r.submit(driver.Read, l, d, driver.Desc{Len: 1 << 20})
	far.Drop(d.key)
	if err := r.end(tag); err != nil {
		t.Error(err)
	}
	r.same("memory that was dropped", r.content(d), r.content(l))
	for deadline := time.Now().Add(limit); ; time.Sleep(time.Millisecond) {
		far.far.mapping.Lock()
		n := len(far.far.maps)
		far.far.mapping.Unlock()
		if n == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d mappings are left of imports that were dropped", n)
		}
	}
}

// TestNonsense sends what no backend would: each connection is closed, and another is served.
func TestNonsense(t *testing.T) {
	cfg := testConfig()
	cfg.DialTimeout = limit
	r, far := newFarRig(t, cfg)
	d, _ := r.shared(far, 1<<20)
	page, mem, err := hostmem.NewSealed("test", pageBytes, false)
	require.NoError(t, err)
	small, less, err := hostmem.NewSealed("test", 4096, false)
	require.NoError(t, err)
	defer func() {
		_, _, _, _ = unix.Close(page), unix.Close(small), unix.Munmap(mem), unix.Munmap(less)
	}()
	soft, err := unix.MemfdCreate("test", unix.MFD_ALLOW_SEALING|unix.MFD_CLOEXEC)
	require.NoError(t, err)
	defer unix.Close(soft)
	require.NoError(t, unix.Ftruncate(soft, pageBytes))
	hello := head{Kind: sayHello}
	for what, send := range map[string]func(*wire) error{
		"one byte": func(w *wire) error {
			_, err := w.conn.Write([]byte{1})
			return err
		},
		"much": func(w *wire) error {
			_, err := w.conn.Write(make([]byte, 2*packetMax))
			return err
		},
		"no page": func(w *wire) error { return w.send(&hello, nil, limit) },
		"two pages": func(w *wire) error {
			return w.send(&hello, nil, limit, page, page)
		},
		"a short page":        func(w *wire) error { return w.send(&hello, nil, limit, small) },
		"a page that shrinks": func(w *wire) error { return w.send(&hello, nil, limit, soft) },
		"another packet": func(w *wire) error {
			return w.send(&head{Kind: sayAsk}, nil, limit, page)
		},
		"nonsense later": func(w *wire) error { return w.afterHello(&head{Kind: 99}, page) },
		"a slot it never had": func(w *wire) error {
			return w.afterHello(&head{Kind: sayDrop, Slot: 5}, page)
		},
		"a slot of none": func(w *wire) error {
			return w.afterHello(&head{Kind: sayDrop, Slot: 1 << 31}, page)
		},
	} {
		w := r.silent()
		if err := send(w); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		w.wantHungUp(t, what)
	}
	for range 2 * handshakesMax {
		r.silent()
	}
	r.p = far
	if !bytes.Equal(r.content(d), r.content(d)) || far.gone() {
		t.Error("nonsense has ended the connection of another process")
	}
}

// TestSilence: a connection that says nothing is closed in time.
func TestSilence(t *testing.T) {
	cfg := peersConfig()
	cfg.DialTimeout = 2 * time.Second
	r := newRig(t, cfg)
	r.silent().wantHungUp(t, "nothing")
}

// wantHungUp wants the other end to close without a word, and within half of the limit.
func (w *wire) wantHungUp(t *testing.T, after string) {
	t.Helper()
	_ = w.conn.SetReadDeadline(time.Now().Add(limit / 2))
	if _, _, fd, err := w.receive(); !errors.Is(err, unix.ECONNRESET) &&
		(err == nil || errors.Is(err, os.ErrDeadlineExceeded)) {
		t.Errorf("%s: a packet (descriptor %d), %v, want to be hung up on", after, fd, err)
	}
}

// silent is a connection that has said nothing.
func (r *rig) silent() *wire {
	r.t.Helper()
	at, err := socketOf(r.b.Addr())
	require.NoError(r.t, err)
	conn, err := dialUnix(at)
	require.NoError(r.t, err)
	r.t.Cleanup(func() { _ = conn.Close() })
	return &wire{conn: conn}
}

// join says hello, with the page in which it counts batches, and must be welcome.
func (w *wire) join(page int) error {
	if err := w.send(&head{Kind: sayHello}, nil, limit, page); err != nil {
		return err
	}
	h, tail, theirs, err := w.receive()
	closeDescriptor(theirs)
	if err == nil && h.Kind != sayWelcome {
		err = driver.ErrCorrupt
	}
	if err == nil {
		err = h.outcome(tail)
	}
	return err
}

// ask shows a token, which must open memory.
func (w *wire) ask(token []byte) (slot uint32, err error) {
	if err := w.send(&head{Kind: sayAsk, ID: 1}, token, limit); err != nil {
		return 0, err
	}
	h, tail, block, err := w.receive()
	closeDescriptor(block)
	if err == nil {
		err = h.outcome(tail)
	}
	return h.Slot, err
}

// afterHello says something once it is a client.
func (w *wire) afterHello(h *head, page int) error {
	if err := w.join(page); err != nil {
		return err
	}
	return w.send(h, nil, limit)
}
