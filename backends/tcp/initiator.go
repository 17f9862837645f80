// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"fmt"
	"math"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// What the initiator does for a batch, in the order of its life: Submit, putNext, payloadSent,
// onAck, completeIfOver. p.mu guards the batches of a peer and their parts.

const can = driver.CanPattern | driver.CanNotify

// Can implements driver.Peer.
func (p *peer) Can() driver.Can { return can }

// Submit implements driver.Peer. It checks the batch, copies it and puts it into a queue, from
// which the connections cut parts (putNext). A part is over once its bytes are read (payloadSent)
// and the owner has acknowledged it (onAck), and the batch with its last part (completeIfOver).
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
		p.mu.Lock()
		switch {
		case p.failed:
			err = driver.ErrPeerLost
		case x.tail == driver.NotifyTail && p.credit == 0:
			p.submitWaitsForCredit = true
			err = driver.ErrFull
		default:
			if x.tail == driver.NotifyTail { // one place among the owner's messages
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
		}
		p.mu.Unlock()
	}
	if err != nil {
		x.reset()
		p.b.batches.put(x)
		p.b.done.GiveBack()
		return err
	}
	if !large {
		p.conns[express].startWriting(false) // by this goroutine, as far as the socket has room
		return nil
	}
	for i := min(bulk, len(p.conns)-1); i < len(p.conns); i++ {
		p.conns[i].startWriting(true)
	}
	return nil
}

// batchFor returns the batch of which a connection sends the next part; nil: none.
// Preconditions: p.mu is held.
func (p *peer) batchFor(c *conn) *batch {
	if c.index == express && p.small.first != nil {
		return p.small.first
	}
	if c.index == express && len(p.conns) > bulk {
		return nil
	}
	return p.large.first
}

// part is the share of a batch that goes into one frame: pieces of one pair of memories, or the
// notification. It stays in the table of its connection until it is over.
type part struct {
	batch *batch // nil: this place of the table is free
	use   uint32 // how many parts have had this place
	first int    // the piece with which the part begins
	skip  uint64 // bytes of that piece that an earlier part has
	n     uint64 // bytes; 0: a notification
	pair  int    // index into batch.pairs
	notif bool

	// A part is over when it is both sent and acknowledged. Most often it is sent first, but the
	// goroutine that writes may be slower than the owner, and a malicious owner may say anything.
	sent   bool // no goroutine reads memory of the batch to send it
	acked  bool
	status session.Status
}

// partTable has the parts of one connection that are not over.
type partTable struct {
	parts []part
	free  []uint32 // indices of places
	bytes uint64   // of all parts, which Config.Flight bounds
}

// add returns an id, which the frame carries and the owner repeats.
func (k *partTable) add(q part) (id uint64) {
	var i uint32
	if n := len(k.free); n > 0 {
		i, k.free = k.free[n-1], k.free[:n-1]
	} else {
		i = uint32(len(k.parts))
		k.parts = append(k.parts, part{})
	}
	q.use = k.parts[i].use + 1
	k.parts[i] = q
	k.bytes += q.n
	q.batch.partsUnacked++
	return uint64(q.use)<<32 | uint64(i)
}

// find returns the part of an id; nil: the owner made the id up.
func (k *partTable) find(id uint64) *part {
	i := id & math.MaxUint32
	if i >= uint64(len(k.parts)) || k.parts[i].batch == nil || k.parts[i].use != uint32(id>>32) {
		return nil
	}
	return &k.parts[i]
}

// putNext implements side: it cuts the next part off the first batch in the queue, and puts its
// frame into the chunk: a table of entries of one pair of memories, or a fragment of a pattern. The
// bytes of a Write follow as c.out.payload.
func (p *peer) putNext(c *conn) bool {
	if c.index == control {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	x := p.batchFor(c)
	if x == nil || p.failed {
		return false
	}
	if x.piece == x.count { // the batch is a notification without bytes
		x.queue.remove(x)
		p.sendNotif(x)
		return true // gatherQueued sends it
	}
	k := &p.parts[c.index]
	if k.bytes > 0 && k.bytes+min(partBytes, x.bytes) > uint64(p.b.cfg.Flight) {
		return false
	}
	q := part{batch: x, first: x.piece, skip: x.pieceOff, sent: x.op == driver.Read}
	for x.entryLen == 0 && !x.pairs[x.pairAt].matches(&x.descs[x.piece]) {
		x.pairAt++
	}
	q.pair = x.pairAt
	v, o := &x.pairs[x.pairAt], &c.out
	h := header{kind: kindWrite, key: v.remote.key, ticket: v.remote.ticket, stamp: p.ownerTime()}
	if x.op == driver.Read {
		h.kind = kindRead
	} else if x.tail != driver.NoTail {
		h.message = x.number
	}
	start := o.chunk.n
	o.putHead(&h) // takes the room; the head is written again when all of it is known
	if x.entryLen > 0 {
		h.flags |= flagPattern
		q.n, h.count = x.cutPattern(o)
	} else {
		q.n, h.count = x.cutTable(o, v)
	}
	h.length = h.table()
	x.partsSent++
	h.id = k.add(q)
	if x.op == driver.Write {
		x.partsUnread++
		h.length += uint32(q.n)
		o.payload = payload{mem: v.local.seg.Mem, id: h.id, unfinished: true,
			ranges: x.localRanges(&q)}
		p.lastSent = p.b.clock.Now()
	}
	h.append(o.chunk.mem[start:start])
	if x.piece == x.count { // payloadSent sends its notification
		x.queue.remove(x)
	}
	return true
}

// localRanges returns the ranges of a part in local memory.
func (x *batch) localRanges(q *part) ranges {
	r := ranges{left: q.n}
	if x.entryLen > 0 {
		r.walkPattern(&x.pattern, &x.pattern.Local, q.first, q.skip)
	} else {
		r.descs, r.i, r.skip = x.descs, q.first, q.skip
	}
	return r
}

// cutTable appends a table of entries to the chunk: the owner's side of descriptors, until the part
// is full or a descriptor is of another pair of memories. Adjacent descriptors become one entry.
func (x *batch) cutTable(o *sender, v *pair) (bytes uint64, entries uint32) {
	var off, n uint64 // of the entry under way
	b := o.chunk.mem[:o.chunk.n]
	for x.piece < x.count && bytes < partBytes {
		d := &x.descs[x.piece]
		if !v.matches(d) {
			break
		}
		k := min(d.Len-x.pieceOff, partBytes-bytes)
		if n > 0 && off+n == d.Remote+x.pieceOff {
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
			off, n = d.Remote+x.pieceOff, k
		}
		bytes += k
		if x.pieceOff += k; x.pieceOff == d.Len {
			x.piece, x.pieceOff = x.piece+1, 0
		}
	}
	if n > 0 {
		b = appendEntry(b, off, n)
		entries++
	}
	o.chunk.n = len(b)
	return bytes, entries
}

// sendNotif queues the notification of a batch, all parts of which are sent.
// Preconditions: p.mu is held.
func (p *peer) sendNotif(x *batch) {
	c := p.conns[express]
	h := header{kind: kindNotif, count: x.partsSent, message: x.number, stamp: p.ownerTime()}
	h.id = p.parts[express].add(part{batch: x, notif: true, sent: true})
	c.queueFrame(&h, x.msg)
	p.lastSent = p.b.clock.Now()
}

// payloadSent implements side: the bytes of a part of a Write are read. If reading them faulted,
// the owner got zeros in their place and cannot tell. So the notification of the batch is sent only
// now, when the bytes of all parts are read and none has faulted.
func (p *peer) payloadSent(c *conn) {
	p.mu.Lock()
	if q := p.parts[c.index].find(c.out.payload.id); q != nil {
		x := q.batch
		q.sent = true
		x.partsUnread--
		if err := c.out.payload.status.Err(); err != nil {
			p.failBatch(x, err)
		}
		if x.queue == nil && x.partsUnread == 0 && x.tail != driver.NoTail && !p.failed {
			if x.err == nil {
				p.sendNotif(x)
			} else {
				p.withdrawNotif(x)
			}
		}
		p.endPart(c, q, c.out.payload.id)
	}
	p.mu.Unlock()
	p.b.wakeForDone()
	if c.index != express {
		p.conns[express].writeQueued() // perhaps its notification
	}
}

// onAck handles the acknowledgement of a part. It reports false for an id that the owner made up.
func (p *peer) onAck(c *conn, h *header) bool {
	p.mu.Lock()
	q := p.parts[c.index].find(h.id)
	if q == nil || q.acked {
		p.mu.Unlock()
		return false
	}
	q.acked, q.status = true, session.Status(h.status)
	p.endPart(c, q, h.id)
	more := p.batchFor(c) != nil
	p.mu.Unlock()
	p.b.handOver(c)
	if more { // Config.Flight may have room for it now
		c.startWriting(c.index != express)
	}
	p.conns[express].writeQueued()
	return true
}

// endPart takes a part out of its table if it is over.
// Preconditions: p.mu is held.
func (p *peer) endPart(c *conn, q *part, id uint64) {
	if !q.sent || !q.acked {
		return
	}
	x, k := q.batch, &p.parts[c.index]
	if err := q.status.Err(); err != nil {
		p.failBatch(x, err)
	}
	k.bytes -= q.n
	x.partsUnacked--
	q.batch = nil
	k.free = append(k.free, uint32(id))
	p.completeIfOver(x)
}

// failBatch makes an error that of the batch, unless it has one, and cuts no more parts off it.
// Preconditions: p.mu is held.
func (p *peer) failBatch(x *batch, why error) {
	if x.err == nil {
		x.err = why
	}
	if x.queue != nil {
		x.queue.remove(x)
		p.withdrawNotif(x)
	}
}

// withdrawNotif tells the owner that no notification follows the batch. The owner then delivers the
// messages behind that one: so lastSent counts this frame too.
// Preconditions: p.mu is held.
func (p *peer) withdrawNotif(x *batch) {
	if x.tail == driver.NoTail || p.failed {
		return
	}
	x.tail = driver.NoTail
	p.conns[express].queueFrame(&header{kind: kindVoid, count: x.partsSent, message: x.number,
		stamp: p.ownerTime()}, nil)
	p.lastSent = p.b.clock.Now()
}

// completeIfOver completes a batch that is not in a queue and has no part left. The caller wakes
// the program once it has unlocked p.mu. Preconditions: p.mu is held.
func (p *peer) completeIfOver(x *batch) {
	if x.queue == nil && x.partsUnacked == 0 && p.byTag[x.tag] == x {
		delete(p.byTag, x.tag)
		p.complete(x)
	}
}

// complete queues the completion of a batch. It frees the batch first, since with the completion
// polled another Submit may need one.
func (p *peer) complete(x *batch) {
	tag, err := x.tag, x.err
	x.reset()
	p.b.batches.put(x)
	p.b.done.Push(tag, err)
}

// readTarget returns where the bytes of a part of a Read land. It reports false for an id that the
// owner made up.
func (p *peer) readTarget(c *conn, h *header) (l *landing, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	q := p.parts[c.index].find(h.id)
	if q == nil || q.notif || q.batch.op != driver.Read || q.n != uint64(h.length) {
		return nil, false
	}
	x := q.batch
	seg := &x.pairs[q.pair].local.seg
	l = &c.in.land
	*l = landing{mem: seg.Mem, shared: seg.Shared, cancelled: &x.cancelled,
		ranges: x.localRanges(q)}
	return l, true
}

// onReadLanded fails a Read whose local memory has faulted. The part is over when the owner's
// acknowledgement comes.
func (p *peer) onReadLanded(c *conn, id uint64, status session.Status) {
	if status == session.StatusOK {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if q := p.parts[c.index].find(id); q != nil {
		p.failBatch(q.batch, status.Err())
	}
}

// Cancel implements driver.Peer. Parts that are sent go on: that the owner acknowledges them proves
// that nothing of them lands later. Bytes of a Read that still come go nowhere.
func (p *peer) Cancel(tag uint64) {
	p.mu.Lock()
	x := p.byTag[tag]
	if x == nil {
		p.mu.Unlock()
		return
	}
	if x.op == driver.Read {
		x.cancelled.Store(true)
	}
	if x.op == driver.Read || x.queue != nil {
		p.failBatch(x, driver.ErrAborted)
	}
	p.completeIfOver(x)
	p.mu.Unlock()
	p.b.wakeForDone()
	p.conns[express].writeQueued()
}
