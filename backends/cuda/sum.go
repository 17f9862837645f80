// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"
	"slices"
	"time"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/csrc/digest"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// SumCells computes digests of cells in device memory, as package csrc/digest does in DRAM, and
// waits for the result. A kernel within Config.Budget does the work, on a stream of the lowest
// priority. It starts when the device has completed the work that the events of StartAfter for the
// cells had recorded at the time of the call.
//
// A Revoke that replaces memory of AllocDevice waits for SumCells, and so does the Closer that
// frees it. Other memory must stay allocated until the call returns.
//
// Errors: driver.ErrBounds for a cell outside its memory, or memory that is not allocated;
// driver.ErrNotSupported without a Budget; driver.ErrTimeout if the events do not come, or a Revoke
// does not end, within Config.SumTimeout; the error of the CUDA driver if an event was recorded on
// a stream that is being captured.
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
	deadline := time.Now().Add(b.cfg.SumTimeout)
	stop := func() error {
		switch {
		case b.closed.Load():
			return driver.ErrClosed
		case time.Now().After(deadline):
			return fmt.Errorf("no event of StartAfter, or no end of a revoke, for %v, which "+
				"Config.SumTimeout sets: %w", b.cfg.SumTimeout, driver.ErrTimeout)
		}
		return nil
	}
	var sum digest.Digest
	for len(list) > 0 {
		n := 1
		for n < len(list) && list[n].Memory.Device == list[0].Memory.Device {
			n++
		}
		one, err := b.sumOn(list[0].Memory.Device, list[:n], stop)
		if err != nil {
			return digest.Digest{}, fmt.Errorf("digest device memory: %w", err)
		}
		sum.Add(one)
		list = list[n:]
	}
	return sum, nil
}

// sumOn digests cells of one device.
func (b *Backend) sumOn(ordinal int, list []digest.DeviceCells,
	stop func() error) (digest.Digest, error) {
	d := b.device(ordinal)
	if d == nil {
		return digest.Digest{}, fmt.Errorf("memory of device %d, which Config.Devices leaves "+
			"out: %w", ordinal, driver.ErrNotSupported)
	}
	if d.sums == nil {
		return digest.Digest{}, d.noSums
	}
	if err := d.untilReached(b.gates.before(list), stop); err != nil {
		return digest.Digest{}, err
	}
	var under []*ownBlock
	if err := await(func() (ok bool) {
		under, ok = enterUnder(list)
		return ok
	}, stop); err != nil {
		return digest.Digest{}, err
	}
	defer leaveAll(under)
	for i := range list { // from here on no renew replaces the memory
		if m := &list[i].Memory; i == 0 || *m != list[i-1].Memory {
			if err := d.holds(m.Addr, m.Len); err != nil {
				return digest.Digest{}, err
			}
		}
	}
	testpoint.At("cuda: held") // the memory of a sum cannot be replaced or freed
	return d.sums.Sum(list)
}

// enterUnder enters all blocks that contain memory of the list, or none.
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

// side is a stream that only a sum uses, to wait for events.
type side struct {
	*gpu.Device
	taken bool // guarded by device.mu
}

// untilReached waits for the work that the events have recorded by now. The program may record them
// again at any time, so a stream of this sum alone waits: it keeps the earlier recording.
func (d *device) untilReached(events []uint64, stop func() error) (err error) {
	var s *side
	for _, e := range events {
		// Query the event first: a stream that waits for a captured event joins the capture.
		came, err := d.mover.EventDone(e)
		if err != nil {
			return fmt.Errorf("wait for an event of StartAfter: %w", err)
		}
		if came {
			continue
		}
		if s == nil {
			if s, err = d.side(stop); err != nil {
				return err
			}
			defer d.putBack(s)
		}
		if err := s.Await(uintptr(e)); err != nil {
			return err
		}
	}
	if s == nil {
		return nil
	}
	testpoint.At("cuda: behind") // the stream waits for events
	over := func() (over bool) {
		over, err = s.StreamDone()
		return over || err != nil
	}
	if late := await(over, stop); late != nil {
		return late
	}
	return err
}

// side returns an idle one. The stream of a sum that has given up may still wait. There are as many
// as gated workers.
func (d *device) side(stop func() error) (s *side, err error) {
	take := func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		for _, s = range d.sides {
			if over, err := s.StreamDone(); !s.taken && over && err == nil {
				s.taken = true
				return true
			}
		}
		if len(d.sides) == len(d.gated) {
			return false
		}
		one, failed := gpu.Open(d.ordinal)
		if err = failed; err == nil {
			s = &side{one, true}
			d.sides = append(d.sides, s)
		}
		return true
	}
	if late := await(take, stop); late != nil {
		return nil, late
	}
	return s, err
}

func (d *device) putBack(s *side) {
	d.mu.Lock()
	defer d.mu.Unlock()
	s.taken = false
}

// before returns the events that the cells of one device must wait for.
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

// reachOfCells returns the range from the first cell to the last. If a cell lies outside the
// memory, the result has no meaning; then nothing is read.
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
