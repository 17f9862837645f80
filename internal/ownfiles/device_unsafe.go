// SPDX-License-Identifier: Apache-2.0

package ownfiles

import (
	"fmt"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

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
