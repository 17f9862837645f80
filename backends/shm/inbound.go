// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"fmt"
	"net"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/proc"
)

// inbound is our side of a connection that a peer dialled: it reaches our memory.
type inbound struct {
	b     *Backend
	conn  uint64 // its number
	self  bool   // the peer is this backend
	sock  *net.UnixConn
	inbox inbox
	event int // the peer's
	pid   proc.Remote

	mu   sync.Mutex // guards the page and what was read of it
	page []byte     // theirs, shared; nil after release
	in   receiver   // notifications
	out  sender     // answers
	gone bool       // no more messages will come
	said bool       // and the program knows
	left bool       // proof that the peer is out of our memory for good

	abandoned [announceMax]uint64 // announcements that Revoke made harmless
	barred    [announceMax]uint64 // those that stood before the gate was renewed
}

// serve answers the peer until it hangs up, or its process ends: a child of that may have
// inherited the socket.
func (c *inbound) serve() {
	var watch sync.WaitGroup
	if !c.self && c.pid.Known() {
		watch.Go(func() {
			if c.pid.Wait() == nil {
				c.drop()
			}
		})
	}
	c.listen()
	c.mu.Lock()
	c.gone = true
	c.looksOut()
	c.mu.Unlock()
	c.drop()
	c.shed()
	c.pid.StopWaits()
	watch.Wait()
	c.b.wake()
}

// looksOut keeps a proof that the peer is out of our memory: it says so in the page, where
// nothing can lose the word as the socket does when it is reset, or its process has ended.
// Preconditions: c.mu is held.
func (c *inbound) looksOut() bool {
	if !c.left && c.page != nil {
		c.left = word(c.page, pageLeftAt).Load() != 0 || c.pid.Dead()
	}
	return c.left
}

// listen returns when the connection has ended.
func (c *inbound) listen() {
	for {
		kind, body, fds, err := c.inbox.read()
		if err != nil {
			return
		}
		closeAll(fds) // a peer has none to give after its hello
		switch kind {
		case msgFetch:
			err = c.fetched(body)
		case msgPing:
			err = c.say([]byte{msgPong}, nil)
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

// finished reports whether nothing needs the connection any more.
func (c *inbound) finished() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.said && c.looksOut()
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
	c.in.ring, c.out.ring = ring{}, ring{}
	if c.page != nil {
		_ = unix.Munmap(c.page) // our own mapping, whole: cannot fail
		c.page = nil
	}
	c.pid.Release()
}
