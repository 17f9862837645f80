// SPDX-License-Identifier: Apache-2.0

package testkit

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/internal/clock"
)

// Clock is a clock that tests move: it stands still until Advance or Run moves it.
type Clock struct {
	now    atomic.Int64
	moving sync.Mutex // held by the goroutine that moves it

	mu     sync.Mutex
	timers map[*timer]struct{} // those that are set
}

type timer struct {
	c   *Clock
	f   func()
	due int64 // c.mu guards it
}

// NewClock returns a clock that stands.
func NewClock() *Clock {
	c := &Clock{timers: map[*timer]struct{}{}}
	c.now.Store(int64(time.Hour))
	return c
}

// Now implements clock.Clock.
func (c *Clock) Now() int64 { return c.now.Load() }

// Sleep implements clock.Clock.
func (c *Clock) Sleep(d time.Duration) {
	over, _ := clock.After(c, d)
	<-over
}

// AfterFunc implements clock.Clock. Where d has passed already it starts a goroutine for f, else
// the goroutine that moves the clock calls f.
func (c *Clock) AfterFunc(d time.Duration, f func()) clock.Timer {
	t := &timer{c: c, f: f}
	t.Reset(d)
	return t
}

// Stop implements clock.Timer.
func (t *timer) Stop() bool {
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	_, was := t.c.timers[t]
	delete(t.c.timers, t)
	return was
}

// Reset implements clock.Timer.
func (t *timer) Reset(d time.Duration) bool {
	was := t.Stop()
	if d <= 0 {
		go t.f()
		return was
	}
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	t.due = t.c.now.Load() + int64(d)
	t.c.timers[t] = struct{}{}
	return was
}

// Advance moves the clock by d. What timers call has returned when it returns.
func (c *Clock) Advance(d time.Duration) {
	c.moving.Lock()
	defer c.moving.Unlock()
	end := c.now.Load() + int64(d)
	for t := c.next(end); t != nil; t = c.next(end) {
		t.f()
	}
}

// Jump moves the clock by d at once, as it moves while a process is stopped: what is due by then is
// called late, and once.
func (c *Clock) Jump(d time.Duration) {
	c.moving.Lock()
	defer c.moving.Unlock()
	now := c.now.Add(int64(d))
	var due []*timer
	c.mu.Lock()
	for t := range c.timers {
		if t.due <= now {
			due = append(due, t)
			delete(c.timers, t)
		}
	}
	slices.SortFunc(due, func(a, b *timer) int { return cmp.Compare(a.due, b.due) })
	c.mu.Unlock()
	for _, t := range due {
		t.f()
	}
}

// Next is how long it is until the first timer is due, at most a limit.
func (c *Clock) Next(limit time.Duration) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	for t := range c.timers {
		limit = min(limit, time.Duration(t.due-c.now.Load()))
	}
	return max(limit, 0)
}

// next moves the clock to the first timer that is due by end and takes that one out, or moves the
// clock to end if there is none.
func (c *Clock) next(end int64) *timer {
	c.mu.Lock()
	defer c.mu.Unlock()
	var first *timer
	for t := range c.timers {
		if t.due <= end && (first == nil || t.due < first.due) {
			first = t
		}
	}
	if first == nil {
		c.now.Store(end)
		return nil
	}
	c.now.Store(max(c.now.Load(), first.due))
	delete(c.timers, first)
	return first
}

// Run advances the clock by step for each millisecond that this process runs, until stop is
// called. While the process stands still, so does the clock.
func (c *Clock) Run(step time.Duration) (stop func()) {
	over, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-over:
				return
			case <-time.After(time.Millisecond):
				c.Advance(step)
			}
		}
	}()
	return sync.OnceFunc(func() { close(over); <-ended })
}
