// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/internal/session"
)

// directMin is from how many bytes of contiguous memory on the kernel copies into place. Less
// goes through a chunk, which is read with one call for many frames and pieces.
const directMin = 8 << 10

// receiver is the reading half of a connection, which its reading goroutine alone uses. Bytes come
// through a chunk, but for those of large payloads in plain text, which the kernel puts in place.
type receiver struct {
	chunk    *chunk          // nil while the connection waits for a frame
	from, to int             // read and not used yet, in chunk
	head     [headBytes]byte // of TLS, before there is a chunk
	h        header
	land     landing
	vector   vector
	large    bool // the last payload was: the next one is to go in place as well
	short    bool // the last read brought less than was asked, so the next one may wait

	// readOnce, which readMore has the poller call; made once, since a closure would be allocated.
	read func(fd uintptr) bool

	into *landing // what readOnce reads, and how it ended
	room int
	idle bool
	err  error
}

// errOver is the end of a connection by our own side.
var errOver = errors.New("the connection is over")

// receive is the reading goroutine of a connection.
func (c *conn) receive() {
	err := c.end.serve(c)
	if c.in.chunk != nil {
		c.b.chunks.put(c.in.chunk)
	}
	if !c.over.Load() {
		c.end.broken(c, err)
	}
}

// nextFrame returns the head of the next frame, and what must be there of it as a whole. Both stay
// until it is called again.
func (c *conn) nextFrame() (h *header, body []byte, err error) {
	in := &c.in
	if err := c.buffer(headBytes); err != nil {
		return nil, nil, err
	}
	h = &in.h
	if err := h.decode((*[headBytes]byte)(in.chunk.mem[in.from:])); err != nil {
		return nil, nil, err
	}
	in.from += headBytes
	n := h.buffered()
	if err := c.buffer(n); err != nil {
		return nil, nil, err
	}
	body = in.chunk.mem[in.from : in.from+n]
	in.from += n
	if payload := int(h.length) - n; payload > 0 {
		in.large = payload >= directMin
		body = in.chunk.table[:copy(in.chunk.table[:], body)] // the payload comes over it
	}
	return h, body, nil
}

// buffer has at least n bytes in the chunk. Behind a large frame there is probably another, of
// which only the head and one entry are taken: its payload has a place of its own.
func (c *conn) buffer(n int) error {
	in := &c.in
	for in.to-in.from < n {
		if in.from > 0 {
			in.to = copy(in.chunk.mem[:], in.chunk.mem[in.from:in.to])
			in.from = 0
		}
		whole := max(n, chunkBytes)
		if in.large {
			whole = max(n, headBytes+entryBytes)
		}
		in.room = whole - in.to
		if err := c.readMore(nil, in.to == 0 && n == headBytes); err != nil {
			return err
		}
	}
	return nil
}

// land brings the payload of a frame to where it goes, piece by piece.
func (c *conn) land(l *landing) error {
	in := &c.in
	for l.left > 0 {
		var err error
		if in.from == in.to {
			in.from, in.to, in.room = 0, 0, chunkBytes
			err = c.readMore(l, false)
		} else {
			b := in.chunk.mem[in.from:in.to]
			b = b[:min(uint64(len(b)), l.left, handMax)]
			if err = c.copyPiece(l, b); err == nil {
				in.from += len(b)
			}
		}
		if err == errStale {
			c.kickAnswers()
			err = c.awaitResume()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// copyPiece copies bytes that have come, at most handMax.
func (c *conn) copyPiece(l *landing, b []byte) error {
	left := l.left - uint64(len(b))
	switch err := c.enter(l); err {
	case nil:
		if err := l.place(b); err != nil {
			l.mem, l.status = nil, session.StatusOf(err)
		}
		c.leave(l)
	case errUnwanted:
	default:
		return err
	}
	l.left = left
	return nil
}

// readMore reads once, up to in.room bytes into the chunk, and waits for the other side where
// nothing has come: between frames, idle, without a chunk. In plain text the bytes of l that may go
// in place go there first.
func (c *conn) readMore(l *landing, idle bool) (err error) {
	in := &c.in
	if in.short || c.tls && l == nil {
		c.kickAnswers() // before we wait
	}
	if !c.tls {
		in.into, in.idle = l, idle
		if err := c.raw.Read(in.read); err != nil {
			return err
		}
		return in.err
	}
	n := 0
	if idle {
		if in.chunk != nil {
			c.b.chunks.put(in.chunk)
			in.chunk = nil
		}
		n, err = c.net.Read(in.head[:])
		in.chunk = c.b.chunks.get()
		copy(in.chunk.mem[:], in.head[:n])
	} else {
		n, err = c.net.Read(in.chunk.mem[in.to:][:in.room])
	}
	if in.to += n; n > 0 {
		return nil // an error comes again
	}
	return err
}

// readOnce is readMore in plain text, as the poller calls it until it reports true. For a Read of
// ours it walks the lists of a batch (aim, skipOver) outside enter and leave. completeAll may have
// that batch used again, which is safe only because closing the socket first waits for this.
func (c *conn) readOnce(fd uintptr) bool {
	in := &c.in
	if in.chunk == nil {
		in.chunk = c.b.chunks.get()
	}
	aimed, room := 0, in.room
	if l := in.into; l != nil && l.aim(&in.vector) {
		switch err := c.enter(l); err {
		case nil:
			aimed, room = in.vector.sum, headBytes+entryBytes
		case errUnwanted: // it goes into the chunk
			in.vector.drop()
		default:
			in.vector.drop()
			in.err = err
			return true
		}
	}
	in.vector.add(in.chunk.mem[in.to:][:room])
	asked := in.vector.sum
	n, err := in.vector.call(unix.SYS_READV, int(fd))
	if aimed > 0 {
		c.leave(in.into)
	}
	in.vector.drop()
	switch {
	case aimed > 0 && err == unix.EFAULT: // the kernel has kept what it could not place
		in.into.mem, in.into.status = nil, session.StatusFault
		return c.readOnce(fd)
	case err == unix.EAGAIN:
		if in.idle {
			c.b.chunks.put(in.chunk)
			in.chunk = nil
		}
		c.kickAnswers()
		return false
	case err == nil && n == 0:
		err = errEnded
	case err == nil:
		in.short = n < asked
		if placed := min(n, aimed); placed > 0 {
			in.into.skipOver(uint64(placed))
			n -= placed
		}
		in.to += n
	}
	in.err = err
	return true
}
