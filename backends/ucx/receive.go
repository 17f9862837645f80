// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"github.com/sluicehq/sluice/driver"
)

// Receive implements driver.Backend. A connection's last message waits until
// the rings were seen empty after its end was known: then all messages before it
// are out.
func (b *Backend) Receive(msgs []driver.Message) (int, error) {
	if b.gate.IsShut() {
		return 0, driver.ErrClosed
	}
	n := b.gather(msgs)
	if n == 0 && b.quiet {
		b.drive()
		n = b.gather(msgs)
	}
	b.quiet = n == 0
	return n, nil
}

// gather takes messages out of the rings, and then the last words of connections.
func (b *Backend) gather(msgs []driver.Message) (n int) {
	b.leaving = b.words.Pending(b.leaving[:0])
	for n < len(msgs) {
		notif, ok := b.net.Receive()
		if !ok {
			break
		}
		if e := b.end(notif.Conn); e != nil {
			msgs[n] = driver.Message{Conn: e.number(), Data: notif.Data}
			n++
		}
	}
	told := b.leaving[:min(len(b.leaving), len(msgs)-n)]
	for _, c := range told {
		msgs[n] = driver.Message{Conn: c.conn, Err: driver.ErrPeerLost}
		n++
		c.told()
	}
	if len(told) > 0 {
		b.words.Drop(len(told))
	}
	clear(b.leaving) // keep no connection alive
	return n
}

// told notes that the program knows of the end.
func (c *inbound) told() {
	c.mu.Lock()
	c.said = true
	c.mu.Unlock()
	c.forget()
}

// Answer implements driver.Backend.
func (b *Backend) Answer(conn uint64, msg []byte) error {
	if !b.gate.Enter() {
		return driver.ErrClosed
	}
	defer b.gate.Exit()
	if len(msg) > messageMax {
		return driver.ErrBounds
	}
	c := b.acceptedAs(conn)
	if c == nil {
		return driver.ErrPeerLost
	}
	return c.answer(msg)
}

// acceptedAs returns the connection of a peer to us with this number, or nil.
func (b *Backend) acceptedAs(conn uint64) *inbound {
	b.endsMu.RLock()
	defer b.endsMu.RUnlock()
	return b.accepted[conn]
}

// answer sends a notification to the end that began the connection.
func (c *inbound) answer(msg []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.link == nil || c.left {
		return driver.ErrPeerLost
	}
	return c.link.Notify(msg)
}

func (c *inbound) number() uint64 { return c.conn }
func (p *peer) number() uint64    { return p.conn }
