// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// odds is what a rule remembers.
type odds struct {
	matched, fired atomic.Uint64

	mu   sync.Mutex
	next time.Time // when the rate of limit is free again
}

// What is drawn for one event is drawn from different streams.
const (
	drawChance = iota
	drawTime
)

// draw returns a number in [0, 1) that follows from the seed, the rule, how many events
// have matched it, and the stream: splitmix64 of a counter, so that no draw depends on
// how many others there were.
func (b *Backend) draw(rule int, n uint64, stream uint64) float64 {
	x := b.seed
	for _, word := range [...]uint64{uint64(rule), n, stream} {
		x = mix(x + 0x9e3779b97f4a7c15*(word+1))
	}
	return float64(x>>11) / (1 << 53)
}

func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// occasion is an event that rules are held against.
type occasion struct {
	events Event
	size   uint64 // bytes
	pieces int
	peer   uint64
}

// fires counts the event, and reports whether rule i hits it, as the nth that matched.
func (b *Backend) fires(i int, o *occasion) (n uint64, hit bool) {
	r := &b.rules[i]
	if r.On&o.events == 0 || r.Size != nil && !r.Size(o.size) ||
		r.Peer != nil && !r.Peer(o.peer) {
		return 0, false
	}
	d := &b.odds[i]
	n = d.matched.Add(1)
	if n <= r.Skip || r.Every > 1 && (n-r.Skip)%r.Every != 0 || r.Chance > 0 &&
		b.draw(i, n, drawChance) >= r.Chance {
		return n, false
	}
	for {
		fired := d.fired.Load()
		if r.Most != 0 && fired >= r.Most {
			return n, false
		}
		if d.fired.CompareAndSwap(fired, fired+1) {
			return n, true
		}
	}
}

// span is the time of a rule for the nth event, jitter included.
func (b *Backend) span(i int, n uint64) time.Duration {
	d := &b.rules[i].Do
	switch {
	case d.kind == reorder:
		return time.Duration(b.draw(i, n, drawTime) * float64(d.time))
	case d.jitter == 0:
		return d.time
	}
	return max(0, d.time+time.Duration((2*b.draw(i, n, drawTime)-1)*float64(d.jitter)))
}

// through says when so many bytes are through at the rate of rule i: those that came
// before are first. What was not used of the rate before, up to its burst, counts.
func (b *Backend) through(i int, bytes uint64) time.Time {
	r, d := &b.rules[i].Do, &b.odds[i]
	now := time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	if oldest := now.Add(-takes(r.burst, r.rate)); d.next.Before(oldest) {
		d.next = oldest
	}
	d.next = d.next.Add(takes(bytes, r.rate))
	return d.next
}

// takes is the time of so many bytes at a rate.
func takes(bytes, rate uint64) time.Duration {
	return time.Duration(math.Min(float64(bytes)/float64(rate)*1e9, float64(TimeMax)))
}

// verdict is what the rules have in store for one event.
type verdict struct {
	hit    bool
	start  time.Time     // hand it on then; zero: now
	hold   time.Duration // no completion before that is over
	ending kind          // drop, swallow, fail, refuse, stall, flap, or 0
	err    error         // of fail and refuse
	time   time.Duration // of stall and flap
	breach breach
}

// breach is what a verdict has against the contract.
type breach struct {
	kinds kind
	after time.Duration // of those that take a time
}

func (x breach) is(k kind) bool { return x.kinds&k != 0 }

// judge holds an event against all rules.
func (b *Backend) judge(o *occasion) (v verdict) {
	for i := range b.rules {
		n, hit := b.fires(i, o)
		if !hit {
			continue
		}
		v.hit = true
		switch d := &b.rules[i].Do; d.kind {
		case delay, reorder:
			v.hold += b.span(i, n)
		case late:
			v.begin(time.Now().Add(b.span(i, n)))
		case limit:
			v.begin(b.through(i, o.size))
		case model:
			v.begin(time.Now().Add(d.time + d.perPiece*time.Duration(o.pieces) +
				takes(o.size, d.rate)))
		case drop, swallow, fail, refuse, stall, flap:
			if v.ending == 0 { // the first one ends it
				v.ending, v.err, v.time = d.kind, d.err, d.time
			}
		default:
			v.breach.kinds |= d.kind
			if d.time != 0 {
				v.breach.after = d.time
			}
		}
	}
	return v
}

// begin keeps the latest of several beginnings.
func (v *verdict) begin(at time.Time) {
	if at.After(v.start) {
		v.start = at
	}
}
