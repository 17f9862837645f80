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

// job is a batch. New allocates all jobs; they are reused. The C code knows a job by its number.
//
// Other goroutines find a job only while it is live: from just before the C code starts it until
// finish takes its end off the ring. If the C code refuses the batch, live is cleared before
// Backend.starting is unlocked, so StreamWait finds only batches that the C code has started.
//
// A cancel names the serial. So a cancel that comes before the C code starts the batch takes
// effect, and one that comes after its end does not cancel the next batch with the same number.
type job struct {
	b      *Backend
	number int

	live   bool                  // guarded by Backend.mu; false: no other goroutine uses the job
	serial atomic.Uint64         // tells this batch from others with the same number
	why    atomic.Pointer[error] // the reason of a cancel; nil: none
	p      *peer
	tag    uint64

	dev    *device
	pairs  []pair
	events []uint64 // CUevents that it waits for
	shared int      // index of the shared stream that it uses; -1: none
	gate   int      // index of the gated worker that it has alone; -1: none
	place  *gpu.Place
	slow   bool // it uses host memory that is not pinned
	call   string
	run    gpu.Run
	gather gpu.Entries
}

// pair is the two memories of a descriptor. Consecutive descriptors mostly name the same two, so
// check looks them up only when the keys change.
type pair struct {
	localKey, remoteKey uint32
	local               *memory
	remote              *remote
	way                 gpu.Way
}

// scratch holds slices that Submit needs only until the batch is on a stream.
type scratch struct {
	pieces []gpu.Piece
	runs   []driver.Desc // of one entry of a pattern
}

// scratchMax is how many are kept: about as many as goroutines submit at once.
const scratchMax = 8

// Can implements driver.Peer. The backend carries no notifications.
func (p *peer) Can() driver.Can { return driver.CanPattern }

// Submit implements driver.Peer. It first checks the whole batch and enters the memories, so that
// an invalid batch starts nothing. Then it puts the first copies on a stream. The thread of the
// stream (csrc/cuda/feed.c) does the rest of the batch, and finish completes it.
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
	if b.closed.Load() { // Poll reads closed before the tags: it may have returned ErrClosed
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
	if p.far != nil { // attend must take the end: the other process waits, and Poll may not come
		b.ends.AddWaiting(1)
	}
	// Count the batch before looking at gone: an owner that closes waits for the batch, or this
	// sees that it is gone.
	p.unfinished.Add(1)
	if p.gone() {
		err = driver.ErrPeerLost
	} else if err = j.start(s.pieces); err == nil {
		return nil // j may belong to another batch by now
	}
	p.unfinished.Add(-1)
	if p.far != nil {
		b.ends.AddWaiting(-1)
	}
	j.undo()
	return err
}

// newJob returns a job for a tag, or nil if all are in use.
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

// release frees the job of a batch that has ended. Its tag stays in use until Poll returns it.
func (j *job) release() {
	for i := range j.pairs {
		v := &j.pairs[i]
		v.local.block.leave()
		v.remote.m.block.leave()
		v.local.localGrant.leave()
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

// check validates the batch and turns it into pieces for the copy engine, or into the parameters of
// the gather kernel or of a gather by the CPU.
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
			case driver.ErrFull: // no fault of a piece: the caller tries again
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
	case !local.localGrant.enter():
		return fmt.Errorf("local key %d: %w", localKey, driver.ErrBounds)
	case !r.enter():
		local.localGrant.leave()
		return j.p.refused(remoteKey, r)
	case !local.block.enter(): // renew is replacing the memory
		local.localGrant.leave()
		r.leave()
		return driver.ErrFull
	case !r.m.block.enter():
		local.block.leave()
		local.localGrant.leave()
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

// deviceOf returns the device on whose stream a copy runs: that of the source, if this backend has
// opened it, else that of the destination. The peer's memory may be on a device not opened here.
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

// add appends a descriptor as a piece, or merges it with the last piece if they are adjacent and of
// the same pair. Pieces of different pairs are never merged: the CUDA driver refuses a copy across
// two allocations, or across two ranges that were pinned separately, even if they are adjacent.
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

// start hands the batch to the C code: to the worker of a stream, or to the patient worker.
func (j *job) start(pieces []gpu.Piece) (err error) {
	b, m := j.b, j.dev.mover
	b.starting.RLock()
	defer b.starting.RUnlock()

	// Choose the worker. Each batch that waits for events has one of its own. Batches that may
	// block in the CUDA driver or in a gather by the CPU go to the patient worker.
	var worker int
	switch {
	case j.slow && len(j.events) > 0:
		return fmt.Errorf("memory that is not pinned cannot wait for an event (Explain says "+
			"why it is not): %w", driver.ErrNotSupported)
	case j.slow || j.gather.Count > 0:
		worker = m.BlockingWorker()
	case len(j.events) > 0:
		if j.gate, worker, err = j.dev.gatedWorker(); err != nil {
			j.gate = -1
			return err
		}
	default:
		j.shared = j.dev.worker()
		worker = j.shared
	}

	// From here on cancels and StreamWait find the batch. A Revoke that came after the batch
	// entered the memory may have looked for batches already and missed this one.
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

	// Once the C code has started the batch, the job may be reused for another one.
	number, events, gather, placed := j.number, j.events, j.gather, j.place != nil
	j.serial.Store(serial) // the same value: orders this goroutine before the Load in finish
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

// names reports whether the batch uses m, whose grant has ended, by a token. Backend.mu is held.
func (j *job) names(m *memory) bool {
	for i := range j.pairs {
		if r := j.pairs[i].remote; r.m == m && r.grant.ended.Load() {
			return true
		}
	}
	return false
}

// overtaken reports whether another process has revoked or replaced memory that the batch used: the
// written bytes may then be in memory that nothing uses.
func (j *job) overtaken() bool {
	for i := range j.pairs {
		if j.pairs[i].remote.grant.overtaken() {
			return true
		}
	}
	return false
}

// cancel drops the copies that are not yet on a stream, of the live batches that which selects.
func (b *Backend) cancel(which func(*job) bool, why *error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, j := range b.jobs {
		if j.live && which(j) && j.why.CompareAndSwap(nil, why) {
			j.dev.mover.Cancel(j.number, j.serial.Load())
		}
	}
}

// cancelSenders does the same for batches of the backends that reach this one.
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

// help is reap for goroutines that wait for a batch of this backend, also those of another backend.
func (b *Backend) help() {
	b.reaping.Lock()
	defer b.reaping.Unlock()
	b.reap()
}

// attend is the goroutine that completes batches for which another process waits: the program may
// not call Poll for a long time.
func (b *Backend) attend() {
	defer close(b.attended)
	for b.heed.Wait() == nil && !b.closing.Load() {
		b.help()
	}
}

// finish completes a batch. The caller holds reaping.
func (b *Backend) finish(d *ring.Done) {
	j := b.jobs[d.Tag]
	j.serial.Load() // orders the writes of start, up to its Store, before this goroutine
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
	testpoint.At("cuda: judged") // the imports were checked after the copies had ended
	if p.far != nil {
		b.ends.AddWaiting(-1)
	}
	j.release()
	b.done.Push(tag, err)
	p.unfinished.Add(-1)
}
