// SPDX-License-Identifier: Apache-2.0

package files

import (
	"fmt"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// These constants do not compile unless a Place has the size of the kernel's struct iovec.
const (
	_ = uint(unsafe.Sizeof(Place{}) - unsafe.Sizeof(unix.Iovec{}))
	_ = uint(unsafe.Sizeof(unix.Iovec{}) - unsafe.Sizeof(Place{}))
)

// addressOf returns the address of the first byte of mem. The memory must not move, and its
// registration must keep it alive.
func addressOf(mem []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))) }

// Pointer returns the address of the first place, as an iovec. The places are those of a request.
func Pointer(places []Place) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(places))) }

// mapAnonymous returns zeroed, page-aligned bytes outside the Go heap.
func mapAnonymous(n int) ([]byte, error) {
	return unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
}

func unmap(mem []byte) error { return unix.Munmap(mem) }

// deviceSize asks a block device how many bytes it has.
func deviceSize(fd int) (size uint64, err error) {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.BLKGETSIZE64,
		uintptr(unsafe.Pointer(&size)))
	if errno != 0 {
		return 0, fmt.Errorf("size of the device: %w", os.NewSyscallError("ioctl",
			syscall.Errno(errno)))
	}
	return size, nil
}
