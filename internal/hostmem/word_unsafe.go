// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"sync/atomic"
	"unsafe"
)

// SharedWord returns 8 bytes of shared pages as a word that processes change at once; off is a
// multiple of 8.
func SharedWord(mem []byte, off int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&mem[off : off+8][0]))
}
