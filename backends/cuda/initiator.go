// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"
	"sync/atomic"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// job is a batch. Jobs are made at the start and reused; their number is what C knows them by.
//
// The job is the one record of its batch. Other goroutines find it only while it is live: from just
// before C begins it until its end is taken off the ring. What C refuses is live no more before
// Backend.starting is given up, so that StreamWait finds only batches that C has begun. A cancel
// names the serial, so that one that comes before C begins the batch holds, and one that comes
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
	pairs  []pair
	events []uint64 // that it waits for
	shared int      // stream that it counts on, -1: none
	gate   int      // worker of its own, -1: none
	place  *gpu.Place
	slow   bool // it names memory that is not pinned
	call   string
	run    gpu.Run
	gather gpu.Entries
}

// pair is the two memories of a descriptor. Neighbouring descriptors mostly name the same, so it is
// looked up only when the keys change.
type pair struct {
	localKey, remoteKey uint32
	local               *memory
	remote              *remote
	way                 gpu.Way
}

// scratch is room that a batch needs only until it is on a stream.
type scratch struct {
	pieces []gpu.Piece
	runs   []driver.Desc // of one entry of a pattern
}

// scratchMax is how many are kept: as many as submit at once, mostly.
const scratchMax = 8

// Can implements driver.Peer. Messages take another backend.
func (p *peer) Can() driver.Can { return driver.CanPattern }

// Submit implements driver.Peer. It checks the whole batch, so that one that cannot work starts
// nothing, enters the memories, and puts the first copies on a stream. What remains of the batch is
// the stream's thread's (csrc/cuda/feed.c); finish ends it.
func (p *peer) Submit(tag uint64, batch *driver.Batch) error {
	if err := batch.Check(p.Can()); err != nil {
		return err
	}
	p.entry.RLock()
	defer p.entry.RUnlock()
	b := p.from
	switch {
	case p.closed:
		return driver.ErrClosed
	case p.gone():
		return driver.ErrPeerLost
	}
	j := b.newJob(p, tag)
	if j == nil {
		return driver.ErrFull
	}
	if b.closed.Load() { // Poll looks at the tags behind closed: it may have said ErrClosed
		j.undo()
		return driver.ErrClosed
	}
	var s *scratch
	select {
	case s = <-b.scratch:
		s.pieces = s.pieces[:0]
	default:
		s = &scratch{pieces: make([]gpu.Piece, 0, 64)}
	}
	defer func() {
		select {
		case b.scratch <- s:
		default:
		}
	}()
	err := j.check(batch, s)
	if err != nil {
		j.undo()
		return err
	}
	if p.far != nil { // the other process waits for the end, and the program may not poll
		b.ends.Heed(1)
	}
	// Counted first: an owner that closes waits for the batch, or is seen to be gone.
	p.unfinished.Add(1)
	if p.gone() {
		err = driver.ErrPeerLost
	} else if err = j.start(s.pieces); err == nil {
		return nil // and j may be another batch by now
	}
	p.unfinished.Add(-1)
	if p.far != nil {
		b.ends.Heed(-1)
	}
	j.undo()
	return err
}

// newJob returns a job for a tag, nil if there is none.
func (b *Backend) newJob(p *peer, tag uint64) *job {
	if !b.done.Take() {
		return nil
	}
	b.mu.Lock()
	j := b.free[len(b.free)-1]
	b.free = b.free[:len(b.free)-1]
	b.mu.Unlock()
	j.p, j.tag, j.dev, j.place = p, tag, nil, nil
	j.shared, j.gate, j.slow, j.call = -1, -1, false, "copy"
	j.events = j.events[:0]
	j.why.Store(nil)
	return j
}

// release makes a job free that is under way no more; its tag stays taken until it is polled.
func (j *job) release() {
	for i := range j.pairs {
		v := &j.pairs[i]
		v.local.block.leave()
		v.remote.m.block.leave()
		v.local.own.leave()
		v.remote.leave()
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
	clear(j.pairs)
	j.pairs = j.pairs[:0]
	j.gather = gpu.Entries{}
	j.b.free = append(j.b.free, j)
}

// undo is release for a job that was never started.
func (j *job) undo() {
	j.release()
	j.b.done.GiveBack()
}

// check makes the batch pieces, or what a kernel or a processor needs.
func (j *job) check(b *driver.Batch, s *scratch) error {
	if b.Pattern != nil {
		return j.checkPattern(b.Op, b.Pattern, s)
	}
	for i := range b.Descs {
		d := &b.Descs[i]
		n := len(j.pairs)
		joins := n > 0 && j.pairs[n-1].localKey == d.LocalKey &&
			j.pairs[n-1].remoteKey == d.RemoteKey
		if !joins {
			switch err := j.enter(b.Op, d.LocalKey, d.RemoteKey); err {
			case nil:
			case driver.ErrFull: // of no piece: try again
				return err
			default:
				return &driver.PieceError{Piece: i, Err: err}
			}
		}
		v := &j.pairs[len(j.pairs)-1]
		if err := d.Check(v.local.seg.Len, v.remote.m.seg.Len); err != nil {
			return &driver.PieceError{Piece: i, Err: err}
		}
		v.add(&s.pieces, b.Op, d, i, joins)
		if err := j.gateOf(v, d); err != nil {
			return err
		}
	}
	return nil
}

// enter adds a pair of memories to the batch, and enters both.
func (j *job) enter(op driver.Op, localKey, remoteKey uint32) error {
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
	case !local.block.enter(): // other memory goes under it
		local.own.leave()
		r.leave()
		return driver.ErrFull
	case !r.m.block.enter():
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
		j.dev = j.b.deviceOf(src, dst)
	}
	for _, m := range [...]*memory{src, dst} {
		j.slow = j.slow || m.pin != nil && !m.pin.pinned()
	}
	j.pairs = append(j.pairs, pair{localKey: localKey, remoteKey: remoteKey, local: local,
		remote: r, way: j.dev.way(src, dst)})
	return nil
}

// deviceOf is the device on whose stream a copy goes: of the source, if that is ours. The peer's
// memory may be on a device that we have not opened.
func (b *Backend) deviceOf(src, dst *memory) *device {
	for _, m := range []*memory{src, dst} {
		if m.dev != nil {
			if d := b.device(m.dev.ordinal); d != nil {
				return d
			}
		}
	}
	return b.devices[0]
}

func (d *device) way(src, dst *memory) gpu.Way {
	here := func(m *memory) bool { return m.dev != nil && m.dev.ordinal == d.ordinal }
	switch {
	case src.dev == nil && here(dst):
		return gpu.Up
	case dst.dev == nil && here(src):
		return gpu.Down
	case here(src) && here(dst):
		return gpu.Within
	}
	return gpu.Any
}

// add makes a descriptor a piece, or a part of the one before, which it joins only where that
// is of the same pair: the driver takes no copy across two allocations, or two ranges that were
// pinned one by one, though one ends where the other begins.
func (v *pair) add(pieces *[]gpu.Piece, op driver.Op, d *driver.Desc, index int, joins bool) {
	dst, src := v.remote.m.base+d.Remote, v.local.base+d.Local
	if op == driver.Read {
		dst, src = src, dst
	}
	if n := len(*pieces); joins && n > 0 {
		last := &(*pieces)[n-1]
		if last.Dst+last.Len == dst && last.Src+last.Len == src {
			last.Len += d.Len
			return
		}
	}
	*pieces = append(*pieces, gpu.Piece{Dst: dst, Src: src, Len: d.Len, Way: v.way,
		Index: uint32(index)})
}

// start puts the batch on a stream, or on the list of the patient one.
func (j *job) start(pieces []gpu.Piece) (err error) {
	b, m := j.b, j.dev.mover
	b.starting.RLock()
	defer b.starting.RUnlock()

	// The stream. Batches that wait for events have one each, and those that the driver or a
	// processor may keep waiting go to the patient one.
	var worker int
	switch {
	case j.slow && len(j.events) > 0:
		return fmt.Errorf("memory that is not pinned cannot wait for an event (Explain says "+
			"why it is not): %w", driver.ErrNotSupported)
	case j.slow || j.gather.Count > 0:
		worker = m.Patient()
	case len(j.events) > 0:
		if j.gate, worker, err = j.dev.gatedWorker(); err != nil {
			j.gate = -1
			return err
		}
	default:
		j.shared = j.dev.worker()
		worker = j.shared
	}

	// From here on cancels and StreamWait find the batch. A Revoke of memory since the batch
	// entered it may have looked for batches already.
	b.mu.Lock()
	for i := range j.pairs {
		if j.pairs[i].remote.revoked() {
			b.mu.Unlock()
			return driver.ErrRevoked
		}
	}
	j.live = true
	serial := j.serial.Add(1)
	b.mu.Unlock()
	testpoint.At("cuda: shown") // cancels find the batch

	// Once C has begun the batch, the job may be another one.
	number, events, gather, placed := j.number, j.events, j.gather, j.place != nil
	j.serial.Store(serial) // as it is: finish loads it, and is ordered behind this
	switch {
	case gather.Count > 0:
		err = m.SubmitEntries(number, serial, &gather)
	case placed:
		err = m.SubmitRun(worker, number, serial, &j.run, events)
	default:
		err = m.Submit(worker, number, serial, pieces, events)
	}
	if err != nil {
		b.mu.Lock()
		j.live = false
		b.mu.Unlock()
	}
	testpoint.At("cuda: launched") // copies are on a stream, or will be
	return err
}

// names reports whether the batch reaches memory of a peer. Backend.mu is held.
func (j *job) names(m *memory) bool {
	for i := range j.pairs {
		if r := j.pairs[i].remote; r.m == m && r.grant.ended.Load() {
			return true
		}
	}
	return false
}

// overtaken reports whether another process has ended an import that the batch used: what was
// written then may be in memory that nothing uses.
func (j *job) overtaken() bool {
	for i := range j.pairs {
		if j.pairs[i].remote.grant.overtaken() {
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

// reap takes ends of batches off the ring. The caller holds reaping.
func (b *Backend) reap() {
	for n := len(b.reaped); n == len(b.reaped) && !b.down; {
		n = b.ends.Poll(b.reaped)
		for i := range b.reaped[:n] {
			b.finish(&b.reaped[i])
		}
	}
}

// help is reap for another goroutine: of a backend that waits for a batch of this one.
func (b *Backend) help() {
	b.reaping.Lock()
	defer b.reaping.Unlock()
	b.reap()
}

// attend takes ends off the ring that another process waits for, where the program may not poll.
func (b *Backend) attend() {
	defer close(b.attended)
	for b.heed.Wait() == nil && !b.closing.Load() {
		b.help()
	}
}

// finish ends a batch. The caller holds reaping.
func (b *Backend) finish(d *ring.Done) {
	j := b.jobs[d.Tag]
	j.serial.Load() // what was written before C had the job is seen from here on
	p, tag := j.p, j.tag
	var err error
	switch why := j.why.Load(); {
	case d.Status == 0:
	case why != nil && d.Status == gpu.Canceled:
		err = *why
	case d.Piece >= 0:
		err = &driver.PieceError{Piece: int(d.Piece), Err: gpu.Status(j.call, d.Status)}
	default:
		err = gpu.Status(j.call, d.Status)
	}
	testpoint.At("cuda: ended") // the copies have ended
	if err == nil && j.overtaken() {
		err = driver.ErrRevoked
	}
	testpoint.At("cuda: judged") // the import was still good after that
	if p.far != nil {
		b.ends.Heed(-1)
	}
	j.release()
	b.done.Push(tag, err)
	p.unfinished.Add(-1)
}
