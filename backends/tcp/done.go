// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

// Poll implements driver.Backend.
func (b *Backend) Poll(done []driver.Completion) (int, error) {
	n := b.done.Pop(done)
	if n == 0 && b.closed.Load() && b.done.Taken() == 0 {
		return 0, driver.ErrClosed
	}
	return n, nil
}

// FD implements driver.Backend.
func (b *Backend) FD() int { return b.event.FD() }

// wake wakes the program if it sleeps on the event.
func (b *Backend) wake() {
	if b.armed.Load() && b.armed.CompareAndSwap(true, false) {
		_ = b.event.Signal() // fails only when closed: no goroutine sleeps on it any more
	}
}

// Reap implements driver.Reaper.
func (b *Backend) Reap(by func() (more bool)) { b.reap.Store(&by) }

// handOver is called by the goroutine that reads c, which holds no lock. It has the engine take
// completions and messages in this goroutine, or, where the engine gave nothing to Reap, wakes it.
func (b *Backend) handOver(c *conn) {
	if b.done.Ready() == 0 && b.inbox.ready.Load() == 0 {
		return
	}
	c.in.look.handed = true
	if by := b.reap.Load(); by == nil {
		b.wake()
	} else if (*by)() {
		b.wakeForRoom() // Arm must report it: what the engine left may stand in no queue here
	}
}

// wakeForDone wakes the program if a completion waits for Poll.
func (b *Backend) wakeForDone() {
	if b.done.Ready() > 0 {
		b.wake()
	}
}

// wakeForRoom wakes the program, of which a call has returned ErrFull, since there is room now.
func (b *Backend) wakeForRoom() {
	b.roomNews.Store(true)
	b.wake()
}

// Arm implements driver.Backend. It sets armed and then looks into the queues; a goroutine that
// adds something to a queue does so and then looks at armed. One of the two sees the other.
func (b *Backend) Arm() (ready bool, err error) {
	if b.closed.Load() {
		return false, driver.ErrClosed
	}
	b.armed.Store(true)
	return b.done.Ready() > 0 || b.inbox.ready.Load() > 0 || b.roomNews.Swap(false), nil
}

// inbox has the messages that wait for Receive. Credit and Config.PeersMax bound it.
type inbox struct {
	ready atomic.Int64 // len(list), read without the lock

	mu   sync.Mutex
	list []message
}

// message is a notification, an answer, or the end of a connection (err).
type message struct {
	connID uint64
	source messageSource
	data   []byte
	err    error
}

// messageSource is the peer or inbound of a message. received is called when the program has
// received the message, which makes room for another.
type messageSource interface{ received() }

func (x *inbox) add(l message) {
	x.mu.Lock()
	x.list = append(x.list, l)
	x.ready.Add(1)
	x.mu.Unlock()
}

func (b *Backend) deliver(l message) {
	b.inbox.add(l)
	b.wake()
}

// Receive implements driver.Backend.
func (b *Backend) Receive(msgs []driver.Message) (int, error) {
	if b.inbox.ready.Load() == 0 {
		if b.closed.Load() {
			return 0, driver.ErrClosed
		}
		return 0, nil
	}
	x := &b.inbox
	for i := range msgs {
		x.mu.Lock()
		if len(x.list) == 0 {
			x.mu.Unlock()
			return i, nil
		}
		l := x.list[0]
		x.list[0] = message{} // keep nothing alive
		if x.list = x.list[1:]; len(x.list) == 0 {
			x.list = nil
		}
		x.ready.Add(-1)
		x.mu.Unlock()
		msgs[i] = driver.Message{Conn: l.connID, Data: l.data, Err: l.err}
		l.source.received()
	}
	return len(msgs), nil
}
