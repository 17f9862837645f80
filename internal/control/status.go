// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"

	"github.com/sluicehq/sluice/driver"
)

// Status is how the owner of memory answers.
type Status uint8

// The answers.
const (
	OK Status = iota
	Revoked
	BadToken
	Closed
	Full
	Failed
	Bounds
	Fault
)

var statusErrors = [...]error{
	OK: nil, Revoked: driver.ErrRevoked, BadToken: driver.ErrBadToken,
	Closed: driver.ErrPeerLost, Full: driver.ErrFull, Failed: driver.ErrCorrupt,
	Bounds: driver.ErrBounds, Fault: driver.ErrFault,
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
	return Failed
}
