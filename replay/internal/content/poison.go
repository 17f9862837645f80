// SPDX-License-Identifier: Apache-2.0

package content

import "bytes"

// poisonBytes is what lies in a block without an owner: freed memory that
// changes was written late. It is a page long, to compare by the page.
var poisonBytes = bytes.Repeat([]byte{0xde, 0xad, 0x4b, 0x16, 0xb1, 0x0c, 0xca, 0x5e}, 512)

// Poison overwrites b.
func Poison(b []byte) {
	for len(b) > 0 {
		b = b[copy(b, poisonBytes):]
	}
}

// Poisoned reports whether b is as Poison left it.
func Poisoned(b []byte) bool {
	for len(b) > 0 {
		n := min(len(b), len(poisonBytes))
		if !bytes.Equal(b[:n], poisonBytes[:n]) {
			return false
		}
		b = b[n:]
	}
	return true
}
