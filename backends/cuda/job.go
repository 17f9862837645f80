// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"
	"sync/atomic"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// job is a batch. Jobs are made at the start and reused; their number is what C knows them by.
//
// The job is the one record of its batch. Others find it only while it is live: from just
// before C begins it until its end is taken off the ring. What C refuses is live no more before
// starting is given up, so that StreamWait finds only batches that C has begun. A cancel names
// the serial, so that one that comes before C begins the batch holds, and one that comes
// after its end does not touch the next batch of the number.
type job struct {
	b      *Backend
	number int

	live   bool                  // Backend.mu guards it, and what follows from others until then
	serial atomic.Uint64         // which of the batches with this number it is
	why    atomic.Pointer[error] // it was asked to end early
	p      *peer
	tag    uint64

	dev    *device
	views  []view
	events []uint64 // that it waits for
	notify *session.Notification
	shared int // stream that it counts on, -1: none
	gate   int // worker of its own, -1: none
	place  *gpu.Place
	slow   bool // it names memory that is not pinned
	call   string
	run    gpu.Run
	gather gpu.Entries
}

// view is a pair of memories. Neighbouring descriptors mostly name the same, so it is looked up
// only when the keys change.
type view struct {
	localKey, remoteKey uint32
	local               *memory
	remote              *remote
	way                 gpu.Way
}

func (v *view) shows(d *driver.Desc) bool {
	return v.localKey == d.LocalKey && v.remoteKey == d.RemoteKey
}

// leave undoes what look entered.
func (v *view) leave() {
	v.local.block.leave()
	v.remote.m.block.leave()
	v.local.own.leave()
	v.remote.leave()
}

// take returns a job for a tag, nil if there is none.
func (b *Backend) take(p *peer, tag uint64) *job {
	if b.taken.Add(1) > int64(len(b.jobs)) {
		b.taken.Add(-1)
		return nil
	}
	b.mu.Lock()
	j := b.free[len(b.free)-1]
	b.free = b.free[:len(b.free)-1]
	b.mu.Unlock()
	j.p, j.tag, j.dev, j.notify, j.place = p, tag, nil, nil, nil
	j.shared, j.gate, j.slow, j.call = -1, -1, false, "copy"
	j.events = j.events[:0]
	j.why.Store(nil)
	return j
}

// give makes a job free that is under way no more; its tag stays taken until it is polled.
func (j *job) give() {
	for i := range j.views {
		j.views[i].leave()
	}
	if j.shared >= 0 {
		j.dev.loads[j.shared].Add(-1)
	}
	if j.gate >= 0 {
		j.dev.ungate(j.gate)
	}
	if j.place != nil {
		j.dev.unplace(j.place)
	}
	j.b.mu.Lock()
	defer j.b.mu.Unlock()
	j.live = false
	clear(j.views)
	j.views = j.views[:0]
	j.gather = gpu.Entries{}
	j.b.free = append(j.b.free, j)
}

// undo is give for a job that was never started.
func (j *job) undo() {
	j.give()
	j.b.taken.Add(-1)
}

// show makes a job known to cancels and StreamWait, and returns its serial, unless memory
// was revoked since the job entered it: that Revoke may have looked for batches already.
func (j *job) show() (serial uint64, err error) {
	j.b.mu.Lock()
	defer j.b.mu.Unlock()
	for i := range j.views {
		if j.views[i].remote.revoked() {
			return 0, driver.ErrRevoked
		}
	}
	j.live = true
	return j.serial.Add(1), nil
}

// hide undoes show: C has refused the batch.
func (j *job) hide() {
	j.b.mu.Lock()
	j.live = false
	j.b.mu.Unlock()
}

// names reports whether the batch reaches memory of a peer. Backend.mu is held.
func (j *job) names(m *memory) bool {
	for i := range j.views {
		if r := j.views[i].remote; r.m == m && r.grant.ended.Load() {
			return true
		}
	}
	return false
}

// overtaken reports whether another process has ended an import that the batch used: what was
// written then may be in memory that nothing uses.
func (j *job) overtaken() bool {
	for i := range j.views {
		if j.views[i].remote.grant.overtaken() {
			return true
		}
	}
	return false
}

// cancel drops what is not yet on a stream of the batches that a condition names.
func (b *Backend) cancel(which func(*job) bool, why *error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, j := range b.jobs {
		if j.live && which(j) && j.why.CompareAndSwap(nil, why) {
			j.dev.mover.Cancel(j.number, j.serial.Load())
		}
	}
}

// cancelSenders does so with batches of our peers.
func (b *Backend) cancelSenders(which func(*job) bool, why *error) {
	for _, from := range b.sources() {
		from.cancel(which, why)
	}
}

// look adds a pair of memories to the batch, and enters both.
func (j *job) look(op driver.Op, localKey, remoteKey uint32) error {
	local, r := j.b.memories.At(localKey), j.p.remote(remoteKey)
	switch {
	case local == nil:
		return fmt.Errorf("local key %d: %w", localKey, driver.ErrBounds)
	case r == nil:
		return fmt.Errorf("remote key %d: %w", remoteKey, driver.ErrBounds)
	case op == driver.Write && r.m.seg.ReadOnly:
		return driver.ErrReadOnly
	case local.dev == nil && r.m.dev == nil:
		return fmt.Errorf("from dram to dram: another backend does that: %w",
			driver.ErrNotSupported)
	case !local.own.enter():
		return fmt.Errorf("local key %d: %w", localKey, driver.ErrBounds)
	case !r.enter():
		local.own.leave()
		return j.p.refused(remoteKey, r)
	}
	v := view{localKey: localKey, remoteKey: remoteKey, local: local, remote: r}
	if !local.block.enter() {
		local.own.leave()
		r.leave()
		return driver.ErrFull // other memory goes under it
	}
	if !r.m.block.enter() {
		local.block.leave()
		local.own.leave()
		r.leave()
		return driver.ErrFull
	}
	src, dst := local, r.m
	if op == driver.Read {
		src, dst = dst, src
	}
	if j.dev == nil {
		j.dev = j.b.ours(src, dst)
	}
	v.way = j.way(src, dst)
	j.views = append(j.views, v)
	return nil
}

// ours is the device on whose stream a copy goes: of the source, if that is one's. The peer's
// memory may be on a device that we have not opened.
func (b *Backend) ours(src, dst *memory) *device {
	for _, m := range []*memory{src, dst} {
		if m.dev != nil {
			if d := b.device(m.dev.ordinal); d != nil {
				return d
			}
		}
	}
	return b.devices[0]
}

func (j *job) way(src, dst *memory) gpu.Way {
	here := func(m *memory) bool { return m.dev.ordinal == j.dev.ordinal }
	for _, m := range [...]*memory{src, dst} {
		if m.pin != nil && !m.pin.pinned() {
			j.slow = true
		}
	}
	switch {
	case src.dev == nil && here(dst):
		return gpu.Up
	case dst.dev == nil && here(src):
		return gpu.Down
	case src.dev != nil && dst.dev != nil && here(src) && here(dst):
		return gpu.Within
	}
	return gpu.Any
}
