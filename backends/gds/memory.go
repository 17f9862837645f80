// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"fmt"

	"github.com/sluicehq/sluice/csrc/cufile"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/lentmem"
	"github.com/sluicehq/sluice/internal/ownfiles"
)

// memory is one registration: memory of a device or of the host, or a range of a file.
type memory = ownfiles.Memory[extent]

// extent is where a memory lies.
type extent struct {
	device int           // whose context cuFile is called in
	at     uint64        // address
	buffer *buffer       // what cuFile knows of it; nil of a file
	shared driver.Shared // of host memory whose pages may be renewed; nil: there are none

	file *file // a range of a file; nil: memory
	off  uint64
}

// Register implements driver.Backend. A file is opened once more, so the caller's descriptor may be
// closed when Register has returned; further ranges of it, and parts of registered memory, cost
// little. A file that cuFile does not take (its filesystem, without compat mode) is an error that
// wraps *cufile.Error.
func (b *Backend) Register(seg driver.Segment) (driver.Memory, error) {
	if !b.caps.Pairs.Local().Has(seg.Kind) {
		return nil, fmt.Errorf("register %v with gds: %w", seg.Kind, driver.ErrNotSupported)
	}
	if seg.Kind == driver.File && seg.Buffered {
		return nil, fmt.Errorf("register a file with gds: cuFile goes past the page cache, and "+
			"Segment.Buffered asks for it: use posix, or leave Buffered out: %w",
			driver.ErrNotSupported)
	}
	return b.flights.Register(&seg, func(m *memory) error { return b.find(&m.Extent, &seg) })
}

// find makes the segment known to cuFile.
func (b *Backend) find(e *extent, seg *driver.Segment) (err error) {
	switch seg.Kind {
	case driver.File:
		e.off = seg.FileOff
		e.file, err = b.use(seg)
		return err
	case driver.HBM:
		if err := lentmem.Check(seg.Addr, seg.Len); err != nil {
			return err
		}
		e.device, e.at = seg.Device, seg.Addr
	default:
		e.at, e.shared = addressOf(seg.Mem), seg.Shared
	}
	if e.device < 0 || e.device >= cufile.Devices {
		return fmt.Errorf("device %d is not within 0 to %d: %w", e.device, cufile.Devices-1,
			driver.ErrBounds)
	}
	if err := b.mover.Use(e.device); err != nil {
		return err
	}
	if seg.Kind == driver.HBM {
		if err := b.holds(e, seg.Len); err != nil {
			return err
		}
	}
	e.buffer, err = buffers.use(b, seg, e.at)
	return err
}

// holds checks that the range is allocated, and all of it on the device.
func (b *Backend) holds(e *extent, size uint64) error {
	whose, until, err := b.mover.Whose(e.device, e.at, size)
	switch {
	case err != nil && until > e.at:
		return fmt.Errorf("%d bytes of device memory at %#x: only %d of them are allocated: %w",
			size, e.at, until-e.at, driver.ErrBounds)
	case err != nil:
		return fmt.Errorf("%d bytes at %#x, which is not device memory, or was freed: %w (%w)",
			size, e.at, driver.ErrBounds, err)
	case whose != e.device:
		return fmt.Errorf("%d bytes at %#x, which are of device %d and not of %d: %w", size, e.at,
			whose, e.device, driver.ErrBounds)
	}
	return nil
}

// base is what cuFile is told of a place in the memory: an address as it was registered, and where
// behind it.
func (e *extent) base(off uint64) (base, offset uint64) {
	if e.buffer.registered() {
		return e.buffer.at, e.at - e.buffer.at + off
	}
	return e.at, off
}

// giveBack ends what Register made of a segment.
func (b *Backend) giveBack(m *memory) error {
	if m.Extent.file != nil {
		return b.unuse(m.Extent.file)
	}
	return buffers.unuse(b, m.Extent.buffer)
}
