// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"crypto/tls"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// conn is one connection between an initiator and an owner, at either end. One goroutine reads it,
// parked in the runtime's poller (receive.go). A goroutine that has something to send writes as far
// as the socket takes it; a second goroutine, which starts when it is first needed, writes the rest
// (send.go).
type conn struct {
	b          *Backend
	side       side
	index      int          // control, express or bulk
	tcp        *net.TCPConn // the socket, which is closed
	net        net.Conn     // tcp, or TLS over it
	raw        syscall.RawConn
	tls        bool
	tlsRecords *records // between TLS and tcp; nil in plain text

	in     receiver      // of the reading goroutine alone
	landMu sync.Mutex    // held while a piece lands
	resume chan struct{} // one place: a reading goroutine in awaitResume goes on

	writeMu       sync.Mutex // guards out; before the mutexes of peer and inbound
	out           sender
	writeRequests atomic.Int64  // over 0: a goroutine writes, or is about to
	writerWork    chan struct{} // one place: the writing goroutine is to write
	startWriter   sync.Once
	writeBlocking func(fd uintptr) bool // writeAll; RawConn waits while the socket is full
	writeNow      func(fd uintptr) bool // writeAll, which leaves the rest to the writing goroutine

	queuedMu sync.Mutex // guards queued; the innermost lock
	queued   []byte     // whole frames, which go before those of batches

	stopped             atomic.Bool // nothing lands or is written any more
	readerWaitsForQueue atomic.Bool // the reading goroutine waits until queued is written
	answerWaitsForQueue atomic.Bool // the program waits to Answer until queued is written
	hasReads            atomic.Bool // Reads of the peer wait for their bytes
	closed              chan struct{}
	closeOnce           sync.Once

	silenceWatch   session.SilenceWatch // of Backend.pulse alone
	pendingAtPulse bool                 // the last pulse found bytes unacknowledged; of pulse alone
}

// The connections of a peer, by index. Small batches and notifications go over express, so that
// they never wait behind a large one. With a single connection for data, express carries large
// batches as well.
const (
	control = iota
	express
	bulk
)

// side is the end that a connection belongs to: a peer, at the initiator, or an inbound, at the
// owner.
type side interface {
	// serve is the loop of the reading goroutine: it reads frames until the connection ends, and
	// returns why.
	serve(c *conn) error
	// broken is called when serve has returned and this end has not stopped the connection.
	broken(c *conn, err error)
	// putNext puts the next frame of a batch, or of the answer to a Read, into c.out.chunk, and its
	// payload into c.out.payload. It reports whether there was one. c.writeMu is held.
	putNext(c *conn) bool
	// payloadSent is called when all of c.out.payload is in the chunk or written. c.writeMu is
	// held.
	payloadSent(c *conn)
}

func newConn(b *Backend, s side, index int, tcp *net.TCPConn, secure net.Conn) (*conn, error) {
	c := &conn{
		b: b, side: s, index: index, tcp: tcp, net: secure, tls: secure != net.Conn(tcp),
		resume: make(chan struct{}, 1), writerWork: make(chan struct{}, 1),
		closed: make(chan struct{}),
	}
	if secure, ok := secure.(*tls.Conn); ok {
		c.tlsRecords, _ = secure.NetConn().(*records)
	}
	var err error
	if c.raw, err = tcp.SyscallConn(); err != nil {
		return nil, fmt.Errorf("connection of tcp: %w", err)
	}
	c.in.read = c.readOnce
	c.writeBlocking = func(fd uintptr) bool { return c.writeAll(int(fd), false) != errBlocked }
	c.writeNow = func(fd uintptr) bool {
		if c.writeAll(int(fd), c.tls) == errBlocked {
			c.wakeWriter()
		}
		return true
	}
	c.writeRequests.Store(1) // the handshake writes, until startReading
	return c, nil
}

// startReading ends the handshake: the caller writes what the handshake has queued, and starts the
// reading goroutine, unless the backend closes, which closes c as well.
func (c *conn) startReading() {
	if c.tls {
		c.tlsRecords.keep(c)
	}
	_ = c.raw.Write(c.writeNow) // fails only where it is closed, which the reading goroutine finds
	c.b.tasks.Start(c.receive)
}

var errClosedByPeer = fmt.Errorf("the other side has closed the connection: %w", driver.ErrPeerLost)

// stop waits for the piece that is landing, and lets no later one land. The other end does not
// notice it.
func (c *conn) stop() {
	c.landMu.Lock()
	c.stopped.Store(true)
	c.landMu.Unlock()
}

// close stops the connection and closes its socket. A hard close resets it: the kernel drops what
// the other end has not acknowledged, and tells it at once. close waits for no other process.
func (c *conn) close(hard bool) {
	c.stopped.Store(true)
	c.closeOnce.Do(func() {
		if hard {
			_ = c.tcp.SetLinger(0) // fails only where it is closed
		}
		_ = c.tcp.Close() // no data is lost that Close could report
		close(c.closed)
	})
	c.stop()
	c.writeMu.Lock() // no goroutine writes any more, so no memory is read
	c.out.release(c.b)
	c.writeMu.Unlock()
}

// resumeReader lets the reading goroutine go on that is, or will be, in awaitResume.
func (c *conn) resumeReader() {
	select {
	case c.resume <- struct{}{}:
	default:
	}
}

// awaitResume blocks the reading goroutine until resumeReader. The caller then checks again what it
// waits for. The error is that of a connection that has stopped.
func (c *conn) awaitResume() error {
	select {
	case <-c.resume:
		if !c.stopped.Load() {
			return nil
		}
	case <-c.closed:
	}
	return errStopped
}
