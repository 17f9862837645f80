// SPDX-License-Identifier: Apache-2.0

// Package dmabuf keeps device memory reachable after its owner has closed the descriptor.
package dmabuf

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// Dup returns the same range with a descriptor of the caller's, for Close. Nil gives nil.
func Dup(d *driver.DMABuf) (*driver.DMABuf, error) {
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

// Close closes the descriptor of a Dup, once. Nil is left alone.
func Close(d *driver.DMABuf) error {
	if d == nil {
		return nil
	}
	return os.NewSyscallError("close", unix.Close(d.FD))
}
