// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/session"
)

// channel is a control connection: frames over TCP, each a length of four bytes and a message. send
// never blocks.
//
// A peer that sends nothing is not lost; one whose host acknowledges nothing is. See hostWatch and
// Backend.pulse.
type channel struct {
	conn net.Conn
	in   *bufio.Reader

	mu       sync.Mutex
	out      []byte // frames to write
	spare    []byte // the buffer that was written last, for reuse
	ending   bool   // close the connection when all frames are written
	drains   bool   // with ending: first wait until the other side closes
	ended    bool
	ready    chan struct{} // wakes write; capacity 1
	over     chan struct{} // closed by close
	writing  sync.WaitGroup
	closing  sync.Once
	closeErr error

	head [4]byte // of receive
	body [controlMax]byte

	cfg   *Config
	raw   syscall.RawConn
	idle  session.SilenceWatch // of pulse
	heard atomic.Uint64        // number of messages received
}

// aLongTimeAgo is a deadline that has passed.
var aLongTimeAgo = time.Unix(1, 0)

// unsentMax bounds the bytes in out. A connection whose peer does not read is closed beyond that.
const unsentMax = 1 << 20

var errUnread = errors.New("the peer leaves its control messages unread")

// newChannel returns a channel over a connection, which the channel closes.
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

// tuneTCP makes the kernel detect a dead host, and retransmit soon after an outage.
func tuneTCP(tcp *net.TCPConn, failure time.Duration) syscall.RawConn {
	session.KeepAlive(tcp, failure)
	raw, err := tcp.SyscallConn()
	if err != nil {
		return nil
	}
	_ = raw.Control(func(fd uintptr) { // without the option, recovery only takes longer
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_THIN_LINEAR_TIMEOUTS, 1)
	})
	return raw
}

// outbound returns the kernel's state of the bytes sent: which of them are acknowledged.
func (c *channel) outbound() session.Outbound {
	if c.raw == nil {
		return session.NoOutbound
	}
	return c.cfg.kernel(c.raw)
}

// start starts the goroutine that writes.
func (c *channel) start() { c.writing.Go(c.write) }

// send queues a message, and reports whether the connection was open. receive returns the error
// that ends the connection.
func (c *channel) send(m session.Message) bool {
	c.mu.Lock()
	open := !c.ended && !c.ending
	if open {
		at := len(c.out)
		c.out = appendMessage(append(c.out, 0, 0, 0, 0), m)
		binary.LittleEndian.PutUint32(c.out[at:], uint32(len(c.out)-at-4))
	}
	full := len(c.out) > unsentMax
	c.mu.Unlock()
	if full {
		c.close(errUnread)
		return false
	}
	c.wakeWriter()
	return open
}

func (c *channel) wakeWriter() {
	select {
	case c.ready <- struct{}{}:
	default:
	}
}

// write writes queued frames to the connection until it ends.
func (c *channel) write() {
	for {
		select {
		case <-c.ready:
		case <-c.over:
			return
		}
		for {
			out, last := c.nextOutput()
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

// nextOutput returns the queued frames, and whether they are the last.
func (c *channel) nextOutput() (out []byte, last bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	out, c.out = c.out, c.spare[:0]
	c.spare = out
	return out, c.ending
}

// receive returns the next message; it handles ping and pong itself. An error ends the connection.
// Only one goroutine may call receive.
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
		switch m {
		case ping:
			c.send(pong)
		case pong:
		default:
			return m, nil
		}
	}
}

// failed closes the connection with err, and returns the error that closed it first. It does not
// close the connection for a deadline that another goroutine has set to interrupt receive.
func (c *channel) failed(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return err
	}
	c.close(err)
	return c.closeErr
}

// closeWhenSent closes the connection after all queued frames are written, at the latest after
// limit.
func (c *channel) closeWhenSent(limit time.Duration) { c.closeSoon(limit, false) }

// closeWhenRead is closeWhenSent for a side that needs its last message to be read. It reads and
// drops what the other side still sends: a close with unread bytes would reset the connection, and
// the other side could lose the message. No goroutine may call receive any more.
func (c *channel) closeWhenRead(limit time.Duration) { c.closeSoon(limit, true) }

func (c *channel) closeSoon(limit time.Duration, drains bool) {
	c.mu.Lock()
	c.ending, c.drains = true, drains
	c.mu.Unlock()
	_ = c.conn.SetReadDeadline(time.Time{}) // drain must not see a deadline set for receive
	c.wakeWriter()
	c.writing.Go(func() {
		if clock.Pass(c.cfg.clock, limit, c.over, nil) {
			_ = c.conn.SetDeadline(aLongTimeAgo) // fails only if the connection is closed
		}
	})
}

// drain closes the sending direction, and reads until the other side closes its own.
func (c *channel) drain() {
	c.mu.Lock()
	drains := c.drains
	c.mu.Unlock()
	if tcp, ok := c.conn.(*net.TCPConn); ok && drains && tcp.CloseWrite() == nil {
		_, _ = io.Copy(io.Discard, c.in)
	}
}

// close ends the connection with an error for receive. It does not wait.
func (c *channel) close(err error) {
	c.closing.Do(func() {
		c.mu.Lock()
		c.ended = true
		c.mu.Unlock()
		c.closeErr = err
		close(c.over)
		_ = c.conn.Close() // an error does not matter
	})
}

// wait waits for all goroutines of the channel, except the receiver.
func (c *channel) wait() { c.writing.Wait() }

// listen opens the listeners of the control.
func (b *Backend) listen() error {
	if b.cfg.Listen != "" {
		return b.listenAt(b.cfg.Listen, nil)
	}
	var errs []error
	for _, a := range b.railHosts() {
		if len(b.address.control) == controlsMax {
			break
		}
		if err := b.listenAt(netip.AddrPortFrom(a, 0).String(), nil); err != nil {
			errs = append(errs, err)
		}
	}
	if len(b.listeners) > 0 {
		return nil
	}
	// InfiniBand without IP addresses: listen on all addresses of this host.
	if err := b.listenAt(":0", hostAddresses()); err != nil {
		return errors.Join(append(errs, err)...)
	}
	return nil
}

// railHosts returns the addresses of the rails' network devices, without link-local ones.
func (b *Backend) railHosts() (list []netip.Addr) {
	for _, r := range b.rails {
		for _, p := range b.cfg.sysfs.prefixes(r.gid.NetDev) {
			a := p.Addr().Unmap()
			if !a.IsLinkLocalUnicast() && !slices.Contains(list, a) {
				list = append(list, a)
			}
		}
	}
	return list
}

// hostAddresses returns the global addresses of this host, or the loopback address if there is
// none.
func hostAddresses() []netip.Addr {
	list := session.HostAddresses()
	if len(list) == 0 {
		list = append(list, netip.AddrFrom4([4]byte{127, 0, 0, 1}))
	}
	return list
}

// listenAt opens a listener, and adds its address to that of the backend. If the listener is on all
// addresses, it adds known, or those of the rails or the host.
func (b *Backend) listenAt(at string, known []netip.Addr) error {
	l, err := net.Listen("tcp", at)
	if err != nil {
		return fmt.Errorf("listen for peers, see Config.Listen: %w", err)
	}
	b.listeners = append(b.listeners, l)
	bound, ok := l.Addr().(*net.TCPAddr)
	if !ok {
		return fmt.Errorf("listen for peers at %v: no address of TCP", l.Addr())
	}
	own, _ := netip.AddrFromSlice(bound.IP)
	switch {
	case !own.IsUnspecified():
		known = []netip.Addr{own.Unmap()}
	case known == nil:
		if known = b.railHosts(); len(known) == 0 {
			known = hostAddresses()
		}
	}
	for _, a := range known[:min(len(known), controlsMax-len(b.address.control))] {
		b.address.control = append(b.address.control, netip.AddrPortFrom(a, uint16(bound.Port)))
	}
	return nil
}

// reachMax is how long reach tries an address before it tries the next.
const reachMax = time.Second

// reach connects to the control of an owner. It tries the owner's addresses in turn, first those in
// a subnet of our rails.
func (b *Backend) reach(ctx context.Context, a *address) (net.Conn, error) {
	strange := func(at netip.AddrPort) int {
		for _, r := range b.rails {
			if r.gid.Subnet.IsValid() && r.gid.Subnet.Contains(at.Addr()) {
				return 0
			}
		}
		return 1
	}
	list := slices.Clone(a.control)
	slices.SortStableFunc(list, func(x, y netip.AddrPort) int { return strange(x) - strange(y) })
	var errs []error
	for i, at := range list {
		dialing, cancel := context.WithCancelCause(ctx)
		late := fmt.Errorf("%v has not answered in %v: open the firewall for that port, or have "+
			"the owner name other addresses in Config.Listen: %w", at, reachMax, driver.ErrTimeout)
		if i < len(list)-1 {
			go func() {
				if clock.Pass(b.cfg.clock, reachMax, dialing.Done(), nil) {
					cancel(late)
				}
			}()
		}
		conn, err := (&net.Dialer{}).DialContext(dialing, "tcp", at.String())
		if err != nil && context.Cause(dialing) == late {
			err = late
		}
		cancel(nil)
		if err == nil {
			return conn, nil
		}
		errs = append(errs, err)
		if ctx.Err() != nil {
			break
		}
	}
	return nil, errors.Join(errs...)
}
