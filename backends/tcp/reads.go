// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"github.com/sluicehq/sluice/internal/session"
)

// read is a Read of a peer that waits to be served.
type read struct {
	id     uint64
	table  []byte
	slots  []uint32
	frag   fragment // where table is empty
	m      *memory
	ticket uint64
	bytes  uint64
}

// reads are those of one connection, in order: a ring that grows to what the peer asks for
// at once, at most readsMax.
type reads struct {
	ring []read
	head int
	n    int
	full bool // a reader waits for a place
	now  read
	wait int // bytes of tables and lists that wait
	kept int // bytes that the places have for them
}

const (
	readsMax  = 1024
	tablesMax = 1 << 20 // bytes of tables and lists of the reads of a connection, and as many kept
)

// push reports false if there are too many. The table is copied.
func (s *reads) push(a read) bool {
	if s.n == readsMax || s.n > 0 && s.wait+a.listed() > tablesMax {
		s.full = true
		return false
	}
	if s.n == len(s.ring) {
		bigger := make([]read, max(8, 2*len(s.ring)))
		for i := range s.n {
			bigger[i] = s.ring[(s.head+i)%len(s.ring)]
		}
		s.ring, s.head = bigger, 0
	}
	place := &s.ring[(s.head+s.n)%len(s.ring)]
	s.wait += a.listed()
	s.kept -= place.room()
	a.table = append(place.table[:0], a.table...)
	a.slots = append(place.slots[:0], a.slots...)
	s.kept += a.room()
	*place = a
	s.n++
	if s.kept > 2*tablesMax {
		s.shed()
	}
	return true
}

// shed gives back what the free places have.
func (s *reads) shed() {
	for i := s.n; i < len(s.ring); i++ {
		place := &s.ring[(s.head+i)%len(s.ring)]
		s.kept -= place.room()
		*place = read{}
	}
}

func (a *read) listed() int { return len(a.table) + 4*len(a.slots) }
func (a *read) room() int   { return cap(a.table) + 4*cap(a.slots) }

// pop moves the first into now, whose table stays until the next pop.
func (s *reads) pop() bool {
	if s.n == 0 {
		return false
	}
	place := &s.ring[s.head]
	spare := read{table: s.now.table, slots: s.now.slots}
	s.kept += spare.room() - place.room()
	s.now = *place
	s.wait -= s.now.listed()
	*place = spare
	s.head = (s.head + 1) % len(s.ring)
	s.n--
	return true
}

// ask takes a Read. It is served when those before it are.
func (g *inbound) ask(c *conn, h *header) verdict {
	m := g.b.memories.At(h.key)
	if m == nil || !m.opens(h.ticket) {
		c.post(&header{kind: kindAck, id: h.id, status: uint8(session.StatusRevoked),
			stamp: g.b.clock.Now()}, nil)
		return more
	}
	r, status := c.in.named(&m.seg)
	if status == session.StatusFailed || r.left > partBytes {
		return finished
	}
	if status != session.StatusOK {
		c.post(&header{kind: kindAck, id: h.id, status: uint8(status),
			stamp: g.b.clock.Now()}, nil)
		return more
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	a := read{id: h.id, table: r.table, m: m, ticket: h.ticket, bytes: r.left}
	if r.pattern != nil {
		a.frag, a.slots = c.in.frag, r.pattern.Remote.List
	}
	if !g.reads[c.index].push(a) {
		return paused
	}
	c.serves.Store(true)
	return more
}

// next implements end: it begins the answer to the next Read.
func (g *inbound) next(c *conn) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := &g.reads[c.index]
	if !s.pop() {
		c.serves.Store(false)
		return false
	}
	if s.full {
		s.full = false
		c.proceed()
	}
	a := &s.now
	c.out.put(&header{kind: kindData, id: a.id, length: uint32(a.bytes)})
	c.out.src = source{mem: a.m.seg.Mem, m: a.m, ticket: a.ticket, open: true, ranges: a.ranges()}
	return true
}

// ranges walks what is read. The fragment is where the read is, which stays until it is served.
func (a *read) ranges() ranges {
	r := ranges{table: a.table, left: a.bytes, size: a.m.seg.Len}
	if len(a.table) == 0 {
		f := &a.frag
		f.pattern.Loops = f.loops[:len(f.pattern.Loops)]
		if f.pattern.Remote.List != nil {
			f.pattern.Remote.List = a.slots
		}
		r.walkPattern(&f.pattern, &f.pattern.Remote, 0, f.skip)
	}
	return r
}

// sent implements end: the acknowledgement follows the bytes, and says whether they are good.
func (g *inbound) sent(c *conn) {
	a := &g.reads[c.index].now // ours alone until next
	c.out.put(&header{kind: kindAck, id: a.id, status: uint8(c.out.src.status),
		stamp: g.b.clock.Now()})
}
