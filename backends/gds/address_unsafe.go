// SPDX-License-Identifier: Apache-2.0

package gds

import "unsafe"

// addressOf is where memory lies that does not move.
func addressOf(mem []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))) }
