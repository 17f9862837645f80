// SPDX-License-Identifier: Apache-2.0

package testkit

import (
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// WithheldMemory is memory whose pages do not come until they are supplied: a thread that touches
// one stands in the kernel until then.
type WithheldMemory struct {
	fd   int
	mem  []byte
	once sync.Once
}

// What userfaultfd(2) takes, of <linux/userfaultfd.h>.
const (
	uffdAPI      = 0xc018aa3f
	uffdRegister = 0xc020aa00
	uffdZero     = 0xc020aa04
)

// WithholdPages takes those of a private mapping away, as a file of a server that is gone does.
// Where userfaultfd(2) is not permitted, the error is a *driver.UnavailableError.
func WithholdPages(mem []byte) (*WithheldMemory, error) {
	// a blocking one cannot be polled
	fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK, 0, 0)
	if errno != 0 {
		return nil, &driver.UnavailableError{Backend: "userfaultfd", Reason: errno.Error(),
			Fix: "run the test as root"}
	}
	w := &WithheldMemory{fd: int(fd), mem: mem}
	if err := unix.Madvise(mem, unix.MADV_DONTNEED); err != nil {
		return nil, err
	}
	api := [3]uint64{0xAA}
	if err := w.control(uffdAPI, unsafe.Pointer(&api)); err != nil {
		return nil, err
	}
	const missing = 1
	register := [4]uint64{address(mem), uint64(len(mem)), missing}
	return w, w.control(uffdRegister, unsafe.Pointer(&register))
}

func address(mem []byte) uint64 {
	return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem))))
}

func (w *WithheldMemory) control(request uintptr, arg unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(w.fd), request,
		uintptr(arg)); errno != 0 {
		return errno
	}
	return nil
}

// Await returns when a thread stands.
func (w *WithheldMemory) Await(t *testing.T) {
	t.Helper()
	fds := []unix.PollFd{{Fd: int32(w.fd), Events: unix.POLLIN}}
	if n, err := unix.Poll(fds, 20_000); n != 1 || fds[0].Revents != unix.POLLIN {
		t.Fatalf("no thread touches the memory: %v, %#x", err, fds[0].Revents)
	}
}

// Supply fills all pages with zeros, and lets all threads go on. A second one does nothing.
func (w *WithheldMemory) Supply(t *testing.T) {
	w.once.Do(func() {
		zero := [4]uint64{address(w.mem), uint64(len(w.mem))}
		if err := w.control(uffdZero, unsafe.Pointer(&zero)); err != nil {
			t.Error(err)
		}
		_ = unix.Close(w.fd)
	})
}
