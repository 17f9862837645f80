// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"fmt"
	"slices"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// Rules say how a wrapped backend misbehaves. The zero value is one that does not. Parse
// reads them from text, String writes them.
type Rules struct {
	Seed uint64 // of everything that is left to chance
	List []Rule // all that match apply, in order
}

// RulesMax bounds Rules.List.
const RulesMax = 1024

// Rule is one fault: when it happens, and what.
type Rule struct {
	On Event

	// What must match. An event that matches is counted, whether the rule fires or not.
	Size          Range         // bytes of the batch or of the message
	Peer          Range         // number of the connection, in the order of Connect, from 0
	After, Before time.Duration // since Wrap; Before 0: for ever

	// Which of those that match are hit.
	Skip   uint64  // the first ones are let off
	Every  uint64  // only each nth after those; 0 and 1: all
	Chance float64 // share of those, by the seed; 0: all
	Most   uint64  // so many in all; 0: any number

	Do           Deed
	Time, Jitter time.Duration // Jitter: at most so much more or less, by the seed
	PerPiece     time.Duration // of Model
	Rate         uint64        // bytes a second, of Limit and Model
	Burst        uint64        // bytes that Limit lets through at once
	Err          error         // of Fail and Refuse: one of Errors
}

// Range is an interval with both of its ends. A Max of 0 is no upper end, unless Exact.
type Range struct {
	Min, Max uint64
	Exact    bool // Min alone
}

func (r Range) has(n uint64) bool {
	if r.Exact {
		return n == r.Min
	}
	return n >= r.Min && (r.Max == 0 || n <= r.Max)
}

// Event is what a rule is about.
type Event uint16

// The events. A batch is one call of Submit and its kin.
const (
	Batch    Event = 1 << iota // any batch
	Read                       // a batch that reads
	Write                      // a batch that writes bytes
	Message                    // a batch with a message, with bytes or without
	Count                      // a batch with a count
	Connect                    // Backend.Connect
	Import                     // Peer.Import
	Register                   // Backend.Register
	Fence                      // Fencer.Fence
	Receive                    // a message that has come in
)

// batches are the events that one batch can be.
const batches = Batch | Read | Write | Message | Count

// Deed is what a rule does.
type Deed uint8

// The deeds that the contract allows: a program must bear them.
const (
	// the completion comes no sooner than Time after Submit; a message in, or a call, so much later
	Delay Deed = iota + 1
	Late       // the batch begins that much later
	// the completion is held back for up to Time, so that it overtakes and is overtaken
	Reorder
	Limit   // batches share Rate, and begin when those before them are through
	Model   // a batch takes Time + PerPiece x pieces + bytes / Rate
	Drop    // the bytes move, but no completion comes until Cancel, Close or the peer's death
	Swallow // nothing moves, and no completion comes until then
	Fail    // nothing moves, and the batch ends with Err
	Refuse  // the call is refused with Err
	Stall   // Submit answers ErrFull for Time, to all batches of the connection
	Flap    // the connection is lost, and for Time none is made to that address
)

// The deeds that break the contract: a detector must find them. In text they begin with
// an exclamation mark.
const (
	BreakDuplicate Deed = iota + 64 // the completion comes twice
	BreakForget                     // the completion never comes, not even at Close
	BreakEarly                      // the completion comes at once, the bytes move Time later
	BreakCorrupt                    // other bytes arrive
	BreakSkip                       // the end of the batch is left out; a fence does nothing
	BreakLateWrite                  // the bytes move Time after the batch has ended with an error
	BreakOvertake                   // the message arrives Time before its bytes
	// a message that came in is received up to Time later, behind those that came after it
	BreakSwap
	BreakLose   // a message that came in is not received
	BreakRepeat // a message that came in is received twice
)

// Breaks reports whether the deed is against the contract.
func (d Deed) Breaks() bool { return d >= BreakDuplicate }

// Breaks reports whether any rule is against the contract.
func (r *Rules) Breaks() bool {
	return slices.ContainsFunc(r.List, func(rule Rule) bool { return rule.Do.Breaks() })
}

// deedForm is how a deed is written, and where it makes sense.
type deedForm struct {
	do    Deed
	name  string
	on    Event
	takes operand
	usage string // of its operands
}

// operand is what follows the name of a deed.
type operand uint8

const (
	nothing operand = iota
	timing          // a time, perhaps with jitter
	span            // a time
	rate            // a rate, perhaps a burst
	model           // a time, a time for each piece, a rate
	cause           // the name of an error
)

var deedForms = []deedForm{
	{Delay, "delay", batches | Connect | Fence | Receive, timing, "delay TIME[±TIME]"},
	{Late, "late", batches, timing, "late TIME[±TIME]"},
	{Reorder, "reorder", batches, span, "reorder TIME"},
	{Limit, "limit", batches, rate, "limit RATE [burst=SIZE]"},
	{Model, "model", batches, model, "model TIME TIME RATE"},
	{Drop, "drop", batches, nothing, "drop"},
	{Swallow, "swallow", batches, nothing, "swallow"},
	{Fail, "fail", batches, cause, "fail ERROR"},
	{Refuse, "refuse", batches | Connect | Import | Register | Fence, cause, "refuse ERROR"},
	{Stall, "stall", batches, span, "stall TIME"},
	{Flap, "flap", batches, span, "flap TIME"},
	{BreakDuplicate, "!duplicate", batches, nothing, "!duplicate"},
	{BreakForget, "!forget", batches, nothing, "!forget"},
	{BreakEarly, "!early", Read | Write, span, "!early TIME"},
	{BreakCorrupt, "!corrupt", Read | Write, nothing, "!corrupt"},
	{BreakSkip, "!skip", Read | Write | Fence, nothing, "!skip"},
	{BreakLateWrite, "!latewrite", Read | Write, span, "!latewrite TIME"},
	{BreakOvertake, "!overtake", Message, span, "!overtake TIME"},
	{BreakSwap, "!swap", Receive, span, "!swap TIME"},
	{BreakLose, "!lose", Receive, nothing, "!lose"},
	{BreakRepeat, "!repeat", Receive, nothing, "!repeat"},
}

func (d Deed) form() *deedForm {
	for i := range deedForms {
		if deedForms[i].do == d {
			return &deedForms[i]
		}
	}
	return nil
}

// String returns the name as rules are written.
func (d Deed) String() string {
	if f := d.form(); f != nil {
		return f.name
	}
	return fmt.Sprintf("Deed(%d)", uint8(d))
}

var eventNames = []struct {
	event Event
	name  string
}{
	{Batch, "batch"}, {Read, "read"}, {Write, "write"}, {Message, "message"}, {Count, "count"},
	{Connect, "connect"}, {Import, "import"}, {Register, "register"}, {Fence, "fence"},
	{Receive, "receive"},
}

// String returns the name as rules are written.
func (e Event) String() string {
	for _, n := range eventNames {
		if n.event == e {
			return n.name
		}
	}
	return fmt.Sprintf("Event(%d)", uint16(e))
}

// Errors are what Rule.Err may be, by the names that rules have for them.
var Errors = []struct {
	Name string
	Err  error
}{
	{"aborted", driver.ErrAborted}, {"badtoken", driver.ErrBadToken}, {"bounds", driver.ErrBounds},
	{"busy", driver.ErrBusy}, {"closed", driver.ErrClosed}, {"corrupt", driver.ErrCorrupt},
	{"fault", driver.ErrFault},
	{"lost", driver.ErrPeerLost}, {"readonly", driver.ErrReadOnly}, {"revoked", driver.ErrRevoked},
	{"timeout", driver.ErrTimeout}, {"unavailable", driver.ErrUnavailable},
	{"unsupported", driver.ErrNotSupported},
}

func nameOf(err error) string {
	for _, e := range Errors {
		if e.Err == err {
			return e.Name
		}
	}
	return ""
}

// Check reports what no wrapped backend can do. Its errors are driver.ErrBounds.
func (r *Rules) Check() error {
	if len(r.List) > RulesMax {
		return fmt.Errorf("fault: %d rules, at most %d: %w", len(r.List), RulesMax,
			driver.ErrBounds)
	}
	for i := range r.List {
		if what := r.List[i].flaw(); what != "" {
			return fmt.Errorf("fault: rule %d: %s: %w", i+1, what, driver.ErrBounds)
		}
	}
	return nil
}

// flaw says what is wrong with a rule, or nothing.
func (r *Rule) flaw() string {
	f := r.Do.form()
	switch {
	case f == nil:
		return fmt.Sprintf("there is no %v", r.Do)
	case !slices.ContainsFunc(eventNames, func(n struct {
		event Event
		name  string
	}) bool {
		return n.event == r.On
	}):
		return fmt.Sprintf("%v is not one event", r.On)
	case f.on&r.On == 0:
		return fmt.Sprintf("%v does not concern %v", r.Do, r.On)
	case !(r.Chance >= 0 && r.Chance < 1):
		return "Chance is not in [0, 1)"
	case r.On&(batches|Connect|Import) == 0 && r.Peer != Range{}:
		return fmt.Sprintf("%v knows no Peer", r.On)
	case r.On&(batches|Receive) == 0 && r.Size != Range{}:
		return fmt.Sprintf("%v has no Size", r.On)
	case !r.Size.sound() || !r.Peer.sound():
		return "a range ends before it begins"
	case min(r.After, r.Before, r.Time, r.Jitter, r.PerPiece) < 0 ||
		max(r.Time, r.Jitter, r.PerPiece) > TimeMax:
		return fmt.Sprintf("a time is below 0 or above %v", TimeMax)
	case r.Before != 0 && r.Before <= r.After:
		return "it ends before it begins"
	}
	return r.misfit(f.takes)
}

// TimeMax bounds each time of a rule.
const TimeMax = 24 * time.Hour

func (r Range) sound() bool {
	return r.Exact && r.Max == 0 || !r.Exact && (r.Max == 0 || r.Min <= r.Max)
}

// misfit compares the fields that are set with those that the deed takes.
func (r *Rule) misfit(takes operand) string {
	switch {
	case (takes == cause) != (r.Err != nil) || r.Err != nil && nameOf(r.Err) == "":
		return fmt.Sprintf("%v: Err is %v: want one of Errors for fail and refuse, and "+
			"none otherwise", r.Do, r.Err)
	case takes != rate && takes != model && r.Rate != 0, takes == rate && r.Rate == 0,
		takes == model && r.Rate == 0:
		return fmt.Sprintf("%v with a Rate of %d", r.Do, r.Rate)
	case takes != rate && r.Burst != 0:
		return fmt.Sprintf("%v with a Burst", r.Do)
	case takes != model && r.PerPiece != 0:
		return fmt.Sprintf("%v with a time for each piece", r.Do)
	case takes != timing && r.Jitter != 0:
		return fmt.Sprintf("%v with jitter", r.Do)
	case takes != timing && takes != span && takes != model && r.Time != 0:
		return fmt.Sprintf("%v with a time", r.Do)
	}
	return ""
}
