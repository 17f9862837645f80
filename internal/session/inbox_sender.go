// SPDX-License-Identifier: Apache-2.0

package session

import (
	"sync"

	"github.com/sluicehq/sluice/driver"
)

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
