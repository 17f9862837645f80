// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/proc"
)

// probe finds out whether we may read a process's memory, before a transfer
// depends on it.
func probe(p proc.Remote, base uint64) error {
	var b [1]byte
	local := []unix.Iovec{{Base: &b[0], Len: 1}}
	remote := []unix.RemoteIovec{{Base: uintptr(base), Len: 1}}
	_, err := unix.ProcessVMReadv(p.PID, local, remote, 0)
	return foreignError(err)
}

// errForbidden is the answer where the kernel forbids one process to read another.
var errForbidden error = &driver.UnavailableError{
	Backend: "shm",
	Reason: "foreign memory of another process: " +
		"process_vm_readv and process_vm_writev are not permitted",
	Fix: "sysctl kernel.yama.ptrace_scope=0, or allow both in the container's seccomp profile, " +
		"or allocate the memory with Engine.Alloc",
}

func foreignError(err error) error {
	switch err {
	case nil, driver.ErrRevoked, driver.ErrPeerLost:
		return err // not the kernel's
	case syscall.EPERM, syscall.ENOSYS:
		return errForbidden
	case syscall.ESRCH:
		return driver.ErrPeerLost
	case syscall.EFAULT:
		return driver.ErrFault
	}
	return fmt.Errorf("copy to or from peer's memory: %w",
		os.NewSyscallError("process_vm_readv or process_vm_writev", err))
}
