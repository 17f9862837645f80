// SPDX-License-Identifier: Apache-2.0

package cuda

import "unsafe"

const tallyBytes = uint64(unsafe.Sizeof(tally{}))

// bytesOf returns the memory of a struct that a kernel takes by value, reads or adds to.
func bytesOf[T any](v *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v))
}

const (
	cellsBytes = uint64(unsafe.Sizeof(cellsArgs{}))
	totalBytes = uint64(unsafe.Sizeof(digestTotal{}))
)
