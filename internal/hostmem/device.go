// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// lent is the device memory of this process that other processes map: address to length. A
// revoke against one that is frozen puts other memory under the addresses (backends/cuda,
// Config.Peers), which a device that was told of the memory before would not see: it would go on
// with the old.
var (
	lentMu sync.RWMutex
	lent   = map[uint64]uint64{}
)

// AddLent lists a range of device memory, before another process can map it.
func AddLent(at, n uint64) {
	lentMu.Lock()
	lent[at] = n
	lentMu.Unlock()
}

// RemoveLent ends AddLent, before the range is freed.
func RemoveLent(at uint64) {
	lentMu.Lock()
	delete(lent, at)
	lentMu.Unlock()
}

// CheckNotLent returns driver.ErrNotSupported for a range that overlaps one that is listed. A
// backend asks whose device, or library, is to know the memory itself.
func CheckNotLent(at, n uint64) error {
	lentMu.RLock()
	defer lentMu.RUnlock()
	for from, size := range lent {
		if at < from+size && from < at+n {
			return fmt.Errorf("register device memory at %#x that other processes map "+
				"(Config.Peers of the cuda backend): a revoke may put other memory there, which "+
				"would not be noticed here: %w", at, driver.ErrNotSupported)
		}
	}
	return nil
}

// DupDMABuf returns the same range with a descriptor of the caller's, for CloseDMABuf: the memory
// stays reachable when its owner closes the other. Nil gives nil.
func DupDMABuf(d *driver.DMABuf) (*driver.DMABuf, error) {
	if d == nil {
		return nil, nil
	}
	fd, err := unix.FcntlInt(uintptr(d.FD), unix.F_DUPFD_CLOEXEC, 0)
	switch {
	case err == unix.EBADF:
		return nil, fmt.Errorf("dma-buf: descriptor %d is not open: %w (%w)", d.FD,
			driver.ErrBounds, err)
	case err != nil:
		return nil, fmt.Errorf("keep dma-buf: %w", os.NewSyscallError("fcntl", err))
	}
	return &driver.DMABuf{FD: fd, Offset: d.Offset}, nil
}

// CloseDMABuf closes the descriptor of a DupDMABuf, once. Nil is left alone.
func CloseDMABuf(d *driver.DMABuf) error {
	if d == nil {
		return nil
	}
	return os.NewSyscallError("close", unix.Close(d.FD))
}
