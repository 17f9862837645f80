// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"fmt"
)

// Segment is a range to register. Which fields count depends on Kind; the rest
// must be zero.
type Segment struct {
	Kind Kind
	Len  uint64 // bytes; with DRAM it is len(Mem)

	// DRAM: the bytes. They must stay mapped and must not move until the Memory is revoked, so a
	// program must keep a reference to a Go slice. A batch that touches memory which is no longer
	// mapped fails with ErrFault.
	Mem []byte

	// DRAM that other processes can map: Mem is [SharedOff, SharedOff+Len) of it.
	// Nil: foreign memory, which only this process has.
	Shared    Shared
	SharedOff uint64

	// HBM: the device ordinal and the device address. The memory must stay allocated until the
	// Memory is revoked. DMABuf names the memory to other devices, such as NICs. If it is nil, a
	// backend does without it, or returns an error that says what is missing.
	Device int
	Addr   uint64
	DMABuf *DMABuf

	// File: an open descriptor, kept by the caller, and the offset in it. With Extends the
	// range may lie past the end of a regular file: a write makes the file longer, and a read of
	// bytes that were not written fails. Otherwise such a range is ErrBounds. Buffered asks a
	// backend that bypasses the page cache to move all bytes through it.
	FD       int
	FileOff  uint64
	Extends  bool
	Buffered bool

	// ReadOnly refuses writes by peers (and, to a File, all writes).
	ReadOnly bool

	// Only lists the bytes that peers may access; nil: all. If the backend on this side copies the
	// bytes for a peer, it must refuse an access outside Only with ErrBounds. If peers access the
	// memory directly, their engines are guaranteed to check, but nothing stops a peer that lies.
	//
	// When Revoke shuts out a frozen peer, it must not change bytes outside Only, or must return an
	// error if that is impossible. A backend that cannot shut out a frozen peer
	// so must return ErrNotSupported from Register or Import.
	Only Ranges

	// Secret is the 128 bits that a token begins with. The engine is guaranteed
	// to draw it anew for each registration.
	Secret [16]byte
}

// Shared is memory that other processes can map, such as hostmem's.
type Shared interface {
	// Lend calls f with the file descriptors that hold the memory now, in order of offset and
	// without gaps. No Renew runs before f has returned; afterwards the descriptors may be
	// closed. f must not call Renew, nor keep the slice.
	Lend(f func(extents []Extent) error) error

	// OnRenew registers f. Each Renew calls f before it replaces the first page, also when another
	// backend or the program renews: a peer that still maps the old pages must learn of it before
	// its writes are lost. f must neither block nor call the Shared. stop is idempotent; once it
	// has returned, f is not called any more.
	//
	// f returns a function, over, that reports whether all writes through mappings of the old
	// pages have ended, also those for which a Revoke no longer waits. A later Renew reuses the
	// old pages when over of each backend returns true. f returns nil if no peer maps the pages. A
	// backend that can never know returns a function that is always false: then no Renew reuses
	// them.
	OnRenew(f func() (over func() bool)) (stop func())

	// Renew puts fresh pages under [off, off+n), widened to whole pages, with the content of the
	// old ones. Writes of another process through an older mapping are lost, and so may be what
	// this program itself writes to those pages at that moment: leased ranges should therefore be
	// whole pages. Renew waits for all calls between Enter and Leave, for a bounded time and at
	// most until ctx ends.
	Renew(ctx context.Context, off, n uint64) error

	// A backend calls Enter before, and Leave after, every write that it makes into the memory
	// from this process: a copy, a read from a socket, a request for which the kernel or a device
	// writes the answer there. No Renew runs in between, so no such byte is lost. Enter waits for
	// a Renew that runs. The time between the two must be bounded, and must not depend on a peer.
	// TryEnter is for a caller that must not block, because it would keep others from calling
	// Leave: where Enter would wait, it returns false and has not entered.
	Enter()
	TryEnter() bool
	Leave()
}

// Holder is implemented by a Shared that can be kept from replacing its pages. A backend whose
// device uses physical pages, such as a NIC that has pinned them, must hold them for as long: after
// a Renew the device would go on with the old pages.
type Holder interface {
	// Hold makes Renew return ErrBusy until release is called, which must be idempotent. Hold
	// waits for a Renew that runs. Several callers may hold at once.
	Hold() (release func(), err error)
}

// Extent is a contiguous part of a Shared that lies in one file descriptor.
type Extent struct {
	Off, Len uint64 // bytes within the Shared
	FD       int
	FDOff    uint64 // bytes within the descriptor
}

// Check reports whether the fields fit the kind.
func (s *Segment) Check() error {
	if s.Len == 0 {
		return fmt.Errorf("segment: no bytes: %w", ErrBounds)
	}
	if s.DMABuf != nil && s.Kind != HBM {
		return fmt.Errorf("segment: a dma-buf with %v, which is for hbm: %w", s.Kind, ErrBounds)
	}
	if err := s.Only.Check(s.Len); err != nil {
		return fmt.Errorf("segment: %w", err)
	}
	switch s.Kind {
	case DRAM:
		if s.Len != uint64(len(s.Mem)) {
			return fmt.Errorf("segment: Len is %d but Mem has %d bytes: %w", s.Len, len(s.Mem),
				ErrBounds)
		}
	case HBM:
		return s.checkDevice()
	case File:
		if s.FD < 0 {
			return fmt.Errorf("segment: descriptor %d is not open: %w", s.FD, ErrBounds)
		}
	default:
		return fmt.Errorf("segment: kind %d: %w", s.Kind, ErrNotSupported)
	}
	return nil
}

func (s *Segment) checkDevice() error {
	switch {
	case s.Addr == 0:
		return fmt.Errorf("segment: no device address: %w", ErrBounds)
	case s.Addr+s.Len < s.Len:
		return fmt.Errorf("segment: %d bytes at device address %#x: %w", s.Len, s.Addr, ErrBounds)
	case s.DMABuf == nil:
		return nil
	}
	return s.DMABuf.check(s.Addr, s.Len)
}

// Slice returns the part [off, off+n), all of it, as a segment with another secret: what a
// lease registers.
func (s Segment) Slice(off, n uint64, secret [16]byte) (Segment, error) {
	if n == 0 || !within(off, n, s.Len) {
		return Segment{}, fmt.Errorf("segment: [%d, +%d) of %d bytes: %w", off, n, s.Len, ErrBounds)
	}
	s.Len, s.Secret, s.Only = n, secret, nil
	switch s.Kind {
	case DRAM:
		s.Mem = s.Mem[off : off+n : off+n]
		s.SharedOff += off
	case HBM:
		s.Addr += off
		if s.DMABuf != nil {
			s.DMABuf = &DMABuf{FD: s.DMABuf.FD, Offset: s.DMABuf.Offset + off}
		}
	case File:
		s.FileOff += off
	}
	return s, nil
}
