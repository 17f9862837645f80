// SPDX-License-Identifier: Apache-2.0

package session

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

// Inbox holds what a backend has received until its program takes it. Any goroutine may
// call its methods, but Open, at any time.
type Inbox struct {
	most  int64
	wake  func()
	alarm atomic.Bool // there is something to see that is in no list
	conns atomic.Uint64

	reserved atomic.Int64 // slots: of messages in list, and of those on their way

	mu      sync.Mutex
	list    []driver.Message
	starved []*Inbox // of senders that found no slot
}

// Open makes room for most messages. wake is called when there is something for the
// program; it may be called with any lock held.
func (b *Inbox) Open(most int, wake func()) { b.most, b.wake = int64(most), wake }

// NewConn returns a number for a connection of this backend that it never had before.
func (b *Inbox) NewConn() uint64 { return b.conns.Add(1) }

// Alarm wakes the program for something that is in no list: Ready reports it once.
func (b *Inbox) Alarm() {
	b.alarm.Store(true)
	b.wake()
}

// Ready reports whether there is a message, or was an alarm since the last call.
func (b *Inbox) Ready() bool {
	b.mu.Lock()
	n := len(b.list)
	b.mu.Unlock()
	return n > 0 || b.alarm.Swap(false)
}

// Lost delivers the last word of a connection. It needs no slot.
func (b *Inbox) Lost(conn uint64) {
	b.deliver(driver.Message{Conn: conn, Err: driver.ErrPeerLost})
}

func (b *Inbox) deliver(m driver.Message) {
	b.mu.Lock()
	b.list = append(b.list, m)
	b.mu.Unlock()
	b.wake()
}

// Receive moves messages into msgs and returns how many.
func (b *Inbox) Receive(msgs []driver.Message) int {
	b.mu.Lock()
	n := copy(msgs, b.list)
	b.list = slices.Delete(b.list, 0, n) // and keeps none of their bytes alive
	b.mu.Unlock()
	slots := 0
	for i := range msgs[:n] {
		if msgs[i].Err == nil { // a last word had none
			slots++
		}
	}
	if slots > 0 {
		b.release(slots)
	}
	return n
}

// reserve takes a slot. Where there is none, from is alarmed once one has come free.
func (b *Inbox) reserve(from *Inbox) bool {
	for b.reserved.Add(1) > b.most {
		b.reserved.Add(-1)
		b.starve(from) // and look again: a slot may have come free before
		if b.reserved.Load() >= b.most {
			return false
		}
	}
	return true
}

func (b *Inbox) starve(from *Inbox) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !slices.Contains(b.starved, from) {
		b.starved = append(b.starved, from)
	}
}

// release gives slots back and alarms the senders that found none.
func (b *Inbox) release(n int) {
	b.reserved.Add(int64(-n))
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, from := range b.starved {
		from.Alarm()
	}
	clear(b.starved)
	b.starved = b.starved[:0]
}

// Notification is a message that waits for its bytes, and for the messages before it.
type Notification struct {
	data []byte
	done bool
	err  error
}

// Sender keeps the notifications of one connection in the order of submission. Any
// goroutine may call its methods at any time.
type Sender struct {
	From, To *Inbox // of both backends; set before use
	Conn     uint64 // what To's backend calls the connection; set before use

	mu   sync.Mutex
	list []*Notification
}

// Reserve reserves a slot in the receiver's inbox and a position in this sender's order for
// the tail of a batch, and copies the message. Without a tail it returns nil. It
// returns ErrFull, and has copied nothing, when the inbox has no free slot; From is alarmed
// when a slot may be free again.
func (s *Sender) Reserve(b *driver.Batch) (*Notification, error) {
	if b.Tail == driver.NoTail {
		return nil, nil
	}
	if !s.To.reserve(s.From) {
		return nil, driver.ErrFull
	}
	n := &Notification{data: append([]byte{}, b.Notify...)}
	s.mu.Lock()
	s.list = append(s.list, n)
	s.mu.Unlock()
	return n, nil
}

// Send delivers a message that belongs to no bytes, behind all that are reserved.
func (s *Sender) Send(msg []byte) error {
	n, err := s.Reserve(&driver.Batch{Tail: driver.NotifyTail, Notify: msg})
	if err == nil {
		s.Post(n, nil)
	}
	return err
}

// Post ends the wait of a notification for its bytes, with err if it must not arrive, and
// delivers all that no longer wait for an earlier one. A nil Notification is none.
func (s *Sender) Post(n *Notification, err error) {
	if n == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	n.done, n.err = true, err
	for len(s.list) > 0 && s.list[0].done {
		head := s.list[0]
		s.list[0] = nil
		s.list = s.list[1:]
		if head.err != nil {
			s.To.release(1)
		} else {
			s.To.deliver(driver.Message{Conn: s.Conn, Data: head.data})
		}
	}
}
