// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

// inbox holds what peers sent until Receive. Credit bounds it.
type inbox struct {
	ready atomic.Int64 // letters in list: looked at before the lock

	mu   sync.Mutex
	list []letter
}

// letter is a message, or the last word of a connection.
type letter struct {
	from *inbound
	data []byte
	err  error
}

func (b *Backend) deliver(l letter) {
	b.inbox.mu.Lock()
	b.inbox.list = append(b.inbox.list, l)
	b.inbox.ready.Add(1)
	b.inbox.mu.Unlock()
	b.wake()
}

// Receive implements driver.Receiver.
func (b *Backend) Receive(msgs []driver.Message) (int, error) {
	if b.inbox.ready.Load() == 0 {
		if b.closed.Load() {
			return 0, driver.ErrClosed
		}
		return 0, nil
	}
	for i := range msgs {
		l, ok := b.inbox.pop()
		if !ok {
			return i, nil
		}
		msgs[i] = driver.Message{From: l.from.addr, Data: l.data, Err: l.err}
		if l.err == nil {
			l.from.received()
		}
	}
	return len(msgs), nil
}

func (x *inbox) pop() (letter, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if len(x.list) == 0 {
		return letter{}, false
	}
	l := x.list[0]
	x.list[0] = letter{} // keep nothing alive
	if x.list = x.list[1:]; len(x.list) == 0 {
		x.list = nil
	}
	x.ready.Add(-1)
	return l, true
}

// count adds an arrival.
func (b *Backend) count(number uint32) {
	if b.counters.Arrive(number) {
		b.alarm()
	}
}

// Count implements driver.Counting.
func (b *Backend) Count(counter uint32) uint64 { return b.counters.Count(counter) }

// AwaitCount implements driver.Counting.
func (b *Backend) AwaitCount(counter uint32, n uint64) bool { return b.counters.Await(counter, n) }
