// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// inbound is the owner's end of a peer: over it the peer reaches our memory and sends
// messages. The reading goroutines of its connections do all the work.
type inbound struct {
	b       *Backend
	conn    uint64 // our number for it
	host    session.Host
	session uint64
	secret  [16]byte    // what its further connections show
	limit   clock.Timer // for the connections to join
	ages    ages

	mu       sync.Mutex // after wmu of a connection, before ctlMu
	conns    []*conn    // nil: has not joined yet
	reads    []reads    // by connection
	had      bool       // the peer's program has the connection
	halted   bool       // nothing lands any more
	ended    bool
	left     bool // dismissed; it holds its place until the program has received its messages
	notifs   notifs
	further  int // connections beyond those that we open to a peer: see quotas
	returned int // messages that were received, and of which the peer is not told

	answerMax int  // bytes of an answer that the peer takes
	room      int  // answers for which the peer has room
	starved   bool // an Answer found none
}

// postedMax bounds the acknowledgements that a peer has us keep, and, but for one, the answers.
const postedMax = 256 << 10

func newInbound(b *Backend, n int) *inbound {
	return &inbound{
		b: b, conn: b.lastConn.Add(1), conns: make([]*conn, n), reads: make([]reads, n),
		notifs: notifs{arrivals: map[uint64]*arrival{}, waiting: map[uint64]message{}, next: 1},
	}
}

// place adds a connection, which is then welcomed, and read only after that: whatever comes over
// another finds control in its place. It reports false when it is too late, or the place is taken.
func (g *inbound) place(c *conn) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ended || g.halted || g.conns[c.index] != nil {
		return false
	}
	g.conns[c.index] = c
	return true
}

// end ends all connections, once nothing lands any more that came over one of them. The last
// word tells the program, unless it is the program that closes.
func (g *inbound) end(lastWord bool) {
	if g == nil {
		return
	}
	g.mu.Lock()
	was := g.ended
	g.ended = true
	had := g.had
	g.mu.Unlock()
	if was {
		return
	}
	g.limit.Stop()
	for _, c := range g.conns {
		if c != nil {
			c.stop()
		}
	}
	for _, c := range g.conns {
		if c != nil {
			c.close(false)
		}
	}
	g.mu.Lock()
	g.notifs.releaseQuota(g)
	lastWord = lastWord && had
	if lastWord {
		g.notifs.kept++
	}
	g.left = true
	left := g.notifs.kept == 0
	g.mu.Unlock()
	g.b.dismiss(g, left)
	if lastWord {
		g.b.deliver(message{conn: g.conn, from: g, err: driver.ErrPeerLost})
	}
}

// broken implements end. Where control stands, it still tells the peer that nothing lands, but
// for a peer that breaks the rules.
func (g *inbound) broken(c *conn, err error) {
	if c.index == ctl || errors.Is(err, driver.ErrCorrupt) {
		g.end(true)
		return
	}
	g.halt()
	g.limit.Reset(g.b.cfg.Handshake)
}

// halt has nothing land any more that this peer sends, and tells it so. Control goes on.
func (g *inbound) halt() {
	g.mu.Lock()
	g.halted = true
	conns := slices.Clone(g.conns)
	g.mu.Unlock()
	for _, c := range conns[express:] {
		if c != nil {
			c.close(false)
		}
	}
	if c := conns[ctl]; c != nil {
		c.post(&header{kind: kindStopped}, nil)
		g.b.tasks.Start(func() { c.kick(false) }) // our caller may hold locks of it
	}
}

// expire ends a connection that is not whole after Config.Handshake, so that it holds no place
// of Config.PeersMax, and one that has halted.
func (g *inbound) expire() {
	g.mu.Lock()
	whole := g.had && !g.halted && !slices.Contains(g.conns, nil)
	g.mu.Unlock()
	if !whole {
		g.b.tasks.Start(func() { g.end(true) })
	}
}

// accept implements end: what a peer may say.
func (g *inbound) accept(c *conn) verdict {
	if c.posted() > postedMax {
		c.choked.Store(true)
		if c.posted() > postedMax { // look again: it may have been written meanwhile
			return paused
		}
	}
	h := &c.in.h
	v := finished
	switch {
	case h.kind == kindReady:
		g.mu.Lock()
		g.had = true
		g.ages.extend(h.ticket)
		g.mu.Unlock()
		v = more
	case c.index == ctl:
		v = g.told(c, h)
	case h.kind == kindWrite:
		v = g.aim(c, h)
	case h.kind == kindRead:
		v = g.ask(c, h)
	case h.kind == kindNotif && c.index == express:
		v = g.noted(c, h)
	case h.kind == kindVoid && c.index == express:
		v = g.voided(c, h)
	}
	if v == finished {
		c.in.err = fmt.Errorf("frame of kind %d out of place: %w", h.kind, driver.ErrCorrupt)
	}
	return v
}

// told takes what comes over the control connection.
func (g *inbound) told(c *conn, h *header) verdict {
	switch h.kind {
	case kindImport:
		return g.show(c, h)
	case kindPing:
		c.post(&header{kind: kindPong, stamp: g.b.clock.Now()}, nil)
	case kindCredit:
		g.credited(int(h.count))
	case kindConfirm:
		if !g.vouched(h) {
			return finished
		}
	case kindStop:
		g.halt()
	default:
		return finished
	}
	return more
}

// show answers an Import.
func (g *inbound) show(c *conn, h *header) verdict {
	if len(c.in.body) != 16 {
		return finished
	}
	a := header{kind: kindImported, id: h.id}
	m, ticket, err := g.b.show(h.key, h.ticket, c.in.body)
	a.status = uint8(session.StatusOf(err))
	if err == nil {
		a.ticket, a.batch = ticket, m.seg.Len
		if m.seg.ReadOnly {
			a.flags = flagReadOnly
		}
	}
	c.post(&a, nil)
	return more
}

// named walks what a frame names of a memory. Bounds: a pattern is not within it, as where the
// peer's program has changed its index list, or something is not within Segment.Only. Failed: no
// peer of ours says that.
func (in *receiver) named(seg *driver.Segment) (r ranges, status session.Status) {
	size := seg.Len
	r.size = size
	if in.h.flags&flagPattern == 0 {
		var ok bool
		r.table = in.body
		if r.left, ok = tableBytes(in.body, size); !ok {
			return r, session.StatusFailed
		}
		return r, r.within(seg.Only)
	}
	f := &in.frag
	if !f.decode(in.body, in.chunk.slots[:]) {
		return r, session.StatusFailed
	}
	r.left = f.bytes
	if !f.check(size) {
		return r, session.StatusBounds
	}
	r.walkPattern(&f.pattern, &f.pattern.Remote, 0, f.skip)
	return r, r.within(seg.Only)
}

// within says whether all that is left of the part may be reached. A pattern may name much more:
// that is not looked at.
func (r ranges) within(only driver.Ranges) session.Status {
	at := 0
	for only != nil && r.left > 0 {
		off, n, ok := r.next()
		if !ok || !only.Has(off, n, &at) {
			return session.StatusBounds
		}
		r.advance(n)
	}
	return session.StatusOK
}

// aim says where the bytes of a Write go. Those for memory whose epoch has ended go nowhere.
func (g *inbound) aim(c *conn, h *header) verdict {
	if h.flags&flagNotified != 0 && g.crowded() {
		return finished
	}
	l := &c.in.land
	l.left, l.owner, l.stamp, l.ticket = h.payload(), g, h.stamp, h.ticket
	m := g.b.memories.At(h.key)
	if m == nil || !m.opens(h.ticket) {
		l.status = session.StatusRevoked
		return more
	}
	testpoint.At("tcp: aimed") // the ticket of a write's head was good
	if m.seg.ReadOnly {
		return finished // no peer of ours asks for that
	}
	r, status := c.in.named(&m.seg)
	if status == session.StatusFailed || r.left != l.left {
		return finished
	}
	l.ranges, l.status = r, status
	if status == session.StatusOK {
		l.m, l.mem, l.shared = m, m.seg.Mem, m.seg.Shared
	}
	return more
}

// finish implements end.
func (g *inbound) finish(c *conn) {
	h := &c.in.h
	if h.kind != kindWrite {
		return
	}
	status := c.in.land.status
	c.post(&header{kind: kindAck, id: h.id, status: uint8(status), stamp: g.b.clock.Now()}, nil)
	if h.flags&flagNotified != 0 {
		g.landed(h.batch, status == session.StatusOK)
	}
}
