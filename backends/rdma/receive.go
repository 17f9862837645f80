// SPDX-License-Identifier: Apache-2.0

package rdma

import "github.com/sluicehq/sluice/driver"

// Receive implements driver.Backend. A connection's last message waits until the ring
// was seen empty after its end was known: then all messages before it are out.
func (b *Backend) Receive(msgs []driver.Message) (int, error) {
	if !b.gate.Enter() {
		return 0, driver.ErrClosed
	}
	defer b.gate.Exit()
	n := b.gather(msgs)
	if n == 0 && b.quiet {
		b.net.Drive()
		n = b.gather(msgs)
	}
	b.quiet = n == 0
	return n, nil
}

// gather takes messages, then answers, then last words.
func (b *Backend) gather(msgs []driver.Message) (n int) {
	b.leaving = b.words.Pending(b.leaving[:0])
	n = b.take(msgs)
	n += b.answers.take(msgs[n:])
	told := b.leaving[:min(len(b.leaving), len(msgs)-n)]
	for _, c := range told {
		msgs[n] = driver.Message{Conn: c.link.ID(), Err: driver.ErrPeerLost}
		n++
		b.remove(c.link.ID())
	}
	if len(told) > 0 {
		b.words.Drop(len(told))
	}
	clear(b.leaving) // keep no connection alive
	return n
}

// take fills msgs unless the ring is empty.
func (b *Backend) take(msgs []driver.Message) (n int) {
	for n < len(msgs) {
		notif, ok := b.net.Receive()
		if !ok {
			break
		}
		if _, known := b.end(notif.Conn).(*inbound); known {
			msgs[n] = driver.Message{Conn: notif.Conn, Data: notif.Data}
			n++
		}
	}
	return n
}
