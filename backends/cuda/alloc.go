// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/backends"
	"github.com/sluicehq/sluice/csrc"
)

// AllocDevice returns n bytes of a device's memory, not zeroed, as a segment that each backend can
// register which takes HBM. Where the driver exports it (CUDA 11.7, and a device that can), Segment.DMABuf is set,
// so that NICs may register it too, without nvidia_peermem. The memory comes from the driver's virtual memory
// management where there is one, in whole pieces of mostly 2 MiB, and from its plain
// allocator elsewhere.
//
// The Closer frees it. It must be closed after every registration of the memory was, at any time,
// also after the backend; closing it again does nothing.
func (b *Backend) AllocDevice(ordinal int, n uint64) (backends.Segment, io.Closer, error) {
	if n == 0 || n > 1<<60 {
		return backends.Segment{}, nil, fmt.Errorf("allocate %d bytes of device memory: %w", n, backends.ErrBounds)
	}
	b.open.RLock()
	defer b.open.RUnlock()
	switch {
	case b.closed.Load():
		return backends.Segment{}, nil, backends.ErrClosed
	case b.device(ordinal) == nil:
		return backends.Segment{}, nil, fmt.Errorf("allocate on device %d, which Config.Devices leaves out: %w", ordinal, backends.ErrNotSupported)
	}
	block, err := csrc.NewCUDABlock(ordinal, n)
	if err != nil {
		return backends.Segment{}, nil, err
	}
	own := &ownBlock{block: block, fd: -1}
	seg := backends.Segment{Kind: backends.HBM, Len: n, Device: ordinal, Addr: block.At}
	fd, off, err := block.Export()
	if err == nil && fd >= 0 { // what cannot be exported is memory all the same
		own.fd = fd
		seg.DMABuf = &backends.DMABuf{FD: fd, Offset: off}
	}
	return seg, own, nil
}

// ownBlock frees memory of AllocDevice.
type ownBlock struct {
	once  sync.Once
	block *csrc.CUDABlock
	fd    int // of its dma-buf; -1: none
}

// Close implements io.Closer.
func (o *ownBlock) Close() (err error) {
	o.once.Do(func() {
		err = o.block.Close()
		if o.fd >= 0 {
			err = errors.Join(err, os.NewSyscallError("close", unix.Close(o.fd)))
		}
	})
	return err
}
