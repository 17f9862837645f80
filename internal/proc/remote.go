// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// Remote names the process at the other end of a socket, as the kernel says. Copies of it
// are the same Remote. All methods may be called by any goroutine at any time; the zero
// value knows nothing.
type Remote struct {
	PID int // 0: it lives in a PID namespace that this one does not see
	FD  int // a pidfd, readable when the process has ended, until Release; -1: none

	start uint64 // without a pidfd: when the process began
	end   *Waiter
}

// soPeerPIDFD is SO_PEERPIDFD of <asm-generic/socket.h>, since Linux 6.5.
const soPeerPIDFD = 77

// Identify asks which process is at the other end, and refuses another user's. A process
// whose end could not be learnt is refused, too.
func Identify(c *net.UnixConn) (id Remote, err error) {
	id.FD = -1
	raw, err := c.SyscallConn()
	if err != nil {
		return id, err
	}
	var cred *unix.Ucred
	pidfd := -1
	ctrlErr := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		if err == nil {
			pidfd, err = openPIDFD(int(fd), int(cred.Pid))
		}
	})
	if ctrlErr != nil || err != nil {
		return id, fmt.Errorf("identify peer: %w", errors.Join(ctrlErr, err))
	}
	if int(cred.Uid) != os.Getuid() {
		closeFD(pidfd)
		return id, fmt.Errorf("peer runs as uid %d, we as %d: run both as one user: %w",
			cred.Uid, os.Getuid(), os.ErrPermission)
	}
	id.PID = int(cred.Pid)
	return id, id.watch(pidfd)
}

// openPIDFD returns a pidfd of the peer, -1 where the kernel has none. Another lack, of
// descriptors say, is an error: taken for an old kernel, it would be taken for a proof.
func openPIDFD(sock, pid int) (int, error) {
	fd, err := peerPIDFD(sock)
	if err == nil {
		return fd, nil
	}
	if err != unix.ENOPROTOOPT {
		return -1, os.NewSyscallError("getsockopt(SO_PEERPIDFD)", err)
	}
	if pid == 0 {
		return -1, nil
	}
	fd, err = pidfdOpen(pid, 0)
	switch err {
	case nil:
		return fd, nil
	case unix.ENOSYS, unix.EPERM: // EPERM is how some sandboxes say ENOSYS
		return -1, nil
	}
	return -1, os.NewSyscallError("pidfd_open", err)
}

// The calls, for tests to fail.
var (
	pidfdOpen = unix.PidfdOpen
	peerPIDFD = func(sock int) (int, error) {
		return unix.GetsockoptInt(sock, unix.SOL_SOCKET, soPeerPIDFD)
	}
)

// watch takes the pidfd over, also when it fails.
func (r *Remote) watch(pidfd int) (err error) {
	if pidfd < 0 {
		if r.PID == 0 {
			return fmt.Errorf("identify peer: it lives in another PID namespace, and this "+
				"kernel has no SO_PEERPIDFD (Linux 6.5): share the namespace: %w",
				driver.ErrNotSupported)
		}
		r.start, err = StartOf(r.PID)
		return err
	}
	defer closeFD(pidfd)
	if r.end, err = NewWaiter(pidfd); err != nil {
		return fmt.Errorf("watch peer: %w", err)
	}
	r.FD = r.end.FD()
	return nil
}

func closeFD(fd int) {
	if fd >= 0 {
		_ = unix.Close(fd) // received and not used: nothing can be lost
	}
}

// Known reports whether there is a descriptor.
func (r Remote) Known() bool { return r.end != nil }

// Dead reports whether the process is known to have ended: its memory is gone by then.
func (r Remote) Dead() bool {
	if r.end != nil {
		return r.end.Ready()
	}
	if r.start == 0 {
		return false
	}
	start, err := StartOf(r.PID)
	return errors.Is(err, os.ErrNotExist) || err == nil && start != r.start
}

// Wait sleeps until the process has ended. After StopWaits it returns driver.ErrTimeout,
// after Release driver.ErrClosed, and driver.ErrNotSupported without a descriptor.
func (r Remote) Wait() error {
	if r.end == nil {
		return driver.ErrNotSupported
	}
	return r.end.Wait()
}

// StopWaits ends each Wait, now and later. Dead goes on.
func (r Remote) StopWaits() {
	if r.end != nil {
		_ = r.end.SetDeadline(time.Unix(1, 0)) // fails after Release only
	}
}

// Release closes the descriptor. It is idempotent. Dead answers false from then on.
func (r Remote) Release() {
	if r.end != nil {
		_ = r.end.Close() // a pidfd has nothing to flush
	}
}
