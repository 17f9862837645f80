// SPDX-License-Identifier: Apache-2.0

package cuda

import "unsafe"

// addressOf says where memory outside the Go heap lies.
func addressOf(mem []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))) }

// bytesOf are indices as a device reads them.
func bytesOf(list []uint32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(list))), 4*len(list))
}
