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

// inbound is the owner's end of the connections of one peer, by which the peer reaches memory of
// this backend and sends notifications. The reading goroutines of its connections do all the work:
// serve is their loop, landWrite the way of a Write. Reads are queued and answered by putNext.
type inbound struct {
	b         *Backend
	connID    uint64 // what Message.Conn says
	host      session.Host
	session   uint64
	secret    [16]byte    // which the peer shows to join further connections
	joinTimer clock.Timer // calls expire
	ages      ages

	mu         sync.Mutex  // after conn.writeMu, before conn.queuedMu; guards what follows
	conns      []*conn     // nil: has not joined yet
	reads      []readQueue // by connection
	ready      bool        // the peer has said that all connections have joined
	halted     bool        // no more bytes land, and no more messages are delivered
	ended      bool        // end was called: the connections are closed
	forgotten  bool        // the Backend has removed it; it may still have places
	notifs     notifications
	places     int // places of Config.PeersMax in use, until the program has received all messages
	creditOwed int // messages received by the program that the peer has no credit for yet

	answerMax          int  // bytes of the longest answer that the peer accepts
	answerRoom         int  // answers for which the peer has room
	answerWaitsForRoom bool // an Answer has returned ErrFull for lack of room
}

// queuedMax bounds the acknowledgements and answers that are queued for a peer which does not read.
// One answer may exceed it.
const queuedMax = 256 << 10

func newInbound(b *Backend, n int) *inbound {
	return &inbound{
		b: b, connID: b.lastConnID.Add(1), conns: make([]*conn, n), reads: make([]readQueue, n),
		notifs: notifications{next: 1},
	}
}

// addConn adds a connection that joins. The caller sends the welcome and starts to read the
// connection only afterwards: a frame of any connection can then rely on the control connection. It
// returns false if the inbound has ended, or has a connection of this index.
func (g *inbound) addConn(c *conn) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ended || g.halted || g.conns[c.index] != nil {
		return false
	}
	g.conns[c.index] = c
	return true
}

// end closes all connections, and returns when no more bytes land that came over them. With tell,
// the program receives ErrPeerLost as the last message, if all connections had joined.
func (g *inbound) end(tell bool) {
	if g == nil {
		return
	}
	g.mu.Lock()
	before := g.ended
	g.ended = true
	tell = tell && g.ready
	g.mu.Unlock()
	if before {
		return
	}
	g.joinTimer.Stop()
	for _, c := range g.conns {
		if c != nil {
			c.close(false)
		}
	}
	g.mu.Lock()
	g.notifs.ring = nil
	if tell {
		g.notifs.unreceived++
	}
	g.forgotten = true
	free := g.notifs.unreceived == 0
	g.mu.Unlock()
	g.b.forget(g, free)
	if tell {
		g.b.deliver(message{connID: g.connID, source: g, err: driver.ErrPeerLost})
	}
}

// broken implements side. It ends all connections if the control connection broke, or the peer
// breaks the protocol. Otherwise it halts, which tells the peer that nothing more lands.
func (g *inbound) broken(c *conn, err error) {
	if c.index == control || errors.Is(err, driver.ErrCorrupt) {
		g.end(true)
		return
	}
	g.halt()
	g.joinTimer.Reset(g.b.cfg.Handshake)
}

// halt ends all connections of the peer but the control connection. When no more bytes land and no
// more messages are delivered, it tells the peer so over that (kindStopped).
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
		c.queueFrame(&header{kind: kindStopped}, nil)
		g.b.tasks.Start(func() { c.startWriting(false) }) // the caller may hold locks of c
	}
}

// expire ends an inbound whose connections have not all joined within Config.Handshake, or that was
// halted that long ago. It would otherwise use a place of Config.PeersMax for ever.
func (g *inbound) expire() {
	g.mu.Lock()
	whole := g.ready && !g.halted && !slices.Contains(g.conns, nil)
	g.mu.Unlock()
	if !whole {
		g.b.tasks.Start(func() { g.end(true) })
	}
}

// errMisplaced: the frame breaks the protocol.
var errMisplaced = errors.New("frame out of place")

// serve implements side: it handles what the peer sends.
func (g *inbound) serve(c *conn) error {
	for {
		for c.queuedBytes() > queuedMax { // the peer does not read the answers
			c.readerWaitsForQueue.Store(true)
			if c.queuedBytes() > queuedMax { // else they were written meanwhile
				c.writeQueued()
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
			g.ready = true
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

// onControl handles a frame of the control connection.
func (g *inbound) onControl(c *conn, h *header, body []byte) error {
	switch h.kind {
	case kindImport:
		return g.onImport(c, h, body)
	case kindPing:
		c.queueFrame(&header{kind: kindPong, stamp: g.b.clock.Now()}, nil)
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

// onImport answers with the ticket and the size of the memory that the token names.
func (g *inbound) onImport(c *conn, h *header, secret []byte) error {
	if len(secret) != 16 {
		return errMisplaced
	}
	a := header{kind: kindImported, id: h.id}
	m, ticket, err := g.b.openToken(h.key, h.ticket, secret)
	a.status = uint8(session.StatusOf(err))
	if err == nil {
		a.ticket, a.message = ticket, m.seg.Len
		if m.seg.ReadOnly {
			a.flags = flagReadOnly
		}
	}
	c.queueFrame(&a, nil)
	return nil
}

// landWrite handles one part of a Write, from its head to the acknowledgement. Bytes for memory
// that was revoked are read and go nowhere.
func (g *inbound) landWrite(c *conn, h *header, body []byte) error {
	if h.message != 0 && !g.expects(h.message) {
		return errMisplaced
	}
	l := &c.in.land
	*l = landing{inbound: g, stamp: h.stamp, ticket: h.ticket}
	l.left = uint64(int(h.length) - h.bodyBytes())

	// Find the memory and the ranges in it: this is the check of the owner's bounds.
	if m := g.b.memories.At(h.key); m == nil || !m.hasTicket(h.ticket) {
		l.status = session.StatusRevoked
	} else {
		testpoint.At("tcp: aimed") // the ticket in the head was that of the memory
		r, status := c.in.chunk.rangesOf(h, body, &m.seg)
		if m.seg.ReadOnly || status == session.StatusFailed || r.left != l.left {
			return errMisplaced
		}
		if l.ranges, l.status = r, status; status == session.StatusOK {
			l.owned, l.mem, l.shared = m, m.seg.Mem, m.seg.Shared
		}
	}

	// The bytes land, each piece behind the gate of the memory: see beginPiece.
	if err := c.land(l); err != nil {
		return err
	}

	if h.message == 0 || g.onPartLanded(c, h.message, l.status == session.StatusOK) {
		c.queueFrame(&header{kind: kindAck, id: h.id, status: uint8(l.status),
			stamp: g.b.clock.Now()}, nil)
	}
	return nil
}

// rangesOf returns the ranges that a frame names, within seg. StatusBounds: a pattern leaves the
// memory, or a range leaves Segment.Only. StatusFailed: the frame breaks the protocol.
func (k *chunk) rangesOf(h *header, body []byte, seg *driver.Segment) (r ranges,
	status session.Status) {
	if h.flags&flagPattern == 0 {
		var ok bool
		r.table = body
		if r.left, ok = tableBytes(body, seg.Len); !ok {
			return r, session.StatusFailed
		}
		return r, r.checkOnly(seg.Only)
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
	return r, r.checkOnly(seg.Only)
}

// checkOnly checks that the ranges lie within Segment.Only, those of this part alone: its pattern
// may name many more.
func (r ranges) checkOnly(only driver.Ranges) session.Status {
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

// queueRead queues a part of a Read behind the earlier ones. It waits for room.
func (g *inbound) queueRead(c *conn, h *header, body []byte) error {
	for {
		g.mu.Lock()
		queued := g.reads[c.index].push(h, body)
		if queued {
			c.hasReads.Store(true)
		}
		g.mu.Unlock()
		if queued {
			return nil
		}
		c.writeQueued()
		if err := c.awaitResume(); err != nil {
			return err
		}
	}
}

// putNext implements side: it writes the head of the answer to the first Read in the queue into
// the chunk to be sent, and has the connection send the payload behind it.
func (g *inbound) putNext(c *conn) bool {
	var h header
	chunk := c.out.chunk
	g.mu.Lock()
	s := &g.reads[c.index]
	body, ok := s.pop(&h, chunk.table[:])
	if !ok {
		c.hasReads.Store(false)
	} else if s.readerWaits {
		s.readerWaits = false
		c.resumeReader()
	}
	g.mu.Unlock()
	if !ok {
		return false
	}
	answer := header{kind: kindAck, id: h.id, status: uint8(session.StatusRevoked),
		stamp: g.b.clock.Now()}
	m := g.b.memories.At(h.key)
	if m == nil || !m.hasTicket(h.ticket) {
		c.out.putHead(&answer)
		return true
	}
	r, status := chunk.rangesOf(&h, body, &m.seg)
	switch {
	case status == session.StatusFailed || r.left > partBytes:
		g.b.tasks.Start(func() { g.end(true) }) // the peer breaks the protocol
		return false
	case status != session.StatusOK:
		answer.status = uint8(status)
		c.out.putHead(&answer)
		return true
	}
	c.out.putHead(&header{kind: kindData, id: h.id, length: uint32(r.left)})
	c.out.payload = payload{mem: m.seg.Mem, owned: m, ticket: h.ticket, id: h.id, unfinished: true,
		ranges: r}
	return true
}

// payloadSent implements side: after the bytes of a Read comes the acknowledgement, with the status
// of those bytes.
func (g *inbound) payloadSent(c *conn) {
	c.out.putHead(&header{kind: kindAck, id: c.out.payload.id, status: uint8(c.out.payload.status),
		stamp: g.b.clock.Now()})
}

// readQueue has the frames of Reads that have come over one connection and are not answered yet.
// inbound.mu guards it.
type readQueue struct {
	frames      []byte
	from        int  // index in frames of the first byte that is queued
	readerWaits bool // the reading goroutine waits for room
}

// readsMax bounds the bytes of the frames in a readQueue.
const readsMax = 1 << 20

// push adds a frame at the end. It reports false where there is no room.
func (s *readQueue) push(h *header, body []byte) bool {
	n := headBytes + len(body)
	if wait := len(s.frames) - s.from; wait > 0 && wait+n > readsMax {
		s.readerWaits = true
		return false
	}
	if s.from > 0 && len(s.frames)+n > cap(s.frames) {
		s.frames, s.from = s.frames[:copy(s.frames, s.frames[s.from:])], 0
	}
	s.frames = append(h.append(s.frames), body...)
	return true
}

// pop removes the first frame, and copies its body to table.
func (s *readQueue) pop(h *header, table []byte) (body []byte, ok bool) {
	rest := s.frames[s.from:]
	if len(rest) == 0 {
		return nil, false
	}
	_ = h.decode((*[headBytes]byte)(rest)) // was checked when it came
	n := headBytes + int(h.length)
	body = table[:copy(table, rest[headBytes:n])]
	if s.from += n; s.from == len(s.frames) {
		s.frames, s.from = s.frames[:0], 0
	}
	return body, true
}
