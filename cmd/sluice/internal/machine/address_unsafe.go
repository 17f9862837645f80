// SPDX-License-Identifier: Apache-2.0

package machine

import "unsafe"

// addressOf returns where b lies, for a call that takes addresses as numbers.
func addressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(&b[0])) }
