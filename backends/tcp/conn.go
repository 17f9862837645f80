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

// conn is one connection of a peer, at either end. A goroutine reads it, parked in the
// runtime's poller; a goroutine that has something to send writes as far as the socket takes it,
// and a second goroutine, which begins when that happens first, writes the rest.
type conn struct {
	b     *Backend
	end   end
	index int          // control, express or bulk
	tcp   *net.TCPConn // what is closed
	net   net.Conn     // tcp, or TLS over it
	raw   syscall.RawConn
	tls   bool
	below *records // of TLS, where net is that

	in     receiver      // of the reading goroutine
	rmu    sync.Mutex    // held while a piece lands
	resume chan struct{} // one place: a reader that waits may go on

	wmu      sync.Mutex // held while something is written
	out      sender
	kicks    atomic.Int64  // over 0: a goroutine writes, or will
	work     chan struct{} // one place: the writing is the goroutine's
	start    sync.Once     // of that goroutine
	writeOut func(fd uintptr) bool
	writeNow func(fd uintptr) bool

	queueMu sync.Mutex // the innermost lock
	queue   []byte     // whole frames that go before any other

	over    atomic.Bool // nothing is read or written any more
	choked  atomic.Bool // the reader waits until the queue is written
	crowded atomic.Bool // the program waits until the queue is written, to Answer
	serves  atomic.Bool // there are Reads to answer
	gone    chan struct{}
	ended   sync.Once

	host session.SilenceWatch // of pulse
	left bool                 // some was not acknowledged at the last pulse; of pulse
}

// The connections of a peer, by index. Small batches and notifications go over express, so that
// they never wait behind a large one; with a single connection for data that is bulk as well.
const (
	control = iota
	express
	bulk
)

// end is what a connection belongs to: a peer of ours, or an inbound.
type end interface {
	// serve reads frames until the connection ends, and returns why. Its reading goroutine calls
	// it.
	serve(c *conn) error
	// broken tells that serve has returned although the connection was not over.
	broken(c *conn, err error)
	// next puts the next frame of data into the chunk, and says with out.src what follows it. It
	// reports whether there was one. out is the caller's.
	next(c *conn) bool
	// sent ends what out.src was. out is the caller's.
	sent(c *conn)
}

func newConn(b *Backend, e end, at int, tcp *net.TCPConn, secure net.Conn) (*conn, error) {
	c := &conn{
		b: b, end: e, index: at, tcp: tcp, net: secure, tls: secure != net.Conn(tcp),
		resume: make(chan struct{}, 1), work: make(chan struct{}, 1), gone: make(chan struct{}),
	}
	if secure, ok := secure.(*tls.Conn); ok {
		c.below, _ = secure.NetConn().(*records)
	}
	var err error
	if c.raw, err = tcp.SyscallConn(); err != nil {
		return nil, fmt.Errorf("connection of tcp: %w", err)
	}
	c.in.read = c.readOnce
	c.writeOut = func(fd uintptr) bool { return c.drain(int(fd)) != errBlocked }
	c.writeNow = func(fd uintptr) bool {
		if c.drain(int(fd)) == errBlocked {
			c.handOver()
		}
		return true
	}
	return c, nil
}

// run begins to read. It does nothing once the backend closes, which closes c as well.
func (c *conn) run() { c.b.tasks.Start(c.receive) }

var errEnded = fmt.Errorf("the other side has closed the connection: %w", driver.ErrPeerLost)

// stop has nothing land any more: when it returns, no piece is in hand. The other
// side notices nothing yet.
func (c *conn) stop() {
	c.rmu.Lock()
	c.over.Store(true)
	c.rmu.Unlock()
}

// close ends the connection. hard takes back what the other side has not acknowledged, and
// tells it so at once. It does not wait for a peer.
func (c *conn) close(hard bool) {
	c.over.Store(true)
	c.ended.Do(func() {
		if hard {
			_ = c.tcp.SetLinger(0) // fails only where it is closed
		}
		_ = c.tcp.Close() // nothing is to be saved
		close(c.gone)
	})
	c.stop()
	c.wmu.Lock() // no goroutine writes any more, so no memory is read
	c.out.release(c.b)
	c.wmu.Unlock()
}

// proceed lets a reader go on that waits in awaitResume.
func (c *conn) proceed() {
	select {
	case c.resume <- struct{}{}:
	default:
	}
}

// awaitResume has the reading goroutine wait for proceed. What its caller waits for is looked at
// again. The error says that the connection is over instead.
func (c *conn) awaitResume() error {
	select {
	case <-c.resume:
		if !c.over.Load() {
			return nil
		}
	case <-c.gone:
	}
	return errOver
}
