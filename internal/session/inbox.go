// SPDX-License-Identifier: Apache-2.0

package session

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

// Inbox holds the messages that a backend has received until its program calls Receive. It has a
// limited number of slots. A sender of the same process (Sender) reserves a slot before the bytes
// of its batch move, so that the message behind them always finds room.
//
// Any goroutine may call the methods at any time, except that Open must come first.
type Inbox struct {
	slots    int64
	wake     func()
	alarmed  atomic.Bool   // Alarm was called, and Ready has not reported it yet
	lastConn atomic.Uint64 // the last result of NewConn

	reserved atomic.Int64 // slots in use: by messages in list, and by those that will be delivered

	mu      sync.Mutex
	list    []driver.Message
	starved []*Inbox // inboxes of senders that found no free slot: release alarms them
}

// Open sets the number of slots. The Inbox calls wake when there is something for the program,
// maybe with locks held: wake must not block.
func (b *Inbox) Open(slots int, wake func()) { b.slots, b.wake = int64(slots), wake }

// NewConn returns a new number for a connection of this backend.
func (b *Inbox) NewConn() uint64 { return b.lastConn.Add(1) }

// Alarm wakes the program although there may be no message: a sender may try again. Ready reports
// it once.
func (b *Inbox) Alarm() {
	b.alarmed.Store(true)
	b.wake()
}

// Ready reports whether there is a message, or Alarm was called since the last Ready.
func (b *Inbox) Ready() bool {
	b.mu.Lock()
	n := len(b.list)
	b.mu.Unlock()
	return n > 0 || b.alarmed.Swap(false)
}

// DeliverLoss delivers the last message of a connection, driver.ErrPeerLost. It needs no slot.
func (b *Inbox) DeliverLoss(conn uint64) {
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
	b.list = slices.Delete(b.list, 0, n) // clears the end, so that no data stays alive
	b.mu.Unlock()
	slots := 0
	for i := range msgs[:n] {
		if msgs[i].Err == nil { // the loss of a connection has no slot
			slots++
		}
	}
	if slots > 0 {
		b.release(slots)
	}
	return n
}

// reserve reserves a slot. If none is free it returns false, and a later release alarms from.
func (b *Inbox) reserve(from *Inbox) bool {
	for b.reserved.Add(1) > b.slots {
		b.reserved.Add(-1)
		b.addStarved(from)
		if b.reserved.Load() >= b.slots { // else a release came before addStarved: try again
			return false
		}
	}
	return true
}

func (b *Inbox) addStarved(from *Inbox) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !slices.Contains(b.starved, from) {
		b.starved = append(b.starved, from)
	}
}

// release frees slots and alarms the senders that found none.
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

// Notification is a message that is not delivered yet: the bytes of its batch are not complete, or
// an earlier message is not delivered.
type Notification struct {
	data []byte
	done bool  // the batch has ended: Post was called
	err  error // the message must not be delivered
}

// Sender delivers the notifications of one connection in the order of submission. Any goroutine may
// call its methods at any time.
type Sender struct {
	From, To *Inbox // of the sending and of the receiving backend; set before use
	Conn     uint64 // the number of the connection in To's messages; set before use

	mu   sync.Mutex
	list []*Notification // in the order of submission
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

// Send delivers a message that belongs to no batch, after all messages that are reserved.
func (s *Sender) Send(msg []byte) error {
	n, err := s.Reserve(&driver.Batch{Tail: driver.NotifyTail, Notify: msg})
	if err == nil {
		s.Post(n, nil)
	}
	return err
}

// Post says that the batch of a notification has ended. With an error the message is dropped. Post
// delivers each message of the connection whose turn has come. It does nothing if n is nil.
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
