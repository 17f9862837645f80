// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"sync/atomic"
	"unsafe"
)

// word returns 8 bytes of a mapping as an atomic word. off is a multiple of 8. A side that writes
// and then looks at what the other side writes exchanges (Swap) and does not store: under the race
// detector, a Load may overtake a Store to memory that is not Go's own.
func word(mem []byte, off uint64) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&mem[off : off+8][0]))
}

// addressOf returns where a slice starts, for the kernel only.
func addressOf(mem []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))) }

func addressOfByte(b *byte) uint64 { return uint64(uintptr(unsafe.Pointer(b))) }
