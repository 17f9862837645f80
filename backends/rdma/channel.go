// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
)

// channel is the control connection of a peer: frames over TCP, each a length of four
// bytes and a message. Sending never waits.
//
// A peer that is silent is not lost. A caller that waits for the peer's program pings it,
// and gives up by itself. The kernel ends a connection to a host that is gone.
type channel struct {
	conn net.Conn
	in   *bufio.Reader

	mu       sync.Mutex
	out      []byte // frames to write
	spare    []byte // what was written
	ending   bool   // close when all is written
	drains   bool   // but not before the other side has
	ended    bool
	ready    chan struct{} // has one place
	over     chan struct{} // closed by close
	writing  sync.WaitGroup
	closing  sync.Once
	closeErr error

	head [4]byte // of receive
	body [controlMax]byte

	clock  clock.Clock
	heard  atomic.Uint64 // messages that came
	pinged atomic.Bool   // and not answered yet
}

// unsentMax bounds what a peer that does not read may leave with us.
const unsentMax = 1 << 20

// What goes all the time costs no memory.
var (
	pingBytes = ping{}.encode()
	pongBytes = pong{}.encode()
)

var errUnread = errors.New("the peer leaves its control messages unread")

// newChannel takes over a TCP connection. patience is how long the other host may be out
// of reach, be there something to send or not.
func newChannel(conn net.Conn, patience time.Duration, clock clock.Clock) *channel {
	c := &channel{
		conn: conn, in: bufio.NewReaderSize(conn, controlMax+4), clock: clock,
		ready: make(chan struct{}, 1), over: make(chan struct{}),
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		tuneTCP(tcp, patience)
	}
	return c
}

// tuneTCP has the kernel give a dead host up, and try again soon after an outage.
func tuneTCP(tcp *net.TCPConn, patience time.Duration) {
	probes := net.KeepAliveConfig{
		Enable: true, Idle: max(patience/2, time.Second), Interval: max(patience/20, time.Second),
		Count: 10,
	}
	_ = tcp.SetKeepAliveConfig(probes) // fails only where it is closed
	raw, err := tcp.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) { // a kernel without one of these takes longer
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT,
			int(patience.Milliseconds()))
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_THIN_LINEAR_TIMEOUTS, 1)
	})
}

// start begins to write.
func (c *channel) start() { c.writing.Go(c.write) }

// send puts a message on its way, and reports whether the connection was open. The end of
// the connection is told of by receive.
func (c *channel) send(msg []byte) bool {
	c.mu.Lock()
	open := !c.ended && !c.ending
	if open {
		c.out = binary.LittleEndian.AppendUint32(c.out, uint32(len(msg)))
		c.out = append(c.out, msg...)
	}
	full := len(c.out) > unsentMax
	c.mu.Unlock()
	if full {
		c.close(errUnread)
		return false
	}
	c.stir()
	return open
}

func (c *channel) stir() {
	select {
	case c.ready <- struct{}{}:
	default:
	}
}

// write moves what was sent.
func (c *channel) write() {
	for {
		select {
		case <-c.ready:
		case <-c.over:
			return
		}
		for {
			out, last := c.take()
			if len(out) == 0 && !last {
				break
			}
			if _, err := c.conn.Write(out); err != nil {
				c.close(fmt.Errorf("send control message: %w", err))
				return
			}
			if last {
				c.drain()
				c.close(nil)
				return
			}
		}
	}
}

// take returns what is to be written, and whether nothing follows.
func (c *channel) take() (out []byte, last bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	out, c.out = c.out, c.spare[:0]
	c.spare = out
	return out, c.ending
}

// ping asks for a sign of life, unless the last one is not answered yet.
func (c *channel) ping() {
	if c.pinged.CompareAndSwap(false, true) {
		c.send(pingBytes)
	}
}

// silence is how long a peer says nothing while a call waits for it.
type silence struct {
	*clock.Stopwatch
	ch    *channel
	heard uint64
	since time.Time
}

func (c *channel) listening(limit time.Duration) *silence {
	s := clock.NewStopwatch(c.clock, limit)
	return &silence{Stopwatch: s, ch: c, heard: c.heard.Load(), since: s.Look()}
}

// lasts asks for a sign of life, and returns for how long there was none.
func (s *silence) lasts() time.Duration {
	s.ch.ping()
	now := s.Look()
	if heard := s.ch.heard.Load(); heard != s.heard {
		s.heard, s.since = heard, now
	}
	return now.Sub(s.since)
}

// receive returns the next message that is not for the channel itself. An error ends the
// connection; only one goroutine may call it.
func (c *channel) receive() (any, error) {
	for {
		if _, err := io.ReadFull(c.in, c.head[:]); err != nil {
			return nil, c.failed(err)
		}
		n := binary.LittleEndian.Uint32(c.head[:])
		if n > controlMax {
			return nil, c.failed(fmt.Errorf("control message of %d bytes: %w", n,
				driver.ErrCorrupt))
		}
		if _, err := io.ReadFull(c.in, c.body[:n]); err != nil {
			return nil, c.failed(err)
		}
		m, err := decodeControl(c.body[:n])
		if err != nil {
			return nil, c.failed(err)
		}
		c.heard.Add(1)
		switch m.(type) {
		case ping:
			c.send(pongBytes)
		case pong:
			c.pinged.Store(false)
		default:
			return m, nil
		}
	}
}

// failed closes the connection for a reason, and returns the first one. A deadline that
// passed, which another goroutine set, leaves it open.
func (c *channel) failed(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return err
	}
	c.close(err)
	return c.closeErr
}

// finish closes the connection once all that was sent is written, within a time.
func (c *channel) finish(limit time.Duration) { c.end(limit, false) }

// farewell is finish for a side that wants its last message read: what the other side still sends
// is dropped, since to close with that unread would take back what it has not read yet. No
// goroutine may receive any more.
func (c *channel) farewell(limit time.Duration) { c.end(limit, true) }

func (c *channel) end(limit time.Duration, drains bool) {
	c.mu.Lock()
	c.ending, c.drains = true, drains
	c.mu.Unlock()
	_ = c.conn.SetReadDeadline(time.Time{}) // one that ended receive would end drain, too
	c.stir()
	c.writing.Go(func() {
		if clock.Pass(c.clock, limit, c.over, nil) {
			_ = c.conn.SetDeadline(aLongTimeAgo) // fails only where it is closed
		}
	})
}

// drain says that nothing follows, and reads until the other side says the same.
func (c *channel) drain() {
	c.mu.Lock()
	drains := c.drains
	c.mu.Unlock()
	if tcp, ok := c.conn.(*net.TCPConn); ok && drains && tcp.CloseWrite() == nil {
		_, _ = io.Copy(io.Discard, c.in)
	}
}

// close ends the connection. It does not wait.
func (c *channel) close(err error) {
	c.closing.Do(func() {
		c.mu.Lock()
		c.ended = true
		c.mu.Unlock()
		c.closeErr = err
		close(c.over)
		_ = c.conn.Close() // nothing is to be saved
	})
}

// wait returns when nothing of the channel runs but its receiver.
func (c *channel) wait() { c.writing.Wait() }
