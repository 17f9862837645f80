// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/session"
)

// The writing half of a connection, the same at both ends. Control frames are queued (queueFrame).
// The frames of batches, and the answers to Reads, are made when the socket has room for them: by
// putNext of the connection's side. One goroutine at a time writes (writeAll): the goroutine that
// had something to send (startWriting), or the connection's writing goroutine (writeLoop).

// gatherMin is the length in bytes from which on the kernel reads a run straight from memory. The
// writing goroutine copies shorter ones into the chunk first.
const gatherMin = 8 << 10

// inlineMax is how many bytes of a batch the caller of Submit may write itself.
const inlineMax = 64 << 10

// sender holds the bytes that a connection writes next: first the chunk, then the direct runs,
// which are all of one payload. conn.writeMu guards it.
type sender struct {
	chunk        *chunk // nil: nothing is to be written
	chunkWritten int    // bytes of chunk that are written
	direct       [vectorMax - 1][]byte
	directFrom   int // the first of direct that is not all written
	directEnd    int // behind the last of direct
	payload      payload
	vector       vector
}

// payload is the bytes that follow the head of a frame, as far as they are not in chunk or direct.
type payload struct {
	ranges
	mem []byte
	// the memory of a Read that a peer asked for: its gate is held while mem is read; nil: mem is
	// the local side of a Write
	owned      *memory
	ticket     uint64         // that the Read brought
	status     session.Status // not OK: the rest is sent as zeros
	id         uint64         // of the part
	unfinished bool           // side.payloadSent is to be called
}

func (o *sender) release(b *Backend) {
	if o.chunk != nil {
		b.chunks.put(o.chunk)
		o.chunk = nil
	}
	o.vector.drop()
	clear(o.direct[:o.directEnd])
	o.chunkWritten, o.directFrom, o.directEnd = 0, 0, 0
}

// chunkRoom is how many bytes the chunk takes: as TLS records they must fit into another chunk.
func (o *sender) chunkRoom() int { return len(o.chunk.mem) - recordsSlack - o.chunk.n }

// putHead appends a head to the chunk.
func (o *sender) putHead(h *header) { o.chunk.n = len(h.append(o.chunk.mem[:o.chunk.n])) }

// queueFrame queues a frame that goes before those of batches. The caller must startWriting.
func (c *conn) queueFrame(h *header, body []byte) {
	h.length = uint32(len(body))
	c.queuedMu.Lock()
	c.queued = append(h.append(c.queued), body...)
	c.queuedMu.Unlock()
}

func (c *conn) queuedBytes() int {
	c.queuedMu.Lock()
	defer c.queuedMu.Unlock()
	return len(c.queued)
}

// sendFrame queues a frame without a body, and starts to write.
func (c *conn) sendFrame(h header) {
	c.queueFrame(&h, nil)
	c.startWriting(false)
}

// writeQueued starts to write if frames are queued, or Reads wait for their bytes.
func (c *conn) writeQueued() {
	if c.queuedBytes() > 0 || c.hasReads.Load() || c.tlsRecords != nil && c.tlsRecords.wait() {
		c.startWriting(false)
	}
}

// startWriting starts to write all frames and payloads that wait. If another goroutine writes
// already, that one checks again before it stops. Otherwise this goroutine writes as much as the
// socket takes, unless the work is large, and leaves the rest to the writing goroutine.
func (c *conn) startWriting(large bool) {
	if c.writeRequests.Add(1) > 1 {
		return
	}
	if large || c.raw.Write(c.writeNow) != nil {
		c.wakeWriter()
	}
}

// wakeWriter leaves the writing to the writing goroutine, which it starts the first time.
// Preconditions: the caller is the goroutine that writes.
func (c *conn) wakeWriter() {
	c.startWriter.Do(func() { c.b.tasks.Start(c.writeLoop) })
	c.writerWork <- struct{}{} // does not block: one goroutine writes, and there is one place
}

// writeLoop is the writing goroutine. It waits for the socket in the runtime's poller.
func (c *conn) writeLoop() {
	for {
		select {
		case <-c.writerWork:
		case <-c.closed:
			return
		}
		if c.raw.Write(c.writeBlocking) != nil {
			return // the connection is closed
		}
	}
}

// errBlocked says that the socket takes no more bytes now.
var errBlocked = errors.New("the socket is full")

// writeAll writes until nothing waits any more and no other goroutine has asked meanwhile. After
// errBlocked the caller still is the goroutine that writes: the socket is full, or a bounded call
// has written its share. Any other error is the end of the connection, which the reading goroutine
// finds too, and reports.
func (c *conn) writeAll(fd int, bounded bool) error {
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	o, share := &c.out, 2*inlineMax
	for {
		requests := c.writeRequests.Load()
		for {
			if c.stopped.Load() {
				return errStopped
			}
			made := o.chunk != nil && o.chunkWritten < o.chunk.n || o.directFrom < o.directEnd ||
				c.tlsRecords != nil && c.tlsRecords.wait()
			if !made && !c.makeNext() {
				break
			}
			n, err := c.writeOnce(fd)
			if err == unix.EAGAIN {
				return errBlocked
			}
			if err != nil {
				return err
			}
			share -= n
			k := 0
			if o.chunk != nil {
				k = min(n, o.chunk.n-o.chunkWritten)
				o.chunkWritten += k
			}
			for n -= k; n > 0; n -= k {
				b := o.direct[o.directFrom]
				k = min(n, len(b))
				if o.direct[o.directFrom] = b[k:]; k == len(b) {
					o.directFrom++
				}
			}
			if bounded && share <= 0 {
				return errBlocked
			}
		}
		o.release(c.b)
		if c.writeRequests.CompareAndSwap(requests, 0) {
			return nil
		}
	}
}

// makeNext fills chunk and direct with the bytes to be written next: the rest of a payload, queued
// frames, frames of batches. It reports whether there are any.
func (c *conn) makeNext() bool {
	o := &c.out
	if o.chunk == nil {
		o.chunk = c.b.chunks.get()
	}
	o.chunk.n, o.chunkWritten, o.directFrom, o.directEnd = 0, 0, 0, 0
	for {
		switch {
		case o.payload.left > 0:
			if !c.addPayload() {
				return true
			}
		case o.directEnd > 0:
			return true // what follows is to be written behind the direct runs
		case o.chunkRoom() < headBytes:
			return true // payloadSent may put a head: that goes into the next chunk
		case o.payload.unfinished:
			c.side.payloadSent(c)
			o.payload = payload{}
		case o.chunkRoom() < chunkSlack:
			return true
		case c.gatherQueued():
		case !c.side.putNext(c):
			return o.chunk.n > 0
		}
	}
}

// gatherQueued moves all queued frames into the chunk, or makes them the first direct run where
// they do not fit. It reports whether there were any.
func (c *conn) gatherQueued() bool {
	o := &c.out
	c.queuedMu.Lock()
	defer c.queuedMu.Unlock()
	if len(c.queued) == 0 {
		return false
	}
	if c.readerWaitsForQueue.Swap(false) {
		c.resumeReader()
	}
	if c.answerWaitsForQueue.Swap(false) {
		c.b.wakeForRoom() // there is room to Answer
	}
	if len(c.queued) <= o.chunkRoom() {
		o.chunk.n += copy(o.chunk.mem[o.chunk.n:], c.queued)
		if c.queued = c.queued[:0]; cap(c.queued) > bodyMax {
			c.queued = nil
		}
		return true
	}
	o.direct[0], o.directEnd = c.queued, 1
	c.queued = nil
	return true
}

// addPayload adds some of the payload: a long run to direct, or short ones to the chunk. It reports
// false where there is room for neither.
func (c *conn) addPayload() bool {
	o, s := &c.out, &c.out.payload
	if s.status == session.StatusOK && !c.tls {
		if off, n := s.next(); n >= gatherMin {
			if o.directEnd == len(o.direct) {
				return false
			}
			o.direct[o.directEnd] = s.mem[off : off+n]
			o.directEnd++
			s.advance(n)
			return true
		}
	}
	switch {
	case o.directEnd > 0 || o.chunkRoom() == 0:
		return false
	case s.status != session.StatusOK: // its memory may not be read, and the frame has its length
		n := min(uint64(o.chunkRoom()), s.left)
		clear(o.chunk.mem[o.chunk.n:][:n])
		o.chunk.n += int(n)
		s.left -= n
	case s.owned != nil && !s.owned.enterGate(s.ticket):
		s.status = session.StatusRevoked
	default:
		if err := o.copyPieces(c.tls); err != nil {
			s.status = session.StatusOf(err)
		}
		if s.owned != nil {
			s.owned.leaveGate()
		}
	}
	return true
}

// copyPieces copies runs of the payload into the chunk until it is full or, unless all are to be
// copied, a long run comes.
func (o *sender) copyPieces(all bool) (err error) {
	defer hostmem.CatchFault(&err, hostmem.PanicOnFault())
	s := &o.payload
	ahead := prefetcher{s.ranges, s.mem}
	ahead.fetch(prefetchAhead)
	for s.left > 0 && o.chunkRoom() > 0 {
		ahead.fetch(1)
		off, n := s.next()
		if !all && n >= gatherMin {
			return nil
		}
		n = min(n, uint64(o.chunkRoom()))
		o.chunk.n += copy(o.chunk.mem[o.chunk.n:], s.mem[off:off+n])
		s.advance(n)
	}
	return nil
}

// writeOnce makes one call: of TLS, or of the kernel. The kernel reads direct runs of the owner's
// memory behind the gate of that memory.
func (c *conn) writeOnce(fd int) (int, error) {
	o := &c.out
	if c.tls {
		return c.writeRecords(fd)
	}
	head := o.chunk.mem[o.chunkWritten:o.chunk.n]
	if m := o.payload.owned; m != nil && o.directFrom < o.directEnd {
		if m.enterGate(o.payload.ticket) {
			defer m.leaveGate()
		} else {
			o.zeroRest(session.StatusRevoked)
		}
	}
	o.vector.add(head)
	for _, b := range o.direct[o.directFrom:o.directEnd] {
		o.vector.add(b)
	}
	if o.vector.n == 0 {
		return 0, nil
	}
	n, err := o.vector.call(unix.SYS_WRITEV, fd)
	o.vector.drop()
	if err == unix.EFAULT { // no byte was taken: the kernel counts those that it has read
		o.zeroRest(session.StatusFault)
		return 0, nil
	}
	return n, err
}

// writeRecords is writeOnce by TLS. It encrypts bytes once all earlier ones are written.
func (c *conn) writeRecords(fd int) (n int, err error) {
	o := &c.out
	if err := c.tlsRecords.flush(fd); err != nil {
		return 0, err
	}
	var b []byte
	if o.chunk != nil {
		b = o.chunk.mem[o.chunkWritten:o.chunk.n]
	}
	if len(b) == 0 && o.directFrom < o.directEnd {
		b = o.direct[o.directFrom]
		b = b[:min(len(b), chunkBytes)]
	}
	if n, err = c.net.Write(b); err == nil {
		err = c.tlsRecords.flush(fd)
	}
	if err == unix.EAGAIN {
		err = nil // the next call writes the rest
	}
	return n, err
}

// zeroRest has the rest of the payload sent as zeros, the direct runs too: its memory was revoked,
// or has faulted.
func (o *sender) zeroRest(why session.Status) {
	for _, b := range o.direct[o.directFrom:o.directEnd] {
		o.payload.left += uint64(len(b))
	}
	clear(o.direct[:o.directEnd])
	o.directFrom, o.directEnd = 0, 0
	o.payload.status = why
}
