// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/internal/session"
)

// directMin is from how many bytes of contiguous memory on the kernel copies into place. Less
// goes through a chunk, which is read with one call for many frames and pieces.
const directMin = 8 << 10

// receiver is what a connection has read so far. rmu guards it.
type receiver struct {
	head  [headBytes]byte
	got   int // of head, and then
	phase phase
	h     header
	body  []byte // what of a frame is needed as a whole; in chunk, unless it is large
	land  landing
	frag  fragment // of an owner: what land walks
	err   error

	chunk    *chunk
	from, to int // read and not looked at, in chunk
	vector   vector
	aimed    int // bytes of vector that lie in place
	large    bool
}

type phase uint8

const (
	atHead phase = iota
	atBody
	atPayload
)

// consume takes what was read off the chunk.
func (c *conn) consume() verdict {
	in := &c.in
	for {
		b := in.chunk.mem[in.from:in.to]
		switch in.phase {
		case atHead:
			n := copy(in.head[in.got:], b)
			in.got, in.from = in.got+n, in.from+n
			if in.got < headBytes {
				return more
			}
			if in.err = in.h.decode(&in.head); in.err != nil {
				return finished
			}
			in.phase, in.body = atBody, in.chunk.table[:0]
		case atBody:
			n := min(in.h.buffered()-len(in.body), len(b))
			in.body, in.from = append(in.body, b[:n]...), in.from+n
			if len(in.body) < in.h.buffered() {
				return more
			}
			in.land = landing{}
			if v := c.end.accept(c); v != more {
				return v
			}
			in.phase = atPayload
		case atPayload:
			n, v := in.land.fill(b)
			in.from += n
			if v != more {
				return v
			}
			if in.land.left > 0 && in.from < in.to {
				continue
			}
			if in.land.left > 0 {
				return more
			}
			if n := in.h.payload(); n > 0 {
				in.large = n >= directMin
			}
			c.end.finish(c)
			in.phase, in.got, in.land = atHead, 0, landing{}
		}
	}
}

// aim lists where the next bytes go: those of a large payload into place, what follows into
// the chunk. Behind a large frame there is probably another, of which only the head and the
// table may be taken: its payload has a place of its own.
func (c *conn) aim() {
	in := &c.in
	in.vector.drop()
	in.aimed, in.from, in.to = 0, 0, 0
	room := chunkBytes
	if in.phase == atPayload && in.land.mem != nil {
		ahead := in.land.ranges
		for in.vector.n < vectorMax-1 && ahead.left > 0 {
			off, n, ok := ahead.next()
			if !ok || n < directMin && ahead.left > directMin {
				break
			}
			in.vector.add(in.land.mem[off : off+n])
			ahead.advance(n)
		}
		in.aimed = in.vector.sum
		if in.aimed > 0 {
			room = headBytes + entryBytes
		}
	}
	if in.aimed == 0 && in.large && in.phase == atHead {
		room = headBytes + entryBytes - in.got
	}
	in.vector.add(in.chunk.mem[:room])
}

// fetch reads once and takes what came.
func (c *conn) fetch(fd int) (n int, err error, v verdict) {
	in := &c.in
	c.aim()
	if in.aimed > 0 {
		switch in.land.enter() {
		case paused:
			return 0, nil, paused
		case finished: // what is not wanted goes into the chunk
			in.vector.drop()
			in.aimed = 0
			in.vector.add(in.chunk.mem[:chunkBytes])
		}
	}
	n, err = in.vector.read(fd)
	if in.aimed > 0 {
		in.land.leave()
		if err == unix.EFAULT {
			in.land.mem, in.land.status = nil, session.StatusFault
			return c.fetch(fd) // into the chunk: the kernel has kept what it could not place
		}
	}
	if n <= 0 || err != nil {
		return n, err, more
	}
	placed := min(n, in.aimed)
	in.land.skipOver(uint64(placed))
	in.to = n - placed
	return n, nil, c.consume()
}

// readable is what the poller calls: it reads until there is nothing left.
func (c *conn) readable(fd uintptr) bool {
	c.after = c.readAll(int(fd))
	return c.after != idle
}

func (c *conn) readAll(fd int) verdict {
	c.rmu.Lock()
	defer c.rmu.Unlock()
	in := &c.in
	if c.over.Load() {
		return finished
	}
	if in.chunk == nil {
		in.chunk = c.b.chunks.take()
	} else if v := c.consume(); v != more { // what was left, if we were held
		return v
	}
	for {
		n, err, v := c.fetch(int(fd))
		switch {
		case wouldBlock(err):
			if in.phase == atHead {
				c.rest()
			}
			c.kickAnswers()
			return idle
		case err != nil:
			in.err = err
			return finished
		case v != more:
			return v
		case n == 0:
			in.err = errEnded
			return finished
		case n < in.vector.sum:
			c.kickAnswers() // before we look in vain
		}
		if c.over.Load() {
			return finished
		}
	}
}

// rest gives back what an idle connection does not need.
func (c *conn) rest() {
	in := &c.in
	in.vector.drop()
	in.body = nil
	c.b.chunks.give(in.chunk)
	in.chunk = nil
}

// readPlain is the reading goroutine.
func (c *conn) readPlain() error {
	for {
		if err := c.raw.Read(c.read); err != nil {
			return err
		}
		c.kickAnswers()
		if c.after == paused && c.awaitResume() {
			continue
		}
		return c.in.err
	}
}

// readSecure is readPlain over TLS, which has records and blocks: the head of a frame is
// awaited without a chunk.
func (c *conn) readSecure() error {
	var head [headBytes]byte
	for {
		n, err := c.net.Read(head[:headBytes-c.in.got])
		if err != nil {
			return err
		}
		c.rmu.Lock()
		if c.over.Load() {
			c.rmu.Unlock()
			return nil
		}
		if c.in.chunk == nil {
			c.in.chunk = c.b.chunks.take()
		}
		c.in.from, c.in.to = 0, copy(c.in.chunk.mem[:], head[:n])
		c.rmu.Unlock()
		if err := c.readFrame(); err != nil || c.over.Load() {
			return err
		}
	}
}

// readFrame takes what is in the chunk, and reads on until a frame has ended.
func (c *conn) readFrame() error {
	for {
		c.rmu.Lock()
		if c.over.Load() {
			c.rmu.Unlock()
			return nil
		}
		switch v := c.consume(); {
		case v == finished:
			defer c.rmu.Unlock()
			return c.in.err
		case v == paused:
			c.rmu.Unlock()
			c.kickAnswers()
			if !c.awaitResume() {
				return nil
			}
			continue
		case c.in.phase == atHead:
			c.rest()
			c.rmu.Unlock()
			c.kickAnswers()
			return nil
		}
		want := c.wanted()
		mem := c.in.chunk
		c.rmu.Unlock()
		// The chunk is ours until the lock is held again, unless we are stopped: then
		// what it holds is dropped.
		n, err := c.net.Read(mem.mem[:want])
		if err != nil {
			return err
		}
		c.rmu.Lock()
		c.in.from, c.in.to = 0, n
		c.rmu.Unlock()
	}
}

// wanted is how much of the present frame a read may bring.
func (c *conn) wanted() int {
	in := &c.in
	if in.phase == atPayload {
		return int(min(in.land.left, chunkBytes))
	}
	return min(in.h.buffered()-len(in.body), chunkBytes)
}
