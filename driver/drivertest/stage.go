// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"errors"
	"fmt"
	"runtime"
	"testing"

	"github.com/sluicehq/sluice/driver"
)

// stage is what a check plays on: a near side, in this process and in the
// check's hands, connected to a far side that takes orders.
type stage struct {
	testing.TB
	h      Harness
	wiring Wiring
	caps   driver.Caps

	near *host // its backend, called directly
	home *side // the same, by orders
	far  *side
	proc *process // nil unless the far side is one

	peer    driver.Peer // from near to far
	peerID  int
	farAddr []byte

	locals  map[uint32]*memory // by near's key
	remotes map[uint32]*memory // by the key of an import into peer
	seeds   uint64
	attacks int
}

// newStage opens both sides and connects them. They are closed, and their
// ledgers audited, when the test ends.
func newStage(tb testing.TB, h Harness, w Wiring) *stage {
	tb.Helper()
	h.check(tb)
	s := &stage{
		TB: tb, h: h, wiring: w,
		locals: map[uint32]*memory{}, remotes: map[uint32]*memory{},
	}
	s.Cleanup(s.noErrands)
	s.near = s.openHere("near")
	s.home = s.side("near", s.near)
	s.caps = s.near.b.Caps()
	switch w {
	case Self:
		s.far = s.side("far", s.near)
	case Pair:
		s.far = s.side("far", s.openHere("far"))
	case Processes:
		s.startFar()
	}
	s.farAddr = s.far.must(request{Do: "addr"}).Data
	s.connect()
	return s
}

// noErrands waits for the goroutines of a check that is over.
func (s *stage) noErrands() {
	s.Helper()
	if n := errands.wait(errandsMax); n > 0 {
		s.Errorf("%d goroutines of this check have not ended %v after it: what they use is not "+
			"given back\n%s", n, errandsMax, stacks())
	}
}

// ok ends the check where there is an error. what says what was being done, as Fatalf takes it.
func (s *stage) ok(err error, what ...any) {
	if err == nil {
		return
	}
	s.Helper()
	if len(what) > 0 {
		err = fmt.Errorf(what[0].(string)+": %w", append(what[1:], err)...)
	}
	s.Fatal(err)
}

func (s *stage) side(name string, p party) *side {
	return &side{TB: s.TB, party: p, name: name, limit: s.h.Limit, late: s.h.Settle}
}

func (s *stage) openHere(name string) *host {
	s.Helper()
	host, err := openHost(s.h)
	if err != nil {
		SkipIfUnavailable(s.TB, err)
	}
	s.Cleanup(func() {
		for _, fault := range host.close() {
			s.Errorf("%s side: %s", name, fault)
		}
	})
	return host
}

func (s *stage) startFar() {
	s.Helper()
	s.proc = startProcess(s.TB, s.h)
	s.far = s.side("far", s.proc)
	s.far.must(request{Do: "open", Populate: s.h.populated})
	s.Cleanup(func() {
		_ = s.proc.thaw() // a check that failed may have left it frozen
		r, err := s.far.try(request{Do: "close"})
		if err != nil && !errors.Is(err, errGone) {
			s.Errorf("far side: close: %v", err)
		}
		for _, fault := range r.Faults {
			s.Errorf("far side: %s", fault)
		}
	})
}

func (s *stage) connect() {
	s.Helper()
	id, err := s.near.connect(s.farAddr, s.h.Limit)
	s.ok(err, "connect to the far side")
	s.peerID, s.peer = id, s.near.peer(id)
}

func (s *stage) seed() uint64 {
	s.seeds++
	return s.seeds
}

// hang fails the check with the stacks of all goroutines.
func (s *stage) hang(what string) {
	s.Helper()
	s.Fatalf("%s: nothing happened within %v\n%s", what, s.h.Limit, stacks())
}

// stacks are those of all goroutines.
func stacks() []byte {
	text := make([]byte, 1<<20)
	return text[:runtime.Stack(text, true)]
}

// inTime runs f, which must return within the limit.
func (s *stage) inTime(what string, f func() error) error {
	s.Helper()
	err := within(s.h.Limit, f)
	if errors.Is(err, errLate) {
		s.hang(what)
	}
	return err
}

// local is near memory, painted.
func (s *stage) local(size uint64) *memory {
	s.Helper()
	m := s.home.local(size)
	s.locals[m.key] = m
	m.paint(s.seed())
	return m
}

// remote is far memory, painted and imported.
func (s *stage) remote(size uint64) *memory {
	s.Helper()
	m := s.far.share(size)
	m.paint(s.seed())
	s.imports(m)
	return m
}

// imports makes m's token known to the near side's peer.
func (s *stage) imports(m *memory) {
	s.Helper()
	key, size, err := s.peer.Import(m.token)
	s.ok(err, "import a fresh token of %d bytes", len(m.token))
	if size != m.size {
		s.Fatalf("import: size %d, want %d", size, m.size)
	}
	m.as = key
	s.remotes[key] = m
}

func desc(l *memory, lOff uint64, r *memory, rOff, n uint64) driver.Desc {
	return driver.Desc{Local: lOff, Remote: rOff, Len: n, LocalKey: l.key, RemoteKey: r.as}
}

// submit starts a batch, which must be accepted.
func (s *stage) submit(op driver.Op, descs ...driver.Desc) uint64 {
	s.Helper()
	tag, err := s.near.submit(s.peerID, op, descs, nil)
	s.ok(err, "submit %v of %d descriptors", op, len(descs))
	return tag
}

// await returns the outcome of a tag.
func (s *stage) await(tag uint64) error {
	s.Helper()
	err := s.near.ledger.await(tag, s.h.Limit)
	if errors.Is(err, errLate) {
		s.hang(err.Error())
	}
	return err
}

// move runs a batch, which must succeed, and applies it to the models.
func (s *stage) move(op driver.Op, descs ...driver.Desc) {
	s.Helper()
	s.ok(s.await(s.submit(op, descs...)), "%v of %d descriptors", op, len(descs))
	s.apply(op, descs...)
}

// apply does to the models what a batch does to memory.
func (s *stage) apply(op driver.Op, descs ...driver.Desc) {
	for _, d := range descs {
		l := s.locals[d.LocalKey].want[d.Local : d.Local+d.Len]
		r := s.remotes[d.RemoteKey].want[d.Remote : d.Remote+d.Len]
		if op == driver.Read {
			copy(l, r)
		} else {
			copy(r, l)
		}
	}
}

// settle makes completed writes visible to the far program, by the means that
// the contract names: a later message, else a revoke.
func (s *stage) settle(m *memory) {
	s.Helper()
	if s.can(driver.CanNotify) {
		s.notify([]byte("settle"))
		if r := s.far.must(request{Do: "receive", Count: 1}); string(
			r.Messages[0].Data) != "settle" {
			s.Fatalf("a message %q is left over", r.Messages[0].Data)
		}
		return
	}
	s.ok(m.revoke(), "revoke")
	m.again()
	s.imports(m)
}

// notify runs a write with a message, which must succeed, and applies it.
func (s *stage) notify(msg []byte, descs ...driver.Desc) {
	s.Helper()
	s.ok(s.await(s.submitNotify(msg, descs...)), "notify with %d descriptors", len(descs))
	s.apply(driver.Write, descs...)
}

func (s *stage) submitNotify(msg []byte, descs ...driver.Desc) uint64 {
	s.Helper()
	tag, err := s.near.submit(s.peerID, driver.Write, descs, msg)
	s.ok(err, "submit a message of %d bytes with %d descriptors", len(msg), len(descs))
	return tag
}
