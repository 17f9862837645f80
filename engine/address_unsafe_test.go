// SPDX-License-Identifier: Apache-2.0

package engine

import "unsafe"

// addressOf is what a device of these tests calls its memory by.
func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }
