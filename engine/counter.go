// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

// CountersMax is how many counters an engine has.
const CountersMax = driver.CountersMax

// Counter is one of an engine's counters of arrivals. Transfers of peers count on it with
// Transfer.Count, once each and when their data is visible here, whichever peer counted. A
// receiver that knows how many transfers make up its work, the layers of a request say,
// waits for their number: it is woken once, and no message has to be received for each.
type Counter struct {
	number  uint32
	lanes   []*lane // that count
	closing <-chan struct{}

	tally *tally
	waits []*countWait // guarded by tally.mu
	seen  []uint64     // what look has read of each lane; guarded by tally.mu
}

// tally has the counters that the program has asked for.
type tally struct {
	waiting  atomic.Int64 // calls of Wait that sleep
	mu       sync.Mutex
	counters map[uint32]*Counter
}

type countWait struct {
	n    uint64
	done chan struct{}
}

// Counter returns a counter by its number, which peers name. All callers get the same one.
// ErrBounds: there are CountersMax. ErrNotSupported: none of the backends counts.
func (e *Engine) Counter(number uint32) (*Counter, error) {
	if number >= CountersMax {
		return nil, &OpError{Op: "counter", Err: fmt.Errorf("number %d, below %d: %w", number,
			CountersMax, ErrBounds)}
	}
	e.tally.mu.Lock()
	defer e.tally.mu.Unlock()
	if c := e.tally.counters[number]; c != nil {
		return c, nil
	}
	c := &Counter{number: number, closing: e.closing, tally: &e.tally}
	for _, l := range e.lanes {
		if l.notifies() {
			c.lanes = append(c.lanes, l)
		}
	}
	c.seen = make([]uint64, len(c.lanes))
	if len(c.lanes) == 0 {
		return nil, &OpError{Op: "counter", Err: fmt.Errorf("none of the backends counts "+
			"arrivals: %w", ErrNotSupported)}
	}
	if e.tally.counters == nil {
		e.tally.counters = map[uint32]*Counter{}
	}
	e.tally.counters[number] = c
	return c, nil
}

// Value is how many transfers have counted since the engine was opened. It never goes back:
// a program that uses a counter again waits for its present value and what is to come.
func (c *Counter) Value() (n uint64) {
	for _, l := range c.lanes {
		n += l.b.Count(c.number)
	}
	return n
}

// Wait blocks until Value has reached n. The context ends the wait; the loss of a peer does
// not. It is ErrClosed when the engine closes. Any number of goroutines may wait.
func (c *Counter) Wait(ctx context.Context, n uint64) error {
	if c.Value() >= n {
		return nil
	}
	w := &countWait{n: n, done: make(chan struct{})}
	for _, l := range c.lanes {
		l.park()
		defer l.unpark()
	}
	c.enlist(w)
	select {
	case <-w.done:
		return nil
	case <-ctx.Done():
	case <-c.closing:
	}
	if c.resign(w) {
		return nil // it was there, too
	}
	if ctx.Err() == nil {
		return fmt.Errorf("wait for counter %d to reach %d: %w", c.number, n, ErrClosed)
	}
	return fmt.Errorf("wait for counter %d to reach %d, it is at %d: %w", c.number, n, c.Value(),
		context.Cause(ctx))
}

func (c *Counter) enlist(w *countWait) {
	c.tally.mu.Lock()
	defer c.tally.mu.Unlock()
	c.tally.waiting.Add(1)
	c.waits = append(c.waits, w)
	c.look()
}

// resign takes w out of the list and reports whether its count was reached.
func (c *Counter) resign(w *countWait) bool {
	c.tally.mu.Lock()
	defer c.tally.mu.Unlock()
	i := slices.Index(c.waits, w)
	if i < 0 {
		return true
	}
	c.waits = slices.Delete(c.waits, i, i+1)
	c.tally.waiting.Add(-1)
	c.look()
	return false
}

// look wakes those whose count is reached, and asks the backends to tell of the next.
// Preconditions: c.tally.mu is held.
func (c *Counter) look() {
	for {
		value := c.read()
		c.waits = slices.DeleteFunc(c.waits, func(w *countWait) bool {
			if value < w.n {
				return false
			}
			close(w.done)
			c.tally.waiting.Add(-1)
			return true
		})
		if !c.ask(value) {
			return
		}
	}
}

// read is Value, and keeps what it has seen of each lane.
// Preconditions: c.tally.mu is held.
func (c *Counter) read() (value uint64) {
	for i, l := range c.lanes {
		c.seen[i] = l.b.Count(c.number)
		value += c.seen[i]
	}
	return value
}

// ask has the backends tell of the arrival that the first of the waits needs, and reports
// whether that is there already. Of several backends each may bring a part of what is
// missing: one of them brings its share at least. What is missing, and the shares, are of
// the value that read has seen: an arrival since then is one of those we ask for.
// Preconditions: c.tally.mu is held.
func (c *Counter) ask(value uint64) (reached bool) {
	missing := uint64(0)
	for _, w := range c.waits {
		if m := w.n - value; missing == 0 || m < missing {
			missing = m
		}
	}
	lanes := uint64(len(c.lanes))
	for i, l := range c.lanes {
		n := uint64(math.MaxUint64)
		if missing > 0 {
			n = c.seen[i] + (missing-1)/lanes + 1
		}
		reached = l.b.AwaitCount(c.number, n) || reached
	}
	return reached
}

// count wakes the goroutines that wait for counters, for a lane that was woken.
func (l *lane) count() {
	t := &l.e.tally
	if !l.notifies() || t.waiting.Load() == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, c := range t.counters {
		if len(c.waits) > 0 {
			c.look()
		}
	}
}
