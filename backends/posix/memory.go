// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"errors"
	"fmt"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/ownfiles"
)

// memory is one registration: host memory or a range of a file.
type memory = ownfiles.Memory[extent]

// extent is where a memory lies.
type extent struct {
	mem    []byte        // host memory
	pin    pin           // where io_uring knows it
	shared driver.Shared // whose pages may be renewed; nil: there are none

	file *file // a range of a file; nil: host memory
	off  uint64
}

// Register implements driver.Backend. A file is opened once more, so the caller's
// descriptor may be closed when Register has returned; further ranges of it cost little.
func (b *Backend) Register(seg driver.Segment) (driver.Memory, error) {
	if seg.Kind != driver.DRAM && seg.Kind != driver.File {
		return nil, fmt.Errorf("register %v with posix: %w", seg.Kind, driver.ErrNotSupported)
	}
	return b.flights.Register(&seg, func(m *memory) (err error) {
		if seg.Kind == driver.File {
			m.Extent.off = seg.FileOff
			m.Extent.file, err = b.use(&seg)
			return err
		}
		m.Extent.mem, m.Extent.pin, m.Extent.shared = seg.Mem, b.pinMemory(&seg), seg.Shared
		return nil
	})
}

// giveBack ends what Register made of a segment. After an error io_uring keeps a part of it still,
// unless closing the file was the error, which is told once.
func (b *Backend) giveBack(m *memory) error {
	f := m.Extent.file
	if f == nil {
		return b.unpin(&m.Extent.pin)
	}
	kept, err := b.unuse(f)
	if !kept {
		m.Extent.file = nil
	}
	return err
}

// use finds the file of a segment, or opens it.
func (b *Backend) use(seg *driver.Segment) (*file, error) {
	id, err := ownfiles.Admit(seg)
	if err != nil {
		return nil, err
	}
	key, why := fileKey{id, b.cfg.Buffered || seg.Buffered}, ""
	switch {
	case b.cfg.Buffered:
		why = "Config.Buffered"
	case seg.Buffered:
		why = "as its registration asked (Segment.Buffered)"
	}
	b.flights.Mu.Lock()
	defer b.flights.Mu.Unlock()
	f := b.files[key]
	if f == nil {
		if f, err = openFile(seg.FD, key, why); err != nil {
			return nil, err
		}
		if err := b.mover.addFile(f); err != nil {
			return nil, errors.Join(err, f.close())
		}
		f.inode = b.inodeOf(f.ID)
		b.files[key] = f
	}
	f.refs++
	return f, nil
}

// unuse closes a file that no memory lies in any more. Kept says that the file is in use still.
func (b *Backend) unuse(f *file) (kept bool, err error) {
	b.flights.Mu.Lock()
	defer b.flights.Mu.Unlock()
	if f.refs > 1 {
		f.refs--
		return false, nil
	}
	err = b.mover.dropFile(f)
	if err != nil {
		return true, fmt.Errorf("close file: %w", err)
	}
	delete(b.files, f.fileKey)
	if err := errors.Join(b.dropInode(f.ID, f.inode), f.close()); err != nil {
		return false, fmt.Errorf("close file: %w", err)
	}
	return false, nil
}
