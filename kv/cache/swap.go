// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// writesMax is how many blocks may wait for a disk.
const writesMax = 4 << 10

// job is blocks of one length that have room on a disk.
type job struct {
	blocks  []diskWrite
	size    uint32
	slots   []uint32 // in memory
	places  []uint32 // on the disk
	records []uint32
}

// writer gives what was offered to the disks, until the cache is closed. Each of them has a writer
// of its own, so that none waits for one that hangs.
func (c *Cache) writer() {
	var disks sync.WaitGroup
	for _, d := range c.disks {
		disks.Go(func() {
			for j := range d.jobs {
				c.swapOut(d, j)
			}
			_ = c.emptyRecords(d) // what has a record still is found by the next start
		})
		disks.Go(func() { // a write may have to wait for its turn, and Remove does not
			for {
				select {
				case <-d.wake:
					if d.usable() {
						_ = c.emptyRecords(d) // again within a second
					}
				case <-c.life.Done():
					return
				}
			}
		})
	}
	var batch []diskWrite
	for w := range c.writes {
		batch = append(batch[:0], w)
		size := c.index.entry(w.i).size
		for bytes, more := size, true; more && bytes < batchBytes; {
			select {
			case w, more = <-c.writes:
				if more {
					batch = append(batch, w)
					bytes += c.index.entry(w.i).size
				}
			default:
				more = false
			}
		}
		for len(batch) > 0 { // blocks of one length, for one disk, at a time
			batch = c.plan(batch)
		}
	}
	for _, d := range c.disks {
		close(d.jobs)
	}
	disks.Wait()
	close(c.written)
}

// plan finds room on one disk for the first blocks of a list that have one length, as many as a
// stage takes where it is sealed, and has its writer write them. It returns the others.
func (c *Cache) plan(list []diskWrite) (rest []diskWrite) {
	x := c.index
	var to *disk
	j := &job{size: x.entry(list[0].i).size}
	for _, w := range list {
		e := x.entry(w.i)
		if e.size != j.size || to != nil && to.seal != nil && len(j.blocks) == c.batchOf(j.size) {
			rest = append(rest, w)
			continue
		}
		id := c.spaces.lane(e.space)
		lane := c.spaces.at(id)
		let, claim := c.admit(id, Disk, 1, uint64(j.size))
		var (
			d             *disk
			place, record uint32
			ok            bool
		)
		if let > 0 {
			d, place, record, ok = c.diskRoom(w.i, to)
		}
		switch {
		case !ok && let > 0 && to != nil: // another disk may have room
			lane.claimed[Disk].Add(-claim)
			rest = append(rest, w)
		case !ok:
			lane.claimed[Disk].Add(-claim)
			c.stats.unwritten.Add(1)
			c.endWrite(w, nil, 0)
		default:
			to = d
			w.lane, w.claim = lane, claim
			j.blocks, j.records = append(j.blocks, w), append(j.records, record)
			j.slots, j.places = append(j.slots, e.slot), append(j.places, place)
		}
	}
	if to == nil {
		return rest
	}
	soon := time.NewTimer(to.cfg.SlowAfter)
	defer soon.Stop()
	select {
	case to.jobs <- j:
	case <-soon.C:
		c.unplan(to, j)
	}
	return rest
}

// unplan ends a job that has not begun: nothing of it was written.
func (c *Cache) unplan(d *disk, j *job) {
	d.mu.Lock()
	d.budget.left += float64(uint64(len(j.blocks)) * d.costOf(uint64(j.size)))
	d.mu.Unlock()
	for k, w := range j.blocks {
		d.release(j.records[k])
		c.endWrite(w, nil, 0)
	}
}

// swapOut is the story of a write to a disk.
func (c *Cache) swapOut(to *disk, j *job) {
	// The records of what lay in the places before, before their bytes change.
	if !to.usable() || c.emptyRecords(to) != nil || to.saveBudget() != nil {
		c.unplan(to, j)
		return
	}

	// The bytes first.
	ctx, cancel := context.WithTimeout(c.life, diskLimit)
	defer cancel()
	from, slots := c.region, j.slots
	staged, sealed, err := c.takeStage(ctx, to, len(j.blocks), j.size)
	if err != nil { // the disk was not asked, and has not answered
		c.unplan(to, j)
		return
	}
	if staged != nil {
		from, slots = staged.region, sealed
		err = c.sealTo(to, staged, slots, j)
	}
	var file Place
	if err == nil {
		file, err = c.placeOn(to, j.size)
	}
	var t *engine.Transfer
	to.begins()
	if err == nil {
		t, err = c.moveAt(ctx, from, engine.SwapOut, engine.Write, slots, j.places, &file,
			engine.Route{Durable: to.cfg.Durable})
	}
	proved := true
	if err == nil {
		err, proved = c.finish(ctx, t)
	}
	if !proved {
		// It may still land in the places. What it takes from the slots by then nobody reads.
		to.failed(err)
		c.keep(t, func(proved bool) {
			to.ends(err, false)
			to.giveStage(staged, proved)
			if proved {
				for k := range j.blocks {
					to.release(j.records[k])
				}
			}
		})
		for _, w := range j.blocks {
			c.endWrite(w, nil, 0)
		}
		return
	}
	to.giveStage(staged, true)
	testpoint.At("cache: on disk")

	// Then the records, and what says where the blocks are.
	to.recording.Lock()
	defer to.recording.Unlock()
	for k, w := range j.blocks {
		e := c.index.entry(w.i)
		if err == nil && c.beginRecord(w.i, to, j.records[k]) {
			err = to.write(j.records[k], &record{key: e.key, space: c.spaces.digest(e.space),
				crc: e.crc, size: j.size, place: j.places[k], at: c.wallOf(w.i)})
		}
	}
	if err == nil && to.cfg.Durable {
		err = os.NewSyscallError("fdatasync", unix.Fdatasync(int(to.f.Fd())))
	}
	testpoint.At("cache: recorded")
	if err != nil {
		err = fmt.Errorf("write: %w", err)
	}
	to.ends(err, c.life.Err() == nil)
	for k, w := range j.blocks {
		if err != nil {
			to.release(j.records[k]) // it may have been written
			to.emptySoon()
			c.endWrite(w, nil, 0)
			continue
		}
		c.stats.swappedOut.Add(1)
		c.endWrite(w, to, j.records[k])
	}
	c.arrived()
}

// beginRecord reports whether a block is still to be on its disk. From now on a restart may find
// its record, which is to be emptied unless endWrite finds the block there still.
func (c *Cache) beginRecord(i uint32, d *disk, record uint32) bool {
	s := c.index.shardFor(i)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := c.index.entry(i)
	if e.state != present {
		return false
	}
	d.mustEmpty(blockID{e.key, e.space}, record)
	return true
}

// endWrite ends the pin of a block that was offered: it is on a disk now, or d is nil.
func (c *Cache) endWrite(w diskWrite, d *disk, record uint32) {
	s := c.index.shardFor(w.i)
	s.mu.Lock()
	e := c.index.entry(w.i)
	c.offeredBytes.Add(-int64(e.size))
	switch {
	case d == nil:
	case e.state == present:
		d.stays(blockID{e.key, e.space})
		c.onDisk(s, w.i, d, record)
	default:
		d.release(record)
		d.emptySoon()
	}
	if w.lane != nil {
		w.lane.claimed[Disk].Add(-w.claim)
	}
	e.flags &^= writing
	waiting := s.waiting[w.i]
	delete(s.waiting, w.i)
	c.unpinLocked(s, w.i)
	s.mu.Unlock()
	w.op.written()
	for _, op := range waiting {
		op.written()
	}
	if c.offered.Add(-1) == 0 {
		c.arrived()
	}
}

// diskRoom finds a place for a block on a disk: on one, if that is not nil. It lets others go for
// it, from disks that may be written to now, unless there is another disk to ask.
func (c *Cache) diskRoom(i uint32, on *disk) (d *disk, place, record uint32, ok bool) {
	e := c.index.entry(i)
	size := uint64(e.size)
	again := e.marks[Memory]&^useless != 0 // it may change meanwhile
	if on == nil {
		c.turn++
	}
	first := c.turn % len(c.disks) // the one with the fewest jobs
	for k, d := range c.disks {
		if len(d.jobs) < len(c.disks[first].jobs) {
			first = k
		}
	}
	kept := keptExtents{length: c.disks[first].length(size)}
	for range 4 * len(c.disks) {
		able := false
		for k := range c.disks {
			d := c.disks[(first+k)%len(c.disks)]
			if on != nil && d != on || !d.usable() {
				continue
			}
			place, record, affords, ok := d.reserve(size, again)
			if ok {
				return d, place, record, true
			}
			able = able || affords
		}
		if !able || on != nil && len(c.disks) > 1 {
			return nil, 0, 0, false
		}
		if !c.evictFor(&kept, Disk) {
			return nil, 0, 0, false
		}
	}
	return nil, 0, 0, false
}

// swapIn is the story of a read from the disks: of those blocks of a part of a Load that are on
// them alone. What it brings has a slot afterwards, and keeps its pin; the others' pins end, and
// held is none; one that was removed or replaced meanwhile is Undone. Before it waits for room it
// calls release, if that is not nil, which may take long: others may read the blocks meanwhile.
func (c *Cache) swapIn(ctx context.Context, op *Op, held []uint32, begin, end int, size uint32,
	release func()) {
	x := c.index
	var mine, others []uint32 // numbers of keys: to read here, and read by other loads
	for k := begin; k < end; k++ {
		if held[k] == none {
			continue
		}
		s := x.shardFor(held[k])
		s.mu.Lock()
		switch e := x.entry(held[k]); {
		case e.slot != none:
		case e.state != present: // removed or replaced since it was found
			c.unpinLocked(s, held[k])
			held[k], op.outcomes[k] = none, Undone
		case e.flags&reading != 0:
			others = append(others, uint32(k))
		default:
			e.flags |= reading
			mine = append(mine, uint32(k))
		}
		s.mu.Unlock()
	}
	op.fromDisk = op.fromDisk || len(mine)+len(others) > 0
	if op.class == engine.Prefetch {
		op.reads = nil // a Load may look at the list before
		for _, k := range mine {
			op.reads = append(op.reads, held[k])
		}
		slices.Sort(op.reads)
	}
	var within context.Context // once there was too little room
	var since time.Time
	for len(mine) > 0 {
		news := c.coming()
		// Those on one disk, but for what was removed since.
		d := c.disks[x.entry(held[mine[0]]).disk]
		var batch, places, records, rest []uint32
		for _, k := range mine {
			switch at, record, ok := c.placeOnDisk(held[k], d); {
			case ok:
				batch, places = append(batch, k), append(places, at)
				records = append(records, record)
			case c.disks[x.entry(held[k]).disk] == d:
				op.outcomes[k] = Undone
				c.notRead(held, []uint32{k})
			default:
				rest = append(rest, k)
			}
		}
		mine = rest
		short := c.readFrom(ctx, d, op, held, batch, places, records, size)
		if len(short) < len(batch) || len(batch) == 0 {
			c.arrived()
		}
		if len(short) == 0 {
			continue
		}
		if release != nil && op.class != engine.Prefetch { // the room may be what this one has
			c.leaveToOthers(held, append(mine, short...))
			release()
			c.swapIn(ctx, op, held, begin, end, size, nil)
			return
		}
		var err error
		if within == nil && op.class != engine.Prefetch {
			var cancel context.CancelFunc
			since = time.Now()
			within, cancel = context.WithTimeout(ctx, diskLimit-op.short)
			defer cancel()
			c.wanting.Add(1) // and look once more, as nobody has told of room before
			defer c.wanting.Add(-1)
		} else if within == nil || !c.fits(x.entry(held[short[0]]).space, size) {
			err = ErrNoRoom
		} else {
			err = c.sleep(within, news, true)
		}
		if err == nil {
			mine = append(mine, short...)
			continue
		}
		if ctx.Err() != nil {
			op.fail(ctx, fmt.Errorf("load: wait for room: %w", context.Cause(ctx)), short)
		} else {
			for _, k := range short {
				op.outcomes[k] = NoRoom
			}
		}
		c.notRead(held, short)
		c.arrived()
	}
	if within != nil {
		op.short += time.Since(since)
	}
	c.await(ctx, op, held, others, size, release)
}

// readFrom reads blocks from their places on a disk. It returns those for which there is no room.
func (c *Cache) readFrom(ctx context.Context, d *disk, op *Op, held, batch, places,
	records []uint32, size uint32) (short []uint32) {
	x := c.index
	if len(batch) == 0 {
		return nil
	}
	slots, endClaim := c.reserve(x.entry(held[batch[0]]).space, len(batch), size)
	defer endClaim()
	n := len(slots)
	batch, places, short = batch[:n], places[:n], batch[n:]
	if n == 0 {
		return short
	}
	err, proved := context.Cause(ctx), true
	if err == nil {
		err = d.unused()
	}
	to, at, open := c.region, slots, func() error { return nil }
	var staged *stage
	if err == nil {
		var sealed []uint32
		if staged, sealed, err = c.takeStage(ctx, d, n, size); staged != nil {
			to, at = staged.region, sealed
			list := make([]uint32, n)
			for j, k := range batch {
				list[j] = held[k]
			}
			open = func() error {
				return c.openFrom(d, staged, sealed, slots, list, records, size)
			}
		}
	}
	var file Place
	if err == nil {
		file, err = c.placeOn(d, size)
	}
	var t *engine.Transfer
	if err == nil {
		t, err = c.moveAt(ctx, to, op.class, engine.Read, at, places, &file, engine.Route{})
	}
	if err == nil {
		if op.class == engine.Prefetch { // Loads that wait for its blocks promote it
			c.fetch.Store(&fetch{t, op.reads})
			c.arrived()
		}
		d.begins()
		err, proved = c.timedRead(ctx, d, t, op.class, uint64(n)*uint64(size), open)
		if proved {
			d.ends(err, ctx.Err() == nil)
		} else {
			d.failed(err)
		}
	}
	if err != nil {
		op.fail(ctx, fmt.Errorf("load: %w", err), batch)
		c.notRead(held, batch)
		if proved {
			d.giveStage(staged, true)
			c.places.giveBackAll(slots)
			return short
		}
		c.keep(t, func(proved bool) {
			d.ends(err, false)
			d.giveStage(staged, proved)
			if proved {
				c.places.giveBackAll(slots)
				c.freed()
			}
		})
		return short
	}
	d.giveStage(staged, true)
	for j, k := range batch {
		i := held[k]
		e := x.entry(i)
		s := x.shardFor(i)
		s.mu.Lock()
		e.slot = slots[j]
		e.flags &^= reading | verified // whoever loads it verifies it
		c.places.own(e.slot, i)
		c.spaces.count(e.space, Memory, 1, int64(size))
		if e.state == present {
			x.commit(i)
			c.enqueue(s, i, Memory)
			if op.class == engine.Prefetch { // nobody has used it yet
				c.queuesOf(s, i, Memory).letGoFirst(i)
			}
		}
		s.mu.Unlock()
		c.stats.swappedIn.Add(1)
	}
	return short
}

// placeOnDisk is where on a disk a block is, and the number of its record, if it is there.
func (c *Cache) placeOnDisk(i uint32, d *disk) (place, record uint32, ok bool) {
	s := c.index.shardFor(i)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := c.index.entry(i)
	if e.record == none || c.disks[e.disk] != d {
		return 0, 0, false
	}
	return d.placeOf(e.record), e.record, true
}

// leaveToOthers lets other operations read blocks. Their pins stay.
func (c *Cache) leaveToOthers(held, which []uint32) {
	for _, k := range which {
		s := c.index.shardFor(held[k])
		s.mu.Lock()
		c.index.entry(held[k]).flags &^= reading
		s.mu.Unlock()
	}
	c.arrived()
}

// notRead ends the pins of blocks that were not read from their disk.
func (c *Cache) notRead(held, which []uint32) {
	for _, k := range which {
		i := held[k]
		s := c.index.shardFor(i)
		s.mu.Lock()
		c.index.entry(i).flags &^= reading
		c.unpinLocked(s, i)
		s.mu.Unlock()
		held[k] = none
	}
}

// await waits until other operations have brought blocks from their disks. What a Prefetch brings
// is no longer behind the reads of Loads then. What they could not bring, as a Prefetch has less
// room, it brings itself, once.
func (c *Cache) await(ctx context.Context, op *Op, held, which []uint32, size uint32,
	release func()) {
	var again []uint32
	for len(which) > 0 {
		news, f := c.coming(), c.fetch.Load()
		var rest []uint32
		for _, k := range which {
			s := c.index.shardFor(held[k])
			s.mu.Lock()
			e := c.index.entry(held[k])
			there, still := e.slot != none, e.flags&reading != 0
			s.mu.Unlock()
			switch {
			case there:
			case still && ctx.Err() == nil:
				rest = append(rest, k)
				if f == nil || op.class == engine.Prefetch {
					continue
				}
				if _, fetched := slices.BinarySearch(f.blocks, held[k]); fetched {
					f.t.Promote()
				}
			case still:
				op.outcomes[k] = Late
				c.unpin(held[k])
				held[k] = none
			case !op.retries:
				again = append(again, k)
			default:
				op.fail(ctx, fmt.Errorf("load: two other operations could not read a block: "+
					"load it again: %w", engine.ErrBusy), []uint32{k})
				c.unpin(held[k])
				held[k] = none
			}
		}
		if which = rest; len(which) > 0 {
			_ = c.sleep(ctx, news, false)
		}
	}
	if len(again) > 0 {
		if release != nil {
			release()
		}
		op.retries = true
		for _, k := range again {
			c.swapIn(ctx, op, held, int(k), int(k)+1, size, nil)
		}
		op.retries = false
	}
}

// sleepers are operations that wait for others: for blocks that those read, or for room.
type sleepers struct {
	wanting atomic.Int32 // Loads that wait for room, or are about to
	queued  atomic.Int32 // Prefetches that wait for their turn: they hold nothing

	// guarded by Cache.mu:
	asleep int  // operations that have had no news yet
	refuse bool // the next Load that waits for room is refused
}

// sleep waits for news of others. A Load that waits for room is refused, by ErrNoRoom, where none
// is coming: no block is on its way to a disk, and all operations that run wait for each other.
// One such operation at a time: what it gives up may be enough for the others.
func (c *Cache) sleep(ctx context.Context, news <-chan struct{}, forRoom bool) error {
	c.mu.Lock()
	if (<-chan struct{})(c.news) == news {
		none := c.asleep+1+int(c.queued.Load()) >= len(c.room) && c.offered.Load() == 0
		switch {
		case forRoom && (none || c.refuse):
			c.refuse = false
			c.mu.Unlock()
			return ErrNoRoom
		case none && c.wanting.Load() > 0:
			c.wakeLocked()
			c.refuse = true
		default:
			c.asleep++
		}
	}
	c.mu.Unlock()
	select {
	case <-news:
		return nil
	case <-ctx.Done():
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if (<-chan struct{})(c.news) == news {
		c.asleep--
	}
	return context.Cause(ctx)
}

// fits reports whether a namespace's quota lets it have a block of a size in memory at all.
func (c *Cache) fits(id uint16, size uint32) bool {
	quota := c.spaces.at(c.spaces.lane(id)).quota[Memory].Load()
	return quota == 0 || uint64(size) <= quota
}

// arrived wakes the loads that wait for blocks which others read, or for room, Remove, and Drain.
func (c *Cache) arrived() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wakeLocked()
}

func (c *Cache) wakeLocked() {
	close(c.news)
	c.news, c.asleep, c.refuse = make(chan struct{}), 0, false
}

// freed is arrived for those that wait for room.
func (c *Cache) freed() {
	if c.wanting.Load() > 0 {
		c.arrived()
	}
}

// coming returns what is closed at the next arrival.
func (c *Cache) coming() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.news
}

// onlyHere reports whether a Load has found the block where it is on its disk alone.
func (e *entry) onlyHere() bool { return e.slot == none && e.pins > 0 }
