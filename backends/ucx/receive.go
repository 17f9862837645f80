// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"github.com/sluicehq/sluice/driver"
)

// Receive implements driver.Receiver. A connection's last message waits until
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

// gather takes from each context in turn, and begins with another one each time.
func (b *Backend) gather(msgs []driver.Message) (n int) {
	b.leaving = b.words.Pending(b.leaving[:0])
	for i := range b.lines {
		n += b.lines[(b.turn+i)%len(b.lines)].receive(msgs[n:])
	}
	b.turn++
	told := b.leaving[:min(len(b.leaving), len(msgs)-n)]
	for _, c := range told {
		msgs[n] = driver.Message{From: c.addr, Err: driver.ErrPeerLost}
		n++
		c.told()
	}
	if len(told) > 0 {
		b.words.Drop(len(told))
	}
	clear(b.leaving) // keep no connection alive
	return n
}

// receive takes messages out of the rings of one context. It fills msgs unless
// the rings are empty.
func (l *line) receive(msgs []driver.Message) (n int) {
	for n < len(msgs) {
		note, ok := l.net.Receive()
		if !ok {
			break
		}
		l.mu.RLock()
		c, known := l.ends[note.Conn].(*inbound)
		l.mu.RUnlock()
		if known {
			msgs[n] = driver.Message{From: c.addr, Data: note.Data}
			n++
		}
	}
	return n
}

// told notes that the program knows of the end.
func (c *inbound) told() {
	c.mu.Lock()
	c.said = true
	c.mu.Unlock()
	c.forget()
}
