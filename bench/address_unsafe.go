// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"sync/atomic"
	"unsafe"
)

// AddressOf returns where memory outside the Go heap lies, for Link.Address in
// another process. 0 without memory.
func AddressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// word is the beginning of memory that others write to. It has 8 bytes, aligned.
func word(b []byte) *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&b[:8][0])) }
