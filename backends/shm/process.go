// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"fmt"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/backends"
)

// processID names the process at the other end of a socket, as the kernel says.
type processID struct {
	pid int
	fd  int // a pidfd, readable when the process has ended; -1: none
}

// soPeerPIDFD is SO_PEERPIDFD of <asm-generic/socket.h>, since Linux 6.5.
const soPeerPIDFD = 77

// identify asks who is at the other end, and refuses another user.
func identify(c *net.UnixConn) (id processID, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return id, err
	}
	var cred *unix.Ucred
	id.fd = -1
	ctrlErr := raw.Control(func(fd uintptr) {
		if cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err != nil {
			return
		}
		id.fd, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, soPeerPIDFD)
		if err != nil {
			id.fd, err = unix.PidfdOpen(int(cred.Pid), 0)
		}
		if err != nil {
			id.fd, err = -1, nil // an old kernel: the socket alone tells of the end
		}
	})
	if ctrlErr != nil || err != nil {
		return id, fmt.Errorf("identify peer: %w", firstError(ctrlErr, err))
	}
	if int(cred.Uid) != os.Getuid() {
		id.release()
		return id, fmt.Errorf("peer runs as uid %d, we as %d: run both as one user: %w", cred.Uid, os.Getuid(), os.ErrPermission)
	}
	id.pid = int(cred.Pid)
	return id, nil
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func (p *processID) known() bool { return p.fd >= 0 }

// dead reports whether the process has ended: its memory is gone by then.
func (p *processID) dead() bool {
	if p.fd < 0 {
		return false
	}
	fds := []unix.PollFd{{Fd: int32(p.fd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n == 1
}

func (p *processID) release() {
	if p.fd >= 0 {
		_ = unix.Close(p.fd)
		p.fd = -1
	}
}

// probe finds out whether we may read the process's memory, before a transfer
// depends on it.
func (p *processID) probe(base uint64) error {
	var b [1]byte
	local := []unix.Iovec{{Base: &b[0], Len: 1}}
	remote := []unix.RemoteIovec{{Base: uintptr(base), Len: 1}}
	_, err := unix.ProcessVMReadv(p.pid, local, remote, 0)
	return foreignError(err)
}

// errForbidden is the answer where the kernel forbids one process to read another.
var errForbidden error = &backends.UnavailableError{
	Backend: "shm",
	Reason:  "foreign memory of another process: process_vm_readv is not permitted",
	Fix:     "sysctl kernel.yama.ptrace_scope=0, or allow process_vm_readv in the container's seccomp profile, or allocate the memory with hostmem",
}

var errForeignGone = fmt.Errorf("peer's memory is not mapped any more: %w", backends.ErrPeerLost)

func foreignError(err error) error {
	switch err {
	case nil:
		return nil
	case syscall.EPERM, syscall.ENOSYS:
		return errForbidden
	case syscall.ESRCH:
		return backends.ErrPeerLost
	case syscall.EFAULT:
		return errForeignGone
	}
	return fmt.Errorf("read peer's memory: %w", os.NewSyscallError("process_vm_readv", err))
}
