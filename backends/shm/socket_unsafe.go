// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"io"
	"net"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

const messageBytesMax = 16 << 10 // 512 extents take 14 KiB

// inbox reads the control socket without allocating: the answers to pulls are on
// the way of every write into foreign memory, and net's ReadMsgUnix allocates.
type inbox struct {
	raw  syscall.RawConn
	step func(fd uintptr) bool
	hdr  unix.Msghdr
	iov  unix.Iovec
	buf  [messageBytesMax]byte
	oob  [1024]byte // 250 descriptors take 1,016
	n    int
	err  error
}

// open readies the inbox, which must not move any more.
func (in *inbox) open(c *net.UnixConn) (err error) {
	in.iov.Base = &in.buf[0]
	in.iov.SetLen(len(in.buf))
	in.step = in.receive
	in.raw, err = c.SyscallConn()
	return err
}

// receive is one attempt; false asks to wait until the socket is readable.
func (in *inbox) receive(fd uintptr) bool {
	in.hdr = unix.Msghdr{Iov: &in.iov, Control: &in.oob[0]}
	in.hdr.SetIovlen(1)
	in.hdr.SetControllen(len(in.oob))
	n, _, errno := unix.Syscall(unix.SYS_RECVMSG, fd, uintptr(unsafe.Pointer(&in.hdr)),
		unix.MSG_CMSG_CLOEXEC|unix.MSG_DONTWAIT)
	switch errno {
	case 0:
		in.n, in.err = int(n), nil
	case unix.EAGAIN:
		return false
	case unix.EINTR:
		return in.receive(fd)
	default:
		in.n, in.err = 0, errno
	}
	return true
}

// next waits for a message.
func (in *inbox) next() error {
	if err := in.raw.Read(in.step); err != nil {
		return err
	}
	if in.err == nil && in.n == 0 {
		return io.EOF
	}
	return in.err
}
