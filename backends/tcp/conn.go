// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"crypto/tls"
	"errors"
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
	index int          // ctl, express or bulk
	tcp   *net.TCPConn // what is closed
	net   net.Conn     // tcp, or TLS over it
	raw   syscall.RawConn
	tls   bool
	below *records // of TLS, where net is that

	rmu    sync.Mutex // held while something lands
	in     receiver
	resume chan struct{} // one place: a reader that was held may go on

	wmu   sync.Mutex // held while something is written
	out   sender
	kicks atomic.Int64  // over 0: a goroutine writes, or will
	work  chan struct{} // one place: the writing is the goroutine's
	start sync.Once     // of that goroutine

	ctlMu sync.Mutex // the innermost lock
	ctl   []byte     // whole frames that go before any other

	over    atomic.Bool // nothing is read or written any more
	choked  atomic.Bool // the reader waits until acknowledgements are written
	crowded atomic.Bool // the program waits until answers are
	serves  atomic.Bool // there are Reads to answer
	gone    chan struct{}
	ended   sync.Once

	read, writeOut, writeNow func(fd uintptr) bool // made once: closures would be allocated
	after                    verdict               // of read

	host session.SilenceWatch // of pulse
	left bool                 // some was not acknowledged at the last pulse; of pulse
}

// The connections of a peer, by index. Small batches and notifications go over express, so that
// they never wait behind a large one; with a single connection for data that is bulk as well.
const (
	ctl = iota
	express
	bulk
)

// end is what a connection belongs to: a peer of ours, or an inbound.
type end interface {
	// accept looks at a frame whose head, and what must be there as a whole, has come. It
	// says with in.land where the payload goes. It may be asked again for the same frame
	// after it has said paused. in is the caller's.
	accept(c *conn) verdict
	// finish ends a frame whose payload has come.
	finish(c *conn)
	// next puts the next frame into the chunk, and says with out.src what follows it. It
	// reports whether there was one. out is the caller's.
	next(c *conn) bool
	// eased tells that queued frames are written, where c.crowded was set.
	eased()
	// sent ends what out.src was.
	sent(c *conn)
	// broken tells of the end of a connection, from a goroutine of it.
	broken(c *conn, err error)
}

// verdict is how a step ended.
type verdict uint8

const (
	more    verdict = iota // go on
	idle                   // nothing to read, or to write
	blocked                // the socket takes no more
	paused                 // wait until told to resume
	finished
)

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
	c.read = c.readable
	c.writeOut = func(fd uintptr) bool { return c.drain(int(fd)) != blocked }
	c.writeNow = func(fd uintptr) bool {
		if c.drain(int(fd)) == blocked {
			c.handOver()
		}
		return true
	}
	return c, nil
}

// run begins to read. It does nothing once the backend closes, which closes c as well.
func (c *conn) run() {
	c.b.tasks.Start(func() {
		var err error
		if c.tls {
			err = c.readSecure()
		} else {
			err = c.readPlain()
		}
		if !c.over.Load() {
			c.end.broken(c, err)
		}
	})
}

var errEnded = fmt.Errorf("the other side has closed the connection: %w", driver.ErrPeerLost)

// stop has nothing land any more: when it returns, no piece is in hand. The other
// side notices nothing yet.
func (c *conn) stop() {
	c.over.Store(true)
	c.rmu.Lock()
	if c.in.chunk != nil && !c.tls { // with TLS the reader may still read into it
		c.b.chunks.give(c.in.chunk)
	}
	c.in.chunk = nil
	c.in.vector.drop()
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

// proceed lets a held reader go on.
func (c *conn) proceed() {
	select {
	case c.resume <- struct{}{}:
	default:
	}
}

// awaitResume reports false when the connection is over instead.
func (c *conn) awaitResume() bool {
	select {
	case <-c.resume:
		return !c.over.Load()
	case <-c.gone:
		return false
	}
}

func wouldBlock(err error) bool { return errors.Is(err, syscall.EAGAIN) }
