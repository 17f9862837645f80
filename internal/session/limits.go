// SPDX-License-Identifier: Apache-2.0

package session

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

// SetDefault sets a field that is zero.
func SetDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// CheckWithin returns an error where the value of a field is below low or above high: it names the
// field, and wraps driver.ErrBounds.
func CheckWithin(field string, value, low, high int) error {
	if value < low || value > high {
		return fmt.Errorf("config: %s %d is not within %d to %d: %w", field, value, low, high,
			driver.ErrBounds)
	}
	return nil
}
