// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// Rule is one fault: when it happens, and what. Of several rules all that match apply, in order.
type Rule struct {
	On Event

	// What must match. An event that matches is counted, whether the rule fires or not.
	Size func(uint64) bool // bytes of the batch or of the message; nil: any
	Peer func(uint64) bool // number of the connection, in the order of Connect, from 0; nil: any

	// Which of those that match are hit.
	Skip   uint64  // the first ones are let off
	Every  uint64  // only each nth after those; 0 and 1: all
	Chance float64 // share of those, by the seed; 0: all
	Most   uint64  // so many in all; 0: any number

	Do Deed
}

// RulesMax bounds the rules of a backend.
const RulesMax = 1024

// Exactly matches one number.
func Exactly(n uint64) func(uint64) bool { return func(x uint64) bool { return x == n } }

// AtLeast matches a number and all above it.
func AtLeast(n uint64) func(uint64) bool { return func(x uint64) bool { return x >= n } }

// Event is what a rule is about.
type Event uint16

// The events. A batch is one call of Submit and its kin.
const (
	Batch    Event = 1 << iota // any batch
	Read                       // a batch that reads
	Write                      // a batch that writes bytes
	Message                    // a batch with a message, with bytes or without
	Connect                    // Backend.Connect
	Import                     // Peer.Import
	Register                   // Backend.Register
	Revoke                     // Memory.Revoke
	Receive                    // a message that has come in
	events   = iota
)

// batches are the events that one batch can be.
const batches = Batch | Read | Write | Message

// Deed is what a rule does: the result of one of the functions below.
type Deed struct {
	kind                   kind
	time, jitter, perPiece time.Duration
	rate, burst            uint64
	err                    error
}

type kind uint16

// What the contract allows: of these one ends a batch.
const (
	delay kind = iota + 1
	reorder
	late
	limit
	model
	drop
	swallow
	fail
	refuse
	stall
	flap
)

// What breaks the contract, as bits: one batch may meet several.
const (
	duplicate kind = 16 << iota
	forget
	early
	corrupt
	skip
	lateWrite
	overtake
	swap
	lose
	repeat
)

// concerns says what events a kind of deed makes sense for.
func (k kind) concerns() Event {
	switch k {
	case delay:
		return batches | Connect | Revoke | Receive
	case refuse:
		return batches | Connect | Import | Register | Revoke
	case late, reorder, limit, model, drop, swallow, fail, stall, flap, duplicate, forget:
		return batches
	case early, corrupt, lateWrite:
		return Read | Write
	case skip:
		return Read | Write | Revoke
	case overtake:
		return Message
	case swap, lose, repeat:
		return Receive
	}
	return 0
}

// Deeds that the contract allows, so that a program must bear them. A jitter is how much more or
// less a time may be, by the seed.

// Delay has a batch complete at least t after Submit. It delays a call, or a message that came in,
// by t.
func Delay(t, jitter time.Duration) Deed { return Deed{kind: delay, time: t, jitter: jitter} }

// Late has the batch begin so much later.
func Late(t, jitter time.Duration) Deed { return Deed{kind: late, time: t, jitter: jitter} }

// Reorder holds the completion back for up to t, so that it overtakes others and they it.
func Reorder(t time.Duration) Deed { return Deed{kind: reorder, time: t} }

// Limit has batches share a rate in bytes a second: each begins when those before it are through.
// A rate that was not used adds up, to burst bytes.
func Limit(rate, burst uint64) Deed { return Deed{kind: limit, rate: rate, burst: burst} }

// Model has a batch take t, perPiece for each piece, and its bytes at a rate in bytes a second.
func Model(t, perPiece time.Duration, rate uint64) Deed {
	return Deed{kind: model, time: t, perPiece: perPiece, rate: rate}
}

// Drop moves the bytes, but no completion comes until Cancel, Close or the peer's death.
func Drop() Deed { return Deed{kind: drop} }

// Swallow moves nothing, and no completion comes until Cancel, Close or the peer's death.
func Swallow() Deed { return Deed{kind: swallow} }

// Fail moves nothing, and the batch ends with err.
func Fail(err error) Deed { return Deed{kind: fail, err: err} }

// Refuse has the call return err.
func Refuse(err error) Deed { return Deed{kind: refuse, err: err} }

// Stall has Submit return driver.ErrFull for t, for all batches of the connection.
func Stall(t time.Duration) Deed { return Deed{kind: stall, time: t} }

// Flap loses the connection, and for t none is made to that address.
func Flap(t time.Duration) Deed { return Deed{kind: flap, time: t} }

// Deeds that break the contract: a detector must find them.

// BreakDuplicate has the completion come twice.
func BreakDuplicate() Deed { return Deed{kind: duplicate} }

// BreakForget has the completion never come, not even at Close.
func BreakForget() Deed { return Deed{kind: forget} }

// BreakEarly has the completion come at once, and the bytes move t later.
func BreakEarly(t time.Duration) Deed { return Deed{kind: early, time: t} }

// BreakCorrupt has other bytes arrive.
func BreakCorrupt() Deed { return Deed{kind: corrupt} }

// BreakSkip leaves the end of the batch out. A Revoke does nothing.
func BreakSkip() Deed { return Deed{kind: skip} }

// BreakLateWrite has the bytes move t after the batch has ended with an error.
func BreakLateWrite(t time.Duration) Deed { return Deed{kind: lateWrite, time: t} }

// BreakOvertake has the message arrive t before its bytes.
func BreakOvertake(t time.Duration) Deed { return Deed{kind: overtake, time: t} }

// BreakSwap has a message that came in received up to t later, behind those that came after it.
func BreakSwap(t time.Duration) Deed { return Deed{kind: swap, time: t} }

// BreakLose has a message that came in not received.
func BreakLose() Deed { return Deed{kind: lose} }

// BreakRepeat has a message that came in received twice.
func BreakRepeat() Deed { return Deed{kind: repeat} }

// TimeMax bounds each time of a rule.
const TimeMax = 24 * time.Hour

// checkRules reports what no wrapped backend can do. Its errors are driver.ErrBounds.
func checkRules(rules []Rule) error {
	if len(rules) > RulesMax {
		return fmt.Errorf("%d rules, at most %d: %w", len(rules), RulesMax, driver.ErrBounds)
	}
	for i := range rules {
		if flaw := rules[i].flaw(); flaw != "" {
			return fmt.Errorf("rule %d: %s: %w", i+1, flaw, driver.ErrBounds)
		}
	}
	return nil
}

// flaw says what is wrong with a rule, or nothing.
func (r *Rule) flaw() string {
	d := &r.Do
	switch {
	case d.kind == 0:
		return "it has nothing to Do"
	case r.On == 0 || r.On&(r.On-1) != 0 || r.On >= 1<<events:
		return "On is not one event"
	case d.kind.concerns()&r.On == 0:
		return "what it does makes no sense for what it is On"
	case !(r.Chance >= 0 && r.Chance < 1):
		return "Chance is not in [0, 1)"
	case r.Peer != nil && r.On&(batches|Connect|Import) == 0:
		return "what it is On has no Peer"
	case r.Size != nil && r.On&(batches|Receive) == 0:
		return "what it is On has no Size"
	case min(d.time, d.jitter, d.perPiece) < 0 || max(d.time, d.jitter, d.perPiece) > TimeMax:
		return fmt.Sprintf("a time is below 0 or above %v", TimeMax)
	case (d.kind == limit || d.kind == model) && d.rate == 0:
		return "a rate of 0"
	case (d.kind == fail || d.kind == refuse) && d.err == nil:
		return "no error to end with"
	}
	return ""
}
