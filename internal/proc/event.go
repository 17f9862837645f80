// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// Event is a wake-up call between goroutines or, when its descriptor is sent to
// another process, between processes. Signals that were not waited for add up
// to one. All methods may be called by any goroutine at any time.
type Event struct {
	fd      *polled
	channel *channel // in place of fd, in virtual time
}

// NewEvent makes an event that is not signalled.
func NewEvent() (*Event, error) {
	if c := virtual.Load(); c != nil {
		return c.open(make(chan struct{}, 1)), nil
	}
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("create eventfd: %w", os.NewSyscallError("eventfd2", err))
	}
	return newEvent(fd)
}

// EventFromFD makes an event of an eventfd of another make: one received
// from a peer, or Armer.FD of a backend. It keeps a duplicate, so fd stays the
// caller's to close at any time. It sets O_NONBLOCK, for the peer as well. What
// is no eventfd is refused.
func EventFromFD(fd int) (*Event, error) {
	if c := virtual.Load(); c != nil {
		if signal := c.signal(fd); signal != nil {
			return c.open(signal), nil
		}
	}
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate descriptor %d: %w", fd, os.NewSyscallError("fcntl", err))
	}
	e, err := newEvent(own)
	if err != nil {
		return nil, err
	}
	if err := e.check(); err != nil {
		_ = e.Close()
		return nil, err
	}
	return e, nil
}

func newEvent(fd int) (*Event, error) {
	p, err := newPolled(fd, "eventfd", drain)
	if err != nil {
		return nil, err
	}
	return &Event{fd: p}, nil
}

// check refuses what is no eventfd, without changing its state.
func (e *Event) check() error {
	target, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", e.FD()))
	if err == nil && target != "anon_inode:[eventfd]" {
		return fmt.Errorf("wrap eventfd: the descriptor is %s: %w", target, driver.ErrNotSupported)
	}
	return nil // without /proc the first Signal will tell
}

// FD returns the descriptor, to be sent to a peer or to be watched. It belongs
// to the Event and is -1 after Close; a caller that may race with Close duplicates it
// under a lock of its own.
func (e *Event) FD() int {
	if e.channel != nil {
		return int(e.channel.number.Load())
	}
	return int(e.fd.fd.Load())
}

// Signal wakes one Wait: the one that sleeps, else the next. It does not block
// and does not allocate. After Close it returns driver.ErrClosed, which is
// os.ErrClosed.
func (e *Event) Signal() error {
	if e.channel != nil {
		return e.channel.wake()
	}
	return e.fd.with(SignalFD)
}

// Wait sleeps until the event is signalled and takes the signal. After Close,
// also one that comes meanwhile, it returns driver.ErrClosed, which is
// os.ErrClosed. It does not allocate. Several goroutines may wait; a signal
// wakes one of them.
func (e *Event) Wait() error {
	if e.channel != nil {
		return e.channel.wait()
	}
	return e.fd.wait()
}

// Drain takes a signal that is there, and reports whether there was one. It does
// not block.
func (e *Event) Drain() bool {
	if e.channel != nil {
		return e.channel.try()
	}
	return e.fd.try()
}

// SetDeadline ends every Wait that lasts until then, and each later one, with
// driver.ErrTimeout, which is os.ErrDeadlineExceeded. The zero time is never.
func (e *Event) SetDeadline(t time.Time) error {
	if e.channel != nil {
		return e.channel.setDeadline(t)
	}
	return e.fd.setDeadline(t)
}

// Close wakes every Wait and closes the descriptor. It is idempotent.
func (e *Event) Close() error {
	if e.channel != nil {
		return e.channel.close()
	}
	return e.fd.close()
}

// one is the value that a signal adds to an eventfd.
var one = binary.NativeEndian.AppendUint64(nil, 1)

// SignalFD signals an eventfd. It fails only if the counter is full, and then it holds a signal
// already.
func SignalFD(fd uintptr) { _, _ = unix.Write(int(fd), one) }

// drain takes all signals at once.
func drain(fd int, scratch []byte) bool {
	for {
		n, err := unix.Read(fd, scratch)
		if err != unix.EINTR {
			return n == 8
		}
	}
}

// polled is a descriptor in the runtime's poller. os.File brings what is hard:
// the count of users that keeps a closed number from being used again under a
// running call, and the wake-up of sleepers by Close.
type polled struct {
	file *os.File
	conn syscall.RawConn
	fd   atomic.Int64

	// The closures are made once: one made for each call would be allocated.
	waitFn      func(fd uintptr) bool
	tryFn       func(fd uintptr)
	waitScratch [8]byte // guarded by the read lock of conn

	mu         sync.Mutex // guards what follows
	tried      bool
	tryScratch [8]byte
}

// newPolled takes fd over, also when it fails. Ready is asked whether a waiter
// may go on, before sleeping and after each wake-up; it must not block.
func newPolled(fd int, name string, ready func(fd int, scratch []byte) bool) (*polled, error) {
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, errors.Join(fmt.Errorf("make %s non-blocking: %w", name, err), unix.Close(fd))
	}
	p := &polled{file: os.NewFile(uintptr(fd), name)}
	p.fd.Store(int64(fd))
	if err := p.file.SetDeadline(time.Time{}); err != nil {
		_ = p.file.Close()
		return nil, fmt.Errorf("watch %s: the kernel cannot poll this descriptor: %w", name,
			driver.ErrNotSupported)
	}
	conn, err := p.file.SyscallConn()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("watch %s: %w", name, err), p.file.Close())
	}
	p.conn = conn
	p.waitFn = func(fd uintptr) bool { return ready(int(fd), p.waitScratch[:]) }
	p.tryFn = func(fd uintptr) { p.tried = ready(int(fd), p.tryScratch[:]) }
	return p, nil
}

func (p *polled) wait() error {
	err := p.conn.Read(p.waitFn)
	if err == nil {
		return nil
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return driver.ErrTimeout
	}
	return driver.ErrClosed // the poller knows no other reason
}

func (p *polled) try() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.tried = false
	_ = p.conn.Control(p.tryFn)
	return p.tried
}

// with runs f while the descriptor is held open.
func (p *polled) with(f func(fd uintptr)) error {
	if p.conn.Control(f) != nil {
		return driver.ErrClosed
	}
	return nil
}

func (p *polled) setDeadline(t time.Time) error {
	if p.file.SetReadDeadline(t) != nil {
		return driver.ErrClosed
	}
	return nil
}

func (p *polled) close() error {
	if p.fd.Swap(-1) < 0 {
		return nil
	}
	return p.file.Close()
}
