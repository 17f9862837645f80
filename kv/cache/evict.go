// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// queues are the order of a lane's blocks in a shard. The caller holds the shard's lock, as of all
// that takes one here.
func (c *Cache) queues(s *shard, lane int, t Tier) *laneOrder {
	for len(s.lanes) <= lane {
		s.lanes = append(s.lanes, [tiers]*laneOrder{})
	}
	q := &s.lanes[lane][t]
	if *q == nil {
		l := links{c.index, t}
		*q = &laneOrder{queues: c.cfg.Policy.make(l), links: l, useless: emptyList,
			count: &c.useless[t]}
	}
	return *q
}

func (c *Cache) queuesOf(s *shard, i uint32, t Tier) *laneOrder {
	return c.queues(s, c.spaces.lane(c.index.entry(i).space), t)
}

// enqueue gives a block its place in the order of its lane in a tier.
func (c *Cache) enqueue(s *shard, i uint32, t Tier) {
	c.queuesOf(s, i, t).insert(i)
	c.index.entry(i).flags |= queued << t
}

// dequeue ends enqueue, unless it has ended.
func (c *Cache) dequeue(s *shard, i uint32, t Tier) {
	if e := c.index.entry(i); e.flags&(queued<<t) != 0 {
		c.queuesOf(s, i, t).remove(i)
		e.flags &^= queued << t
	}
}

// touch counts a use of a block in each tier that has it. One that is on no disk is offered again.
func (c *Cache) touch(s *shard, i uint32) {
	e := c.index.entry(i)
	c.memory.stamps[i] = c.now.Load()
	e.flags &^= demoting
	for t := range tiers {
		if e.flags&(queued<<t) != 0 {
			c.queuesOf(s, i, t).touch(i)
		}
	}
	if e.flags&queued != 0 && c.flowOf(i) == WriteThrough {
		c.offer(i, nil)
	}
}

// spot is where a block is in a tier, or was.
type spot struct {
	places *slots // of the memory, or of a disk; nil: it is not in the tier
	place  uint32
	length uint32 // granules
}

func (c *Cache) spotOf(i uint32, t Tier) spot {
	e := c.index.entry(i)
	switch {
	case t == Memory && e.slot != none:
		return spot{c.places, e.slot, granules(uint64(e.size))}
	case t == Disk && e.record != none:
		d := c.disks[e.disk]
		return spot{d.places, d.placeOf(e.record), d.length(uint64(e.size))}
	}
	return spot{}
}

// extentID names an extent of the memory or of a disk.
type extentID struct {
	places *slots
	n      uint32
}

func (p spot) extent() extentID {
	if p.places == nil {
		return extentID{}
	}
	return extentID{p.places, p.place / p.places.each}
}

// keptExtents are the extents that could not be emptied for blocks of a length, as something in
// them is kept: no other block in them goes for one of that length. Each has cost one block, so
// there are keptExtentsMax at most before makeRoom gives up.
type keptExtents struct {
	length uint32
	list   []extentID
}

const keptExtentsMax = 8

// makeRoom reserves places in memory for blocks of a length, and lets others go for them. It
// returns how many it found.
func (c *Cache) makeRoom(length uint32, dst []uint32) (found int) {
	kept := keptExtents{length: length}
	for {
		found += c.places.reserve(length, dst[found:])
		if found == len(dst) || len(kept.list) >= keptExtentsMax || !c.evictFor(&kept, Memory) {
			return found
		}
	}
}

// evictFor lets a block of a tier go for one of another length, and all that shares its extent,
// where it must. It reports whether there was one.
func (c *Cache) evictFor(kept *keptExtents, t Tier) bool {
	from, ok := c.evict(t, c.spaces.order(t), kept)
	if ok && from.length != kept.length {
		c.emptyExtent(from, t, kept)
	}
	return ok
}

// evictOwn lets a block of a lane go from a tier.
func (c *Cache) evictOwn(t Tier, lane int) bool {
	_, ok := c.evict(t, []int{lane}, nil)
	return ok
}

// evict lets the block of a tier go whose turn it is: one of no more use, else one of the first of
// the lanes that has some.
func (c *Cache) evict(t Tier, lanes []int, kept *keptExtents) (from spot, ok bool) {
	first := int(c.hand.Add(1) % shardsMax)
	for _, useless := range []bool{true, false} {
		if useless && c.useless[t].Load() == 0 {
			continue
		}
		for _, lane := range lanes {
			for k := range c.index.shards {
				s := &c.index.shards[(first+k)%len(c.index.shards)]
				s.mu.Lock()
				from, ok = c.evictLocked(s, lane, t, useless, kept)
				s.mu.Unlock()
				if ok {
					return from, true
				}
			}
		}
	}
	return spot{}, false
}

// evictLocked is evict for one lane in one shard; useless: of no more use alone.
func (c *Cache) evictLocked(s *shard, lane int, t Tier, useless bool, kept *keptExtents) (
	from spot, ok bool) {
	if lane >= len(s.lanes) || s.lanes[lane][t] == nil {
		return spot{}, false
	}
	order, next := s.lanes[lane][t], uint32(none)
	keep := func(i uint32) bool {
		if c.keeps(i, t) || kept == nil || len(kept.list) == 0 {
			return c.keeps(i, t)
		}
		at := c.spotOf(i, t)
		return at.length != kept.length && slices.Contains(kept.list, at.extent())
	}
	if useless {
		next = order.firstVictim(keep)
	} else {
		next = order.victim(keep)
	}
	if next == none {
		return spot{}, false
	}
	c.index.entry(next).flags &^= queued << t
	from = c.spotOf(next, t)
	c.leave(s, next, t)
	return from, true
}

// leave removes a block from a tier to make room for others.
func (c *Cache) leave(s *shard, i uint32, t Tier) {
	c.stats.evicted[t].Add(1)
	if t == Disk {
		c.leaveDisk(s, i)
		return
	}
	if c.index.entry(i).record == none && c.flowOf(i) == WriteBack {
		c.stats.unwritten.Add(1)
	}
	c.leaveMemory(s, i)
}

// emptyExtent lets all blocks of an extent go, so that it may be cut anew, for blocks of another
// length. Where one of them is kept none goes.
func (c *Cache) emptyExtent(from spot, t Tier, kept *keptExtents) {
	owners, ok := from.places.empties(from.place, from.length)
	if !ok {
		return
	}
	defer from.places.emptied(from.place)
	for _, leaves := range []bool{false, true} { // look at all of them first
		for _, i := range owners {
			in, may := true, false
			if i != reservedSlot {
				s := c.index.shardFor(i)
				s.mu.Lock()
				in = c.spotOf(i, t).extent() == from.extent()
				may = in && c.index.entry(i).flags&(queued<<t) != 0 && !c.keeps(i, t)
				if may && leaves {
					c.leave(s, i, t)
				}
				s.mu.Unlock()
			}
			if in && !may {
				kept.list = append(kept.list, from.extent())
				return
			}
		}
	}
}

// leaveMemory ends a block's place in memory. Nothing holds it.
func (c *Cache) leaveMemory(s *shard, i uint32) {
	e := c.index.entry(i)
	c.dequeue(s, i, Memory)
	c.index.withdraw(i)
	testpoint.At("cache: withdrawn")
	if e.state == present && e.record == none {
		c.emit(i, Removed)
	} else if e.state == present {
		c.emit(i, Demoted)
	}
	c.spaces.count(e.space, Memory, -1, -int64(e.size))
	c.places.giveBack(e.slot)
	e.slot = none
	if e.record == none {
		c.index.drop(s, i)
	}
	testpoint.At("cache: left")
}

// leaveDisk ends a block's place on a disk.
func (c *Cache) leaveDisk(s *shard, i uint32) {
	e := c.index.entry(i)
	d := c.disks[e.disk]
	c.dequeue(s, i, Disk)
	c.spaces.count(e.space, Disk, -1, -int64(e.size))
	d.mustEmpty(blockID{e.key, e.space}, e.record)
	d.release(e.record)
	d.emptySoon()
	e.record = none
	if e.slot == none && e.state == present {
		c.emit(i, Removed)
		c.index.drop(s, i)
	}
}

// discard has a block that is present go: from its disk at once, and from memory now or with its
// last pin.
func (c *Cache) discard(s *shard, i uint32) {
	e := c.index.entry(i)
	c.emit(i, Removed)
	c.unretain(i)
	c.index.withdraw(i)
	e.state = leaving
	c.dequeue(s, i, Memory)
	if e.record != none {
		c.leaveDisk(s, i)
	}
	if e.pins == 0 {
		c.leaveAll(s, i)
		c.freed()
	}
}

// leaveAll forgets a block that no queue has and nothing holds, and that is on no disk.
func (c *Cache) leaveAll(s *shard, i uint32) {
	if c.index.entry(i).slot != none {
		c.leaveMemory(s, i)
	} else {
		c.index.drop(s, i)
	}
}

// unpin ends the use of an entry.
func (c *Cache) unpin(i uint32) {
	s := c.index.shardFor(i)
	s.mu.Lock()
	c.unpinLocked(s, i)
	s.mu.Unlock()
}

func (c *Cache) unpinLocked(s *shard, i uint32) {
	e := c.index.entry(i)
	e.pins--
	switch {
	case e.pins > 0:
	case e.state == leaving:
		c.leaveAll(s, i)
	case e.flags&demoting != 0:
		c.leaveForDisk(s, i)
	}
	if e.pins == 0 {
		c.freed()
	}
}

// Remove forgets blocks: once it has returned nil no restart finds them, unless they were stored
// again. One that is loaded at this moment keeps its slot until nothing reads it. Remove waits for
// the disks that have the blocks, at most 30 s. Where it returns an error the blocks are not found
// any more, but a restart may find those of a disk that has failed or does not answer; the cache
// tries again each second.
func (n *Namespace) Remove(keys []Key) error {
	c := n.c
	if !c.enter() {
		return fmt.Errorf("remove: cache: %w", engine.ErrClosed)
	}
	defer c.exit()
	discard := func() {
		c.index.each(n.id, keys, false, func(s *shard, _ int, i uint32, _ uint64) {
			if i == none {
				return
			}
			switch e := c.index.entry(i); e.state {
			case present:
				c.discard(s, i)
			case filling:
				e.flags |= unwanted
			}
		})
	}
	discard()
	below := c.removeBelow(c.life, n.id, keys) // of what giveBelow has given it
	if c.cfg.Below != nil {
		discard() // what raisePart has brought meanwhile
	}

	if err := errors.Join(c.awaitEmptied(c.life, n.id, keys), below); err != nil {
		return fmt.Errorf("remove: %w", err)
	}
	return nil
}

// awaitEmptied waits, at most 30 s, until no restart finds blocks that have left the disks.
func (c *Cache) awaitEmptied(ctx context.Context, id uint16, keys []Key) (all error) {
	ctx, cancel := context.WithTimeout(ctx, diskLimit)
	defer cancel()
	for _, d := range c.disks {
		left, err := 1, error(nil)
		for left > 0 && err == nil {
			news := c.coming()
			left, err = d.unemptied(id, keys)
			if err = cmp.Or(err, d.unused()); left > 0 && err == nil {
				select {
				case <-news:
				case <-ctx.Done():
					err = context.Cause(ctx)
				}
			}
		}
		if left > 0 {
			all = errors.Join(all, fmt.Errorf("a restart may find %d blocks on disk %s: %w", left,
				d.cfg.Path, err))
		}
	}
	return all
}
