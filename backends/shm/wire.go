// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// Messages of the control socket: one kind byte, then the body.
const (
	msgHello   = 1 + iota // dialer: version, bytes of a ring, its address; page and event
	msgWelcome            // owner: version, status, number of its keys; key table and event
	msgFetch              // dialer: number of the request, token: where is the memory's arena
	msgExtents            // owner: its extents, a part at a time, see answerHead
	msgPing               // dialer: asks for a sign of life
	msgPong               // owner: the sign of life
)

const messageBytesMax = 16 << 10 // 512 extents take 14 KiB

// inbox reads messages of the control socket.
type inbox struct {
	buf [messageBytesMax]byte
	oob [1024]byte // 250 descriptors take 1,016
}

// read returns the next message: its kind, the body, which is valid until the
// next call, and the descriptors, which are the caller's.
func (in *inbox) read(c *net.UnixConn) (kind byte, body []byte, fds []int, err error) {
	n, oobn, flags, _, err := c.ReadMsgUnix(in.buf[:], in.oob[:])
	if err == nil && n == 0 {
		err = io.EOF
	}
	controls, parseErr := unix.ParseSocketControlMessage(in.oob[:oobn])
	for i := range controls {
		got, _ := unix.ParseUnixRights(&controls[i]) // another kind of control message has none
		fds = append(fds, got...)
	}
	if err == nil && (parseErr != nil || flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0) {
		err = fmt.Errorf("message is cut: %w", driver.ErrCorrupt)
	}
	if err != nil {
		closeAll(fds)
		return 0, nil, nil, err
	}
	return in.buf[0], in.buf[1:n], fds, nil
}

// send writes one message. The deadline bounds it when the other side is frozen
// and its buffer full.
func send(c *net.UnixConn, timeout time.Duration, msg []byte, fds []int) error {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	if err := c.SetWriteDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	_, _, err := c.WriteMsgUnix(msg, oob, nil)
	_ = c.SetWriteDeadline(time.Time{}) // it would end later writes as well
	return err
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd) // received and not used: nothing can be lost
	}
}

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
// a peer may have made the open file one that blocks, which both sides share. Where there is room
// poll succeeds, also beside signals of the runtime.
func signal(fd int) {
	room := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
	if _, err := unix.Poll(room, 0); err == nil && room[0].Revents&unix.POLLOUT != 0 {
		_, _ = unix.Write(fd, oneEvent[:])
	}
}
