// SPDX-License-Identifier: Apache-2.0

// Package clock has the clock by which a backend judges how old bytes are, and how long a peer has
// been silent. In programs it is the clock of the host. Tests use one that they advance themselves,
// so that a machine that stands still does not change their outcome.
package clock

import (
	"sync"
	"time"
)

// Clock tells the time and sets timers.
type Clock interface {
	// Now is in nanoseconds since a moment of the clock's own. It is never near 0, so that 0 can
	// stand for never.
	Now() int64
	Sleep(d time.Duration)
	// AfterFunc calls f once d has passed, unless the timer is stopped or set again.
	AfterFunc(d time.Duration, f func()) Timer
}

// Timer is a timer of AfterFunc, such as *time.Timer.
type Timer interface {
	Stop() bool
	Reset(d time.Duration) bool
}

// host is the clock of the host. It stands still while the host is suspended.
type host struct{ began time.Time }

// Host returns the clock of the host.
func Host() Clock { return host{time.Now().Add(-time.Hour)} }

func (h host) Now() int64 { return int64(time.Since(h.began)) }

func (h host) Sleep(d time.Duration) { time.Sleep(d) }

func (h host) AfterFunc(d time.Duration, f func()) Timer { return time.AfterFunc(d, f) }

// After returns a channel that is closed once d has passed. The caller stops the timer when it
// waits no longer.
func After(c Clock, d time.Duration) (over <-chan struct{}, t Timer) {
	done := make(chan struct{})
	return done, c.AfterFunc(d, func() { close(done) })
}

// AfterRunning calls f, in a goroutine of its own, once this process has run for d, unless the
// timer is stopped or set again. It counts beats: while the process stands still there are none,
// and one that was late counts as one. So a stranger is not held to time in which this process
// heard nothing.
func AfterRunning(c Clock, d time.Duration, f func()) Timer {
	r := &running{f: f}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.timer = c.AfterFunc(time.Hour, r.beat)
	r.begin(d)
	return r
}

// Pass waits until this process has run for d, or one of the channels is closed. It reports whether
// the time has passed.
func Pass(c Clock, d time.Duration, over, stop <-chan struct{}) bool {
	passed := make(chan struct{})
	timer := AfterRunning(c, d, func() { close(passed) })
	defer timer.Stop()
	select {
	case <-passed:
		return true
	case <-over:
	case <-stop:
	}
	return false
}

// beats is in how many parts AfterRunning counts.
const beats = 32

type running struct {
	f     func()
	mu    sync.Mutex // guards what follows
	timer Timer
	each  time.Duration
	left  int // beats; 0: it was called, or stopped
}

// begin sets the time anew; r.mu is held.
func (r *running) begin(d time.Duration) {
	r.each, r.left = max(d/beats, 1), beats
	r.timer.Reset(r.each)
}

func (r *running) beat() {
	r.mu.Lock()
	over := r.left == 1
	if r.left > 1 {
		r.timer.Reset(r.each)
	}
	r.left = max(0, r.left-1)
	r.mu.Unlock()
	if over {
		r.f()
	}
}

// Stop implements Timer.
func (r *running) Stop() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	was := r.left > 0
	r.left = 0
	r.timer.Stop()
	return was
}

// Reset implements Timer.
func (r *running) Reset(d time.Duration) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	was := r.left > 0
	r.begin(d)
	return was
}
