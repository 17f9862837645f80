// SPDX-License-Identifier: Apache-2.0

package proc

import (
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

func (p *polled) number() int { return int(p.fd.Load()) }

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

func duplicate(fd int) (int, error) {
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("duplicate descriptor %d: %w", fd, os.NewSyscallError("fcntl", err))
	}
	return own, nil
}
