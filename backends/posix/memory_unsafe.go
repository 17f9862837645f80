// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// addressOf returns where a slice starts, for its alignment only.
func addressOf(mem []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))) }

// touches reports whether mem begins where v ends.
func touches(v *unix.Iovec, mem []byte) bool {
	return uintptr(unsafe.Pointer(v.Base))+uintptr(v.Len) == uintptr(unsafe.Pointer(&mem[0]))
}

// behind returns the byte n bytes into v, which is longer.
func behind(v *unix.Iovec, n uint64) *byte { return (*byte)(unsafe.Add(unsafe.Pointer(v.Base), n)) }

// bytesOf returns the memory that v names.
func bytesOf(v *unix.Iovec) []byte { return unsafe.Slice(v.Base, v.Len) }

// vectored calls preadv or pwritev. It does not allocate.
func vectored(call uintptr, fd int, iov []unix.Iovec, off uint64) int {
	n, _, errno := unix.Syscall6(call, uintptr(fd), uintptr(unsafe.Pointer(&iov[0])),
		uintptr(len(iov)), uintptr(off), 0, 0)
	if errno != 0 {
		return -int(errno)
	}
	return int(n)
}

// mapAnonymous returns zeroed, page-aligned bytes outside the Go heap.
func mapAnonymous(n int) ([]byte, error) {
	return unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
}

func unmap(mem []byte) error { return unix.Munmap(mem) }
