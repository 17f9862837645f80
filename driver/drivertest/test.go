// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// guard is how many bytes lie before and behind each piece of memory: nothing may change them.
const guard = 16 << 10

// test is the set-up of a check: a near side, in this process, connected to a far side.
type test struct {
	testing.TB
	h      *Harness
	wiring Wiring
	caps   driver.Caps

	host      *host // of the near side
	near, far *side
	proc      *process // nil unless the far side is one

	peer   driver.Peer // from near to far
	peerID int
	addr   []byte // of the far side

	spaces  []*space
	locals  map[uint32]*memory // by the near side's key
	remotes map[uint32]*memory // by the key of an import into peer
	seeds   uint64
}

// side gives requests to the host of one side.
type side struct {
	*test
	name string
	to   interface{ do(request) reply }
}

// space is memory of one side, with a model of what it must hold, guards included.
type space struct {
	on   *side
	id   int
	addr uintptr // in the process of its side; 0: it is not mapped there
	want []byte
}

// memory is a registration of a part of a space.
type memory struct {
	*space
	reg   int
	off   uint64 // in the space
	size  uint64
	key   uint32 // of its own side's backend
	token []byte
	how   request // by which it was registered

	importKey uint32 // of the other side's peer, once imported
}

// newTest opens both sides and connects them. When the test ends they are closed, and the breaches
// of the contract that their hosts noted fail it.
func newTest(tb testing.TB, h Harness, w Wiring) *test {
	tb.Helper()
	leaks := h.leaks()
	tb.Cleanup(func() {
		for _, left := range leaks() {
			testkit.ErrorBroken(tb, "left behind by this check: %s", left)
		}
	})
	t := &test{TB: tb, h: &h, wiring: w, locals: map[uint32]*memory{},
		remotes: map[uint32]*memory{}}
	t.host = t.open("near")
	t.near = &side{t, "near", t.host}
	t.caps = t.host.b.Caps()
	switch w {
	case Self:
		t.far = &side{t, "far", t.host}
	case Pair:
		t.far = &side{t, "far", t.open("far")}
	case Processes:
		t.startFar()
	}
	t.addr = t.far.must(request{Do: "addr"}).Data
	t.connect()
	return t
}

func (t *test) open(name string) *host {
	host, err := newHost(t.h)
	if err != nil {
		SkipIfUnavailable(t.TB, err)
	}
	t.Cleanup(func() {
		for _, breach := range host.close() {
			t.Errorf("%s side: %s", name, breach)
		}
	})
	return host
}

// startFar starts a process as the far side.
func (t *test) startFar() {
	proc := startProcess(t.TB, t.h)
	far := &side{t, "far", proc}
	t.proc, t.far = proc, far
	far.must(request{Do: "open"})
	t.Cleanup(func() {
		_ = proc.thaw() // a check that failed may have left it frozen
		r, err := far.try(request{Do: "close"})
		if err != nil && !errors.Is(err, errGone) {
			t.Errorf("far side: close: %v", err)
		}
		for _, breach := range r.Breaches {
			t.Errorf("far side: %s", breach)
		}
	})
}

// reopenNear opens another backend as the near side, once that of before has closed.
func (t *test) reopenNear() {
	t.host = t.open("second near")
	t.near = &side{t, "second near", t.host}
}

func (t *test) connect() {
	id, err := t.host.connect(t.addr, t.h.limit)
	t.ok(err, "connect to the far side")
	t.peerID, t.peer = id, t.host.peer(id)
}

// connectBack connects the far side to the near one, and returns the number of the far side's peer.
func (t *test) connectBack() int {
	return t.far.must(request{Do: "connect", Data: t.host.b.Addr()}).ID
}

// tryConnect connects to an address, within some time, and closes the peer again.
func (t *test) tryConnect(what string, addr []byte, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return t.inTime("connect to "+what, func() error {
		p, err := t.host.b.Connect(ctx, addr)
		if err == nil {
			_ = p.Close()
		}
		return err
	})
}

// free unmaps the memory; the check no longer compares it with its model.
func (m *memory) free() {
	t := m.on.test
	m.on.must(request{Do: "free", ID: m.id})
	t.spaces = slices.DeleteFunc(t.spaces, func(sp *space) bool { return sp == m.space })
}

func (t *test) can(bits driver.Can) bool { return t.peer.Can()&bits == bits }

// must sends a request to the side's host. If that fails, the check ends.
func (s *side) must(q request) reply {
	r := s.to.do(q)
	if r.Err != nil {
		s.Fatalf("%s side: %s: %v", s.name, q.Do, r.Err)
	}
	return r
}

// run moves a batch by one of a side's peers.
func (s *side) run(peer int, b *driver.Batch) {
	tag := s.must(request{Do: "submit", Peer: peer, Batch: b}).Tag
	s.must(request{Do: "await", Tag: tag})
}

// receive waits for one message.
func (s *side) receive() message {
	return s.must(request{Do: "receive", Count: 1}).Messages[0]
}

// closePeer closes one of a side's peers.
func (s *side) closePeer(peer int) { s.must(request{Do: "close peer", Peer: peer}) }

// importToken imports a token by one of a side's peers.
func (s *side) importToken(peer int, token []byte) (key uint32) {
	return s.must(request{Do: "import", Peer: peer, Data: token}).Key
}

// try sends a request that may fail to the side's host.
func (s *side) try(q request) (reply, error) {
	r := s.to.do(q)
	return r, r.Err.orNil()
}

// at returns the file and line of the check that called the helper which reports an error.
func at() string {
	pc := make([]uintptr, 32)
	frames := runtime.CallersFrames(pc[:runtime.Callers(2, pc)])
	for f, more := frames.Next(); more; f, more = frames.Next() {
		if strings.Contains(f.Function, "drivertest.check") ||
			strings.Contains(f.Function, "drivertest.(*random)") {
			return fmt.Sprintf("%s:%d: ", filepath.Base(f.File), f.Line)
		}
	}
	return ""
}

// Errorf fails the check, and says at which of its lines.
func (t *test) Errorf(format string, args ...any) {
	t.TB.Errorf("%s", at()+fmt.Sprintf(format, args...))
}

// Fatalf ends the check, and says at which of its lines.
func (t *test) Fatalf(format string, args ...any) {
	t.TB.Fatalf("%s", at()+fmt.Sprintf(format, args...))
}

// broken ends the check: a promise is broken.
func (t *test) broken(format string, args ...any) {
	t.Fatalf(testkit.BrokenPromise+format, args...)
}

// ok ends the check where there is an error.
func (t *test) ok(err error, what string, args ...any) {
	if err != nil {
		t.Fatalf(what+": %v", append(args, err)...)
	}
}

// wantErr fails the check unless err is one of those wanted, of which nil may be one.
func (t *test) wantErr(err error, what string, want ...error) {
	for _, w := range want {
		if err == nil && w == nil || w != nil && errors.Is(err, w) {
			return
		}
	}
	t.Errorf("%s: %v, want %v", what, err, want)
}

// inTime runs f, which must return within the limit.
func (t *test) inTime(what string, f func() error) error {
	err := within(t.h.limit, f)
	if errors.Is(err, errLate) {
		t.host.stuck = true
		t.Fatalf("%s: it has not returned within %v\n%s", what, t.h.limit, stacks())
	}
	return err
}

// returns runs f, which must return within the limit.
func (t *test) returns(what string, f func()) {
	_ = t.inTime(what, func() error { f(); return nil })
}

// until waits until the condition holds.
func (t *test) until(what string, condition func() bool) {
	for w := newWait(t.h.limit); !condition(); {
		if !w.more() {
			t.Fatalf("%s: nothing happened within %v\n%s", what, t.h.limit, stacks())
		}
	}
}

func (t *test) seed() uint64 {
	t.seeds++
	return t.seeds
}

// allocate makes memory of a kind between guards, all filled.
func (s *side) allocate(kind string, n uint64) *space {
	r := s.must(request{Do: "allocate", Kind: kind, Len: n + 2*guard})
	sp := &space{s, r.ID, r.Addr, make([]byte, n+2*guard)}
	sp.fill(0, n+2*guard)
	s.spaces = append(s.spaces, sp)
	return sp
}

// register registers a part of a space with the backend of its side. q has the optional fields.
func (sp *space) register(off, n uint64, q request) *memory {
	q.Do, q.ID, q.Off, q.Len = "register", sp.id, off, n
	m := &memory{space: sp, off: off, size: n, how: q}
	m.reregister()
	return m
}

// reregister registers m once more, after it was revoked.
func (m *memory) reregister() {
	r := m.on.must(m.how)
	m.reg, m.key, m.token = r.ID, r.Key, r.Data
}

// local is memory for a side's own transfers, shared is memory that the other side reaches.
func (s *side) local(n uint64) *memory {
	m := s.allocate("local", n).register(guard, n, request{})
	if s == s.near {
		s.locals[m.key] = m
	}
	return m
}

func (s *side) shared(n uint64) *memory {
	return s.allocate("shared", n).register(guard, n, request{})
}

// sharedRanges is memory of which the other side reaches those ranges alone, and which it has
// imported by one of its peers. It is nil where the backend has no such memory.
func (s *side) sharedRanges(n uint64, only driver.Ranges, to *side, peer int) *memory {
	sp := s.allocate("shared", n)
	m := &memory{space: sp, off: guard, size: n,
		how: request{Do: "register", ID: sp.id, Off: guard, Len: n, Only: only}}
	reg, err := s.try(m.how)
	if err == nil {
		m.reg, m.key, m.token = reg.ID, reg.Key, reg.Data
		reg, err = to.try(request{Do: "import", Peer: peer, Data: m.token})
	}
	if only != nil && errors.Is(err, driver.ErrNotSupported) {
		return nil
	}
	s.ok(err, "register and import")
	m.importKey = reg.Key
	return m
}

// local is memory of the near side; remote is memory of the far side, imported.
func (t *test) local(n uint64) *memory { return t.near.local(n) }

func (t *test) remote(n uint64) *memory {
	m := t.far.shared(n)
	t.importMemory(m)
	return m
}

// importMemory imports m by the near side's peer.
func (t *test) importMemory(m *memory) {
	key, size, err := t.peer.Import(m.token)
	t.ok(err, "import a fresh token of %d bytes", len(m.token))
	if size != m.size {
		t.Fatalf("import: size %d, want %d", size, m.size)
	}
	m.importKey = key
	t.remotes[key] = m
}

// registerRange registers a part of m once more. The bytes are those of m.
func (m *memory) registerRange(off, n uint64) *memory {
	return m.register(m.off+off, n, request{})
}

// bytes returns what m holds now.
func (m *memory) bytes() []byte {
	return m.on.must(request{Do: "get", ID: m.id, Off: m.off, Len: m.size}).Data
}

// model returns the bytes that m must hold.
func (m *memory) model() []byte { return m.want[m.off:][:m.size] }

// fill gives a range other bytes, as its owner would.
func (sp *space) fill(off, n uint64) {
	seed := sp.on.seed()
	sp.on.must(request{Do: "fill", ID: sp.id, Off: off, Len: n, Seed: seed})
	pattern(sp.want[off:][:n], seed)
}

func (m *memory) refill() { m.fill(m.off, m.size) }

// same reports whether all bytes are as in the model, guards included.
func (sp *space) same() bool {
	n := uint64(len(sp.want))
	return sp.on.must(request{Do: "sum", ID: sp.id, Len: n}).Sum == sum(sp.want)
}

// expect fails the check unless all bytes are as in the model.
func (sp *space) expect(when string, args ...any) {
	if !sp.same() {
		got := sp.on.must(request{Do: "get", ID: sp.id, Len: uint64(len(sp.want))}).Data
		sp.on.broken("%s: memory of the %s side, which lies at %d: %s",
			fmt.Sprintf(when, args...), sp.on.name, guard, difference(got, sp.want))
	}
}

// expectUnchanged compares the bytes with the model for a while: nothing may land in them.
func (sp *space) expectUnchanged(when string, args ...any) {
	end := time.Now().Add(20 * time.Millisecond)
	for first := true; first || time.Now().Before(end); first = false {
		sp.expect(when, args...)
	}
	if sp.on.h.awaitLate != nil {
		sp.on.h.awaitLate()
		sp.expect(when, args...)
	}
}

// readIntoModel copies into the model what a range of m holds at this moment, also while the
// process that has it is stopped. It reports false if only that process can read it: memory of a
// device.
func (m *memory) readIntoModel(off, n uint64) bool {
	t := m.on.test
	to := m.model()[off:][:n]
	if h, ok := m.on.to.(*host); ok {
		p, err := h.space(m.id).get(m.off+off, n)
		t.ok(err, "read memory")
		copy(to, p)
		return true
	}
	if m.addr == 0 {
		return false
	}
	t.ok(t.proc.read(to, m.addr+uintptr(m.off+off)), "read memory of the second process")
	return true
}

// expectNoLanding fails the check if anything lands in m, which no peer may reach any more. It
// watches m for a while, then has its program write other bytes, and watches those.
func (m *memory) expectNoLanding(when string, args ...any) {
	m.expectUnchanged(when, args...)
	m.refill()
	m.expectUnchanged(when, args...)
}

// expectNoMoreLanding is expectNoLanding of memory in which anything may have landed before its
// revoke.
func (m *memory) expectNoMoreLanding(when string, args ...any) {
	if !m.readIntoModel(0, m.size) {
		m.refill()
	}
	m.expectNoLanding(when, args...)
}

// revoke ends m; nil is the proof that nothing lands any more.
func (m *memory) revoke() error {
	_, err := m.on.try(request{Do: "revoke", ID: m.reg})
	return err
}

// revokeByThree does it from three goroutines: the proof is there when the first returns.
func (m *memory) revokeByThree() error {
	on, q := m.on, request{Do: "revoke", ID: m.reg}
	errs := make(chan error, 3)
	for range cap(errs) {
		go func() {
			_, err := on.try(q)
			errs <- err
		}()
	}
	return <-errs
}

// revokeAtOnce does it with a context that is over.
func (m *memory) revokeAtOnce() error {
	_, err := m.on.try(request{Do: "revoke", ID: m.reg, Over: true})
	return err
}

// desc returns a descriptor between near and far memory.
func desc(l *memory, lOff uint64, r *memory, rOff, n uint64) driver.Desc {
	return driver.Desc{Local: lOff, Remote: rOff, Len: n, LocalKey: l.key, RemoteKey: r.importKey}
}

// split makes descriptors of at most LenMax bytes, and no more than one batch takes.
func (t *test) split(d driver.Desc) (list []driver.Desc) {
	for d.Len > 0 && len(list) < t.caps.DescsMax {
		piece := d
		if t.caps.LenMax > 0 {
			piece.Len = min(d.Len, t.caps.LenMax)
		}
		list = append(list, piece)
		d.Local, d.Remote, d.Len = d.Local+piece.Len, d.Remote+piece.Len, d.Len-piece.Len
	}
	return list
}

// batch returns a batch of descriptors. whole returns one that moves all bytes of two memories.
func batch(op driver.Op, descs ...driver.Desc) *driver.Batch {
	return &driver.Batch{Op: op, Descs: descs}
}

func (t *test) batchOfAll(op driver.Op, l, r *memory) *driver.Batch {
	return t.batchOf(op, l, 0, r, 0, min(l.size, r.size))
}

// batchOf is a batch of n bytes, in descriptors that the backend takes.
func (t *test) batchOf(op driver.Op, l *memory, lOff uint64, r *memory, rOff,
	n uint64) *driver.Batch {
	return batch(op, t.split(desc(l, lOff, r, rOff, n))...)
}

// withMessage is the batch with a message behind it.
func withMessage(b *driver.Batch, msg []byte) *driver.Batch {
	c := *b
	c.Tail, c.Notify = driver.NotifyTail, msg
	return &c
}

func messageAlone(msg []byte) *driver.Batch { return withMessage(batch(driver.Write), msg) }

var bothOps = []driver.Op{driver.Write, driver.Read}

// posted is a batch that was accepted.
type posted struct {
	tag uint64
	b   *driver.Batch
}

// submit starts a batch, which must be accepted.
func (t *test) submit(b *driver.Batch) posted {
	tag, err := t.host.submit(t.peer, b)
	t.ok(err, "submit %v of %d descriptors", b.Op, len(b.Descs))
	return posted{tag, b}
}

// awaitSuccess waits for batches, which must succeed, and applies them to the models.
func (t *test) awaitSuccess(what string, list ...posted) {
	for i, p := range list {
		t.ok(t.await(p.tag), "%v of %d descriptors, %s, %d of %d", p.b.Op, len(p.b.Descs), what,
			i+1, len(list))
		t.apply(p.b)
	}
}

// await returns the outcome of a tag.
func (t *test) await(tag uint64) error {
	err := t.host.await(tag)
	if errors.Is(err, errLate) {
		t.broken("%v\n%s", err, stacks())
	}
	return err
}

// move runs a batch, which must succeed, and applies it to the models.
func (t *test) move(b *driver.Batch) {
	t.awaitSuccess("alone", t.submit(b))
}

// apply copies in the models what a batch copies in memory.
func (t *test) apply(b *driver.Batch) {
	descs := b.Descs
	if b.Pattern != nil {
		for i := range b.Pattern.Count {
			descs = b.Pattern.AppendDescs(descs, i)
		}
	}
	for _, d := range descs {
		l, r := t.locals[d.LocalKey].model()[d.Local:][:d.Len],
			t.remotes[d.RemoteKey].model()[d.Remote:][:d.Len]
		if b.Op == driver.Read {
			l, r = r, l
		}
		copy(r, l)
	}
}

// outcomeOf submits a batch one time, and returns what became of it.
func (t *test) outcomeOf(b *driver.Batch) error {
	tag, err := t.host.submitOnce(t.peer, b)
	if err == nil {
		err = t.await(tag)
	}
	return err
}

// refused submits a batch that the backend must not accept, and wants that error. It tries once: a
// backend that answered ErrFull instead would otherwise be asked for ever.
func (t *test) refused(what string, want error, b *driver.Batch) {
	tag, err := t.host.submitOnce(t.peer, b)
	if err == nil {
		t.Errorf("%s: Submit accepted it; it completed with %v", what, t.await(tag))
	} else if errors.Is(err, driver.ErrFull) || want != nil && !errors.Is(err, want) {
		t.Errorf("%s: %v, want %v", what, err, want)
	}
}

// makeVisible makes all writes that have completed visible to the far side's program. It finds
// messages that should not have arrived.
func (t *test) makeVisible() {
	if t.can(driver.CanNotify) {
		t.sendToFar([]byte("all is visible"))
		return
	}
	for _, key := range slices.Sorted(maps.Keys(t.remotes)) {
		m := t.remotes[key]
		t.ok(m.revoke(), "revoke, for all to be visible")
		t.peer.Drop(key)
		delete(t.remotes, key)
		m.reregister()
		t.importMemory(m)
	}
}

// sendToFar sends a message, which must be the next to arrive.
func (t *test) sendToFar(msg []byte) (conn uint64) {
	t.awaitSuccess("a message", t.submit(messageAlone(msg)))
	return t.expectMessages(t.far, msg)
}

// sendToNear makes the far side send a message by its way to the near one, where it must be the
// next.
func (t *test) sendToNear(back int, msg []byte) (conn uint64) {
	t.far.run(back, messageAlone(msg))
	return t.expectMessages(t.near, msg)
}

// batchToNear is a batch for the far side, of the first n bytes of its l and of r of the near side.
func (t *test) batchToNear(op driver.Op, back int, l, r *memory, n uint64) *driver.Batch {
	key := t.far.importToken(back, r.token)
	return batch(op, t.split(driver.Desc{Len: n, LocalKey: l.key, RemoteKey: key})...)
}

// patternBatch is a batch of a pattern.
func patternBatch(op driver.Op, l, r *memory, p driver.Pattern) *driver.Batch {
	p.LocalKey, p.RemoteKey = l.key, r.importKey
	return &driver.Batch{Op: op, Pattern: &p}
}

// closeInTime closes a peer or a backend, which must return in time and without an error.
func (t *test) closeInTime(what string, f func() error) {
	t.ok(t.inTime("close "+what, f), "close "+what)
}

// drop drops the key by which m was imported. A check may import it once more.
func (t *test) drop(m *memory) {
	t.peer.Drop(m.importKey)
	delete(t.remotes, m.importKey)
}

// expectMessages receives messages on a side. They must be those wanted, in order, by one
// connection.
func (t *test) expectMessages(on *side, want ...[]byte) (conn uint64) {
	return t.checkMessages(on.must(request{Do: "receive", Count: len(want)}).Messages, want...)
}

// checkMessages compares messages that were received with those wanted.
func (t *test) checkMessages(got []message, want ...[]byte) (conn uint64) {
	for i, m := range got {
		if m.Err != nil || string(m.Data) != string(want[i]) || m.Conn != got[0].Conn {
			t.broken("message %d of %d is %d bytes %x (%v) by connection %d, the "+
				"first by %d, want %d bytes %x", i, len(want), len(m.Data), head(m.Data),
				m.Err, m.Conn, got[0].Conn, len(want[i]), head(want[i]))
		}
		conn = m.Conn
	}
	return conn
}

// expectNoMessages fails the check if another message comes.
func (t *test) expectNoMessages(on *side) {
	r, _ := on.try(request{Do: "receive", Count: 1, Limit: 20 * time.Millisecond})
	if len(r.Messages) > 0 {
		t.broken("after the last message came another: %+v", r.Messages[0])
	}
}

// expectLastMessage receives the last message of a connection, which says that the peer is gone.
func (t *test) expectLastMessage(on *side) (conn uint64) {
	m := on.receive()
	if m.Err == nil {
		t.broken("%x came by connection %d, want its last message", head(m.Data), m.Conn)
	}
	return m.Conn
}

// compare fails the check unless all memory of both sides is as in its model.
func (t *test) compare(when string, args ...any) {
	t.makeVisible()
	for _, sp := range t.spaces {
		sp.expect(when, args...)
	}
}

// ended returns a context that is over.
func ended() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}
