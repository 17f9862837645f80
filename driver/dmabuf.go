// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"os"
)

// DMABuf names device memory to the drivers of other devices. It is a dma-buf of the kernel, such
// as cuMemGetHandleForAddressRange returns.
type DMABuf struct {
	// FD belongs to the program, which must keep it open until Register has returned, and
	// may close it then: a backend that needs the memory for longer must duplicate it.
	FD int

	// Offset is where the Segment begins, in bytes from the start of the dma-buf. It must lie
	// as far within a page as Segment.Addr does.
	Offset uint64
}

// check checks what needs no call of the kernel. addr and n are the Segment's.
func (d *DMABuf) check(addr, n uint64) error {
	page := uint64(os.Getpagesize())
	switch {
	case d.FD < 0:
		return fmt.Errorf("segment: descriptor %d of the dma-buf is not open: %w", d.FD, ErrBounds)
	case d.Offset+n < n:
		return fmt.Errorf("segment: %d bytes at %d of a dma-buf: %w", n, d.Offset, ErrBounds)
	case d.Offset%page != addr%page:
		return fmt.Errorf("segment: device address %#x and offset %#x of the dma-buf differ "+
			"within a page of %d bytes: %w", addr, d.Offset, page, ErrBounds)
	}
	return nil
}
