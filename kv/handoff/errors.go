// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

// The errors that no other package has.
var (
	ErrCancelled = errors.New("cancelled by the receiver")
	ErrRefused   = errors.New("the receiver has too many requests: try again later")
	ErrGeometry  = errors.New("the two sides differ in model, block length or ranks")
	ErrSpan      = errors.New("the ranks were given other tokens of the request")
	errFailed    = errors.New("failed")

	// ErrInUse is an engine.ErrUnproven after which the blocks of this side must never be used
	// again: the engine could not end a transfer of them.
	ErrInUse = fmt.Errorf("a transfer did not end: never use its blocks again: %w",
		engine.ErrUnproven)
)

// LeasesError is an engine.ErrUnproven that passes: leases of a rank could not be revoked in time,
// and the engine goes on to look for their proof. Their blocks may be used again once all of them
// have ended, see engine.Lease.Revoked.
type LeasesError struct {
	Leases []*engine.Lease
	Err    error
}

// Error says what to wait for.
func (e *LeasesError) Error() string {
	return fmt.Sprintf("%d leases could not be revoked: do not use their blocks before they have "+
		"ended: %v", len(e.Leases), e.Err)
}

// Unwrap returns ErrUnproven and the cause.
func (e *LeasesError) Unwrap() []error { return []error{engine.ErrUnproven, e.Err} }

// Reason is why a hand-over ended before it was complete. Its values go over
// the wire and never change.
type Reason uint8

// The reasons.
const (
	Aborted   Reason = 1  // by the sender; is engine.ErrAborted
	Cancelled Reason = 2  // by the receiver; is ErrCancelled
	Refused   Reason = 4  // too many requests at the receiver; is ErrRefused
	TimedOut  Reason = 5  // a limit of the configuration passed; is engine.ErrTimeout
	PeerLost  Reason = 6  // is engine.ErrPeerLost
	Closed    Reason = 7  // the GroupSender or GroupReceiver was closed; is engine.ErrClosed
	Mismatch  Reason = 8  // geometries differ; is ErrGeometry
	Garbled   Reason = 9  // a message broke the protocol; is engine.ErrCorrupt
	Failed    Reason = 10 // anything else; EndError.Err has it on the side where it happened
	OtherSpan Reason = 11 // ranks of a group have other spans; is ErrSpan
	Damaged   Reason = 12 // digests of a layer differ; is layout.ErrMismatch
)

var reasons = [...]error{
	Aborted: engine.ErrAborted, Cancelled: ErrCancelled, Refused: ErrRefused,
	TimedOut: engine.ErrTimeout, PeerLost: engine.ErrPeerLost, Closed: engine.ErrClosed,
	Mismatch: ErrGeometry,
	Garbled:  engine.ErrCorrupt, Failed: errFailed, OtherSpan: ErrSpan,
	Damaged: layout.ErrMismatch,
}

// valid reports whether there is such a reason: 3 is none.
func (r Reason) valid() bool { return int(r) < len(reasons) && reasons[r] != nil }

// String returns the reason in words.
func (r Reason) String() string {
	if !r.valid() {
		return fmt.Sprintf("Reason(%d)", uint8(r))
	}
	return reasons[r].Error()
}

// EndError says why a hand-over ended before it was complete. errors.Is finds
// the error of its Reason, and what Err wraps.
type EndError struct {
	Request uint64
	Peer    string // the other side
	Remote  bool   // the other side ended it
	Reason  Reason
	Err     error // what happened here; may be nil

	counted bool // in Stats
}

// Error names the request, the peer, the side and the reason.
func (e *EndError) Error() string {
	with, side := "", "this side"
	if e.Peer != "" {
		with = " with peer " + e.Peer
	}
	if e.Remote {
		side = "the other side"
	}
	text := fmt.Sprintf("hand over request %d%s: ended by %s: %v", e.Request, with, side, e.Reason)
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

// Unwrap returns the error of the reason and the cause.
func (e *EndError) Unwrap() []error {
	list := make([]error, 0, 2)
	if e.Reason.valid() {
		list = append(list, reasons[e.Reason])
	}
	if e.Err != nil {
		list = append(list, e.Err)
	}
	return list
}

// endOf makes the outcome that a local error stands for, which is the caller's to change. Where a
// context of ours ended the call, its cause says more than the error.
func endOf(ctx context.Context, request uint64, err error) *EndError {
	var end *EndError
	if errors.As(err, &end) {
		own := *end
		return &own
	}
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) &&
		errors.Is(err, ctx.Err()) {
		err = fmt.Errorf("%w: %w", err, cause)
		return &EndError{Request: request, Reason: reasonOf(cause), Err: err}
	}
	return &EndError{Request: request, Reason: reasonOf(err), Err: err}
}

// reasonOf finds the reason that an error stands for.
func reasonOf(err error) Reason {
	switch {
	case errors.Is(err, context.Canceled):
		return Aborted
	case errors.Is(err, context.DeadlineExceeded):
		return TimedOut
	case errors.Is(err, os.ErrClosed):
		return Closed
	}
	for r, reason := range reasons {
		if r := Reason(r); r.valid() && r != Failed && errors.Is(err, reason) {
			return r
		}
	}
	return Failed
}
