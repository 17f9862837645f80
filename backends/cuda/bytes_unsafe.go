// SPDX-License-Identifier: Apache-2.0

package cuda

import "unsafe"

// bytesOf are indices as a device reads them.
func bytesOf(list []uint32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(list))), 4*len(list))
}
