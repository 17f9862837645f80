// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// virtual is set while a test has its events live in channels.
var virtual atomic.Pointer[channels]

// Virtual has NewEvent make events that live in channels, until end is called: in a bubble of
// testing/synctest a goroutine that waits for one is durably blocked. FD of such an event is a
// number that the kernel does not know and EventFromFD does. Only testkit.InVirtualTime calls
// it.
func Virtual() (end func()) {
	virtual.Store(&channels{last: 1 << 30, signals: map[int]chan struct{}{}})
	return func() { virtual.Store(nil) }
}

// channels are the open events of a test that live in channels.
type channels struct {
	mu      sync.Mutex
	last    int                   // the number that was given out last
	signals map[int]chan struct{} // by number; equal for all events that stand for one eventfd
}

// open makes an event of a signal.
func (c *channels) open(signal chan struct{}) *Event {
	e := &channel{all: c, signal: signal, closed: make(chan struct{}), late: make(chan struct{})}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last++
	c.signals[c.last] = signal
	e.number.Store(int64(c.last))
	return &Event{channel: e}
}

// signal returns that of an open event, nil if none has the number.
func (c *channels) signal(number int) chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.signals[number]
}

func (c *channels) forget(number int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.signals, number)
}

// channel takes the place of an Event's descriptor in virtual time. Its methods do the same as
// those of polled.
type channel struct {
	all    *channels
	signal chan struct{} // holds the signal that no goroutine has taken yet
	closed chan struct{}
	number atomic.Int64 // -1: closed

	mu    sync.Mutex    // guards what follows
	late  chan struct{} // closed once the deadline has passed
	timer *time.Timer   // closes late
}

func (c *channel) isClosed() bool { return c.number.Load() < 0 }

func (c *channel) wake() error {
	if c.isClosed() {
		return driver.ErrClosed
	}
	select {
	case c.signal <- struct{}{}:
	default:
	}
	return nil
}

// wait looks at the signal last, as the poller does: a deadline that has passed ends also a Wait
// that need not sleep.
func (c *channel) wait() error {
	c.mu.Lock()
	late := c.late
	c.mu.Unlock()
	if c.isClosed() {
		return driver.ErrClosed
	}
	if isOver(late) {
		return driver.ErrTimeout
	}
	select {
	case <-c.closed:
		return driver.ErrClosed
	case <-late:
		return driver.ErrTimeout
	case <-c.signal:
		return nil
	}
}

func (c *channel) try() bool {
	if c.isClosed() {
		return false
	}
	select {
	case <-c.signal:
		return true
	default:
		return false
	}
}

func (c *channel) setDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.isClosed() {
		return driver.ErrClosed
	}
	if c.timer != nil && !c.timer.Stop() {
		<-c.late // the timer has fired and closes it
	}
	c.timer = nil
	if isOver(c.late) {
		c.late = make(chan struct{})
	}
	switch wait := time.Until(t); {
	case t.IsZero():
	case wait <= 0:
		close(c.late)
	default:
		late := c.late
		c.timer = time.AfterFunc(wait, func() { close(late) })
	}
	return nil
}

func (c *channel) close() error {
	number := c.number.Swap(-1)
	if number < 0 {
		return nil
	}
	c.all.forget(int(number))
	close(c.closed)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.timer != nil {
		c.timer.Stop()
	}
	return nil
}

func isOver(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
