// SPDX-License-Identifier: Apache-2.0

package rdma

import "time"

// clock is what a Backend knows of time. Tests bring their own.
type clock struct {
	now   func() time.Time
	after func(time.Duration) <-chan time.Time
}

// wall is the clock of this machine.
var wall = clock{time.Now, time.After}

// stopwatch measures how long this process has run while it waits for a peer. Its owner looks at
// least once a beat. A look that is late shows that the process stood still, because it was stopped
// or because the machine was busy: that time is no silence of the peer, so it does not count. Nor
// does the beat that follows, in which other goroutines read what the peer said meanwhile. Where
// looks are late again and again the machine is as it is: then some count, so that no wait is for
// ever.
type stopwatch struct {
	clock clock
	beat  time.Duration
	at    time.Time // the time that has counted, after some beginning
	seen  time.Time // when the last look was; zero: nothing counts before the next one
	held  time.Time // nothing counts before this
	late  int       // looks
}

const (
	beatMin = 5 * time.Millisecond
	beatMax = 250 * time.Millisecond
	lateMax = 8 // of so many late looks one counts, as a beat
)

// newStopwatch returns a stopwatch for waits of up to limit.
func newStopwatch(c clock, limit time.Duration) *stopwatch {
	now := c.now()
	return &stopwatch{clock: c, beat: min(max(limit/32, beatMin), beatMax), at: now, seen: now}
}

// look returns the time that has counted.
func (s *stopwatch) look() time.Time {
	now := s.clock.now()
	switch gap := now.Sub(s.seen); {
	case s.seen.IsZero():
	case gap > 2*s.beat:
		s.held = now.Add(s.beat)
		if s.late++; s.late%lateMax == 0 {
			s.at = s.at.Add(s.beat)
		}
	case now.After(s.held):
		s.at = s.at.Add(min(gap, now.Sub(s.held)))
	}
	s.seen = now
	return s.at
}

// rest says that the next look may come at any time. Until then nothing counts.
func (s *stopwatch) rest() { s.seen = time.Time{} }

// tick fires when it is time to look, in a beat at most: until is a time as look returns it.
func (s *stopwatch) tick(until time.Time) <-chan time.Time {
	left := until.Sub(s.at) + max(0, s.held.Sub(s.seen))
	return s.clock.after(min(left, s.beat))
}

// pass waits until this process has run for d, or one of the channels is closed. It reports whether
// the time has passed.
func (c clock) pass(d time.Duration, over, stop <-chan struct{}) bool {
	s := newStopwatch(c, d)
	for end := s.at.Add(d); s.look().Before(end); {
		select {
		case <-s.tick(end):
		case <-over:
			return false
		case <-stop:
			return false
		}
	}
	return true
}
