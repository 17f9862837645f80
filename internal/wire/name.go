// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/sluicehq/sluice/driver"
)

// CheckName returns an error unless a terminal and a log can show the name: it must be at most
// NameMax bytes of UTF-8 without control characters. A peer chooses the names of its regions, and
// must not be able to write other lines into a list of them.
func CheckName(name string) error {
	if len(name) > NameMax {
		return fmt.Errorf("name of %d bytes, at most %d: %w", len(name), NameMax, driver.ErrBounds)
	}
	for i := 0; i < len(name); i++ {
		if (name[i] < ' ' || name[i] >= 0x7f) &&
			(!utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl)) {
			return fmt.Errorf("name %q has a control character, or is not UTF-8: %w", name,
				driver.ErrBounds)
		}
	}
	return nil
}
