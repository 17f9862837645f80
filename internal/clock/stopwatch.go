// SPDX-License-Identifier: Apache-2.0

package clock

import "time"

// Stopwatch measures how long this process has run while it waits for a peer. Its owner looks at
// least once a beat. A look that is late shows that the process stood still, because it was stopped
// or because the machine was busy: that time is no silence of the peer, so it does not count. Nor
// does the beat that follows, in which other goroutines read what the peer said meanwhile. Where
// looks are late again and again the machine is as it is: then some count, so that no wait is for
// ever.
type Stopwatch struct {
	clock Clock
	beat  time.Duration
	at    time.Time // the time that has counted, after some beginning
	seen  time.Time // when the last look was; zero: nothing counts before the next one
	held  time.Time // nothing counts before this
	late  int       // looks
}

// A Stopwatch is to be looked at as often as this.
const (
	BeatMin = 5 * time.Millisecond
	BeatMax = 250 * time.Millisecond
	lateMax = 8 // of so many late looks one counts, as a beat
)

// NewStopwatch returns a Stopwatch for waits of up to limit.
func NewStopwatch(c Clock, limit time.Duration) *Stopwatch {
	now := time.Unix(0, c.Now())
	return &Stopwatch{clock: c, beat: min(max(limit/32, BeatMin), BeatMax), at: now, seen: now}
}

// Look returns the time that has counted.
func (s *Stopwatch) Look() time.Time {
	now := time.Unix(0, s.clock.Now())
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

// Rest says that the next look may come at any time. Until then nothing counts.
func (s *Stopwatch) Rest() { s.seen = time.Time{} }

// Tick is After a beat at most, when it is time to look: until is a time as Look returns it.
func (s *Stopwatch) Tick(until time.Time) (<-chan struct{}, Timer) {
	left := until.Sub(s.at) + max(0, s.held.Sub(s.seen))
	return After(s.clock, min(left, s.beat))
}
