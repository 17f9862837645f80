// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// Rule is one fault: which batches meet it, and what it does. Of several rules all that match
// apply, in order.
type Rule struct {
	On      Event
	AtLeast uint64 // bytes of the batch

	// Which of the batches that match are hit.
	Skip   uint64  // the first ones are let off
	Every  uint64  // only each nth after those; 0 and 1: all
	Chance float64 // share of those, by the seed; 0: all
	Most   uint64  // so many in all; 0: any number

	Do Deed
}

// Event is which batches a rule is about.
type Event uint8

// The events. A batch is one call of Submit.
const (
	Batch   Event = 1 << iota // any batch
	Read                      // a batch that reads
	Write                     // a batch that writes bytes
	Message                   // a batch with a message, with bytes or without
)

// Deed is the action of a rule. The functions below make deeds.
type Deed struct {
	kind         kind
	time, jitter time.Duration
	err          error
}

type kind uint8

const (
	delay kind = iota + 1
	late
	drop
	swallow
	fail
	refuse
	stall
	flap
	duplicate
	early
	corrupt
	lateWrite
)

// Deeds that the contract allows, so that a program must bear them. Of Drop, Swallow, Fail, Refuse,
// Stall and Flap the first that hits a batch counts. A jitter is how much more or less a time may
// be, by the seed.

// Delay has a batch complete at least t after it has begun: with a jitter, others overtake it.
func Delay(t, jitter time.Duration) Deed { return Deed{kind: delay, time: t, jitter: jitter} }

// Late has the batch begin so much later.
func Late(t, jitter time.Duration) Deed { return Deed{kind: late, time: t, jitter: jitter} }

// Drop moves the bytes, but no completion comes until Cancel, Close or the peer's death.
func Drop() Deed { return Deed{kind: drop} }

// Swallow moves nothing, and no completion comes until Cancel, Close or the peer's death.
func Swallow() Deed { return Deed{kind: swallow} }

// Fail moves nothing, and the batch ends with err.
func Fail(err error) Deed { return Deed{kind: fail, err: err} }

// Refuse has Submit return err.
func Refuse(err error) Deed { return Deed{kind: refuse, err: err} }

// Stall has Submit return driver.ErrFull for t, for all batches of the connection.
func Stall(t time.Duration) Deed { return Deed{kind: stall, time: t} }

// Flap loses the connection, and for t none is made to that address.
func Flap(t time.Duration) Deed { return Deed{kind: flap, time: t} }

// Deeds that break the contract: a detector must find them.

// BreakDuplicate has the completion come twice.
func BreakDuplicate() Deed { return Deed{kind: duplicate} }

// BreakEarly has the completion come at once, and the bytes move t later.
func BreakEarly(t time.Duration) Deed { return Deed{kind: early, time: t} }

// BreakCorrupt leaves the second half of each piece as it was.
func BreakCorrupt() Deed { return Deed{kind: corrupt} }

// BreakLateWrite has the bytes move t after the batch has ended with an error.
func BreakLateWrite(t time.Duration) Deed { return Deed{kind: lateWrite, time: t} }

// TimeMax bounds each time of a rule.
const TimeMax = 24 * time.Hour

// flaw says what is wrong with a rule, or nothing.
func (r *Rule) flaw() string {
	d := &r.Do
	switch {
	case d.kind == 0:
		return "it has nothing to Do"
	case r.On == 0 || r.On&(r.On-1) != 0 || r.On > Message:
		return "On is not one event"
	case !(r.Chance >= 0 && r.Chance < 1):
		return "Chance is not in [0, 1)"
	case min(d.time, d.jitter) < 0 || max(d.time, d.jitter) > TimeMax:
		return fmt.Sprintf("a time is below 0 or above %v", TimeMax)
	case (d.kind == fail || d.kind == refuse) && d.err == nil:
		return "no error to end with"
	}
	return ""
}

// count counts the batches that a rule matched, and those in which it fired.
type count struct{ matched, fired uint64 }

// hits counts a batch, and reports whether rule i hits it, as the nth that matched.
// Preconditions: b.mu is held.
func (b *Backend) hits(i int, events Event, bytes uint64) (n uint64, hit bool) {
	r, c := &b.rules[i], &b.counts[i]
	if r.On&events == 0 || bytes < r.AtLeast {
		return 0, false
	}
	c.matched++
	n = c.matched
	if n <= r.Skip || r.Every > 1 && (n-r.Skip)%r.Every != 0 || r.Most != 0 && c.fired >= r.Most ||
		r.Chance > 0 && b.draw(i, n, drawChance) >= r.Chance {
		return n, false
	}
	c.fired++
	return n, true
}

// What is drawn for one batch is drawn from different streams.
const (
	drawChance = iota
	drawTime
)

// draw returns a number in [0, 1) that follows from the seed, the rule, how many batches have
// matched it, and the stream: splitmix64 of a counter, so that no draw depends on how many others
// there were.
func (b *Backend) draw(rule int, n uint64, stream uint64) float64 {
	x := b.seed
	for _, word := range [...]uint64{uint64(rule), n, stream} {
		x += 0x9e3779b97f4a7c15 * (word + 1)
		x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
		x = (x ^ x>>27) * 0x94d049bb133111eb
		x ^= x >> 31
	}
	return float64(x>>11) / (1 << 53)
}

// span is the time of rule i for its nth batch, jitter included.
func (b *Backend) span(i int, n uint64) time.Duration {
	d := &b.rules[i].Do
	return max(0, d.time+time.Duration((2*b.draw(i, n, drawTime)-1)*float64(d.jitter)))
}

// verdict says what all rules together do to one batch.
type verdict struct {
	start  time.Duration // submit it to the wrapped backend so much later
	hold   time.Duration // after that, hold its completion back for so long
	ending kind          // drop, swallow, fail, refuse, stall, flap, or 0
	err    error         // of fail and refuse
	time   time.Duration // of stall and flap

	twice, corrupt    bool
	early, lateWrite  bool
	earlyBy, lateTime time.Duration
}

// judge applies all rules to a batch. Preconditions: b.mu is held.
func (b *Backend) judge(x *driver.Batch) (v verdict) {
	events, bytes := Batch, uint64(0)
	switch {
	case x.Op == driver.Read:
		events |= Read
	case len(x.Descs) > 0 || x.Pattern != nil:
		events |= Write
	}
	if x.Tail == driver.NotifyTail {
		events |= Message
	}
	for i := range x.Descs {
		bytes += x.Descs[i].Len
	}
	if x.Pattern != nil {
		bytes = x.Pattern.Bytes()
	}
	for i := range b.rules {
		n, hit := b.hits(i, events, bytes)
		if !hit {
			continue
		}
		switch d := &b.rules[i].Do; d.kind {
		case delay:
			v.hold += b.span(i, n)
		case late:
			v.start = max(v.start, b.span(i, n))
		case duplicate:
			v.twice = true
		case early:
			v.early, v.earlyBy = true, d.time
		case corrupt:
			v.corrupt = true
		case lateWrite:
			v.lateWrite, v.lateTime = true, d.time
		default:
			if v.ending == 0 {
				v.ending, v.err, v.time = d.kind, d.err, d.time
			}
		}
	}
	return v
}
