// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// vectorMax is how many ranges one call of the kernel takes.
const vectorMax = 18

// vector is the list of ranges for readv and writev. It is part of something on the heap, so
// that a call costs no allocation.
type vector struct {
	list [vectorMax]unix.Iovec
	n    int
	sum  int
}

// add appends a range. The memory of others stays registered while it is in a vector.
func (v *vector) add(b []byte) {
	if len(b) == 0 {
		return
	}
	v.list[v.n].Base = unsafe.SliceData(b)
	v.list[v.n].SetLen(len(b))
	v.n++
	v.sum += len(b)
}

// drop forgets the pointers: memory may be unmapped, and its addresses another's.
func (v *vector) drop() {
	clear(v.list[:v.n])
	v.n, v.sum = 0, 0
}

// call is readv or writev, by its number.
func (v *vector) call(number uintptr, fd int) (int, error) {
	for {
		n, _, errno := unix.Syscall(number, uintptr(fd), uintptr(unsafe.Pointer(&v.list[0])),
			uintptr(v.n))
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}
