// SPDX-License-Identifier: Apache-2.0

package cuda

import "unsafe"

// view32 and view64 are memory as indices. It must lie at a multiple of their size.
func view32(mem []byte) []uint32 {
	return unsafe.Slice((*uint32)(unsafe.Pointer(unsafe.SliceData(mem))), len(mem)/4)
}

func view64(mem []byte) []uint64 {
	return unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(mem))), len(mem)/8)
}
