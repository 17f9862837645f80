// SPDX-License-Identifier: Apache-2.0

package exchange

import (
	"errors"
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

// The outcomes as they go over the wire, by index: 0 is success, the last everything else.
var outcomes = []error{nil, driver.ErrAborted, driver.ErrRevoked, driver.ErrBounds,
	driver.ErrReadOnly, driver.ErrBadToken, driver.ErrClosed, driver.ErrFull,
	driver.ErrNotSupported, driver.ErrTimeout, driver.ErrNoRoute, driver.ErrCorrupt,
	driver.ErrFault, errFar}

var errFar = errors.New("the peer's engine failed")

const textMax = 200 // bytes of text of an error

// OutOfBounds is the code of ErrBounds: an outcome without text.
const OutOfBounds = 3

// AppendOutcome appends a code, 0 for nil, and the error's text.
func AppendOutcome(b []byte, err error) []byte {
	code := 0
	if err != nil {
		for code = 1; code < len(outcomes)-1; code++ {
			if errors.Is(err, outcomes[code]) {
				break
			}
		}
	}
	b = append(b, byte(code))
	if err != nil {
		text := err.Error()
		b = append(b, text[:min(len(text), textMax)]...)
	}
	return b
}

// ParseOutcome returns an error of the same kind and text.
func ParseOutcome(b []byte) error {
	if len(b) == 0 || int(b[0]) >= len(outcomes) || len(b) > 1+textMax {
		return fmt.Errorf("an answer of %d bytes that makes no sense: %w", len(b),
			driver.ErrCorrupt)
	}
	if b[0] == 0 {
		return nil
	}
	return &farError{string(b[1:]), outcomes[b[0]]}
}

// farError is what went wrong at the peer, in its words.
type farError struct {
	text string
	is   error
}

func (e *farError) Error() string { return e.text }
func (e *farError) Unwrap() error { return e.is }
