// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"fmt"
	"math"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// Can implements driver.Peer.
func (p *peer) Can() driver.Can { return can }

const can = driver.CanPattern | driver.CanNotify

// Submit implements driver.Peer. The batch is checked, copied and put into a queue, from which the
// writing goroutines of connections cut parts (next). A part is over once it is written (sent) and
// the owner has acknowledged it (onAck), and the batch with its last part (settle).
func (p *peer) Submit(tag uint64, b *driver.Batch) error {
	if err := b.Check(can); err != nil {
		return err
	}
	if !p.entry.Enter() {
		return driver.ErrClosed
	}
	defer p.entry.Exit()
	if p.dead.Load() {
		return driver.ErrPeerLost
	}
	if b.Tail == driver.NotifyTail && len(b.Notify) > p.notifMax {
		return fmt.Errorf("notification of %d bytes, at most %d: %w",
			len(b.Notify), p.notifMax, driver.ErrBounds)
	}
	if !p.b.done.Take() {
		return driver.ErrFull
	}
	x := p.b.batches.get()
	err := x.prepare(p, tag, b)
	large := x.bytes > inlineMax
	if err == nil {
		err = p.enqueue(x, large)
	}
	if err != nil {
		x.reset()
		p.b.batches.put(x)
		p.b.done.GiveBack()
		return err
	}
	if !large {
		p.conns[express].kick(false) // this goroutine writes it, where the socket has room
		return nil
	}
	for i := min(bulk, len(p.conns)-1); i < len(p.conns); i++ {
		p.conns[i].kick(true)
	}
	return nil
}

// enqueue puts a batch in its queue, and reserves the place of its notification at the owner.
func (p *peer) enqueue(x *batch, large bool) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.failed {
		return driver.ErrPeerLost
	}
	if x.tail == driver.NotifyTail {
		if p.credit == 0 {
			p.starved = true
			return driver.ErrFull
		}
		p.credit--
		p.messages++
		x.number = p.messages
	}
	p.byTag[x.tag] = x
	if large {
		p.large.push(x)
	} else {
		p.small.push(x)
	}
	return nil
}

// turnOf returns the batch of which a connection sends the next part; p.mu is held.
func (p *peer) turnOf(c *conn) *batch {
	if c.index == express && p.small.first != nil {
		return p.small.first
	}
	if c.index == express && len(p.conns) > bulk {
		return nil
	}
	return p.large.first
}

// part is what one frame carries of a batch: pieces of one pair of memories. It is on its
// connection's in-flight table until the owner has acknowledged it.
type part struct {
	batch *batch // nil: free
	turn  uint32 // how often the place was used
	first int    // piece; the part begins at skip in it
	skip  uint64
	n     uint64
	v     int
	notif bool // it is a notification, and n is 0

	// A part is over when both are so. Most often the first comes first, but the goroutine that
	// wrote the last bytes may be slower than the owner, and a malicious owner may say anything.
	out    bool // no goroutine reads of the batch to send it
	acked  bool
	status session.Status
}

// inFlight is the in-flight table: the parts of one connection. p.mu guards them.
type inFlight struct {
	parts  []part
	free   []uint32
	flying uint64 // bytes
}

func (k *inFlight) open(q part) (id uint64) {
	var i uint32
	if n := len(k.free); n > 0 {
		i, k.free = k.free[n-1], k.free[:n-1]
	} else {
		i = uint32(len(k.parts))
		k.parts = append(k.parts, part{})
	}
	q.turn = k.parts[i].turn + 1
	k.parts[i] = q
	k.flying += q.n
	q.batch.flying++
	return uint64(q.turn)<<32 | uint64(i)
}

// at returns the part of an id; nil: the peer made it up.
func (k *inFlight) at(id uint64) *part {
	i := id & math.MaxUint32
	if i >= uint64(len(k.parts)) || k.parts[i].batch == nil || k.parts[i].turn != uint32(id>>32) {
		return nil
	}
	return &k.parts[i]
}

// next implements end: it cuts the next part off a batch that waits, and puts its frame into the
// chunk. The bytes of a Write follow: the connection walks out.src. A frame has one table, of one
// pair of memories, or a fragment of a pattern.
func (p *peer) next(c *conn) bool {
	if c.index == control {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	x := p.turnOf(c)
	if x == nil || p.failed {
		return false
	}
	if x.i == x.count { // a notification alone
		x.queue.remove(x)
		p.sendNotif(x)
		return true // it is queued, and goes next
	}
	k := &p.flight[c.index]
	if k.flying > 0 && k.flying+min(partBytes, x.bytes) > uint64(p.b.cfg.Flight) {
		return false
	}
	q := part{batch: x, first: x.i, skip: x.off, out: x.op == driver.Read}
	for x.entry == 0 && !x.views[x.v].shows(&x.descs[x.i]) {
		x.v++
	}
	q.v = x.v
	v, o := &x.views[x.v], &c.out
	h := header{kind: kindWrite, key: v.remote.key, ticket: v.remote.ticket, stamp: p.stamp()}
	if x.op == driver.Read {
		h.kind = kindRead
	} else if x.tail != driver.NoTail {
		h.message = x.number
	}
	start := o.chunk.n
	o.put(&h) // the place: what it says comes later
	if x.entry > 0 {
		h.flags |= flagPattern
		q.n, h.count = x.cutPattern(o)
	} else {
		q.n, h.count = x.cutTable(o, v)
	}
	h.length = h.table()
	x.sent++
	h.id = k.open(q)
	if x.op == driver.Write {
		x.unread++
		h.length += uint32(q.n)
		o.src = source{mem: v.local.seg.Mem, id: h.id, open: true, ranges: x.locals(&q)}
		p.lastSent = p.b.clock.Now()
	}
	h.append(o.chunk.mem[start:start])
	if x.i == x.count { // its notification follows when all of it is read: see sent
		x.queue.remove(x)
	}
	return true
}

// locals walks the local side of a part.
func (x *batch) locals(q *part) ranges {
	r := ranges{left: q.n}
	if x.entry > 0 {
		r.walkPattern(&x.pattern, &x.pattern.Local, q.first, q.skip)
	} else {
		r.descs, r.i, r.skip = x.descs, q.first, q.skip
	}
	return r
}

// cutTable writes the owner's side of descriptors until the part is full, or another pair of
// memories comes. Neighbours become one entry.
func (x *batch) cutTable(o *sender, v *view) (bytes uint64, entries uint32) {
	var off, n uint64 // of the entry under way
	b := o.chunk.mem[:o.chunk.n]
	for x.i < x.count && bytes < partBytes {
		d := &x.descs[x.i]
		if !v.shows(d) {
			break
		}
		k := min(d.Len-x.off, partBytes-bytes)
		if n > 0 && off+n == d.Remote+x.off {
			n += k
		} else {
			if n > 0 {
				b = appendEntry(b, off, n)
				entries++
			}
			if entries == entriesMax {
				n = 0
				break
			}
			off, n = d.Remote+x.off, k
		}
		bytes += k
		if x.off += k; x.off == d.Len {
			x.i, x.off = x.i+1, 0
		}
	}
	if n > 0 {
		b = appendEntry(b, off, n)
		entries++
	}
	o.chunk.n = len(b)
	return bytes, entries
}

// sendNotif queues the notification of a batch, of which all parts are on their way; p.mu is held.
func (p *peer) sendNotif(x *batch) {
	c := p.conns[express]
	h := header{kind: kindNotif, count: x.sent, message: x.number, stamp: p.stamp()}
	h.id = p.flight[express].open(part{batch: x, notif: true, out: true})
	c.post(&h, x.msg)
	p.lastSent = p.b.clock.Now()
}

// sent implements end: what follows the head of a Write is read. Where our memory has faulted, what
// the owner got in its place are zeros, and it takes them for bytes: so no notification was sent
// before all was read.
func (p *peer) sent(c *conn) {
	p.mu.Lock()
	if q := p.flight[c.index].at(c.out.src.id); q != nil {
		x := q.batch
		q.out = true
		x.unread--
		if err := c.out.src.status.Err(); err != nil {
			p.drop(x, err)
		}
		if x.queue == nil && x.unread == 0 && x.tail != driver.NoTail && !p.failed {
			if x.err == nil {
				p.sendNotif(x)
			} else {
				p.withdrawNotif(x)
			}
		}
		p.endPart(c, q, c.out.src.id)
	}
	p.mu.Unlock()
	p.b.wakeForDone()
	if c.index != express {
		p.conns[express].kickAnswers() // its notification, perhaps
	}
}

// onAck takes word that a part is in place. It reports false for one that the peer made up.
func (p *peer) onAck(c *conn, h *header) bool {
	p.mu.Lock()
	q := p.flight[c.index].at(h.id)
	if q == nil || q.acked {
		p.mu.Unlock()
		return false
	}
	q.acked, q.status = true, session.Status(h.status)
	p.endPart(c, q, h.id)
	more := p.turnOf(c) != nil
	p.mu.Unlock()
	p.b.wakeForDone()
	if more { // there may be room for it now
		c.kick(c.index != express)
	}
	p.conns[express].kickAnswers()
	return true
}

// endPart takes a part out of the in-flight table if it is over; p.mu is held.
func (p *peer) endPart(c *conn, q *part, id uint64) {
	if !q.out || !q.acked {
		return
	}
	x, k := q.batch, &p.flight[c.index]
	if err := q.status.Err(); err != nil {
		p.drop(x, err)
	}
	k.flying -= q.n
	x.flying--
	q.batch = nil
	k.free = append(k.free, uint32(id))
	p.settle(x)
}

// drop takes a batch out of its queue for a reason; p.mu is held. The owner is told that no
// notification follows.
func (p *peer) drop(x *batch, why error) {
	if x.err == nil {
		x.err = why
	}
	if x.queue != nil {
		x.queue.remove(x)
		p.withdrawNotif(x)
	}
}

// withdrawNotif takes a notification back that was not sent; p.mu is held. The owner gives its
// place back, and delivers those behind it: so this counts as something that lets bytes land.
func (p *peer) withdrawNotif(x *batch) {
	if x.tail == driver.NoTail || p.failed {
		return
	}
	x.tail = driver.NoTail
	p.conns[express].post(&header{kind: kindVoid, count: x.sent, message: x.number,
		stamp: p.stamp()}, nil)
	p.lastSent = p.b.clock.Now()
}

// settle completes a batch of which nothing waits or is on its way; p.mu is held. Its caller wakes
// the backend once that is not.
func (p *peer) settle(x *batch) {
	if x.queue == nil && x.flying == 0 && p.byTag[x.tag] == x {
		delete(p.byTag, x.tag)
		p.complete(x)
	}
}

// complete gives a batch back before its place among the completions can come free.
func (p *peer) complete(x *batch) {
	tag, err := x.tag, x.err
	x.reset()
	p.b.batches.put(x)
	p.b.done.Push(tag, err)
}

// target says where the bytes of a Read go. It reports false for a part that the peer made up.
func (p *peer) target(c *conn, h *header) (l *landing, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	q := p.flight[c.index].at(h.id)
	if q == nil || q.notif || q.batch.op != driver.Read || q.n != uint64(h.length) {
		return nil, false
	}
	x := q.batch
	seg := &x.views[q.v].local.seg
	l = &c.in.land
	*l = landing{mem: seg.Mem, shared: seg.Shared, cancel: &x.dropped, ranges: x.locals(q)}
	return l, true
}

// landed takes word of the bytes of a Read, which is over when its acknowledgement comes. It fails
// if its memory has faulted.
func (p *peer) landed(c *conn, id uint64, status session.Status) {
	if status == session.StatusOK {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if q := p.flight[c.index].at(id); q != nil {
		p.drop(q.batch, status.Err())
	}
}

// Cancel implements driver.Peer. What is on its way comes to its end: that it is
// acknowledged proves that nothing more of it lands.
func (p *peer) Cancel(tag uint64) {
	p.mu.Lock()
	x := p.byTag[tag]
	if x == nil {
		p.mu.Unlock()
		return
	}
	if x.op == driver.Read {
		x.dropped.Store(true)
	}
	if x.op == driver.Read || x.queue != nil {
		p.drop(x, driver.ErrAborted)
	}
	p.settle(x)
	p.mu.Unlock()
	p.b.wakeForDone()
	p.conns[express].kickAnswers()
}
