// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/session"
)

// handshakesMax bounds what connections can make us hold before they have said hello: a
// socket and 17 KB each, for Config.DialTimeout.
const handshakesMax = 16

// accept serves peers until the listener is closed.
func (b *Backend) accept() {
	defer b.tasks.Done()
	_ = b.lobby.Serve(b.listener, func(conn net.Conn, v *session.Visit) bool {
		b.tasks.Go(func() {
			if !v.Wait() {
				return
			}
			c, err := b.greet(conn.(*net.UnixConn))
			v.Leave()
			if err != nil {
				_ = conn.Close() // the other side learns no more than that
				return
			}
			c.serve()
		})
		return true
	})
}

// greet checks a new connection and answers it.
func (b *Backend) greet(conn *net.UnixConn) (*inbound, error) {
	if err := conn.SetDeadline(time.Now().Add(b.cfg.DialTimeout)); err != nil {
		return nil, err
	}
	c := &inbound{b: b, sock: conn, event: -1}
	var err error
	if c.pid, err = identify(conn); err != nil {
		return nil, err // another user's takes no place for long
	}
	if err := c.inbox.open(conn); err != nil {
		c.pid.Release()
		return nil, err
	}
	kind, body, fds, err := c.inbox.read()
	if err != nil {
		c.pid.Release()
		return nil, err
	}
	if kind == msgHello {
		err = c.hello(body, fds)
	} else {
		closeAll(fds)
		err = fmt.Errorf("hello of kind %d: %w", kind, driver.ErrCorrupt)
	}
	if err == nil {
		err = b.enlist(c)
	}
	welcome := []byte{msgWelcome, version, byte(statusOf(err))}
	welcome = binary.LittleEndian.AppendUint32(welcome, b.table.keys)
	if err != nil {
		_ = send(conn, b.cfg.DialTimeout, welcome, nil)
		c.release()
		return nil, err
	}
	// Once the welcome is out the peer may send messages: nothing may fail then.
	err = conn.SetDeadline(time.Time{})
	if err == nil {
		err = send(conn, b.cfg.DialTimeout, welcome, []int{b.tableFD, b.event})
	}
	if err != nil {
		b.forget(c)
	}
	return c, err
}

var identify = proc.Identify // tests have a peer of another PID namespace

// hello takes the peer's page and event: version, ring size, address.
func (c *inbound) hello(body []byte, fds []int) (err error) {
	defer func() { closeAll(fds) }()
	if len(body) < 1 || body[0] != version {
		return fmt.Errorf("hello: %w", driver.ErrVersion)
	}
	if len(body) < 9 || len(fds) != 2 {
		return fmt.Errorf("hello of %d bytes, %d descriptors: %w", len(body), len(fds),
			driver.ErrCorrupt)
	}
	ring := binary.LittleEndian.Uint64(body[1:])
	from, err := decodeAddress(body[9:])
	if err != nil {
		return err
	}
	if !ringSizeFits(ring) {
		return fmt.Errorf("ring of %d bytes: %w", ring, driver.ErrCorrupt)
	}
	if err := checkEventFD(fds[1]); err != nil {
		return err
	}
	page, err := hostmem.MapSealed(fds[0], connectionBytes(ring), unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		return err
	}
	if word(page, pageMagicAt).Load() != pageMagic || word(page, pageRingAt).Load() != ring {
		_ = unix.Munmap(page)
		return fmt.Errorf("connection page: %w", driver.ErrCorrupt)
	}
	c.page, c.event = page, fds[1]
	c.in.ring, c.out.ring = ringOf(page, 0), ringOf(page, 1)
	c.self = from == c.b.address && c.pid.PID == os.Getpid()
	fds = fds[:1] // the event stays
	return nil
}

// ofProcess counts the connections of one process. Those that ended without the word that their
// peer is out stay for as long as it lives, so one process has half of the places at most.
func ofProcess(list []*inbound, pid int) (n int) {
	for _, c := range list {
		if c.pid.PID == pid {
			n++
		}
	}
	return n
}

// enlist puts a connection where Revoke and Receive see it. It happens before the
// welcome, so that no peer is ever in our memory unseen.
func (b *Backend) enlist(c *inbound) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	list := *b.inbound.Load()
	if b.closed.Load() {
		return driver.ErrClosed
	}
	if len(list) >= b.cfg.ConnsMax {
		return fmt.Errorf("%d peers, raise Config.ConnsMax: %w", len(list), driver.ErrFull)
	}
	if n := ofProcess(list, c.pid.PID); n >= max(1, b.cfg.ConnsMax/2) && !c.self {
		return fmt.Errorf("%d connections of process %d, raise Config.ConnsMax: %w", n, c.pid.PID,
			driver.ErrFull)
	}
	c.conn = b.conns.Add(1)
	list = append(slices.Clone(list), c)
	b.inbound.Store(&list)
	b.wake() // the program has armed the connections of before, not this one
	return nil
}
