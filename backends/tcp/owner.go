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

	mu       sync.Mutex // after wmu of a connection, before queueMu
	conns    []*conn    // nil: has not joined yet
	reads    []reads    // by connection
	had      bool       // the peer's program has the connection
	halted   bool       // nothing lands, and no message is delivered, any more
	ended    bool
	left     bool // dismissed; it holds its place until the program has received its messages
	notifs   notifications
	places   int // of Config.PeersMax
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
		notifs: notifications{next: 1},
	}
}

// addConn adds a connection, which is then welcomed, and read only after that: whatever comes over
// another finds control in its place. It reports false when it is too late, or the place is taken.
func (g *inbound) addConn(c *conn) bool {
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
			c.close(false)
		}
	}
	g.mu.Lock()
	g.notifs.ring = nil
	lastWord = lastWord && had
	if lastWord {
		g.notifs.kept++
	}
	g.left = true
	left := g.notifs.kept == 0
	g.mu.Unlock()
	g.b.forget(g, left)
	if lastWord {
		g.b.deliver(message{conn: g.conn, from: g, err: driver.ErrPeerLost})
	}
}

// broken implements end. Where control stands, it still tells the peer that nothing lands, but
// for a peer that breaks the rules.
func (g *inbound) broken(c *conn, err error) {
	if c.index == control || errors.Is(err, driver.ErrCorrupt) {
		g.end(true)
		return
	}
	g.halt()
	g.limit.Reset(g.b.cfg.Handshake)
}

// halt has nothing land any more that this peer sends, nor any message delivered, and tells it so.
// Control goes on.
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
	if c := conns[control]; c != nil {
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

// errMisplaced is a frame that no peer of ours sends.
var errMisplaced = errors.New("frame out of place")

// serve implements end: what a peer may say.
func (g *inbound) serve(c *conn) error {
	for {
		for c.posted() > postedMax { // it does not read what we answer
			if c.choked.Store(true); c.posted() > postedMax { // it may have been written meanwhile
				c.kickAnswers()
				if err := c.awaitResume(); err != nil {
					return err
				}
			}
		}
		h, body, err := c.nextFrame()
		if err != nil {
			return err
		}
		switch {
		case h.kind == kindReady:
			g.mu.Lock()
			g.had = true
			g.ages.extend(h.ticket)
			g.mu.Unlock()
		case c.index == control:
			err = g.onControl(c, h, body)
		case h.kind == kindWrite:
			err = g.landWrite(c, h, body)
		case h.kind == kindRead:
			err = g.queueRead(c, h, body)
		case h.kind == kindNotif && c.index == express:
			err = g.onNotification(c, h, body)
		case h.kind == kindVoid && c.index == express:
			err = g.onVoid(c, h)
		default:
			err = errMisplaced
		}
		if err == errMisplaced {
			err = fmt.Errorf("frame of kind %d out of place: %w", h.kind, driver.ErrCorrupt)
		}
		if err != nil {
			return err
		}
	}
}

// onControl takes what comes over the control connection.
func (g *inbound) onControl(c *conn, h *header, body []byte) error {
	switch h.kind {
	case kindImport:
		return g.onImport(c, h, body)
	case kindPing:
		c.post(&header{kind: kindPong, stamp: g.b.clock.Now()}, nil)
	case kindCredit:
		g.onCredit(int(h.count))
	case kindConfirm:
		return g.onConfirm(h)
	case kindStop:
		g.halt()
	default:
		return errMisplaced
	}
	return nil
}

// onImport answers an Import.
func (g *inbound) onImport(c *conn, h *header, secret []byte) error {
	if len(secret) != 16 {
		return errMisplaced
	}
	a := header{kind: kindImported, id: h.id}
	m, ticket, err := g.b.show(h.key, h.ticket, secret)
	a.status = uint8(session.StatusOf(err))
	if err == nil {
		a.ticket, a.message = ticket, m.seg.Len
		if m.seg.ReadOnly {
			a.flags = flagReadOnly
		}
	}
	c.post(&a, nil)
	return nil
}

// landWrite is what the owner does with a part of a Write, from its head to the answer. Bytes for
// memory whose epoch has ended go nowhere.
func (g *inbound) landWrite(c *conn, h *header, body []byte) error {
	if h.message != 0 && !g.expects(h.message) {
		return errMisplaced
	}
	l := &c.in.land
	*l = landing{owner: g, stamp: h.stamp, ticket: h.ticket}
	l.left = uint64(int(h.length) - h.buffered())

	// Which memory, and where in it: the one look at the bounds of this side.
	if m := g.b.memories.At(h.key); m == nil || !m.hasTicket(h.ticket) {
		l.status = session.StatusRevoked
	} else {
		testpoint.At("tcp: aimed") // the ticket of a write's head was good
		r, status := c.in.chunk.named(h, body, &m.seg)
		if m.seg.ReadOnly || status == session.StatusFailed || r.left != l.left {
			return errMisplaced
		}
		if l.ranges, l.status = r, status; status == session.StatusOK {
			l.m, l.mem, l.shared = m, m.seg.Mem, m.seg.Shared
		}
	}

	// The bytes, each piece behind the gate of the memory: see enter.
	if err := c.land(l); err != nil {
		return err
	}

	if h.message == 0 || g.onPart(h.message, l.status == session.StatusOK) {
		c.post(&header{kind: kindAck, id: h.id, status: uint8(l.status),
			stamp: g.b.clock.Now()}, nil)
	}
	return nil
}

// named walks what a frame names of a memory. Bounds: a pattern is not within it, or something is
// not within Segment.Only. Failed: no peer of ours says that.
func (k *chunk) named(h *header, body []byte, seg *driver.Segment) (r ranges,
	status session.Status) {
	if h.flags&flagPattern == 0 {
		var ok bool
		r.table = body
		if r.left, ok = tableBytes(body, seg.Len); !ok {
			return r, session.StatusFailed
		}
		return r, r.within(seg.Only)
	}
	f := &k.frag
	if !f.decode(body, k.slots[:]) {
		return r, session.StatusFailed
	}
	r.left = f.bytes
	if !f.check(seg.Len) {
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
		off, n := r.next()
		if !only.Has(off, n, &at) {
			return session.StatusBounds
		}
		r.advance(n)
	}
	return session.StatusOK
}

// queueRead takes a Read. It is served when those before it are.
func (g *inbound) queueRead(c *conn, h *header, body []byte) error {
	for {
		g.mu.Lock()
		queued := g.reads[c.index].push(h, body)
		if queued {
			c.serves.Store(true)
		}
		g.mu.Unlock()
		if queued {
			return nil
		}
		c.kickAnswers()
		if err := c.awaitResume(); err != nil {
			return err
		}
	}
}

// next implements end: it begins the answer to the next Read.
func (g *inbound) next(c *conn) bool {
	var h header
	chunk := c.out.chunk
	g.mu.Lock()
	s := &g.reads[c.index]
	body, ok := s.pop(&h, chunk.table[:])
	if !ok {
		c.serves.Store(false)
	} else if s.full {
		s.full = false
		c.proceed()
	}
	g.mu.Unlock()
	if !ok {
		return false
	}
	answer := header{kind: kindAck, id: h.id, status: uint8(session.StatusRevoked),
		stamp: g.b.clock.Now()}
	m := g.b.memories.At(h.key)
	if m == nil || !m.hasTicket(h.ticket) {
		c.out.put(&answer)
		return true
	}
	r, status := chunk.named(&h, body, &m.seg)
	switch {
	case status == session.StatusFailed || r.left > partBytes:
		g.b.tasks.Start(func() { g.end(true) }) // no peer of ours asks for that
		return false
	case status != session.StatusOK:
		answer.status = uint8(status)
		c.out.put(&answer)
		return true
	}
	c.out.put(&header{kind: kindData, id: h.id, length: uint32(r.left)})
	c.out.src = source{mem: m.seg.Mem, m: m, ticket: h.ticket, id: h.id, open: true, ranges: r}
	return true
}

// sent implements end: the acknowledgement follows the bytes, and says whether they are good.
func (g *inbound) sent(c *conn) {
	c.out.put(&header{kind: kindAck, id: c.out.src.id, status: uint8(c.out.src.status),
		stamp: g.b.clock.Now()})
}

// reads are the frames of the Reads of one connection that wait to be served, in order. mu of the
// inbound guards them.
type reads struct {
	frames []byte
	from   int  // where the first begins
	full   bool // the reader waits for room
}

// readsMax is how many bytes of frames may wait of one connection.
const readsMax = 1 << 20

// push adds a Read behind those that wait. It reports false where there is no room.
func (s *reads) push(h *header, body []byte) bool {
	n := headBytes + len(body)
	if wait := len(s.frames) - s.from; wait > 0 && wait+n > readsMax {
		s.full = true
		return false
	}
	if s.from > 0 && len(s.frames)+n > cap(s.frames) {
		s.frames, s.from = s.frames[:copy(s.frames, s.frames[s.from:])], 0
	}
	s.frames = append(h.append(s.frames), body...)
	return true
}

// pop takes the first Read off, and copies what it names to a table.
func (s *reads) pop(h *header, table []byte) (body []byte, ok bool) {
	rest := s.frames[s.from:]
	if len(rest) == 0 {
		return nil, false
	}
	_ = h.decode((*[headBytes]byte)(rest)) // it was sound when it came
	n := headBytes + int(h.length)
	body = table[:copy(table, rest[headBytes:n])]
	if s.from += n; s.from == len(s.frames) {
		s.frames, s.from = s.frames[:0], 0
	}
	return body, true
}
