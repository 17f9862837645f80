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

// directMin is the length in bytes from which on the kernel copies a run of a payload straight into
// memory. Shorter runs go through the chunk, which one call fills with many frames and pieces.
const directMin = 8 << 10

// receiver is what a connection has read. Its reading goroutine alone uses it.
type receiver struct {
	chunk        *chunk          // nil while the connection waits for a frame
	from, to     int             // of chunk: the bytes that are read and not used yet
	head         [headBytes]byte // what TLS reads while there is no chunk
	h            header          // of the frame in hand
	land         landing         // of the payload in hand
	vector       vector
	look         look
	expectLarge  bool // the last payload was large: the next one probably is too
	lastWasShort bool // the last read brought less than was asked, so the next one may wait

	// read is readOnce in the form that RawConn.Read takes: a closure, which is allocated once.
	read func(fd uintptr) bool
	// readMore passes the first three to readOnce, and readErr is what readOnce returns
	readInto *landing
	readRoom int
	readIdle bool
	readErr  error
}

// errStopped says that this end has stopped the connection.
var errStopped = errors.New("the connection is over")

// receive runs in the reading goroutine of a connection, until the connection is over.
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

// buffer reads until the chunk has n unused bytes. After a large frame it reads no more than the
// head and the table of the next one: that frame is probably large too, and the kernel then copies
// its payload straight into memory.
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

// land writes the payload of a frame into memory, piece by piece. If the peer must confirm first
// that it still wants the bytes (proof.go), land waits for the confirmation.
func (c *conn) land(l *landing) error {
	in := &c.in
	for l.left > 0 {
		var err error
		if in.from == in.to {
			in.from, in.to, in.readRoom = 0, 0, chunkBytes
			err = c.readMore(l, false) // the kernel may write a piece straight into memory
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

// readMore waits for bytes and reads once. In plain text the first bytes go straight into the
// memory of l, if the kernel may write there; all others, up to in.readRoom bytes, go into the
// chunk. With idle it waits between frames, and the connection gives its chunk back meanwhile.
func (c *conn) readMore(l *landing, idle bool) (err error) {
	in := &c.in
	if in.lastWasShort || c.tls && l == nil {
		c.writeQueued() // before this goroutine waits
	}
	in.readInto, in.readIdle = l, idle
	if !c.tls {
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

// readOnce does the work of readMore in plain text. The runtime's poller calls it until it returns
// true. For the bytes of a Read, at the initiator, it walks the lists of the batch (listDirect,
// skipOver) outside beginPiece and endPiece. After completeAll the program may use that batch
// again; this is safe only because closing the socket first waits for readOnce.
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
		c.writeQueued()
		if c.look(int(fd)) {
			return c.readOnce(fd)
		}
		if in.readIdle {
			c.b.chunks.put(in.chunk)
			in.chunk = nil
		}
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
