// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/driver"
)

// gates are events of the program before memory of devices.
type gates struct {
	count atomic.Int64 // of list: looked at before the lock
	mu    sync.RWMutex
	list  []gate
}

type gate struct {
	device    int
	from, end uint64 // addresses
	event     uint64
}

func (g *gate) meets(device int, from, end uint64) bool {
	return g.device == device && g.from < end && from < g.end
}

// StartAfter has each batch that is submitted from now on and that reads or writes a byte of the
// segment, which is HBM, start only when the device has reached what event, a CUevent, had
// recorded at the time of the Submit. So a program sets it once for the memory of a layer, records
// the event behind the kernels of that layer in each step, and posts transfers of the layer at any
// time after that call. An event that was never recorded holds nothing up. No processor waits.
//
// It holds for what this backend submits, whichever side of it the segment is on. A segment that
// was set before gets the new event; event 0 ends it. The event must live until then, and until the
// batches and sums that wait for it have ended.
//
// At most Config.Gated batches of a device may wait at a time; further ones are answered with
// driver.ErrFull, which the engine repeats. Host memory that could not be pinned cannot wait: such
// batches are answered with ErrNotSupported. A batch on a stream ends only when its event comes:
// Abort, Revoke and Close wait for it.
func (b *Backend) StartAfter(seg driver.Segment, event uintptr) error {
	if seg.Kind != driver.HBM {
		return fmt.Errorf("gate %v: only device memory can wait for an event: %w", seg.Kind,
			driver.ErrNotSupported)
	}
	if err := seg.Check(); err != nil {
		return err
	}
	if b.closed.Load() {
		return driver.ErrClosed
	}
	g := gate{seg.Device, seg.Addr, seg.Addr + seg.Len, uint64(event)}
	b.gates.mu.Lock()
	defer b.gates.mu.Unlock()
	same := func(o gate) bool { return o.device == g.device && o.from == g.from && o.end == g.end }
	b.gates.list = slices.DeleteFunc(b.gates.list, same)
	if event != 0 {
		b.gates.list = append(b.gates.list, g)
	}
	b.gates.count.Store(int64(len(b.gates.list)))
	return nil
}

// gateOf adds the events before a descriptor to those of the batch.
func (j *job) gateOf(v *pair, d *driver.Desc) error {
	g := &j.b.gates
	if g.count.Load() == 0 {
		return nil
	}
	g.mu.RLock()
	defer g.mu.RUnlock()
	for i := range g.list {
		if !v.meets(&g.list[i], d) || slices.Contains(j.events, g.list[i].event) {
			continue
		}
		if len(j.events) == gpu.WaitsMax {
			return fmt.Errorf("a batch that waits for more than %d events: split it: %w",
				gpu.WaitsMax, driver.ErrBounds)
		}
		j.events = append(j.events, g.list[i].event)
	}
	return nil
}

// meets reports whether a descriptor reads or writes behind a gate.
func (v *pair) meets(g *gate, d *driver.Desc) bool {
	l, r := v.local, v.remote.m
	return l.dev != nil && g.meets(l.dev.ordinal, l.base+d.Local, l.base+d.Local+d.Len) ||
		r.dev != nil && g.meets(r.dev.ordinal, r.base+d.Remote, r.base+d.Remote+d.Len)
}

// StreamWait has a CUstream of the program wait for all batches under way that were submitted
// through this backend and whose memories overlap the segment, which is HBM. What is launched on
// the stream afterwards finds their bytes. It returns how many they are, and does not wait itself.
// All of such a batch goes on its stream now, so that it can be aborted no more. Batches that
// failed hold nothing up: their outcome is told by the transfer alone.
//
// driver.ErrNotSupported: one of them moves host memory that could not be pinned, or is gathered by
// a processor; wait for that transfer first. The others were waited for all the same.
func (b *Backend) StreamWait(stream uintptr, seg driver.Segment) (n int, err error) {
	if seg.Kind != driver.HBM {
		return 0, fmt.Errorf("wait for transfers of %v on a stream: %w", seg.Kind,
			driver.ErrNotSupported)
	}
	b.open.RLock()
	defer b.open.RUnlock()
	if b.closed.Load() {
		return 0, driver.ErrClosed
	}
	b.starting.Lock() // a batch is on a stream, or not there
	defer b.starting.Unlock()
	b.reaping.Lock() // and stays
	defer b.reaping.Unlock()
	b.reap()
	b.mu.Lock()
	defer b.mu.Unlock()
	g := gate{seg.Device, seg.Addr, seg.Addr + seg.Len, 0}
	var errs []error
	for _, j := range b.jobs {
		if !j.live || !j.under(&g) {
			continue
		}
		if err := j.dev.mover.Follow(j.number, uint64(stream)); err != nil {
			errs = append(errs, fmt.Errorf("wait for a transfer on a stream: %w", err))
			continue
		}
		n++
	}
	return n, errors.Join(errs...)
}

// under reports whether a memory of the batch overlaps. Backend.mu is held.
func (j *job) under(g *gate) bool {
	for i := range j.pairs {
		for _, m := range [...]*memory{j.pairs[i].local, j.pairs[i].remote.m} {
			if m.dev != nil && g.meets(m.dev.ordinal, m.base, m.base+m.seg.Len) {
				return true
			}
		}
	}
	return false
}
