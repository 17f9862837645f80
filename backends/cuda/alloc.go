// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"
	"io"

	"github.com/sluicehq/sluice/driver"
)

// AllocDevice returns n bytes of a device's memory, not zeroed, as a segment that each backend can
// register which takes HBM. Where the driver exports it (CUDA 11.7, and a device that can),
// Segment.DMABuf is set, so that NICs may register it too, without nvidia_peermem. The memory comes
// from the driver's virtual memory management where there is one, in whole pieces of mostly 2 MiB,
// and from its plain allocator elsewhere.
//
// With Config.Peers backends of other processes reach it; no dma-buf is exported, and the backends
// rdma and gds, whose devices would go on with the old memory, do not take it. A revoke against a
// process that is frozen, or was killed in a batch, then puts other memory under the addresses: it
// waits for what the program has begun on the device, and while it runs (for longer than
// Config.RevokeGrace, that is) the program must begin no kernel or copy of its own over any byte of
// the allocation.
//
// The Closer frees it. It must be closed after every registration of the memory was, at any time,
// also after the backend; closing it again does nothing.
func (b *Backend) AllocDevice(ordinal int, n uint64) (driver.Segment, io.Closer, error) {
	if n == 0 || n > 1<<60 {
		return driver.Segment{}, nil, fmt.Errorf("allocate %d bytes of device memory: %w", n,
			driver.ErrBounds)
	}
	b.open.RLock()
	defer b.open.RUnlock()
	switch {
	case b.closed.Load():
		return driver.Segment{}, nil, driver.ErrClosed
	case b.device(ordinal) == nil:
		return driver.Segment{}, nil, fmt.Errorf("allocate on device %d, which Config.Devices "+
			"leaves out: %w", ordinal, driver.ErrNotSupported)
	}
	own, err := newOwnBlock(ordinal, n, b.cfg.Peers)
	if err != nil {
		return driver.Segment{}, nil, err
	}
	seg := driver.Segment{Kind: driver.HBM, Len: n, Device: ordinal, Addr: own.block.At}
	if b.cfg.Peers {
		return seg, own, nil
	}
	fd, off, err := own.block.Export()
	if err == nil && fd >= 0 { // what cannot be exported is memory all the same
		own.fd = fd
		seg.DMABuf = &driver.DMABuf{FD: fd, Offset: off}
	}
	return seg, own, nil
}
