// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"math"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

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

func (k *inFlight) close(id uint64) *batch {
	q := k.at(id)
	x := q.batch
	k.flying -= q.n
	x.flying--
	q.batch = nil
	k.free = append(k.free, uint32(id))
	return x
}

// next implements end: it cuts the next part off a batch that waits.
func (p *peer) next(c *conn) bool {
	if c.index == ctl {
		return false
	}
	for {
		there, failed := p.cutNext(c)
		if failed == nil {
			return there
		}
		p.finishBatch(failed)
		p.conns[express].kickAnswers() // no notification of it follows
	}
}

// cutNext reports whether there is something to send. It returns a batch that is over because
// nothing can be sent of it.
func (p *peer) cutNext(c *conn) (there bool, failed *batch) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		x := p.turnOf(c)
		if x == nil || p.failed {
			return false, nil
		}
		if x.whole() { // a notification alone
			x.queue.remove(x)
			p.sendNotif(x)
			return true, nil // it is queued, and goes next
		}
		k := &p.flight[c.index]
		if k.flying > 0 && k.flying+min(partBytes, x.bytes) > uint64(p.b.cfg.Flight) {
			return false, nil
		}
		if !p.cut(c, x) {
			p.drop(x, driver.ErrBounds)
			if p.settled(x) {
				return false, x
			}
			continue
		}
		if x.whole() { // its notification follows when all of it is read: see sent
			x.queue.remove(x)
		}
		return true, nil
	}
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

// cut puts a frame of the next part into the chunk of a connection; p.mu is held. It reports
// false if the index lists of the batch have changed and lead out of the memory.
func (p *peer) cut(c *conn, x *batch) bool {
	o := &c.out
	q := part{batch: x, first: x.i, skip: x.off}
	for x.entry == 0 && !x.views[x.v].shows(&x.descs[x.i]) {
		x.v++
	}
	q.v = x.v
	v := &x.views[x.v]
	start := o.chunk.n
	h := header{kind: kindWrite, key: v.remote.key, ticket: v.remote.ticket}
	h.batch, h.stamp = x.id, p.stamp()
	if x.op == driver.Read {
		h.kind = kindRead
	} else if x.tail != driver.NoTail {
		h.flags = flagNotified
	}
	o.put(&h) // the place: what it says comes later
	if x.entry > 0 {
		h.flags |= flagPattern
		var ok bool
		if q.n, h.count, ok = x.cutPattern(o); !ok {
			o.chunk.n = start
			return false
		}
	} else {
		q.n, h.count = x.tabulate(o, v)
	}
	h.length = h.table()
	x.sent++
	q.out = x.op == driver.Read
	h.id = p.flight[c.index].open(q)
	if x.op == driver.Write {
		x.unread++
		h.length += uint32(q.n)
		o.src = source{mem: v.local.seg.Mem, id: h.id, open: true, ranges: x.locals(&q)}
		if x.entry > 0 { // by the copy of its list
			o.src.walkPattern(&o.local, &o.local.Local, 0, q.skip)
		}
		p.lastSent = p.b.clock.Now()
	}
	h.append(o.chunk.mem[start:start])
	return true
}

// locals walks the local side of a part.
func (x *batch) locals(q *part) ranges {
	r := ranges{left: q.n, size: x.views[q.v].local.seg.Len}
	if x.entry > 0 {
		r.walkPattern(&x.pattern, &x.pattern.Local, q.first, q.skip)
	} else {
		r.descs, r.i, r.skip = x.descs, q.first, q.skip
	}
	return r
}

// tabulate writes the owner's side of descriptors until the part is full, or another pair of
// memories comes. Neighbours become one entry.
func (x *batch) tabulate(o *sender, v *view) (bytes uint64, entries uint32) {
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
	h := header{kind: kindNotif, count: x.sent, batch: x.id, ticket: x.number}
	h.stamp = p.stamp()
	h.id = p.flight[express].open(part{batch: x, notif: true, out: true})
	c.post(&h, x.msg)
	p.lastSent = p.b.clock.Now()
}

// sent implements end: what follows the head of a Write is read. Where our memory has faulted, what
// the owner got in its place are zeros, and it takes them for bytes: so no notification was sent
// before all was read.
func (p *peer) sent(c *conn) {
	p.mu.Lock()
	q := p.flight[c.index].at(c.out.src.id)
	if q == nil {
		p.mu.Unlock()
		return
	}
	q.out = true
	x := q.batch
	x.unread--
	if err := c.out.src.status.Err(); err != nil {
		p.drop(x, err)
	}
	if x.queue == nil && x.unread == 0 && x.tail != driver.NoTail && !p.failed {
		if x.err == nil {
			p.sendNotif(x)
		} else {
			p.voidNotif(x)
		}
	}
	p.endPart(c, p.flight[c.index].at(c.out.src.id), c.out.src.id)
	if c.index != express {
		p.conns[express].kickAnswers() // its notification, perhaps
	}
}

// acked takes word that a part is in place. It reports false for one that the peer made up.
func (p *peer) acked(c *conn, h *header) bool {
	p.mu.Lock()
	q := p.flight[c.index].at(h.id)
	if q == nil || q.acked {
		p.mu.Unlock()
		return false
	}
	q.acked, q.status = true, session.Status(h.status)
	p.endPart(c, q, h.id)
	return true
}

// endPart takes a part out of the in-flight table if it is over. p.mu is held, and is not when it
// returns.
func (p *peer) endPart(c *conn, q *part, id uint64) {
	if !q.out || !q.acked {
		p.mu.Unlock()
		return
	}
	if err := q.status.Err(); err != nil {
		p.drop(q.batch, err)
	}
	x := p.flight[c.index].close(id)
	over := p.settled(x)
	next := p.turnOf(c)
	p.mu.Unlock()
	if over {
		p.finishBatch(x)
	}
	if next != nil {
		c.kick(c.index != express)
	}
	p.conns[express].kickAnswers()
}
