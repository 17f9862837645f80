// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// installFilter puts a seccomp filter over all threads of the process.
func installFilter(program []unix.SockFilter) error {
	const setModeFilter, syncThreads = 1, 1
	p := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, setModeFilter, syncThreads,
		uintptr(unsafe.Pointer(&p)))
	if errno != 0 {
		return fmt.Errorf("install filter: %w", errno)
	}
	return nil
}
