// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/internal/session"
)

// The reading half of a connection, the same at both ends. The reading goroutine (receive) runs
// serve of the connection's side, which takes one frame after the other (nextFrame) and has
// payloads land (land). Bytes come through a chunk, but for those of large payloads in plain text,
// which the kernel copies to their place (readOnce).

// directMin: runs of memory of at least so many bytes are filled by the kernel. Shorter ones go
// through the chunk, which is read with one call for many frames and pieces.
const directMin = 8 << 10

// receiver is what a connection has read. Its reading goroutine alone uses it.
type receiver struct {
	chunk        *chunk          // nil while the connection waits for a frame
	from, to     int             // of chunk: the bytes that are read and not used yet
	head         [headBytes]byte // what TLS reads while there is no chunk
	h            header          // of the frame in hand
	land         landing         // of the payload in hand
	vector       vector
	expectLarge  bool // the last payload was large: the next one probably is too
	lastWasShort bool // the last read brought less than was asked, so the next one may wait

	// readOnce, as RawConn.Read takes it: made once, since a closure would be allocated.
	read func(fd uintptr) bool
	// the arguments of readOnce, as readMore has them, and its result
	readInto *landing
	readRoom int
	readIdle bool
	readErr  error
}

// errStopped: this end has stopped the connection.
var errStopped = errors.New("the connection is over")

// receive is the reading goroutine of a connection.
func (c *conn) receive() {
	err := c.side.serve(c)
	if c.in.chunk != nil {
		c.b.chunks.put(c.in.chunk)
	}
	if !c.stopped.Load() {
		c.side.broken(c, err)
	}
}

// nextFrame reads the head of the next frame, and its body but for the payload. Both are valid
// until the next call.
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
	n := h.bodyBytes()
	if err := c.buffer(n); err != nil {
		return nil, nil, err
	}
	body = in.chunk.mem[in.from : in.from+n]
	in.from += n
	if payload := int(h.length) - n; payload > 0 {
		in.expectLarge = payload >= directMin
		body = in.chunk.table[:copy(in.chunk.table[:], body)] // the payload overwrites it
	}
	return h, body, nil
}

// buffer reads until the chunk has n unused bytes. Behind a large frame it reads no more than the
// head and the table of the next one, whose payload the kernel is to copy to its place.
func (c *conn) buffer(n int) error {
	in := &c.in
	for in.to-in.from < n {
		if in.from > 0 {
			in.to = copy(in.chunk.mem[:], in.chunk.mem[in.from:in.to])
			in.from = 0
		}
		whole := max(n, chunkBytes)
		if in.expectLarge {
			whole = max(n, headBytes+entryBytes)
		}
		in.readRoom = whole - in.to
		if err := c.readMore(nil, in.to == 0 && n == headBytes); err != nil {
			return err
		}
	}
	return nil
}

// land has the payload of a frame land, piece by piece. Where the peer has to confirm first that it
// still wants the bytes (proof.go), land waits for that.
func (c *conn) land(l *landing) error {
	in := &c.in
	for l.left > 0 {
		var err error
		if in.from == in.to {
			in.from, in.to, in.readRoom = 0, 0, chunkBytes
			err = c.readMore(l, false) // readOnce may have a piece land in place
		} else {
			piece := in.chunk.mem[in.from:in.to]
			piece = piece[:min(uint64(len(piece)), l.left, pieceMax)]
			left := l.left - uint64(len(piece))
			switch err = c.beginPiece(l); err {
			case nil:
				if err := l.copyIn(piece); err != nil {
					l.mem, l.status = nil, session.StatusOf(err)
				}
				c.endPiece(l)
				fallthrough
			case errUnwanted:
				l.left, err = left, nil
				in.from += len(piece)
			}
		}
		if err == errStale {
			c.writeQueued() // the question to the peer
			err = c.awaitResume()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// readMore waits for bytes and reads once: in plain text first the bytes of l that the kernel may
// copy to their place, then up to in.readRoom bytes into the chunk. idle says that it waits between
// frames: then the connection keeps no chunk.
func (c *conn) readMore(l *landing, idle bool) (err error) {
	in := &c.in
	if in.lastWasShort || c.tls && l == nil {
		c.writeQueued() // before this goroutine waits
	}
	if !c.tls {
		in.readInto, in.readIdle = l, idle
		if err := c.raw.Read(in.read); err != nil {
			return err
		}
		return in.readErr
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
		n, err = c.net.Read(in.chunk.mem[in.to:][:in.readRoom])
	}
	if in.to += n; n > 0 {
		return nil // the next read returns the error again
	}
	return err
}

// readOnce is readMore in plain text. The poller calls it until it reports true. For the bytes of a
// Read, at the initiator, it walks the lists of the batch (listDirect, skipOver) outside beginPiece
// and endPiece. completeAll may have that batch used again, which is safe only because closing the
// socket first waits for readOnce.
func (c *conn) readOnce(fd uintptr) bool {
	in := &c.in
	if in.chunk == nil {
		in.chunk = c.b.chunks.get()
	}
	direct, room := 0, in.readRoom
	if l := in.readInto; l != nil && l.listDirect(&in.vector) {
		switch err := c.beginPiece(l); err {
		case nil:
			direct, room = in.vector.sum, headBytes+entryBytes
		case errUnwanted: // the bytes go into the chunk, and from there nowhere
			in.vector.drop()
		default:
			in.vector.drop()
			in.readErr = err
			return true
		}
	}
	in.vector.add(in.chunk.mem[in.to:][:room])
	asked := in.vector.sum
	n, err := in.vector.call(unix.SYS_READV, int(fd))
	if direct > 0 {
		c.endPiece(in.readInto)
	}
	in.vector.drop()
	switch {
	case direct > 0 && err == unix.EFAULT: // the socket still has what the kernel could not copy
		in.readInto.mem, in.readInto.status = nil, session.StatusFault
		return c.readOnce(fd)
	case err == unix.EAGAIN:
		if in.readIdle {
			c.b.chunks.put(in.chunk)
			in.chunk = nil
		}
		c.writeQueued()
		return false
	case err == nil && n == 0:
		err = errClosedByPeer
	case err == nil:
		in.lastWasShort = n < asked
		if placed := min(n, direct); placed > 0 {
			in.readInto.skipOver(uint64(placed))
			n -= placed
		}
		in.to += n
	}
	in.readErr = err
	return true
}
