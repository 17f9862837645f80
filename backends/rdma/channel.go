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
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/session"
)

// channel is the control connection of a peer: frames over TCP, each a length of four
// bytes and a message. Sending never waits.
//
// A peer that is silent is not lost, but one whose host acknowledges nothing: see quiet, and
// Backend.pulse.
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

	cfg   *Config
	raw   syscall.RawConn
	idle  session.SilenceWatch // of pulse
	heard atomic.Uint64        // messages that came
}

// unsentMax bounds what a peer that does not read may leave with us.
const unsentMax = 1 << 20

// What goes all the time costs no memory.
var (
	pingBytes = ping{}.encode()
	pongBytes = pong{}.encode()
)

var errUnread = errors.New("the peer leaves its control messages unread")

// newChannel takes over a TCP connection.
func newChannel(conn net.Conn, cfg *Config) *channel {
	c := &channel{
		conn: conn, in: bufio.NewReaderSize(conn, controlMax+4), cfg: cfg,
		ready: make(chan struct{}, 1), over: make(chan struct{}),
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		c.raw = tuneTCP(tcp, cfg.Failure)
	}
	return c
}

// tuneTCP has the kernel give a dead host up, and try again soon after an outage.
func tuneTCP(tcp *net.TCPConn, failure time.Duration) syscall.RawConn {
	session.KeepAlive(tcp, failure)
	raw, err := tcp.SyscallConn()
	if err != nil {
		return nil
	}
	_ = raw.Control(func(fd uintptr) { // a kernel without it takes longer
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_THIN_LINEAR_TIMEOUTS, 1)
	})
	return raw
}

// outbound is what our kernel knows of what we have sent.
func (c *channel) outbound() session.Outbound {
	if c.raw == nil {
		return session.NoOutbound
	}
	return c.cfg.kernel(c.raw)
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
		if clock.Pass(c.cfg.clock, limit, c.over, nil) {
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
