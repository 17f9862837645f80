// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

const hugeBytes = 2 << 20

// word returns 8 bytes of a mapping as an atomic word. off is a multiple of 8. A side that writes
// and then looks at what the other side writes exchanges (Swap) and does not store: under the race
// detector, a Load may overtake a Store to memory that is not Go's own.
func word(mem []byte, off uint64) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&mem[off : off+8][0]))
}

// addressOf returns where a slice starts, for the kernel only.
func addressOf(mem []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))) }

func addressOfByte(b *byte) uint64 { return uint64(uintptr(unsafe.Pointer(b))) }

// reserveAddresses sets aside n bytes, at a multiple of 2 MiB so that huge pages
// can be mapped as such. whole is what unmapAddresses takes.
func reserveAddresses(n uint64) (mem, whole []byte, err error) {
	wide := n + hugeBytes
	p, err := unix.MmapPtr(-1, 0, nil, uintptr(wide), unix.PROT_NONE, unix.MAP_PRIVATE|
		unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, nil, os.NewSyscallError("mmap", err)
	}
	whole = unsafe.Slice((*byte)(p), wide)
	head := -uint64(uintptr(p)) & (hugeBytes - 1)
	return whole[head : head+n : head+n], whole, nil
}

// placeShared maps a descriptor over a part of a reservation.
func placeShared(window []byte, fd int, off uint64) error {
	_, err := unix.MmapPtr(fd, int64(off), unsafe.Pointer(unsafe.SliceData(window)),
		uintptr(len(window)),
		unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED)
	return os.NewSyscallError("mmap", err)
}

func unmapAddresses(whole []byte) error {
	err := unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(whole)), uintptr(len(whole)))
	return os.NewSyscallError("munmap", err)
}
