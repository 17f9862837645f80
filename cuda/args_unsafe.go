// SPDX-License-Identifier: Apache-2.0

package cuda

import "unsafe"

const tallyBytes = uint64(unsafe.Sizeof(tally{}))

// bytes are what a kernel takes by value.
func (a *args) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(a)), unsafe.Sizeof(*a)) }

// bytes are what the kernel for nests takes by value.
func (n *nested) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(n)), unsafe.Sizeof(*n))
}

// bytes are what a kernel adds to.
func (t *tally) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(t)), unsafe.Sizeof(*t))
}

const (
	cellsBytes = uint64(unsafe.Sizeof(cellsArgs{}))
	totalBytes = uint64(unsafe.Sizeof(digestTotal{}))
)

// bytes are what the kernel takes by value.
func (d *digestArgs) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(d)), unsafe.Sizeof(*d))
}

// bytes are what the kernel reads.
func (c *cellsArgs) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(c)), cellsBytes) }

// bytes are what the kernel adds to.
func (t *digestTotal) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(t)), totalBytes) }

// addressOf says where a memory begins; 0 for an empty one.
func addressOf(mem []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))) }
