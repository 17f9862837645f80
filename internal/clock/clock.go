// SPDX-License-Identifier: Apache-2.0

// Package clock is the time by which a backend judges how old bytes are, and how long a peer is
// silent. Programs have the host's clock. Tests have one that they move, so that a machine that
// stands still does not change what they see.
package clock

import "time"

// Clock tells the time and sets timers.
type Clock interface {
	// Now is in nanoseconds since a moment of the clock's own. It is never near 0, so that 0 can
	// stand for never.
	Now() int64
	Sleep(d time.Duration)
	// AfterFunc calls f once d has passed, unless the timer is stopped or set again.
	AfterFunc(d time.Duration, f func()) Timer
}

// Timer is as *time.Timer is, which implements it.
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
