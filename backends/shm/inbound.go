// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"fmt"
	"net"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// inbound is our side of a connection that a peer dialled: it reaches our memory.
type inbound struct {
	b     *Backend
	from  string // Addr of the peer
	sock  *net.UnixConn
	inbox inbox
	event int // the peer's
	pid   processID

	mu      sync.Mutex // guards the page and what was read of it
	page    []byte     // theirs, shared; nil after release
	head    uint64
	corrupt bool
	gone    bool // no more messages will come
	said    bool // and the program knows
	left    bool // proof that the peer is out of our memory for good

	abandoned [announceMax]uint64 // announcements that fresh pages made harmless
}

// serve answers the peer until it hangs up.
func (c *inbound) serve() {
	c.listen()
	c.mu.Lock()
	c.gone = true
	c.mu.Unlock()
	c.drop()
	c.shed()
	c.b.wake()
}

// listen returns when the connection has ended. With a goodbye the peer is out;
// without one it is out when its process is.
func (c *inbound) listen() {
	for {
		kind, body, fds, err := c.inbox.read()
		if err != nil {
			c.mu.Lock()
			c.left = c.left || !c.pid.Known() || c.pid.Dead()
			c.mu.Unlock()
			return
		}
		closeAll(fds) // a peer has none to give after its hello
		switch kind {
		case msgFetch:
			err = c.answer(body)
		case msgBye:
			c.mu.Lock()
			c.left = true
			c.mu.Unlock()
			return
		default:
			err = fmt.Errorf("message of kind %d: %w", kind, driver.ErrCorrupt)
		}
		if err != nil {
			c.drop()
		}
	}
}

// drop breaks the connection off; listen ends by it.
func (c *inbound) drop() { _ = c.sock.Close() }

// hangUp is drop for a backend that closes.
func (c *inbound) hangUp() { c.drop() }

// finished reports whether nothing needs the connection any more.
func (c *inbound) finished() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.said && !c.left {
		c.left = c.pid.Dead()
	}
	return c.said && c.left
}

// forget takes a finished connection off the list.
func (b *Backend) forget(c *inbound) {
	b.mu.Lock()
	list := slices.Clone(*b.inbound.Load())
	if i := slices.Index(list, c); i >= 0 {
		list = slices.Delete(list, i, i+1)
		b.inbound.Store(&list)
	}
	b.mu.Unlock()
	c.release()
}

// shed closes descriptors that an ended connection needs no more: its last
// messages may wait for Receive for long.
func (c *inbound) shed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.event >= 0 {
		_ = unix.Close(c.event)
		c.event = -1
	}
	if c.left {
		c.pid.Release()
	}
}

// release gives back what the connection holds.
func (c *inbound) release() {
	c.drop()
	c.shed()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.page != nil {
		_ = unix.Munmap(c.page) // our own mapping, whole: cannot fail
		c.page = nil
	}
	c.pid.Release()
}
