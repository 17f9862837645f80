// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"slices"
	"sync"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// inboxMax bounds the messages that are held back. Those that have no place stay with the
// wrapped backend, and with the senders.
const inboxMax = flightsMax

// inbox is what has come in and is held back.
type inbox struct {
	mu   sync.Mutex
	list []held               // in the order in which they are to be received
	last map[uint64]time.Time // by connection: when the last of its messages is due
	wake moment
	buf  [16]driver.Message
}

type held struct {
	due time.Time
	m   driver.Message
}

func (x *inbox) isReady() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return len(x.list) > 0 && !x.list[0].due.After(time.Now())
}

// Receive implements driver.Backend.
func (b *Backend) Receive(msgs []driver.Message) (int, error) {
	if b.about&Receive == 0 {
		return b.Backend.Receive(msgs)
	}
	x := &b.inbox
	x.mu.Lock()
	defer x.mu.Unlock()
	err := b.fetch()
	n := 0
	for n < len(msgs) && n < len(x.list) && (!x.list[n].due.After(time.Now()) || b.closed.Load()) {
		msgs[n] = x.list[n].m
		n++
	}
	x.list = slices.Delete(x.list, 0, n)
	if len(x.list) == 0 {
		x.last = nil
	} else if at := x.list[0].due; at.After(time.Now()) {
		b.clock.set(&x.wake, at)
	}
	if n > 0 {
		err = nil
	}
	return n, err
}

// fetch takes what the wrapped backend has, as far as there is room.
// Preconditions: inbox.mu is held.
func (b *Backend) fetch() error {
	x := &b.inbox
	for len(x.list) < inboxMax {
		room := min(len(x.buf), inboxMax-len(x.list))
		n, err := b.Backend.Receive(x.buf[:room])
		for _, m := range x.buf[:n] {
			b.admit(m)
		}
		clear(x.buf[:n])
		if n == 0 || err != nil {
			return err
		}
	}
	return nil
}

// admit holds a message against the rules and gives it its place.
// Preconditions: inbox.mu is held.
func (b *Backend) admit(m driver.Message) {
	x := &b.inbox
	v := b.judge(&occasion{events: Receive, size: uint64(len(m.Data))})
	due := time.Now().Add(v.hold)
	if last := x.last[m.Conn]; last.After(due) {
		due = last // messages of one sender keep their order
	}
	switch {
	case v.breach.is(lose) && m.Err == nil:
		return
	case v.breach.is(swap) && m.Err == nil:
		due = due.Add(v.breach.after) // and those that follow do not wait
	default:
		if x.last == nil {
			x.last = map[uint64]time.Time{}
		}
		x.last[m.Conn] = due
	}
	x.insert(held{due, m})
	if v.breach.is(repeat) && m.Err == nil {
		again := m
		again.Data = append([]byte{}, m.Data...) // the receiver's to keep, each of them
		x.insert(held{due, again})
	}
}

// insert puts a message behind all that are due as early.
func (x *inbox) insert(h held) {
	at := len(x.list)
	for at > 0 && x.list[at-1].due.After(h.due) {
		at--
	}
	x.list = slices.Insert(x.list, at, h)
}
