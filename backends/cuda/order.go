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

// gates are the events of StartAfter, by address range.
type gates struct {
	count atomic.Int64 // len(list): read without the lock
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

// StartAfter makes later batches that read or write a byte of the segment, which is HBM, wait for
// event, a CUevent: a batch starts only when the device has completed the work that the event had
// recorded at the time of the Submit. The device waits, not a CPU core.
//
// A program calls StartAfter once for the memory of a layer. In each step it records the event
// after the kernels of that layer, and then posts transfers of the layer at any time. An event that
// was never recorded delays nothing.
//
// StartAfter applies to batches that this backend submits, with the segment on either side. A
// second call for a segment replaces its event; event 0 removes it. The event must exist until
// then, and until the batches and sums that wait for it have ended.
//
// At most Config.Gated batches of a device may wait at a time. For more, Submit returns
// driver.ErrFull, and the engine tries again. A batch with host memory that could not be pinned
// cannot wait: Submit returns ErrNotSupported. A batch on a stream ends only after its event has
// come: Abort, Revoke and Close wait for it.
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

// gateOf adds the events that a descriptor must wait for to those of the batch.
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

// meets reports whether a descriptor reads or writes the range of a gate.
func (v *pair) meets(g *gate, d *driver.Desc) bool {
	l, r := v.local, v.remote.m
	return l.dev != nil && g.meets(l.dev.ordinal, l.base+d.Local, l.base+d.Local+d.Len) ||
		r.dev != nil && g.meets(r.dev.ordinal, r.base+d.Remote, r.base+d.Remote+d.Len)
}

// StreamWait makes a CUstream of the program wait for all running batches of this backend whose
// memories overlap the segment, which is HBM. Kernels that the program launches on the stream
// afterwards find the bytes. StreamWait returns the number of these batches, and does not wait
// itself. It puts all their copies on streams at once, so they can no longer be aborted. A batch
// that fails does not hold up the stream; only its transfer reports the error.
//
// driver.ErrNotSupported: one of the batches moves host memory that could not be pinned, or a CPU
// core gathers it. Wait for that transfer first. The stream waits for the other batches all the
// same.
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
	b.starting.Lock() // no start is halfway: C has every live batch
	defer b.starting.Unlock()
	b.reaping.Lock() // none ends meanwhile
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

// under reports whether a memory of the batch overlaps the range. Backend.mu is held.
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
