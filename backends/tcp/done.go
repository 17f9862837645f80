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

// wake signals the event if it is armed.
func (b *Backend) wake() {
	if b.armed.Load() && b.armed.CompareAndSwap(true, false) {
		_ = b.event.Signal() // fails only when closed: no goroutine sleeps on it any more
	}
}

// wakeForDone is wake where there is a completion.
func (b *Backend) wakeForDone() {
	if b.done.Ready() > 0 {
		b.wake()
	}
}

// alarm is wake for news that no queue holds: room after ErrFull.
func (b *Backend) alarm() {
	b.news.Store(true)
	b.wake()
}

// Arm implements driver.Backend. The flag goes up before the look, and a goroutine that brings
// something looks at the flag afterwards: one of the two sees the other.
func (b *Backend) Arm() (ready bool, err error) {
	if b.closed.Load() {
		return false, driver.ErrClosed
	}
	b.armed.Store(true)
	return b.done.Ready() > 0 || b.inbox.ready.Load() > 0 || b.news.Swap(false), nil
}

// inbox holds what peers sent until Receive. Credit and Config.PeersMax bound it.
type inbox struct {
	ready atomic.Int64 // messages in list: looked at before the lock

	mu   sync.Mutex
	list []message
}

// message is one that came by a connection, or the last word of one.
type message struct {
	conn uint64
	from taker // what takes its place back; nil: it took none
	data []byte
	err  error
}

// taker is told that the program has received a message, or the last word.
type taker interface{ received() }

func (b *Backend) deliver(l message) {
	b.inbox.mu.Lock()
	b.inbox.list = append(b.inbox.list, l)
	b.inbox.ready.Add(1)
	b.inbox.mu.Unlock()
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
		msgs[i] = driver.Message{Conn: l.conn, Data: l.data, Err: l.err}
		if l.from != nil {
			l.from.received()
		}
	}
	return len(msgs), nil
}
