// SPDX-License-Identifier: Apache-2.0

package rdma

import "time"

// repair is what becomes of the queue pairs of a connection that we began. It decides, and does
// nothing itself: peer.mend carries it out.
//
//	probing -> live            a request without bytes came back
//	probing, live -> waiting   the queue pair failed: C has ended our end of it
//	waiting -> asked           the owner is told, and asked to end its own
//	asked -> probing           it did, and has a new one
//	asked -> waiting           it did, and could not make a new one
//	any -> out                 our device is gone
//
// The pause before the owner is asked is none at first, then grows from pauseMin to
// pauseMax until the queue pair is live again.
type repair struct {
	pairs   []pairRepair
	failure time.Duration // how long no queue pair may be live
	steady  time.Duration // a queue pair that stays live for so long is sound
	dark    time.Duration // a queue pair whose port is down for so long has failed
	none    time.Time     // since when none is live; zero: one is
	owed    time.Time     // since when the owner owes an answer; zero: it does not
	shaky   time.Time     // since when none was sound; zero: one is, or has not failed
}

type pairRepair struct {
	state   pairState
	attempt uint32
	pause   time.Duration
	due     time.Time // waiting: when to ask; live: when it is sound
	down    time.Time // since when our port is down; zero: it is up
}

type pairState uint8

const (
	pairProbing pairState = iota
	pairLive
	pairWaiting
	pairAsked
	pairOut
)

var pairStates = [...]string{"probing", "live", "failed", "asked for", "out"}

func (s pairState) String() string { return pairStates[s] }

const (
	pauseMin = 50 * time.Millisecond
	pauseMax = time.Second
	shakyMax = 10 // times failure
)

func newRepair(pairs int, cfg *Config) *repair {
	least, _ := cfg.FailureTime()
	return &repair{
		pairs:   make([]pairRepair, pairs),
		failure: cfg.Failure, steady: 2 * least, dark: least,
	}
}

// begun notes that the owner has made its ends: from now on a queue pair must come to life. What it
// takes until then is for the context of Connect to bound.
func (r *repair) begun(now time.Time) { r.none = now }

// live notes that a probe came back.
func (r *repair) live(i int, now time.Time) {
	l := &r.pairs[i]
	if l.state != pairProbing {
		return
	}
	l.state, l.pause, l.due = pairLive, 0, now.Add(r.steady)
	r.none = time.Time{}
}

// failed notes the end of our queue pair. moved says that bytes have passed since it was
// live: then it was sound, however short that was.
func (r *repair) failed(i int, moved bool, now time.Time) {
	l := &r.pairs[i]
	if moved {
		r.shaky = time.Time{}
	}
	switch l.state {
	case pairLive:
		l.due = now
	case pairProbing:
		r.later(l, now)
	default:
		return
	}
	l.state = pairWaiting
	r.count(now)
}

// later sets a pause, longer than the one before.
func (r *repair) later(l *pairRepair, now time.Time) {
	l.pause = min(max(pauseMin, 2*l.pause), pauseMax)
	l.due = now.Add(l.pause)
}

// out takes a queue pair out for good. What it held must have been settled.
func (r *repair) out(i int, now time.Time) {
	r.pairs[i].state = pairOut
	r.count(now)
}

// count notes how many queue pairs are live, and since when none is.
func (r *repair) count(now time.Time) {
	if r.shaky.IsZero() {
		r.shaky = now
	}
	for i := range r.pairs {
		if r.pairs[i].state == pairLive {
			return
		}
	}
	if r.none.IsZero() {
		r.none = now
	}
}

// asks returns the queue pairs whose owner is to be asked now.
func (r *repair) asks(now time.Time) (list []int) {
	for i := range r.pairs {
		l := &r.pairs[i]
		if l.state == pairWaiting && !now.Before(l.due) {
			l.state = pairAsked
			l.attempt++
			list = append(list, i)
		}
	}
	r.excuse(now)
	return list
}

// excuse leaves out the time that the owner takes to answer, as far as it has passed: its process
// may be stopped, or kept off its processors. The caller knows whether its host is there.
func (r *repair) excuse(now time.Time) {
	if !r.owed.IsZero() {
		for _, since := range []*time.Time{&r.none, &r.shaky} {
			if !since.IsZero() {
				*since = since.Add(min(now.Sub(r.owed), now.Sub(*since)))
			}
		}
	}
	r.owed = time.Time{}
	for i := range r.pairs {
		if r.pairs[i].state == pairAsked {
			r.owed = now
		}
	}
}

// answered reports whether an answer is the one that is waited for. there says that the
// owner has a new queue pair, and that we have one.
func (r *repair) answered(i int, attempt uint32, there bool, now time.Time) bool {
	if i >= len(r.pairs) || r.pairs[i].state != pairAsked || r.pairs[i].attempt != attempt {
		return false
	}
	l := &r.pairs[i]
	if there {
		l.state = pairProbing
	} else {
		l.state = pairWaiting
		r.later(l, now)
	}
	r.excuse(now)
	return true
}

// hurry ends the pauses: a port is up again.
func (r *repair) hurry(now time.Time) {
	for i := range r.pairs {
		if l := &r.pairs[i]; l.state == pairWaiting {
			l.pause, l.due = 0, now
		}
	}
}

// port notes whether our port of a queue pair is up. While it is down the queue pair is given
// nothing new, so nothing of it fails by itself: see darkened.
func (r *repair) port(i int, up bool, now time.Time) {
	l := &r.pairs[i]
	switch {
	case up:
		l.down = time.Time{}
	case l.down.IsZero():
		l.down = now
	}
}

// darkened returns the queue pairs that have failed because their port was down for as long as a
// NIC would have tried. A shorter outage the queue pairs bear by themselves.
func (r *repair) darkened(now time.Time) (list []int) {
	for i := range r.pairs {
		if l := &r.pairs[i]; l.carries() && !l.down.IsZero() && now.Sub(l.down) >= r.dark {
			list = append(list, i)
		}
	}
	return list
}

// carries reports whether there is a queue pair that may work.
func (l *pairRepair) carries() bool { return l.state == pairLive || l.state == pairProbing }

// gone reports whether the devices of all queue pairs are gone: there will be none.
func (r *repair) gone() bool {
	for i := range r.pairs {
		if r.pairs[i].state != pairOut {
			return false
		}
	}
	return true
}

// lost says why the peer is to be given up, for which something waits; empty: it is not.
func (r *repair) lost(now time.Time) string {
	r.settle(now)
	r.excuse(now)
	switch {
	case !r.none.IsZero() && now.Sub(r.none) > r.failure:
		return "no queue pair came to life in Config.Failure"
	case !r.shaky.IsZero() && now.Sub(r.shaky) > shakyMax*r.failure:
		return "its queue pairs fail over and over"
	}
	return ""
}

// settle notes whether a queue pair has been live for long enough to be sound.
func (r *repair) settle(now time.Time) {
	for i := range r.pairs {
		if l := &r.pairs[i]; l.state == pairLive && !now.Before(l.due) {
			r.shaky = time.Time{}
		}
	}
}

// troubled reports whether time runs that lost looks at.
func (r *repair) troubled() bool {
	for i := range r.pairs {
		if r.pairs[i].state == pairAsked {
			return true
		}
	}
	return !r.none.IsZero() || !r.shaky.IsZero()
}

// bear gives a peer all of its time once more: nothing waits for it yet.
func (r *repair) bear(now time.Time) {
	r.settle(now)
	r.excuse(now)
	if !r.none.IsZero() {
		r.none = now
	}
	if !r.shaky.IsZero() {
		r.shaky = now
	}
}

// next is when to look again without news; zero: never.
func (r *repair) next() (at time.Time) {
	sooner := func(t time.Time) {
		if at.IsZero() || t.Before(at) {
			at = t
		}
	}
	for i := range r.pairs {
		l := &r.pairs[i]
		if l.state == pairWaiting || l.state == pairLive && !r.shaky.IsZero() {
			sooner(l.due)
		}
		if l.carries() && !l.down.IsZero() {
			sooner(l.down.Add(r.dark))
		}
	}
	if !r.none.IsZero() {
		sooner(r.none.Add(r.failure))
	}
	if !r.owed.IsZero() {
		sooner(r.owed.Add(r.failure))
	}
	if at.IsZero() {
		return at
	}
	return at.Add(time.Millisecond) // past it, however clocks are cut
}
