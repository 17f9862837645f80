// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"github.com/sluicehq/sluice/driver"
)

// Receive implements driver.Receiver. It takes from each peer in turn, and
// begins with another one each time.
func (b *Backend) Receive(msgs []driver.Message) (int, error) {
	if b.closed.Load() {
		return 0, driver.ErrClosed
	}
	all := *b.inbound.Load()
	n := 0
	for i := range all {
		if n == len(msgs) {
			break
		}
		c := all[(b.turn+i)%len(all)]
		n += c.receive(msgs[n:])
		if c.finished() {
			b.forget(c)
		}
	}
	b.turn++
	return n, nil
}

// receive takes messages of one peer. Everything in the ring is the peer's to
// write, so nothing there is believed before it is checked.
func (c *inbound) receive(msgs []driver.Message) (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.page == nil {
		return 0
	}
	before := c.head
	for n < len(msgs) && !c.corrupt {
		data, ok := c.take()
		if !ok {
			break
		}
		if data != nil {
			msgs[n] = driver.Message{From: c.from, Data: data}
			n++
		}
	}
	if c.head != before {
		word(c.page, pageHeadAt).Store(c.head)
		if wait := word(c.page, pageWaitingAt); wait.Load() != 0 && wait.Swap(0) != 0 && c.event >= 0 {
			signal(c.event)
		}
	}
	if n < len(msgs) && c.gone && !c.said {
		c.said = true
		msgs[n] = driver.Message{From: c.from, Err: driver.ErrPeerLost}
		n++
	}
	return n
}

// take reads the next entry. ok is false when none is there; data is nil for a
// place that carries nothing.
// Preconditions: c.mu is held.
func (c *inbound) take() (data []byte, ok bool) {
	ring := c.page[ringAt:]
	size := uint64(len(ring))
	at := c.head % size
	w := word(ring, at).Load()
	if w == 0 {
		return nil, false
	}
	state, n := w>>56, w&(1<<56-1)
	room := noteBytes(int(min(n, size)))
	switch {
	case state == notePad && n == size-at:
		clear(ring[at:])
		c.head += n
		return nil, true
	case (state == noteData || state == noteSkip) && n <= messageMax && at+room <= size:
	default:
		c.corrupt = true
		c.drop()
		return nil, false
	}
	if state == noteData {
		data = make([]byte, n)
		copy(data, ring[at+noteHead:])
	}
	clear(ring[at : at+room])
	c.head += room
	return data, true
}

// arm asks the peer for a wake-up, and reports whether something is there already.
func (c *inbound) arm() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.page == nil {
		return false
	}
	word(c.page, pageArmedAt).Store(1) // pairs with the load in endNote, after the head word
	if c.gone && !c.said {
		return true
	}
	return !c.corrupt && word(c.page[ringAt:], c.head%uint64(len(c.page)-ringAt)).Load() != 0
}
