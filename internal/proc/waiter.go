// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"time"

	"golang.org/x/sys/unix"
)

// Waiter watches a descriptor of another make: a pidfd, a socket, an io_uring.
// It reads nothing from it. All methods may be called by any goroutine at any
// time.
type Waiter struct {
	fd *polled
}

// NewWaiter watches a duplicate of fd, so fd stays the caller's to close at any
// time. It sets O_NONBLOCK, which all duplicates share. A descriptor that the
// kernel cannot poll, such as a plain file, is driver.ErrNotSupported.
func NewWaiter(fd int) (*Waiter, error) {
	own, err := duplicate(fd)
	if err != nil {
		return nil, err
	}
	p, err := newPolled(own, "descriptor", readable)
	if err != nil {
		return nil, err
	}
	return &Waiter{fd: p}, nil
}

// FD returns the duplicate, -1 after Close.
func (w *Waiter) FD() int { return w.fd.number() }

// Wait sleeps until the descriptor is readable, or hung up. It returns at once
// as long as it is, so read before the next Wait. A pidfd is readable from the
// end of its process on. After Close, also one that comes meanwhile, it returns
// driver.ErrClosed, which is os.ErrClosed.
func (w *Waiter) Wait() error { return w.fd.wait() }

// Ready reports without blocking whether Wait would return at once.
func (w *Waiter) Ready() bool { return w.fd.try() }

// SetDeadline is Event.SetDeadline.
func (w *Waiter) SetDeadline(t time.Time) error { return w.fd.setDeadline(t) }

// Close wakes every Wait and closes the duplicate. It is idempotent.
func (w *Waiter) Close() error { return w.fd.close() }

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
