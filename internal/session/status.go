// SPDX-License-Identifier: Apache-2.0

package session

import (
	"errors"

	"github.com/sluicehq/sluice/driver"
)

// Status is how the owner of memory answers.
type Status uint8

// The answers.
const (
	StatusOK Status = iota
	StatusRevoked
	StatusBadToken
	StatusClosed
	StatusFull
	StatusFailed
	StatusBounds
	StatusFault
)

var statusErrors = [...]error{
	StatusOK: nil, StatusRevoked: driver.ErrRevoked, StatusBadToken: driver.ErrBadToken,
	StatusClosed: driver.ErrPeerLost, StatusFull: driver.ErrFull, StatusFailed: driver.ErrCorrupt,
	StatusBounds: driver.ErrBounds, StatusFault: driver.ErrFault,
}

// Err is the sentinel that says the same.
func (s Status) Err() error {
	if int(s) >= len(statusErrors) {
		return driver.ErrCorrupt
	}
	return statusErrors[s]
}

// StatusOf is the other way round.
func StatusOf(err error) Status {
	for s, e := range statusErrors {
		if e == nil && err == nil || e != nil && errors.Is(err, e) {
			return Status(s)
		}
	}
	return StatusFailed
}
