// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
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
	end   *polled
}

// soPeerPIDFD is SO_PEERPIDFD of <asm-generic/socket.h>, since Linux 6.5.
const soPeerPIDFD = 77

// Identify asks which process is at the other end, and refuses another user's. A process
// whose end could not be learnt is refused, too. At the end that has dialled it is the one that has
// begun to listen: where that has ended, and another has its socket still, it is Dead, or the error
// is os.ErrProcessDone.
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
	if err == unix.EINVAL || err == unix.ESRCH { // it was reaped, says a kernel before 6.16
		return -1, os.ErrProcessDone
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
	case unix.ESRCH:
		return -1, os.ErrProcessDone
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
	if r.end, err = newPolled(pidfd, "pidfd", readable); err != nil {
		return fmt.Errorf("watch peer: %w", err)
	}
	r.FD = pidfd
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
		return r.end.try()
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
	return r.end.wait()
}

// StopWaits ends each Wait, now and later. Dead goes on.
func (r Remote) StopWaits() {
	if r.end != nil {
		_ = r.end.setDeadline(time.Unix(1, 0)) // fails after Release only
	}
}

// Release closes the descriptor. It is idempotent. Dead answers false from then on.
func (r Remote) Release() {
	if r.end != nil {
		_ = r.end.close() // a pidfd has nothing to flush
	}
}

// readable asks the kernel: the poller tells changes, and the one that matters
// may have come before the descriptor was watched.
func readable(fd int, _ []byte) bool {
	fds := [1]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds[:], 0)
		if err != unix.EINTR {
			return n > 0
		}
	}
}

// StartOf says when a process began, in ticks since the host did: with its number it names the
// process for good.
func StartOf(pid int) (uint64, error) {
	start, _, err := StateOf(pid)
	return start, err
}

// StateOf is StartOf, and reports whether the process has ended with all of its threads and only
// waits to be reaped: then all of its descriptors are closed. They are fields 22, 3 and 20 of
// /proc/<pid>/stat. The second one, in brackets, is the program's name, which may hold anything.
func StateOf(pid int) (start uint64, ended bool, err error) {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, false, fmt.Errorf("identify process %d: %w", pid, err)
	}
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	const at = 22 - 3
	if len(fields) <= at {
		return 0, false, fmt.Errorf("identify process %d: /proc tells %d fields: %w", pid,
			len(fields), driver.ErrCorrupt)
	}
	start, err = strconv.ParseUint(string(fields[at]), 10, 64)
	if err != nil {
		return 0, false, fmt.Errorf("identify process %d: %w", pid, err)
	}
	// the first thread may be a zombie while others still close what the process has
	const threads = 20 - 3
	return start, bytes.ContainsAny(fields[0], "ZX") && string(fields[threads]) == "1", nil
}

// Host digests what two processes must have in common to share memory and to
// see each other's end: the boot, the namespaces, and the user.
func Host() (id [8]byte, err error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return id, fmt.Errorf("identify host: %w", err)
	}
	for _, space := range []string{"ipc", "pid", "user", "mnt"} {
		name, err := os.Readlink("/proc/self/ns/" + space)
		if err != nil {
			return id, fmt.Errorf("identify host: %w", err)
		}
		boot = append(boot, name...)
	}
	boot = strconv.AppendInt(boot, int64(os.Getuid()), 10)
	sum := sha256.Sum256(boot)
	copy(id[:], sum[:])
	return id, nil
}

// Stopped reports whether the process was seen stopped, by SIGSTOP, a debugger or a cgroup's
// freezer: its first thread was. That proves nothing for longer than the look.
func (r Remote) Stopped() bool {
	dir := "/proc/" + strconv.Itoa(r.PID) + "/task/"
	stat, err := os.ReadFile(dir + strconv.Itoa(r.PID) + "/stat")
	if r.PID == 0 || err != nil {
		return false
	}
	_, state, _ := bytes.Cut(stat[bytes.LastIndexByte(stat, ')')+1:], []byte(" "))
	return len(state) > 0 && (state[0] == 'T' || state[0] == 't') ||
		(&Threads{dir: dir}).frozen(strconv.Itoa(r.PID))
}
