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

	// DRAM: the bytes. They must stay mapped and must not move until the Memory
	// is closed, which rules out a Go slice that the program lets go of. Batches that meet
	// memory which is gone fail with ErrFault.
	Mem []byte

	// DRAM that other processes can map: Mem is [SharedOff, SharedOff+Len) of it.
	// Nil: foreign memory, which only this process has.
	Shared    Shared
	SharedOff uint64

	// HBM: the device ordinal and the device address. The memory must stay allocated
	// until the Memory is closed. DMABuf is what other devices know it by, such as NICs;
	// nil: a backend does without, or answers with what would mend that.
	Device int
	Addr   uint64
	DMABuf *DMABuf

	// File: an open descriptor, kept by the caller, and the offset in it. With Extends the
	// range may lie past the end of a regular file: a write makes it longer, and a read of
	// what was not written fails. Otherwise such a range is ErrBounds. Buffered asks for all
	// bytes to go through the page cache: a backend that would go past it should heed it.
	FD       int
	FileOff  uint64
	Extends  bool
	Buffered bool

	// ReadOnly refuses writes by peers (and, to a File, all writes).
	ReadOnly bool

	// Only is what peers may reach of the bytes; nil: all. What peers send beyond it must be
	// ErrBounds where this side places it, or reads it for them. Where peers reach the memory
	// themselves, their engines are guaranteed to look, and nothing keeps out one that lies. Means
	// by which Revoke shuts out a frozen peer must leave the bytes beside it alone; an error is due
	// where they cannot. A backend without such means must answer ErrNotSupported, to Register or
	// to Import.
	Only Ranges

	// Secret is the 128 bits that a token begins with. The engine is guaranteed
	// to draw it anew for each registration.
	Secret [16]byte
}

// Shared is memory that other processes can map, such as hostmem's.
type Shared interface {
	// Lend calls f with the descriptors that hold the memory now, in order of offset and
	// without gaps. No Renew runs before f has returned; afterwards the descriptors may be
	// closed. f must not call Renew, nor keep the slice.
	Lend(f func(extents []Extent) error) error

	// OnRenew has f called in each Renew before the first page moves, also when another
	// backend or the program renews: a peer that still has the old pages must learn of it
	// before what it writes there is lost. f must neither block nor call the Shared. Once
	// stop, which is idempotent, has returned, f runs no more.
	//
	// What f returns reports, from then on, whether each write through a mapping of the old
	// pages has ended, those included that a Revoke has given up: a later Renew takes old pages
	// again when each backend that was told says so. nil: there is none. A backend that
	// can never know returns a function that says false: no Renew uses the old pages again.
	OnRenew(f func() (over func() bool)) (stop func())

	// Renew puts fresh pages under [off, off+n), widened to whole pages, with the
	// content of the old ones. What another process still writes through an
	// older mapping is lost, and so may be what this program itself writes into those
	// pages at that moment: a range that is leased should be whole pages. It waits for
	// all that have entered, for a bounded time and until ctx is over.
	Renew(ctx context.Context, off, n uint64) error

	// Enter and Leave stand around every write into the memory that a backend makes from
	// this process: a copy, a read from a socket, a request of which the kernel or a device
	// is to write the answer there. No Renew runs in between, so no such byte is lost.
	// Enter waits for a Renew that runs. What is between them must be bounded in time,
	// and must not wait for a peer. TryEnter is for a caller that may not wait, since what has
	// entered could not leave meanwhile: it reports false where Enter would wait, and has not
	// entered.
	Enter()
	TryEnter() bool
	Leave()
}

// Holder is implemented by a Shared whose pages can be held where they are. A backend
// whose device knows the pages themselves, as a NIC does that has pinned them, must
// hold them for as long: the device would go on with the old ones.
type Holder interface {
	// Hold has Renew answer ErrBusy until release was called, which must be
	// idempotent. It waits for a Renew that runs. Several may hold at once.
	Hold() (release func(), err error)
}

// Extent is a run of a Shared that lies in one descriptor.
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
