// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// lent is the device memory of this process that other processes may map: address to length. To
// revoke it from a frozen process, the cuda backend replaces the physical memory at these addresses
// (Config.Peers there). Another device that has registered the memory before, such as a NIC, would
// still access the old one.
var (
	lentMu sync.RWMutex
	lent   = map[uint64]uint64{}
)

// AddLent adds a range of device memory to the list. It is called before another process can map
// it.
func AddLent(at, n uint64) {
	lentMu.Lock()
	lent[at] = n
	lentMu.Unlock()
}

// RemoveLent removes the range from the list. It is called before the range is freed.
func RemoveLent(at uint64) {
	lentMu.Lock()
	delete(lent, at)
	lentMu.Unlock()
}

// CheckNotLent returns driver.ErrNotSupported for a range that overlaps one in the list. A backend
// calls it before it registers device memory with a device or a library.
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

// DupDMABuf returns the same range with a duplicate of the descriptor, so that the owner may close
// its own. The caller closes the duplicate with CloseDMABuf. The result for nil is nil.
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

// CloseDMABuf closes the descriptor of a DupDMABuf. It must be called only once. It does nothing
// for nil.
func CloseDMABuf(d *driver.DMABuf) error {
	if d == nil {
		return nil
	}
	return os.NewSyscallError("close", unix.Close(d.FD))
}
