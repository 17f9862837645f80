// SPDX-License-Identifier: Apache-2.0

package fault

import "unsafe"

// contains reports whether part lies within whole. The addresses are compared, and never
// followed.
func contains(whole, part []byte) bool {
	if len(whole) == 0 || len(part) == 0 {
		return false
	}
	from := uintptr(unsafe.Pointer(unsafe.SliceData(part)))
	base := uintptr(unsafe.Pointer(unsafe.SliceData(whole)))
	return from >= base && from-base <= uintptr(len(whole)) &&
		uintptr(len(whole))-(from-base) >= uintptr(len(part))
}
