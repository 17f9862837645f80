// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/sluicehq/sluice/driver"
)

// Shape is what one operation moves, and how many threads do so at once, each
// with a batch of its own.
type Shape struct {
	Op     driver.Op
	Size   uint64 // bytes of a piece
	Batch  int    // pieces of an operation
	Pages  bool   // pieces at random places of a large memory, as one pattern
	Spread uint64 // bytes of that memory; 0: 1 GiB
	// all pieces at one place on each side, which stays in the caches; not with Pages
	Hot     bool
	Dense   int  // with Pages: they lie in one range, one in this many entries of it; 0: anywhere
	Durable bool // of files: an operation ends once the disk has all that it wrote
	Gather  bool // with Pages: the random places are the initiator's, and the peer's are one run
	Threads int
}

// BatchMax bounds the pieces of an operation: 64 MiB of 256 bytes each.
const BatchMax = 1 << 18

// The other bounds of a shape.
const (
	sizeMax    = 1 << 30 // 1 GiB
	threadsMax = 64
	bytesMax   = 4 << 30 // of all threads' batches: both ends, twice over, must fit in memory
)

// ErrShape is what every error about a shape is.
var ErrShape = errors.New("bad shape")

// Check reports whether the shape is within bounds.
func (s *Shape) Check() error {
	switch {
	case s.Op != driver.Read && s.Op != driver.Write:
		return fmt.Errorf("operation %v, want read or write: %w", s.Op, ErrShape)
	case s.Size < 1 || s.Size > sizeMax:
		return fmt.Errorf("size %s, want 1 B to %s: %w", FormatSize(s.Size),
			FormatSize(sizeMax), ErrShape)
	case s.Batch < 1 || s.Batch > BatchMax:
		return fmt.Errorf("batch %d, want 1 to %d: %w", s.Batch, BatchMax, ErrShape)
	case s.Threads < 1 || s.Threads > threadsMax:
		return fmt.Errorf("%d threads, want 1 to %d: %w", s.Threads, threadsMax, ErrShape)
	case s.Hot && s.Pages:
		return fmt.Errorf("hot and pages, want one of them: %w", ErrShape)
	case s.Dense < 0 || s.Dense > 1<<16 || s.Dense > 0 && !s.Pages:
		return fmt.Errorf("dense %d, want 0 to %d, and pages: %w", s.Dense, 1<<16, ErrShape)
	case s.Durable && (s.Pages || s.Op != driver.Write):
		return fmt.Errorf("durable, want writes, and no pages: %w", ErrShape)
	case s.Gather && !s.Pages:
		return fmt.Errorf("gather, want pages with it: %w", ErrShape)
	case s.Spread > bytesMax:
		return fmt.Errorf("spread over %s, want at most %s: %w", FormatSize(s.Spread),
			FormatSize(bytesMax), ErrShape)
	case s.Size*uint64(s.Batch)*uint64(s.Threads) > bytesMax:
		return fmt.Errorf("%d threads x %d pieces x %s, want at most %s in all: %w", s.Threads,
			s.Batch, FormatSize(s.Size), FormatSize(bytesMax), ErrShape)
	}
	return nil
}

// BatchBytes is what one operation moves.
func (s *Shape) BatchBytes() uint64 { return s.Size * uint64(s.Batch) }

// spreadDefault is over what random places are drawn: several times the largest
// caches, which hold 300 MiB and more.
const spreadDefault = 1 << 30 // 1 GiB

// slots is the number of places for pieces on the scattered side of a thread,
// at least twice the batch so that the places are few among many.
func (s *Shape) slots() int {
	if s.Hot {
		return 1
	}
	if !s.Pages {
		return s.Batch
	}
	spread := s.Spread
	if spread == 0 {
		spread = spreadDefault
	}
	return max(2*s.Batch, int(spread/s.Size/uint64(s.Threads)))
}

// LocalBytes is what the initiator must have.
func (s *Shape) LocalBytes() uint64 {
	if s.Gather {
		return s.ScatteredBytes()
	}
	return s.CompactBytes()
}

// RemoteBytes is what the peer must offer.
func (s *Shape) RemoteBytes() uint64 {
	return s.CompactBytes() + s.ScatteredBytes() - s.LocalBytes()
}

// ScatteredBytes is the side of the places: room for every thread's slots.
func (s *Shape) ScatteredBytes() uint64 {
	return uint64(s.Threads) * uint64(s.slots()) * s.stride()
}

// CompactBytes is the other side.
func (s *Shape) CompactBytes() uint64 { return uint64(s.Threads) * s.compact() }

// compact is a thread's part of CompactBytes.
func (s *Shape) compact() uint64 {
	if s.Hot {
		return s.stride()
	}
	return uint64(s.Batch) * s.stride()
}

// MemoryBytes is what a run takes of the machine at most: both ends of the link,
// and of a baseline on either kind of pages.
func (s *Shape) MemoryBytes() uint64 { return 3 * (s.CompactBytes() + s.ScatteredBytes()) }

// stride keeps pieces apart on cache lines; pages lie as they do in a KV pool,
// one behind the other.
func (s *Shape) stride() uint64 {
	if s.Pages {
		return s.Size
	}
	return (s.Size + 63) &^ 63
}

// step is how far the pieces of the initiator lie apart.
func (s *Shape) step() uint64 {
	if s.Hot {
		return 0
	}
	return s.stride()
}

// patterns is how many lists of random places are used in turn, where the memory
// has as many: 2,048 x 656 B then come back after 340 MB of others, so that no
// list stays in a cache. A decode step's entries have not been touched lately,
// either.
const patterns = 256

// plan is where the pieces of one thread lie.
type plan struct {
	shape              Shape
	compact, scattered uint64 // offset of the thread's part on each side
	// slot on the scattered side, for each piece; one list for each operation in turn
	places [][]uint32
}

// local and remote are the offsets by whose they are.
func (p *plan) local() uint64 {
	if p.shape.Gather {
		return p.scattered
	}
	return p.compact
}

func (p *plan) remote() uint64 { return p.compact + p.scattered - p.local() }

// plans draws the places. They depend on the shape alone, so that every run of
// a shape moves the same bytes.
func (s *Shape) plans() []plan {
	list := make([]plan, s.Threads)
	for t := range list {
		random := rand.New(rand.NewPCG(uint64(t), s.Size))
		p := plan{shape: *s, compact: uint64(t) * s.compact(),
			scattered: uint64(t) * uint64(s.slots()) * s.stride()}
		if s.Hot {
			p.places = [][]uint32{make([]uint32, s.Batch)}
			list[t] = p
			continue
		}
		order := draw(random, s.slots(), s.lists()*s.Batch)
		for i := range s.lists() {
			p.places = append(p.places, order[i*s.Batch:][:s.Batch:s.Batch])
		}
		list[t] = p
	}
	return list
}

// lists is how many lists of places a thread has.
func (s *Shape) lists() int {
	if !s.Pages {
		return 1
	}
	return min(patterns, s.slots()/s.Batch)
}

// draw returns n different slots in random order, no two neighbours in a row
// unless there is no other way: neighbours could be moved as one piece.
func draw(random *rand.Rand, slots, n int) []uint32 {
	order := make([]uint32, slots)
	for i := range order {
		order[i] = uint32(i)
	}
	random.Shuffle(slots, func(i, j int) { order[i], order[j] = order[j], order[i] })
	order = order[:n:n]
	for i := 1; i < n; i++ {
		if order[i] == order[i-1]+1 {
			j := random.IntN(n)
			order[i], order[j] = order[j], order[i]
		}
	}
	return order
}
