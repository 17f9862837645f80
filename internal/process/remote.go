// SPDX-License-Identifier: Apache-2.0

package process

import (
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// Remote names the process at the other end of a socket, as the kernel says.
type Remote struct {
	PID int
	FD  int // a pidfd, readable when the process has ended; -1: none
}

// soPeerPIDFD is SO_PEERPIDFD of <asm-generic/socket.h>, since Linux 6.5.
const soPeerPIDFD = 77

// Identify asks who is at the other end, and refuses another user.
func Identify(c *net.UnixConn) (id Remote, err error) {
	id.FD = -1
	raw, err := c.SyscallConn()
	if err != nil {
		return id, err
	}
	var cred *unix.Ucred
	ctrlErr := raw.Control(func(fd uintptr) {
		if cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err != nil {
			return
		}
		id.FD, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, soPeerPIDFD)
		if err != nil {
			id.FD, err = unix.PidfdOpen(int(cred.Pid), 0)
		}
		if err != nil {
			id.FD, err = -1, nil // an old kernel: the socket alone tells of the end
		}
	})
	if ctrlErr != nil || err != nil {
		return id, fmt.Errorf("identify peer: %w", errors.Join(ctrlErr, err))
	}
	if int(cred.Uid) != os.Getuid() {
		id.Release()
		return id, fmt.Errorf("peer runs as uid %d, we as %d: run both as one user: %w", cred.Uid, os.Getuid(), os.ErrPermission)
	}
	id.PID = int(cred.Pid)
	return id, nil
}

// Known reports whether there is a descriptor.
func (r *Remote) Known() bool { return r.FD >= 0 }

// Dead reports whether the process has ended: its memory is gone by then.
func (r *Remote) Dead() bool {
	if r.FD < 0 {
		return false
	}
	fds := []unix.PollFd{{Fd: int32(r.FD), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n == 1
}

// Release closes the descriptor.
func (r *Remote) Release() {
	if r.FD >= 0 {
		_ = unix.Close(r.FD)
		r.FD = -1
	}
}
