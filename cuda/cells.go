// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"math"
	"math/bits"

	"github.com/sluicehq/sluice/csrc/digest"
	"github.com/sluicehq/sluice/driver"
)

// The shape of the kernel that digests, as in digest.h.
const (
	digestThreads = 768 // SL_DIGEST_THREADS
	cellThreads   = 8   // SL_CELL_THREADS
	cellLoads     = 4   // SL_CELL_LOADS
)

// cellsArgs is struct sl_cells of digest.h.
type cellsArgs struct {
	at, room, slots, list    uint64
	stride, step, first, per uint64
	coord, turn              uint64
	n, by, on                [2]uint64
	cells, keys              uint64
	s                        [2]uint64
	cell, width              uint32
	threads, reserved        uint32
}

// digestArgs is struct sl_digest.
type digestArgs struct {
	list, total uint64
	n, reserved uint32
}

// digestTotal is struct sl_digest_total.
type digestTotal struct {
	sum     [2]uint64
	outside uint64
}

// fill takes everything in but the addresses of list and keys. driver.ErrBounds: a cell leaves the
// memory whatever the slots are.
func (a *cellsArgs) fill(c *digest.Cells, m *digest.DeviceMemory, k *digest.Key) error {
	if !c.Valid(m.Len, k) {
		return driver.ErrBounds
	}
	s, per := &c.At, max(1, uint64(c.At.Per))
	*a = cellsArgs{at: m.Addr + s.Base, stride: s.Stride, step: s.Step, first: uint64(s.First),
		per: per, coord: c.Coord, turn: c.Turn, n: [2]uint64{c.Outer.N, c.Axis.N},
		by: [2]uint64{c.Outer.By, c.Axis.By}, on: [2]uint64{c.Outer.On, c.Axis.On},
		cell: uint32(k.Cell())}
	_, a.s[0] = k.Lane(0)
	_, a.s[1] = k.Lane(1)
	var d distance
	d.add(1, m.Addr)
	d.add(1, m.Len)
	addresses := d.over
	d = distance{at: k.Cell()}
	d.add(c.Outer.N-1, c.Outer.By)
	d.add(c.Axis.N-1, c.Axis.By)
	d.add(1, s.Base)
	if addresses || d.over || d.at > m.Len {
		return driver.ErrBounds
	}
	a.room = m.Len - d.at
	// The furthest within a slot is that of some entry.
	d = distance{}
	d.add(min(per-1, a.first+uint64(c.Count)-1), s.Step)
	a.slots = math.MaxUint64
	if s.Stride > 0 {
		a.slots = a.room/s.Stride + 1
	}
	over, cells := bits.Mul64(c.Outer.N*c.Axis.N, uint64(c.Count))
	if d.over || d.at > a.room || over != 0 {
		return driver.ErrBounds
	}
	a.cells = cells
	a.shape()
	return nil
}

// shape chooses how the cells are read.
func (a *cellsArgs) shape() {
	all := a.at | a.stride
	if a.per > 1 {
		all |= a.step
	}
	for i, n := range a.n {
		if n > 1 {
			all |= a.by[i]
		}
	}
	a.width = max(1, width(all))
	piece := uint32(8)
	if a.width == 16 {
		piece = 16
	}
	for a.threads = 1; a.threads < cellThreads && a.threads*cellLoads < a.cell/piece; {
		a.threads *= 2
	}
}

// distance is a sum of products.
type distance struct {
	at   uint64
	over bool // it does not fit
}

func (d *distance) add(n, by uint64) {
	over, product := bits.Mul64(n, by)
	sum, carry := bits.Add64(d.at, product, 0)
	d.at, d.over = sum, d.over || over != 0 || carry != 0
}
