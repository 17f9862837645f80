// SPDX-License-Identifier: Apache-2.0

// Package letters carries messages and counts between backends of one process, each behind the bytes that it belongs
// to: a Line is what a peer has sent, in order, a Box what a backend has received.
package letters

import (
	"sync"

	"github.com/sluicehq/sluice/driver"
)

// Letter is a message or a count that waits for its data and for the letters before it.
type Letter struct {
	data    []byte
	counts  bool
	counter uint32
	done    bool
	err     error
}

// Message holds a copy of a message; nil is none.
func Message(msg []byte) *Letter {
	if msg == nil {
		return nil
	}
	return &Letter{data: append([]byte{}, msg...)}
}

// Count is an arrival at a counter, below driver.CountersMax.
func Count(counter uint32) *Letter { return &Letter{counts: true, counter: counter} }

// Len is how many bytes the message has.
func (x *Letter) Len() int {
	if x == nil {
		return 0
	}
	return len(x.data)
}

// Line is the letters of one peer in order of submission. Its methods may be called by any goroutine.
type Line struct {
	From, To *Box // the boxes of both backends; set before use

	mu   sync.Mutex
	list []*Letter
}

// Promise takes a place in the receiver and in the order of this peer. ErrFull says that there is none: the Box that
// it is From is alarmed when one may have come free.
func (l *Line) Promise(x *Letter) error {
	if x == nil {
		return nil
	}
	if !l.To.promise(l.From) {
		return driver.ErrFull
	}
	l.mu.Lock()
	l.list = append(l.list, x)
	l.mu.Unlock()
	return nil
}

// Post ends the wait of a letter for its data, with err if there is nothing to tell of, and delivers all that no
// longer wait for an earlier one.
func (l *Line) Post(x *Letter, err error) {
	if x == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	x.done, x.err = true, err
	for len(l.list) > 0 && l.list[0].done {
		head := l.list[0]
		l.list = l.list[1:]
		switch {
		case head.err != nil:
			l.To.forget(1)
		case head.counts:
			l.To.arrive(head.counter)
			l.To.forget(1) // no message waits
		default:
			l.To.Deliver(driver.Message{From: l.From.addr, Data: head.data})
		}
	}
}
