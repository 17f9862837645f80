// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine/internal/exchange"
)

// attach gives the notification to the last batch, or to one of its own where that cannot
// carry it: a read's, a durable one, or one of a backend without notifications.
func (t *Transfer) attach() error {
	if !t.notify {
		return nil
	}
	n := len(t.batches)
	if n == 0 || t.op != Write || t.route.Durable ||
		!t.batches[n-1].conn.notifies() {
		c := t.p.messenger(t.route)
		if c == nil {
			return t.noMessenger()
		}
		t.list(c, driver.Batch{Op: Write})
		n++
	}
	if t.message[0] != exchange.IsHello {
		last := t.batches[n-1]
		t.batches = t.batches[:n-1]
		t.greet(last.conn)
		t.batches = append(t.batches, last)
		n = len(t.batches)
	}
	b := &t.batches[n-1]
	b.last = n > 1
	b.Tail, b.Notify = driver.NotifyTail, t.message
	if len(t.message) <= b.conn.lane.caps.MessageMax {
		return nil
	}
	return t.split(b)
}

// greet has the hello of a connection go first that could not when it was opened. A second
// one changes nothing.
func (t *Transfer) greet(c *conn) {
	if !c.greeted.Load() && len(c.hello) > 0 {
		t.list(c, driver.Batch{Op: Write, Tail: driver.NotifyTail, Notify: c.hello})
		t.greets = c
	}
}

// refresh takes over what the program has changed in its message since the last post.
func (t *Transfer) refresh() {
	if len(t.text) == 0 {
		return
	}
	copy(t.message[1:], t.text)
	if t.dirty || len(t.parts) == 0 {
		return
	}
	rest := t.text
	for i := range t.batches {
		if b := &t.batches[i]; b.part {
			rest = rest[copy(b.Notify[exchange.PartHead:], rest):]
		}
	}
}

// split sends a notification in parts: the first where it would go, the others behind it.
func (t *Transfer) split(first *batch) error {
	c, rest := first.conn, t.message[1:]
	if most := t.p.notifyMax; t.message[0] != exchange.IsNotification || len(rest) > most {
		err := fmt.Errorf("message of %d bytes, at most %d by Config.NotifyMax of both engines: %w",
			len(rest), most, ErrBounds)
		return &OpError{Op: "notify", Peer: t.p.name, Err: err}
	}
	room := c.lane.caps.MessageMax - exchange.PartHead
	parts := (len(rest) + room - 1) / room
	t.parts = append(t.parts[:0], make([]byte, len(rest)+parts*exchange.PartHead)...)
	free := t.parts
	for i := range parts {
		n := min(room, len(rest))
		part := free[: exchange.PartHead+n : exchange.PartHead+n]
		part[0], part[1] = exchange.IsPart, 0
		if i == 0 {
			part[1] |= exchange.FirstPart
		}
		if i == parts-1 {
			part[1] |= exchange.LastPart
		}
		copy(part[exchange.PartHead:], rest[:n])
		rest, free = rest[n:], free[exchange.PartHead+n:]
		if i == 0 {
			first.Notify, first.part = part, true
			continue
		}
		t.list(c, driver.Batch{Op: Write, Tail: driver.NotifyTail, Notify: part})
		t.batches[len(t.batches)-1].part = true
	}
	return nil
}

func (t *Transfer) noMessenger() error {
	err := fmt.Errorf("no live backend of the route carries messages: %w", ErrNoRoute)
	for _, c := range t.p.conns {
		if c != nil && c.notifies() && c.isLost() {
			err = fmt.Errorf("%w: %w", err, ErrPeerLost) // one that did
			break
		}
	}
	return &OpError{Op: "notify", Peer: t.p.name, Err: err}
}
