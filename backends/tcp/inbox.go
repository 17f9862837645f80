// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

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
	for i := range msgs {
		l, ok := b.inbox.pop()
		if !ok {
			return i, nil
		}
		msgs[i] = driver.Message{Conn: l.conn, Data: l.data, Err: l.err}
		if l.from != nil {
			l.from.received()
		}
	}
	return len(msgs), nil
}

func (x *inbox) pop() (message, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if len(x.list) == 0 {
		return message{}, false
	}
	l := x.list[0]
	x.list[0] = message{} // keep nothing alive
	if x.list = x.list[1:]; len(x.list) == 0 {
		x.list = nil
	}
	x.ready.Add(-1)
	return l, true
}
