// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"context"
	"errors"

	"github.com/sluicehq/sluice/driver"
)

// sentinels are the errors that keep their identity on the way through a pipe.
var sentinels = map[string]error{
	"closed": driver.ErrClosed, "not supported": driver.ErrNotSupported,
	"unavailable": driver.ErrUnavailable, "full": driver.ErrFull, "busy": driver.ErrBusy,
	"bounds": driver.ErrBounds, "peer lost": driver.ErrPeerLost, "aborted": driver.ErrAborted,
	"revoked": driver.ErrRevoked, "corrupt": driver.ErrCorrupt, "bad token": driver.ErrBadToken,
	"read-only": driver.ErrReadOnly, "timeout": driver.ErrTimeout, "late": errLate, "gone": errGone,
	"version": driver.ErrVersion, "no route": driver.ErrNoRoute,
	"fault": driver.ErrFault, "deadline": context.DeadlineExceeded, "cancelled": context.Canceled,
}

// relayError is an error that another process met.
type relayError struct {
	Text string
	Of   []string // names in sentinels
}

// Error returns the text of the original.
func (e *relayError) Error() string { return e.Text }

// Is reports whether the original was target.
func (e *relayError) Is(target error) bool {
	for _, name := range e.Of {
		if sentinels[name] == target {
			return true
		}
	}
	return false
}

// relay makes an error fit for the pipe; nil stays nil.
func relay(err error) *relayError {
	if err == nil {
		return nil
	}
	r := &relayError{Text: err.Error()}
	for name, s := range sentinels {
		if errors.Is(err, s) {
			r.Of = append(r.Of, name)
		}
	}
	return r
}

// orNil turns a nil pointer into a nil error.
func (e *relayError) orNil() error {
	if e == nil {
		return nil
	}
	return e
}
