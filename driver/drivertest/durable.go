// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"fmt"
	"sync"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/promise"
)

var durableChecks = []check{
	{name: "DurableWrites", wirings: here, needs: driver.CanDurable, run: checkDurableWrites},
	{name: "DurablePattern", wirings: here, needs: driver.CanDurable | driver.CanPattern,
		run: checkDurablePattern},
	{name: "DurableBounds", wirings: here, needs: driver.CanDurable, run: checkDurableBounds},
	{name: "DurableNoAllocation", wirings: here, needs: driver.CanDurable,
		run: checkDurableNoAllocation},
}

// platter is what memory holds that would survive a loss of power: the bytes that were there
// when the last sync began of those that have ended.
type platter struct {
	read func() ([]byte, error)

	mu     sync.Mutex // guards what follows
	begun  [][]byte
	stable []byte
	err    error
}

// watch follows the syncs of the far side's memory; nil where the harness tells of none.
func (s *stage) watch(r *memory) *platter {
	s.Helper()
	far, ok := s.far.party.(*host)
	if s.h.Syncs == nil || !ok {
		s.Log("the harness does not tell of syncs: what they cover is not looked at")
		return nil
	}
	p := &platter{read: func() ([]byte, error) { return far.get(r.id, 0, r.size) }}
	p.stable, p.err = p.read() // as if the disk had been new
	s.h.Syncs(far.b, p.syncBegins, p.syncEnded)
	return p
}

func (p *platter) syncBegins() {
	p.mu.Lock()
	defer p.mu.Unlock()
	b, err := p.read()
	if err != nil {
		p.err = err
	}
	p.begun = append(p.begun, b)
}

func (p *platter) syncEnded() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.begun) > 0 {
		p.stable, p.begun = p.begun[0], p.begun[1:]
	}
}

// holds returns "" if a range of memory would survive as it should be.
func (p *platter) holds(want []byte, off, n uint64) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil {
		return p.err.Error()
	}
	if string(p.stable[off:][:n]) == string(want[off:][:n]) {
		return ""
	}
	return fmt.Sprintf(promise.Mark+"a loss of power would leave other bytes in [%d, +%d): %s",
		off, n, difference(p.stable[off:][:n], want[off:][:n]))
}

// persisting is a submission of a durable write.
func (s *stage) persisting(p *driver.Pattern, descs ...driver.Desc) func(tag uint64) error {
	return s.batching(&driver.Batch{Op: driver.Write, Durable: true, Descs: descs, Pattern: p})
}

// persist runs a durable write among others that are not waited for.
func (s *stage) persist(p *driver.Pattern, descs ...driver.Desc) (tag uint64) {
	s.Helper()
	tag, err := s.near.start(s.persisting(p, descs...))
	s.ok(err, "submit a durable write")
	if p != nil {
		s.applyPattern(driver.Write, p)
	}
	s.apply(driver.Write, descs...)
	return tag
}

// checkDurableWrites has several under way at once, of lengths that go different ways, with
// others between them: when one ends, its bytes are safe.
func checkDurableWrites(s *stage) {
	const slots = 6
	slot := uint64(70 << 10)
	l, r := s.local(slot*slots), s.remote(slot*slots)
	disk := s.watch(r)
	lens := []uint64{1, 656, 4096, 8192 + 7, 64 << 10, 70 << 10}
	for round := range uint64(12) {
		l.paint(s.seed())
		var tags [slots]uint64
		var n [slots]uint64
		for i := range uint64(slots) {
			n[i] = lens[(i+round)%slots]
			d := desc(l, i*slot, r, i*slot, n[i])
			if (i+round)%3 == 2 {
				tags[i] = s.submit(driver.Write, s.pieces(d)...)
				s.apply(driver.Write, d)
				continue
			}
			tags[i] = s.persist(nil, s.pieces(d)...)
		}
		for i, tag := range tags {
			s.ok(s.await(tag), "write of %d bytes", n[i])
			if (uint64(i)+round)%3 == 2 || disk == nil {
				continue
			}
			if fault := disk.holds(r.want, uint64(i)*slot, n[i]); fault != "" {
				s.Fatalf("round %d, a durable write of %d bytes has ended: %s", round, n[i], fault)
			}
		}
	}
	s.compare(l, r, "after durable writes")
}

func checkDurablePattern(s *stage) {
	const n = 300
	entry := uint64(entryLen)
	l, r := s.local(entry*n), s.remote(entry*n)
	disk := s.watch(r)
	for round := range 4 {
		l.paint(s.seed())
		count := min(n, s.caps.RunsMax)
		p := geometry{count: count, localStride: entry, remoteStride: entry}.pattern(l, r, entry)
		p.Remote.List = falling(count)
		s.ok(s.await(s.persist(p)), "a durable pattern")
		if disk == nil {
			continue
		}
		if fault := disk.holds(r.want, 0, r.size); fault != "" {
			s.Fatalf("round %d, a durable pattern have ended: %s", round, fault)
		}
	}
	s.compare(l, r, "after a durable pattern")
}

func checkDurableBounds(s *stage) {
	n := uint64(10000)
	l, r, lAll, rAll := s.cut(n)
	for _, o := range outside(n) {
		for side, bad := range map[string]driver.Desc{
			"local":  {Local: o[0], Len: o[1], LocalKey: l.key, RemoteKey: r.as},
			"remote": {Remote: o[0], Len: o[1], LocalKey: l.key, RemoteKey: r.as},
		} {
			s.refused(fmt.Sprintf("a durable write past %s bounds, %d+%d of %d", side, o[0], o[1],
				n), driver.ErrBounds, s.persisting(nil, bad))
		}
	}
	s.refused("a durable write to an unknown key", driver.ErrBounds,
		s.persisting(nil, driver.Desc{Len: 1, LocalKey: l.key, RemoteKey: 1 << 20}))
	fixed := s.far.shareReadOnly(n)
	s.imports(fixed)
	s.refused("a durable write to read-only memory", driver.ErrReadOnly,
		s.persisting(nil, desc(l, 0, fixed, 0, 1)))
	s.compare(lAll, rAll, "after durable writes that were refused")
}

func checkDurableNoAllocation(s *stage) {
	l, r := s.local(1<<20), s.remote(1<<20)
	for name, n := range map[string]uint64{"a short piece": 1, "a long piece": (1 << 20)} {
		s.noAllocation("durable write of "+name,
			s.persisting(nil, s.pieces(desc(l, 0, r, 0, n))...))
	}
}
