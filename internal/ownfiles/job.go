// SPDX-License-Identifier: Apache-2.0

package ownfiles

import (
	"context"

	"github.com/sluicehq/sluice/driver"
)

// Job is a batch under way: a part of a backend's own jobs, which are made at the start and
// reused, with the memory of their lists. All is guarded by Flights.Mu.
type Job[E any] struct {
	Op    driver.Op
	Tag   uint64
	Views []View[E]
	Items []Item // what there is to move, of the batch alone
	Err   error  // why it ends before it is done

	Slot   int    // of the backend's own part of it
	At     Cursor // what the next request begins with
	Flying int    // requests

	by     *Peer[E]      // nil: not under way
	queued bool          // in Flights.queue
	runs   []driver.Desc // of one entry of a pattern
}

// Cursor is a place in the items of a job.
type Cursor struct {
	Item int
	Off  uint64 // within the item
}

// Item is one contiguous copy of a job.
type Item struct {
	Local, Remote, Len uint64
	View, Index        uint32 // in Job.Views; of the descriptor or the entry in its batch
}

// itemsKept bounds the memory that a job keeps for its next batch: 128 KiB.
const itemsKept = 4 << 10

// View is a pair of memories that a stretch of descriptors names.
type View[E any] struct {
	Local, Remote *Memory[E]

	localKey, remoteKey uint32
}

// Shows reports whether these are the memories of a descriptor.
func (v *View[E]) Shows(d *driver.Desc) bool {
	return v.localKey == d.LocalKey && v.remoteKey == d.RemoteKey
}

// UnderWay reports whether it has begun and was not cleared.
//
// Preconditions: Flights.Mu is held.
func (j *Job[E]) UnderWay() bool { return j.by != nil }

// Clear ends it, or a try to begin it, and forgets what it pointed to.
//
// Preconditions: Flights.Mu is held.
func (j *Job[E]) Clear() {
	clear(j.Views)
	j.Views, j.by, j.Err = j.Views[:0], nil, nil
	if j.Items = j.Items[:0]; cap(j.Items) > itemsKept {
		j.Items = nil
	}
}

// take checks a batch and lists what it moves, so that nothing of it is read later.
//
// Preconditions: Flights.Mu is held.
func (j *Job[E]) take(p *Peer[E], b *driver.Batch, descsMax, runsMax int) error {
	if b.Pattern != nil {
		return j.takePattern(p, b.Op, b.Pattern, runsMax)
	}
	if len(b.Descs) > descsMax {
		return driver.ErrBounds
	}
	for i := range b.Descs {
		if err := j.takeOne(p, b.Op, &b.Descs[i], i); err != nil {
			return err
		}
	}
	return nil
}

// takePattern lists the runs of all entries. Each is checked as it is listed: the index
// lists may change at any time.
func (j *Job[E]) takePattern(p *Peer[E], op driver.Op, g *driver.Pattern, most int) error {
	if err := j.view(p, op, g.LocalKey, g.RemoteKey); err != nil {
		return err
	}
	if err := g.Check(j.Views[0].Local.Size, j.Views[0].Remote.Size); err != nil {
		return err
	}
	if uint64(g.Runs())*uint64(g.Count) > uint64(most) {
		return driver.ErrBounds
	}
	for i := range g.Count {
		j.runs = g.AppendDescs(j.runs[:0], i)
		for k := range j.runs {
			if err := j.takeOne(p, op, &j.runs[k], i); err != nil {
				return err
			}
		}
	}
	if cap(j.runs) > itemsKept {
		j.runs = nil
	}
	return nil
}

// takeOne lists one copy, and the memories of each stretch of copies that has the same.
func (j *Job[E]) takeOne(p *Peer[E], op driver.Op, d *driver.Desc, index int) error {
	if n := len(j.Views); n == 0 || !j.Views[n-1].Shows(d) {
		if err := j.view(p, op, d.LocalKey, d.RemoteKey); err != nil {
			return err
		}
	}
	at := len(j.Views) - 1
	v := &j.Views[at]
	if d.Len == 0 || !within(d.Local, d.Len, v.Local.Size) ||
		!within(d.Remote, d.Len, v.Remote.Size) {
		return d.Check(v.Local.Size, v.Remote.Size)
	}
	j.Items = append(j.Items, Item{d.Local, d.Remote, d.Len, uint32(at), uint32(index)})
	return nil
}

func within(off, n, size uint64) bool { return off <= size && n <= size-off }

// view notes both memories of a pair of keys.
//
// Preconditions: Flights.Mu is held.
func (j *Job[E]) view(p *Peer[E], op driver.Op, localKey, remoteKey uint32) error {
	local, r := p.flights.table.At(localKey), p.imports.At(remoteKey)
	if local == nil || local.revoked || r == nil {
		return errUnknownKey
	}
	switch {
	case local.Kind == driver.File:
		return p.flights.foreign
	case r.revoked:
		return driver.ErrRevoked
	case op == driver.Write && r.ReadOnly:
		return driver.ErrReadOnly
	}
	j.Views = append(j.Views, View[E]{local, r, localKey, remoteKey})
	return nil
}

// uses reports whether the job moves bytes of a memory.
func (j *Job[E]) uses(m *Memory[E]) bool {
	for i := range j.Views {
		v := &j.Views[i]
		if v.Remote == m || v.Local == m {
			return true
		}
	}
	return false
}

// Waited reports whether a caller waits for jobs to end.
//
// Preconditions: Mu is held.
func (b *Flights[E]) Waited() bool { return b.waiters > 0 }

// stop ends those that which picks, as early as can be.
//
// Preconditions: Mu is held.
func (b *Flights[E]) stop(why error, which func(*Job[E]) bool) {
	for _, j := range b.jobs {
		if j.by != nil && j.Err == nil && which(j) {
			j.Err = why
		}
	}
	b.failed = true
	b.cfg.Stop()
}

// end ends those that which picks, and returns when none is left or the context has ended. It gives
// the lock up meanwhile, and looks whenever a job has ended.
//
// Preconditions: Mu is held.
func (b *Flights[E]) end(ctx context.Context, why error, which func(*Job[E]) bool) error {
	if len(b.free) == len(b.jobs) {
		return nil // none is under way: mostly so where a memory is closed
	}
	b.stop(why, which)
	b.waiters++
	defer func() { b.waiters-- }()
	b.cfg.Leave()
	b.Mu.Lock()
	stop := context.AfterFunc(ctx, func() {
		b.Mu.Lock()
		defer b.Mu.Unlock()
		b.ended.Broadcast()
	})
	defer stop()
	for b.any(which) {
		if ctx.Err() != nil {
			return driver.ContextError(ctx)
		}
		b.ended.Wait()
	}
	return nil
}

// any reports whether there is a job under way that which picks.
func (b *Flights[E]) any(which func(*Job[E]) bool) bool {
	for _, j := range b.jobs {
		if j.by != nil && which(j) {
			return true
		}
	}
	return false
}
