// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// Store copies blocks from a place into the cache. A block is found by others once its bytes are
// there and its CRC-32C is known; the first Store of a key wins. A block that is Known is not
// copied, but for Config.CompareKnown. ctx bounds all of it. keys and from.Slots must not change
// before the end.
func (n *Namespace) Store(ctx context.Context, keys []Key, from Place) *Op {
	return n.storeAs(ctx, newOp(len(keys)), keys, from)
}

// Replace is Store for a program whose keys name something else than content: a block takes the
// place of the one that its key has, at the moment at which it is committed. Until then others find
// that one, so that at each moment, also of a kill, they find one of the two as a whole; a Load
// that runs ends with the one that it has found. Of several Replaces of a key at a time the last to
// commit wins, also over a Store. Done: no restart finds what the key had before, or Err names the
// disk that could not empty the record of it, as Remove does.
func (n *Namespace) Replace(ctx context.Context, keys []Key, from Place) *Op {
	op := newOp(len(keys))
	op.replaces = true
	return n.storeAs(ctx, op, keys, from)
}

func (n *Namespace) storeAs(ctx context.Context, op *Op, keys []Key, from Place) *Op {
	size, err := from.check(len(keys), n.c.cfg.Memory.Extent)
	_ = n.c.run(ctx, "store", op, err, func(ctx context.Context) {
		n.store(ctx, op, keys, &from, size)
	})
	return op
}

// store is the story of a Store and of a Replace.
func (n *Namespace) store(ctx context.Context, op *Op, keys []Key, from *Place, size uint32) {
	c, x := n.c, n.c.index
	if ctx.Err() != nil {
		for k := range op.outcomes {
			op.outcomes[k] = Late
			c.stats.stores[Late].Add(1)
		}
		op.err = fmt.Errorf("store: %w", context.Cause(ctx))
		close(op.copied)
		return
	}
	length := granules(uint64(size))

	// Which blocks does the cache not have? The others count as used.
	wanted := 0
	if op.replaces {
		wanted = len(keys)
	} else {
		x.each(n.id, keys, true, func(s *shard, k int, i uint32, _ uint64) {
			switch op.outcomes[k] = c.standing(i, size); op.outcomes[k] {
			case Undone:
				wanted++
			case Known:
				c.touch(s, i)
				c.awaitWrite(s, i, op)
			}
		})
	}

	// Refuse what would only push out blocks that no disk has yet.
	if wanted > 0 {
		if err := c.overrun(n.id, wanted, length); err != nil {
			op.err = fmt.Errorf("store: %w", err)
			for k, o := range op.outcomes {
				if o == Undone {
					op.outcomes[k] = Busy
				}
			}
			wanted = 0
		}
	}

	// Find room, by letting others go; where there is too little, for the head of the chain.
	room, endClaim := c.reserve(n.id, wanted, size)
	slots := make([]uint32, len(keys))
	next := 0
	for k := range keys {
		slots[k] = none
		switch {
		case op.outcomes[k] != Undone:
		case next < len(room):
			slots[k] = room[next]
			next++
		default:
			op.outcomes[k] = NoRoom
		}
	}

	testpoint.At("cache: reserved")

	// Take an entry for each: from here on another Store of the key finds it Pending, but for that
	// of a Replace.
	held := make([]uint32, len(keys))
	x.each(n.id, keys, false, func(s *shard, k int, i uint32, hash uint64) {
		held[k] = none
		if op.outcomes[k] != Undone {
			return
		}
		if i != none && x.entry(i).state == present && c.expired(i) {
			c.stats.expired.Add(1)
			c.discard(s, i)
			i = x.find(s, hash, &keys[k], n.id) // it is there still while it is used
		}
		if !op.replaces {
			op.outcomes[k] = c.standing(i, size)
		}
		if op.outcomes[k] == Undone {
			if held[k] = c.newEntry(s, &keys[k], n.id); held[k] == none {
				op.outcomes[k] = NoRoom
			} else if !op.replaces {
				x.put(s, hash, held[k])
			}
		}
		if held[k] == none {
			c.places.giveBack(slots[k])
			return
		}
		e := x.entry(held[k])
		e.state, e.pins, e.size, e.slot = filling, 1, size, slots[k]
		c.places.own(e.slot, held[k])
		c.spaces.count(n.id, Memory, 1, int64(size))
	})

	endClaim()
	testpoint.At("cache: entered")

	// Copy, a batch while the sums of the one before are computed, and commit each batch as a
	// whole.
	var (
		which  = make([]uint32, 0, len(keys)) // numbers of the keys
		ours   = make([]uint32, 0, len(keys))
		theirs = make([]uint32, 0, len(keys))
		before batch
	)
	for k := 0; k < len(keys); {
		begin := len(which)
		// The sums of the last batch are computed while nothing moves: it is a small one.
		most := min(c.batchOf(size), max(1, batchBytes/4/int(size), (len(keys)-k)/2))
		for end := min(k+most, len(keys)); k < end; k++ {
			if held[k] != none {
				which = append(which, uint32(k))
				ours = append(ours, slots[k])
				theirs = append(theirs, from.Slots[k])
			}
		}
		now := batch{which: which[begin:], slots: ours[begin:]}
		if len(now.which) > 0 {
			err := context.Cause(ctx)
			if err == nil {
				err = n.awaitRate(ctx, len(now.which), size)
			}
			if err == nil {
				now.transfer, err = c.move(ctx, from.class(engine.SwapOut), engine.Read,
					ours[begin:], theirs[begin:], from, engine.Route{})
			}
			if err != nil {
				op.fail(ctx, fmt.Errorf("store: %w", err), now.which)
				c.abandon(held, now.which)
				c.places.giveBackAll(now.slots)
			}
		}
		c.stored(ctx, op, before, held)
		before = now
	}
	c.stored(ctx, op, before, held)
	if c.cfg.CompareKnown {
		n.compare(ctx, op, keys, from, size)
	}
	close(op.copied)
	if op.replaces && slices.Contains(op.outcomes, Done) {
		err := errors.Join(c.awaitEmptied(ctx, n.id, keys), c.removeBelow(ctx, n.id, keys))
		if err != nil && op.err == nil {
			op.err = fmt.Errorf("store: %w", err)
		}
	}

	// Give the new blocks their place in the order, the tail of the chain first, and offer them to
	// the disks. One that was removed meanwhile goes.
	x.each(n.id, keys, true, func(s *shard, k int, i uint32, _ uint64) {
		if op.outcomes[k] != Done {
			return
		}
		e := x.entry(held[k])
		if e.state == present {
			c.enqueue(s, held[k], Memory)
			c.awaitWrite(s, held[k], op) // a hint has offered it
			if c.flowOf(held[k]) == WriteThrough {
				c.offer(held[k], op)
			}
		}
		c.unpinLocked(s, held[k]) // no disk has it yet
	})
	for k, o := range op.outcomes {
		c.stats.stores[o].Add(1)
		if o == Conflict {
			c.emitKey(n.id, keys[k], Conflicted)
		}
	}
	if c.space(n.id).flow() == WriteBack {
		c.wakeKeeper()
	}
}

// standing says what becomes of a Store of a block whose entry is i: Undone, if there is none, or
// it has expired. The caller holds the shard's lock.
func (c *Cache) standing(i, size uint32) Outcome {
	if i == none {
		return Undone
	}
	switch e := c.index.entry(i); {
	case e.state != present:
		return Pending
	case c.expired(i):
		return Undone
	case e.size != size:
		return Conflict
	}
	return Known
}

// reserve finds room in memory for up to so many blocks of a namespace, by letting others go. The
// room is claimed of the namespace's quota until endClaim: by then its blocks count themselves.
func (c *Cache) reserve(id uint16, blocks int, size uint32) (slots []uint32, endClaim func()) {
	lane := c.spaces.lane(id)
	l := c.spaces.at(lane)
	blocks, claimed := c.admit(lane, Memory, blocks, uint64(size))
	slots = make([]uint32, blocks)
	slots = slots[:c.makeRoom(granules(uint64(size)), slots)]
	return slots, func() { l.claimed[Memory].Add(-claimed) }
}

// compare reads the blocks of a Store that are Known into slots of no block, a batch at a time, and
// finds those whose CRC-32C is not that of the cache's block: Conflict. Known stays what it cannot
// read, as there is no room or ctx ends.
func (n *Namespace) compare(ctx context.Context, op *Op, keys []Key, from *Place, size uint32) {
	c := n.c
	held, known := make([]uint32, len(keys)), []uint32(nil)
	c.index.each(n.id, keys, false, func(_ *shard, k int, i uint32, _ uint64) {
		if op.outcomes[k] == Known && i != none && c.standing(i, size) == Known {
			c.index.entry(i).pins++ // so that it does not go for the room to compare it
			held[k], known = i, append(known, uint32(k))
		}
	})
	defer c.unpinAll(held, known)
	for left := known; len(left) > 0 && c.overrun(n.id, 1, granules(uint64(size))) == nil; {
		slots, endClaim := c.reserve(n.id, min(len(left), c.batchOf(size)), size)
		batch, theirs := left[:len(slots)], []uint32(nil)
		left = left[len(slots):]
		for _, k := range batch {
			theirs = append(theirs, from.Slots[k])
		}
		err, proved := n.awaitRate(ctx, len(batch), size), true
		var t *engine.Transfer
		if err == nil && len(batch) > 0 {
			t, err = c.move(ctx, engine.SwapOut, engine.Read, slots, theirs, from, engine.Route{})
		}
		if t != nil {
			err, proved = c.finish(ctx, t)
		}
		for j, k := range batch {
			if sum, fault := c.sum(slots[j], size); err == nil && fault == nil &&
				sum != c.index.entry(held[k]).crc {
				op.outcomes[k] = Conflict
			}
		}
		c.giveBackAfter(t, proved, slots)
		endClaim()
		if err != nil && op.err == nil {
			op.err = fmt.Errorf("store: compare: %w", err)
		}
		if err != nil || len(batch) == 0 {
			return
		}
	}
}

// newEntry takes an entry for a key, which find does not return yet, and lets a block of the shard
// go where there is none. The caller holds the shard's lock.
func (c *Cache) newEntry(s *shard, key *Key, id uint16) uint32 {
	if s.free == none {
		for _, lane := range c.spaces.order(Memory, Disk) {
			// One that has left memory may be on a disk still, and the other way round.
			for went := true; went && s.free == none; {
				_, went = c.evictLocked(s, lane, Memory, false, nil)
				if s.free == none {
					_, onDisk := c.evictLocked(s, lane, Disk, false, nil)
					went = went || onDisk
				}
			}
		}
	}
	return c.index.take(s, key, id)
}

// stored waits for a batch of a Store and makes its blocks known.
func (c *Cache) stored(ctx context.Context, op *Op, b batch, held []uint32) {
	if b.transfer == nil {
		return
	}
	err, proved := c.finish(ctx, b.transfer)
	if err != nil {
		op.fail(ctx, fmt.Errorf("store: %w", err), b.which)
		c.abandon(held, b.which)
		c.giveBackAfter(b.transfer, proved, b.slots)
		return
	}
	testpoint.At("cache: landed")
	for j, k := range b.which {
		i := held[k]
		e := c.index.entry(i)
		sum, err := c.sum(e.slot, e.size)
		if err != nil {
			op.fail(ctx, fmt.Errorf("store: %w", err), b.which[j:j+1])
			c.abandon(held, b.which[j:j+1])
			c.places.giveBack(b.slots[j])
			continue
		}
		s := c.index.shardFor(i)
		s.mu.Lock()
		e.crc = sum
		testpoint.At("cache: summed")
		e.state = leaving
		if e.flags&unwanted == 0 {
			c.memory.stamps[i] = c.now.Load()
			c.index.commit(i)
			if op.replaces {
				testpoint.At("cache: replaces")
				c.succeed(s, i)
			}
			e.state = present
			c.emit(i, Stored)
			testpoint.At("cache: committed")
		}
		s.mu.Unlock()
		op.outcomes[k] = Done
		c.stats.storedBytes.Add(uint64(e.size))
	}
}

// succeed has find return a block that is committed in place of the one that its key has, which
// goes now or with its last pin. A process that is killed between the two leaves both, of which
// attach takes one. The caller holds the shard's lock.
func (c *Cache) succeed(s *shard, i uint32) {
	x, e := c.index, c.index.entry(i)
	hash := x.hash(&e.key, e.space)
	if before := x.find(s, hash, &e.key, e.space); before != none {
		switch b := x.entry(before); b.state {
		case present:
			c.discard(s, before)
		case filling: // as if it had been stored, and replaced at once
			b.flags |= unwanted
		}
		x.hide(s, hash, before)
	}
	x.put(s, hash, i)
}

// abandon forgets entries that no bytes came for. Their slots are the caller's then.
func (c *Cache) abandon(held, which []uint32) {
	for _, k := range which {
		i := held[k]
		s := c.index.shardFor(i)
		s.mu.Lock()
		e := c.index.entry(i)
		c.spaces.count(e.space, Memory, -1, -int64(e.size))
		c.places.own(e.slot, reservedSlot)
		c.index.drop(s, i)
		s.mu.Unlock()
	}
}

// giveBackAfter gives slots back into which a transfer has read: now, or once it is proved that
// nothing of it lands there any more.
func (c *Cache) giveBackAfter(t *engine.Transfer, proved bool, slots []uint32) {
	if proved {
		c.places.giveBackAll(slots)
		return
	}
	c.keep(t, func(proved bool) {
		if proved {
			c.places.giveBackAll(slots)
			c.freed()
		}
	})
}
