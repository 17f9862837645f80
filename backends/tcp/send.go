// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/session"
)

// gatherMin is from how many contiguous bytes on the kernel takes them where they lie. Less
// is gathered in a chunk first.
const gatherMin = 8 << 10

// inlineMax is how many bytes of a batch the caller of Submit may write itself.
const inlineMax = 64 << 10

// sender is what a connection is about to write. wmu guards it.
type sender struct {
	chunk  *chunk
	from   int // written of chunk
	direct [vectorMax - 1][]byte
	first  int // of direct that is not written
	count  int
	src    source
	vector vector
	err    error
}

// source is the payload that follows a head.
type source struct {
	ranges
	mem    []byte
	m      *memory // of the owner, whose gate is held by each piece
	ticket uint64
	status session.Status // not OK: what is left is filled with zeros
	id     uint64         // of the part
	open   bool           // sent is to be called
}

func (o *sender) release(b *Backend) {
	if o.chunk != nil {
		b.chunks.put(o.chunk)
		o.chunk = nil
	}
	o.vector.drop()
	clear(o.direct[:o.count])
	o.from, o.first, o.count = 0, 0, 0
}

// room is how much the chunk takes. Its records must fit into another.
func (o *sender) room() int { return len(o.chunk.mem) - recordsSlack - o.chunk.n }

// put appends a head.
func (o *sender) put(h *header) { o.chunk.n = len(h.append(o.chunk.mem[:o.chunk.n])) }

// post queues a frame that goes before data; kick must follow.
func (c *conn) post(h *header, body []byte) {
	h.length = uint32(len(body))
	c.queueMu.Lock()
	c.queue = append(h.append(c.queue), body...)
	c.queueMu.Unlock()
}

// posted is how many bytes are queued.
func (c *conn) posted() int {
	c.queueMu.Lock()
	defer c.queueMu.Unlock()
	return len(c.queue)
}

// send is post and kick.
func (c *conn) send(h header) {
	c.post(&h, nil)
	c.kick(false)
}

// kickAnswers has written what answers the other side, if anything does.
func (c *conn) kickAnswers() {
	if c.posted() > 0 || c.serves.Load() {
		c.kick(false)
	}
}

// kick has what waits written: by this goroutine as far as the socket takes it, unless the work is
// large, or another goroutine is at it, which then looks again.
func (c *conn) kick(large bool) {
	if c.kicks.Add(1) > 1 {
		return
	}
	if large || c.tls || c.raw.Write(c.writeNow) != nil {
		c.handOver()
	}
}

// handOver leaves the writing to the goroutine. Only the goroutine that has it may call this.
func (c *conn) handOver() {
	c.start.Do(func() { c.b.tasks.Start(c.write) })
	c.work <- struct{}{} // one goroutine has the writing, and there is one place
}

// write is the writing goroutine.
func (c *conn) write() {
	for {
		select {
		case <-c.work:
		case <-c.gone:
			return
		}
		if c.tls {
			_ = c.drain(-1) // the reader finds the same, and tells of it
		} else if c.raw.Write(c.writeOut) != nil {
			return // it is closed
		}
	}
}

// errBlocked: the socket takes no more.
var errBlocked = errors.New("the socket is full")

// drain writes what there is, and gives the writing up unless there is an error.
func (c *conn) drain(fd int) error {
	for {
		before := c.kicks.Load()
		if err := c.flush(fd); err != nil {
			return err
		}
		if c.kicks.CompareAndSwap(before, 0) {
			return nil
		}
	}
}

// flush writes until there is nothing left. The error of a connection that has ended is told by its
// reader, which finds it as well.
func (c *conn) flush(fd int) error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	o := &c.out
	for {
		if c.over.Load() {
			return errOver
		}
		pending := o.chunk != nil && o.from < o.chunk.n || o.first < o.count
		if !pending && !c.load() {
			o.release(c.b)
			return nil
		}
		n, err := c.push(fd)
		if err == unix.EAGAIN {
			return errBlocked
		}
		if err != nil {
			return err
		}
		o.wrote(n)
	}
}

// load puts together what goes next: queued frames, then data. It reports whether there is
// something.
func (c *conn) load() bool {
	o := &c.out
	if o.chunk == nil {
		o.chunk = c.b.chunks.get()
	}
	o.chunk.n, o.from, o.first, o.count = 0, 0, 0, 0
	for {
		switch {
		case o.src.left > 0:
			if !c.gather() {
				return true
			}
		case o.count > 0:
			return true // what follows goes behind the direct bytes
		case o.room() < headBytes:
			return true // small pieces fill a chunk to its end: what sent puts goes into the next
		case o.src.open:
			c.end.sent(c)
			o.src = source{}
		case o.room() < chunkSlack:
			return true
		case c.loadQueued():
		case !c.end.next(c):
			return o.chunk.n > 0
		}
	}
}

// loadQueued moves queued frames into the chunk. Those that do not fit go as they are.
func (c *conn) loadQueued() bool {
	o := &c.out
	c.queueMu.Lock()
	defer c.queueMu.Unlock()
	if len(c.queue) == 0 {
		return false
	}
	if c.choked.Swap(false) {
		c.proceed()
	}
	if c.crowded.Swap(false) {
		c.b.alarm() // there is room to Answer
	}
	if len(c.queue) <= o.room() {
		o.chunk.n += copy(o.chunk.mem[o.chunk.n:], c.queue)
		if c.queue = c.queue[:0]; cap(c.queue) > bodyMax {
			c.queue = nil
		}
		return true
	}
	o.direct[0], o.count = c.queue, 1
	c.queue = nil
	return true
}

// gather adds the next piece of the payload. It reports false if the chunk is full, or there is
// as much in place as one call takes.
func (c *conn) gather() bool {
	o, s := &c.out, &c.out.src
	if s.status != session.StatusOK {
		return o.zeros()
	}
	off, n := s.next()
	if !c.tls && n >= gatherMin {
		if o.count == len(o.direct) {
			return false
		}
		o.direct[o.count] = s.mem[off : off+n]
		o.count++
		s.advance(n)
		return true
	}
	if o.count > 0 || o.room() == 0 {
		return false
	}
	if s.m != nil && !s.m.enter(s.ticket) {
		s.status = session.StatusRevoked
		return true
	}
	if err := o.copyPieces(c.tls); err != nil {
		s.status = session.StatusOf(err)
	}
	if s.m != nil {
		s.m.leave()
	}
	return true
}

// copyPieces copies small pieces into the chunk until it is full or a large one comes.
func (o *sender) copyPieces(all bool) (err error) {
	defer hostmem.CatchFault(&err, hostmem.PanicOnFault())
	s := &o.src
	ahead := prefetcher{s.ranges, s.mem}
	ahead.fetch(prefetchAhead)
	for s.left > 0 && o.room() > 0 {
		ahead.fetch(1)
		off, n := s.next()
		if !all && n >= gatherMin {
			return nil
		}
		n = min(n, uint64(o.room()))
		o.chunk.n += copy(o.chunk.mem[o.chunk.n:], s.mem[off:off+n])
		s.advance(n)
	}
	return nil
}

// zeros stands in for bytes that may be read no more: a frame has its length.
func (o *sender) zeros() bool {
	n := min(uint64(o.room()), o.src.left)
	if o.count > 0 || n == 0 {
		return false
	}
	clear(o.chunk.mem[o.chunk.n:][:n])
	o.chunk.n += int(n)
	o.src.left -= n
	return true
}

// push writes once. What lies in memory of the owner is written behind its gate.
func (c *conn) push(fd int) (int, error) {
	o := &c.out
	head := o.chunk.mem[o.from:o.chunk.n]
	if c.tls {
		if len(head) == 0 {
			head = o.direct[o.first]
		}
		return c.pushSecure(head)
	}
	if m := o.src.m; m != nil && o.first < o.count {
		if m.enter(o.src.ticket) {
			defer m.leave()
		} else {
			o.takeBack(session.StatusRevoked)
		}
	}
	o.vector.add(head)
	for _, b := range o.direct[o.first:o.count] {
		o.vector.add(b)
	}
	if o.vector.n == 0 {
		return 0, nil
	}
	n, err := o.vector.call(unix.SYS_WRITEV, fd)
	o.vector.drop()
	if err == unix.EFAULT { // before any byte: what the kernel has read it counts
		o.takeBack(session.StatusFault)
		return 0, nil
	}
	return n, err
}

// pushSecure writes b as TLS, with one call of the kernel for several records.
func (c *conn) pushSecure(b []byte) (int, error) {
	c.below.hold()
	n, err := c.net.Write(b)
	if e := c.below.flush(); err == nil {
		err = e
	}
	return n, err
}

// takeBack takes back what was to be written from memory whose epoch has ended, or that is gone.
func (o *sender) takeBack(why session.Status) {
	for _, b := range o.direct[o.first:o.count] {
		o.src.left += uint64(len(b))
	}
	clear(o.direct[:o.count])
	o.first, o.count = 0, 0
	o.src.status = why
}

// wrote counts what the socket has taken.
func (o *sender) wrote(n int) {
	k := min(n, o.chunk.n-o.from)
	o.from += k
	for n -= k; n > 0; {
		b := o.direct[o.first]
		k := min(n, len(b))
		if o.direct[o.first] = b[k:]; k == len(b) {
			o.first++
		}
		n -= k
	}
}
