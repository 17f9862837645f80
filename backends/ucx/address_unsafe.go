// SPDX-License-Identifier: Apache-2.0

package ucx

import "unsafe"

// addressOf returns where a slice starts, to compare with others. What it is used
// for lies outside the Go heap, where nothing moves.
func addressOf(mem []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))) }
