// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"
	"slices"

	"github.com/sluicehq/sluice/csrc/digest"
	"github.com/sluicehq/sluice/driver"
)

// SumCells digests cells in memory of devices, as package csrc/digest does in DRAM, with a kernel
// within Config.Budget on a stream of the lowest priority. It waits for the end. The kernel starts
// when the events of StartAfter before the cells have come. A fence that takes memory away from
// another process waits for it, and so does who frees memory of AllocDevice; memory from elsewhere
// must stay until the call returns.
//
// Errors: driver.ErrBounds for a cell outside its memory, or memory that is not allocated;
// driver.ErrNotSupported without a Budget.
func (b *Backend) SumCells(list []digest.DeviceCells) (digest.Digest, error) {
	if !b.cfg.kernels() {
		return digest.Digest{}, fmt.Errorf("digest device memory: Config.Budget is zero, so that "+
			"no kernel may run: set it, or digest in DRAM: %w", driver.ErrNotSupported)
	}
	b.open.RLock()
	defer b.open.RUnlock()
	if b.closed.Load() {
		return digest.Digest{}, driver.ErrClosed
	}
	var sum digest.Digest
	for len(list) > 0 {
		n := 1
		for n < len(list) && list[n].Memory.Device == list[0].Memory.Device {
			n++
		}
		one, err := b.sumOn(list[0].Memory.Device, list[:n])
		if err != nil {
			return digest.Digest{}, fmt.Errorf("digest device memory: %w", err)
		}
		sum.Add(one)
		list = list[n:]
	}
	return sum, nil
}

// sumOn digests cells of one device.
func (b *Backend) sumOn(ordinal int, list []digest.DeviceCells) (digest.Digest, error) {
	d := b.device(ordinal)
	if d == nil {
		return digest.Digest{}, fmt.Errorf("memory of device %d, which Config.Devices leaves "+
			"out: %w", ordinal, driver.ErrNotSupported)
	}
	if d.sums == nil {
		return digest.Digest{}, d.noSums
	}
	var under []*ownBlock
	if err := await(func() (ok bool) {
		under, ok = enterUnder(list)
		return ok
	}, always); err != nil {
		return digest.Digest{}, err
	}
	defer leaveAll(under)
	for i := range list { // nothing moves any more
		if m := &list[i].Memory; i == 0 || *m != list[i-1].Memory {
			if err := d.holds(m.Addr, m.Len); err != nil {
				return digest.Digest{}, err
			}
		}
	}
	parked.At(spotHeld)
	return d.sums.Sum(list, b.gates.before(list))
}

// enterUnder enters all blocks that have memory of the list, or none.
func enterUnder(list []digest.DeviceCells) (under []*ownBlock, ok bool) {
	for i := range list {
		m := &list[i].Memory
		if i > 0 && *m == list[i-1].Memory {
			continue
		}
		for _, o := range blocks.under(m.Addr, m.Len) {
			if slices.Contains(under, o) {
				continue
			}
			if !o.enter() {
				leaveAll(under)
				return nil, false
			}
			under = append(under, o)
		}
	}
	return under, true
}

func leaveAll(list []*ownBlock) {
	for _, o := range list {
		o.leave()
	}
}

// before are the events before cells of one device.
func (g *gates) before(list []digest.DeviceCells) (events []uint64) {
	if g.count.Load() == 0 {
		return nil
	}
	g.mu.RLock()
	defer g.mu.RUnlock()
	for i := range list {
		from, end := reachOfCells(&list[i])
		for k := range g.list {
			e := &g.list[k]
			if e.meets(list[i].Memory.Device, from, end) && !slices.Contains(events, e.event) {
				events = append(events, e.event)
			}
		}
	}
	return events
}

// reachOfCells is the range from the first cell to the last. Where a cell lies outside the memory,
// it may be any: nothing is read.
func reachOfCells(c *digest.DeviceCells) (from, end uint64) {
	if c.Cells.Empty() {
		return 0, 0
	}
	s, per := &c.Cells.At, max(1, uint64(c.Cells.At.Per))
	low, high := uint64(0), (uint64(s.First)+uint64(c.Cells.Count)-1)/per
	if s.List != nil && high < uint64(len(s.List)) {
		used := s.List[:high+1]
		low, high = uint64(slices.Min(used)), uint64(slices.Max(used))
	}
	begin := c.Memory.Addr + s.Base
	return begin + low*s.Stride, begin + high*s.Stride + (per-1)*s.Step +
		(c.Cells.Outer.N-1)*c.Cells.Outer.By + (c.Cells.Axis.N-1)*c.Cells.Axis.By + c.Key.Cell()
}
