// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// memfdError has an engine go on without shm where the kernel makes no memfd for us, as under a
// strict seccomp profile.
func memfdError(err error) error {
	if !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.ENOSYS) {
		return err
	}
	return &driver.UnavailableError{Backend: "shm", Reason: err.Error(),
		Fix: "allow memfd_create in the container's seccomp profile"}
}

// checkEventFD refuses a descriptor that could block or end the process that signals it.
func checkEventFD(fd int) error {
	name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return fmt.Errorf("examine peer's event: %w", err)
	}
	if !strings.HasPrefix(name, "anon_inode:[eventfd]") {
		return fmt.Errorf("peer's event is %q: %w", name, driver.ErrCorrupt)
	}
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err != nil {
		return fmt.Errorf("examine peer's event: %w", os.NewSyscallError("fcntl", err))
	}
	if flags&unix.O_NONBLOCK == 0 {
		return fmt.Errorf("peer's event blocks its signaller: %w", driver.ErrCorrupt)
	}
	return nil
}

var oneEvent = [8]byte{1}

// signal wakes the sleepers on an eventfd. A full counter wakes as well: it is not written to, for
// a peer may have made the open file one that blocks, which both sides share.
func signal(fd int) {
	room := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
	if n, err := unix.Poll(room, 0); err != nil || n == 1 {
		_, _ = unix.Write(fd, oneEvent[:])
	}
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd) // received and not used: nothing can be lost
	}
}
