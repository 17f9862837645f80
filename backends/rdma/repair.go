// SPDX-License-Identifier: Apache-2.0

package rdma

import "time"

// repair is what becomes of the lanes of a connection that we began. It decides, and does
// nothing itself: peer.mend carries it out.
//
//	probing -> live            a request without bytes came back
//	probing, live -> waiting   the lane failed: C has ended our queue pair
//	waiting -> asked           the owner is told, and asked to end its own
//	asked -> probing           it did, and has a new one
//	asked -> waiting           it did, and could not make a new one
//	any -> out                 our device is gone
//
// The pause before the owner is asked is none at first, then grows from pauseMin to
// pauseMax until the lane is live again.
type repair struct {
	lanes   []laneRepair
	answer  time.Duration // how long the owner may take
	failure time.Duration // how long no lane may be live
	steady  time.Duration // a lane that stays live for so long is sound
	dark    time.Duration // a lane whose port is down for so long has failed
	none    time.Time     // since when none is live; zero: one is
	shaky   time.Time     // since when none was sound; zero: one is, or has not failed
	look    time.Time     // when to look again whether something waits; zero: it does
}

type laneRepair struct {
	state   laneState
	attempt uint32
	pause   time.Duration
	due     time.Time // waiting: when to ask; asked: when an answer is late; live: when it is sound
	down    time.Time // since when our port is down; zero: it is up
}

type laneState uint8

const (
	laneProbing laneState = iota
	laneLive
	laneWaiting
	laneAsked
	laneOut
)

var laneStates = [...]string{"probing", "live", "failed", "asked for", "out"}

func (s laneState) String() string { return laneStates[s] }

const (
	pauseMin = 50 * time.Millisecond
	pauseMax = time.Second
	shakyMax = 10 // times failure
)

func newRepair(lanes int, cfg *Config) *repair {
	least, _ := cfg.FailureTime()
	return &repair{
		lanes:  make([]laneRepair, lanes),
		answer: cfg.Failure, failure: cfg.Failure, steady: 2 * least, dark: least,
	}
}

// begun notes that the owner has made its ends: from now on a lane must come to life. What it
// takes until then is for the context of Connect to bound.
func (r *repair) begun(now time.Time) { r.none = now }

// live notes that a probe came back.
func (r *repair) live(i int, now time.Time) {
	l := &r.lanes[i]
	if l.state != laneProbing {
		return
	}
	l.state, l.pause, l.due = laneLive, 0, now.Add(r.steady)
	r.none = time.Time{}
}

// failed notes the end of our queue pair. moved says that bytes have passed since it was
// live: then it was sound, however short that was.
func (r *repair) failed(i int, moved bool, now time.Time) {
	l := &r.lanes[i]
	if moved {
		r.shaky = time.Time{}
	}
	switch l.state {
	case laneLive:
		l.due = now
	case laneProbing:
		r.later(l, now)
	default:
		return
	}
	l.state = laneWaiting
	r.count(now)
}

// later sets a pause, longer than the one before.
func (r *repair) later(l *laneRepair, now time.Time) {
	l.pause = min(max(pauseMin, 2*l.pause), pauseMax)
	l.due = now.Add(l.pause)
}

// out takes a lane out for good. What it held must have been settled.
func (r *repair) out(i int, now time.Time) {
	r.lanes[i].state = laneOut
	r.count(now)
}

// count notes how many lanes are live, and since when none is.
func (r *repair) count(now time.Time) {
	if r.shaky.IsZero() {
		r.shaky = now
	}
	for i := range r.lanes {
		if r.lanes[i].state == laneLive {
			return
		}
	}
	if r.none.IsZero() {
		r.none = now
	}
}

// asks returns the lanes whose owner is to be asked now.
func (r *repair) asks(now time.Time) (list []int) {
	for i := range r.lanes {
		l := &r.lanes[i]
		if l.state == laneWaiting && !now.Before(l.due) {
			l.state, l.due = laneAsked, now.Add(r.answer)
			l.attempt++
			list = append(list, i)
		}
	}
	return list
}

// answered reports whether an answer is the one that is waited for. there says that the
// owner has a new queue pair, and that we have one.
func (r *repair) answered(i int, attempt uint32, there bool, now time.Time) bool {
	if i >= len(r.lanes) || r.lanes[i].state != laneAsked || r.lanes[i].attempt != attempt {
		return false
	}
	l := &r.lanes[i]
	if there {
		l.state = laneProbing
	} else {
		l.state = laneWaiting
		r.later(l, now)
	}
	return true
}

// hurry ends the pauses: a port is up again.
func (r *repair) hurry(now time.Time) {
	for i := range r.lanes {
		if l := &r.lanes[i]; l.state == laneWaiting {
			l.pause, l.due = 0, now
		}
	}
}

// port notes whether our port of a lane is up. While it is down the lane is given nothing
// new, so nothing of it fails by itself: see darkened.
func (r *repair) port(i int, up bool, now time.Time) {
	l := &r.lanes[i]
	switch {
	case up:
		l.down = time.Time{}
	case l.down.IsZero():
		l.down = now
	}
}

// darkened returns the lanes that have failed because their port was down for as long as a
// queue pair would have tried. A shorter outage the queue pairs bear by themselves.
func (r *repair) darkened(now time.Time) (list []int) {
	for i := range r.lanes {
		if l := &r.lanes[i]; l.carries() && !l.down.IsZero() && now.Sub(l.down) >= r.dark {
			list = append(list, i)
		}
	}
	return list
}

// carries reports whether there is a queue pair that may work.
func (l *laneRepair) carries() bool { return l.state == laneLive || l.state == laneProbing }

// gone reports whether the devices of all lanes are gone: there will be none.
func (r *repair) gone() bool {
	for i := range r.lanes {
		if r.lanes[i].state != laneOut {
			return false
		}
	}
	return true
}

// lost says why the peer is to be given up, for which something waits; empty: it is not.
func (r *repair) lost(now time.Time) string {
	r.look = time.Time{}
	for i := range r.lanes {
		l := &r.lanes[i]
		switch {
		case l.state == laneAsked && now.After(l.due):
			return "it does not answer that a lane has failed"
		case l.state == laneLive && !now.Before(l.due):
			r.shaky = time.Time{}
		}
	}
	switch {
	case !r.none.IsZero() && now.Sub(r.none) > r.failure:
		return "no lane came to life in Config.Failure"
	case !r.shaky.IsZero() && now.Sub(r.shaky) > shakyMax*r.failure:
		return "its lanes fail over and over"
	}
	return ""
}

// troubled reports whether time runs that lost looks at.
func (r *repair) troubled() bool {
	for i := range r.lanes {
		if r.lanes[i].state == laneAsked {
			return true
		}
	}
	return !r.none.IsZero() || !r.shaky.IsZero()
}

// bear gives a peer all of its time once more: nothing waits for it. It is to be called often,
// so that what waits later has about as much.
func (r *repair) bear(now time.Time) {
	r.look = now.Add(r.failure / 4)
	if !r.none.IsZero() {
		r.none = now
	}
	if !r.shaky.IsZero() {
		r.shaky = now
	}
	for i := range r.lanes {
		if l := &r.lanes[i]; l.state == laneAsked {
			l.due = now.Add(r.answer)
		}
	}
}

// next is when to look again without news; zero: never.
func (r *repair) next() (at time.Time) {
	sooner := func(t time.Time) {
		if at.IsZero() || t.Before(at) {
			at = t
		}
	}
	for i := range r.lanes {
		l := &r.lanes[i]
		if l.state == laneWaiting || l.state == laneAsked || l.state == laneLive &&
			!r.shaky.IsZero() {
			sooner(l.due)
		}
		if l.carries() && !l.down.IsZero() {
			sooner(l.down.Add(r.dark))
		}
	}
	if !r.look.IsZero() {
		sooner(r.look)
	}
	if !r.none.IsZero() {
		sooner(r.none.Add(r.failure))
	}
	if at.IsZero() {
		return at
	}
	return at.Add(time.Millisecond) // past it, however clocks are cut
}
