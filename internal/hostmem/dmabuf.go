// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

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
