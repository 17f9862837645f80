// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// refusePage has the kernel refuse this thread, for good, to protect or replace a page.
func refusePage(at uint64) error {
	jump := func(k uint32, yes, no uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: yes, Jf: no,
			K: k}
	}
	load := func(k uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: k}
	}
	answer := func(k uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: k}
	}
	const number, first = 0, 16 // offsets in struct seccomp_data
	program := []unix.SockFilter{
		load(number), jump(unix.SYS_MPROTECT, 1, 0), jump(unix.SYS_MMAP, 0, 5),
		load(first), jump(uint32(at), 0, 3), load(first + 4), jump(uint32(at>>32), 0, 1),
		answer(unix.SECCOMP_RET_ERRNO | uint32(unix.ENOMEM)), answer(unix.SECCOMP_RET_ALLOW),
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return os.NewSyscallError("prctl", err)
	}
	p := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, 1, 0, // SECCOMP_SET_MODE_FILTER
		uintptr(unsafe.Pointer(&p))); errno != 0 {
		return os.NewSyscallError("seccomp", errno)
	}
	return nil
}
