// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// The sentinels. Hot calls return them as they are, preallocated; cold calls
// wrap them with a verb phrase that names cause and cure.
var (
	ErrClosed       error = &sentinel{"closed", os.ErrClosed}
	ErrNotSupported error = &sentinel{"not supported", errors.ErrUnsupported}
	ErrUnavailable        = errors.New("unavailable")
	ErrFull               = errors.New("full: poll and try again")
	ErrBusy               = errors.New("busy")
	ErrBounds             = errors.New("out of bounds")
	ErrPeerLost           = errors.New("peer lost")
	ErrAborted            = errors.New("aborted")
	ErrRevoked            = errors.New("revoked")
	ErrVersion            = errors.New("version mismatch")
	ErrNoRoute            = errors.New("no route")
	ErrCorrupt            = errors.New("corrupt")
	ErrBadToken           = errors.New("bad token")
	ErrUnproven           = errors.New("not proved to be over")
	ErrReadOnly           = errors.New("memory is read-only for peers")
	ErrFault              = errors.New("memory fault: keep registered memory mapped and " +
		"writable, and the file under it whole, until its registration is closed; register " +
		"what may only be read as read-only")
	ErrTimeout error = &sentinel{"deadline exceeded", os.ErrDeadlineExceeded}
)

// sentinel is an error of this package that is also one of the standard library.
type sentinel struct {
	text string
	is   error
}

func (e *sentinel) Error() string        { return e.text }
func (e *sentinel) Is(target error) bool { return target == e.is }

// UnavailableError says why a backend cannot work on this machine and how to fix that. It is the
// only error for which a test may skip.
type UnavailableError struct {
	Backend string // "ucx"
	Reason  string // "libucp.so.0: cannot open shared object file"
	Fix     string // "apt-get install libucx0"; may be empty
}

// Error names the backend, the reason and the fix.
func (e *UnavailableError) Error() string {
	if e.Fix == "" {
		return fmt.Sprintf("%s backend unavailable: %s", e.Backend, e.Reason)
	}
	return fmt.Sprintf("%s backend unavailable: %s (to mend: %s)", e.Backend, e.Reason, e.Fix)
}

// Is makes errors.Is(err, ErrUnavailable) true.
func (e *UnavailableError) Is(target error) bool { return target == ErrUnavailable }

// ContextError returns why a context has ended: its cause. If a deadline has passed, the error is
// ErrTimeout as well.
func ContextError(ctx context.Context) error {
	cause := context.Cause(ctx)
	if errors.Is(cause, context.DeadlineExceeded) {
		return fmt.Errorf("%w: %w", ErrTimeout, cause)
	}
	return cause
}

// PieceError names the piece of a batch that failed.
type PieceError struct {
	Piece int // index in the batch that was submitted
	Err   error
}

// Error names the piece and the cause.
func (e *PieceError) Error() string { return fmt.Sprintf("piece %d: %v", e.Piece, e.Err) }

// Unwrap returns the cause.
func (e *PieceError) Unwrap() error { return e.Err }
