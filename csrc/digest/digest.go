// SPDX-License-Identifier: Apache-2.0

// Package digest sums cells of KV cache so that two memories can be compared whatever their
// layouts are: in C, where one call crosses once, whatever it sums, and allocates nothing; with
// CGO_ENABLED=0 in plain Go.
//
// A cell is some bytes and a coordinate of 64 bits. With m the 32-bit little-endian words of
// the bytes, padded with zeros to an even number, there are two lanes:
//
//	NH_v = sum over j of (m[2j] + K_v[2j] mod 1<<32) * (m[2j+1] + K_v[2j+1] mod 1<<32)
//	F_v  = mix64(NH_v ^ mix64(S_v ^ coordinate))
//
// The digest of a set of cells is the sum of F_1, the sum of F_2, both mod 1<<64, and the number
// of cells. mix64 is the finaliser of MurmurHash3. K and S come from a seed (see NewKey).
//
// Two cells of one coordinate that differ have the same F_v with a probability of 2^-32 over the
// seeds, so that both lanes miss a changed cell once in 2^64. As the coordinate goes through
// mix64 together with the bytes, cells that changed places, and changes that are alike in two
// cells, do not cancel. It is no proof against a peer that knows the seed.
//
// Beside it stands CRC32C, at the speed of memory.
package digest

import (
	"math"
	"math/bits"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// Digest is the sum of a set of cells. Equal sets have equal digests, in whatever order and
// parts they are summed.
type Digest struct{ A, B, Cells uint64 }

// Add takes the cells of another set in.
func (d *Digest) Add(o Digest) {
	d.A += o.A
	d.B += o.B
	d.Cells += o.Cells
}

// Cells are cells of one size at even distances in one memory. Entry i begins where At has it,
// and is a grid of cells.
type Cells struct {
	At          driver.Side
	Count       int    // entries
	Outer, Axis Axis   // of an entry; the cells of Axis are summed in turn
	Coord, Turn uint64 // coordinate of the first cell; from an entry to the next
}

// Axis is N cells, By bytes apart, whose coordinates are On apart.
type Axis struct{ N, By, On uint64 }

// Sum digests cells of one memory. A cell outside the memory, or an overflow, is driver.ErrBounds:
// no byte outside is read. Memory that is gone is driver.ErrFault. The list of slots may change
// meanwhile. Parallel calls are allowed.
func Sum(mem []byte, c *Cells, k *Key) (Digest, error) {
	if c.Empty() {
		return Digest{}, nil
	}
	if !c.Valid(uint64(len(mem)), k) {
		return Digest{}, driver.ErrBounds
	}
	return sum(mem, c, k)
}

// Empty reports whether there is no cell.
func (c *Cells) Empty() bool { return c.Count == 0 || c.Outer.N == 0 || c.Axis.N == 0 }

// Valid reports whether the list has all slots, and the cells of an entry have room beside one
// another in a memory of n bytes, so that no sum takes longer than its memory is worth.
// Preconditions: there are cells.
func (c *Cells) Valid(n uint64, k *Key) bool {
	s := &c.At
	if c.Count < 0 || c.Count > math.MaxInt32 || s.Per > 1 && s.First >= s.Per ||
		s.Per <= 1 && s.First != 0 {
		return false
	}
	over, cells := bits.Mul64(c.Outer.N, c.Axis.N)
	if over != 0 || cells > n/uint64(k.cell) {
		return false
	}
	per := max(1, uint64(s.Per))
	return s.List == nil || uint64(len(s.List)) >= (uint64(s.First)+uint64(c.Count)+per-1)/per
}

// Reference is Sum in plain Go.
func Reference(mem []byte, c *Cells, k *Key) (_ Digest, err error) {
	if c.Empty() {
		return Digest{}, nil
	}
	if !c.Valid(uint64(len(mem)), k) {
		return Digest{}, driver.ErrBounds
	}
	defer hostmem.CatchFault(&err, hostmem.PanicOnFault())
	var d Digest
	extent, ok := reach(uint64(k.cell), c.Outer.N-1, c.Outer.By, true)
	extent, ok = reach(extent, c.Axis.N-1, c.Axis.By, ok)
	for i := range uint64(c.Count) {
		at, fits := entry(&c.At, i)
		if !ok || !fits || at > uint64(len(mem)) || extent > uint64(len(mem))-at {
			return Digest{}, driver.ErrBounds
		}
		for j := range c.Outer.N {
			for n := range c.Axis.N {
				k.add(&d, mem[at+j*c.Outer.By+n*c.Axis.By:][:k.cell],
					c.Coord+i*c.Turn+j*c.Outer.On+n*c.Axis.On)
			}
		}
	}
	return d, nil
}

// entry returns where an entry begins, and whether that does not overflow.
func entry(s *driver.Side, i uint64) (uint64, bool) {
	slot, in := i, uint64(0)
	if s.Per > 1 {
		slot, in = (uint64(s.First)+i)/uint64(s.Per), (uint64(s.First)+i)%uint64(s.Per)
	}
	if s.List != nil {
		slot = uint64(s.List[slot])
	}
	at, ok := reach(s.Base, slot, s.Stride, true)
	return reach(at, in, s.Step, ok)
}

// reach returns at + n*by, and whether nothing has overflowed.
func reach(at, n, by uint64, ok bool) (uint64, bool) {
	over, product := bits.Mul64(n, by)
	sum, carry := bits.Add64(at, product, 0)
	return sum, ok && over == 0 && carry == 0
}
