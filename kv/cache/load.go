// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/csrc/digest"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testpoint"
	"github.com/sluicehq/sluice/kv/seal"
)

// batchBytes is how much one transfer moves.
const batchBytes = 8 << 20

// Match says which blocks of a chain the cache has.
type Match struct {
	Prefix int     // of the keys, from the first one on, without a gap
	Blocks []Found // of each key
}

// Found is where a block is.
type Found uint8

// Where a block may be; it may be in memory and on a disk.
const (
	InMemory Found = 1 << iota // a Load copies it at once
	OnDisk                     // a Load reads it from there, if it is not in memory
	Coming                     // a Store of it runs
	InObject                   // the tier below alone has it: a Load reads it from there
	Nowhere  Found = 0
)

// There reports whether a Load finds the block.
func (f Found) There() bool { return f&(InMemory|OnDisk|InObject) != 0 }

// has reports whether the cache has the block of an entry, which may be none. The caller holds the
// shard's lock.
func (c *Cache) has(i uint32) bool { return i != none && c.found(i).There() }

// Match looks for blocks. It moves nothing, does not count as a use, and never waits for a
// transfer.
func (n *Namespace) Match(keys []Key) Match {
	m := Match{Blocks: make([]Found, len(keys))}
	if !n.c.enter() {
		return m
	}
	defer n.c.exit()
	x := n.c.index
	x.each(n.id, keys, false, func(_ *shard, k int, i uint32, _ uint64) {
		if i != none {
			m.Blocks[k] = n.c.found(i)
		}
	})
	n.matchBelow(keys, m.Blocks)
	for m.Prefix < len(keys) && m.Blocks[m.Prefix].There() {
		m.Prefix++
	}
	return m
}

// Group is the keys of a chain in one group of a model's layers, one at each position.
type Group struct {
	Keys []Key
	// Last is how many blocks before a position the group needs: those of its window of attention,
	// or 1 where a block is a state. 0: all.
	Last int
}

// MatchGroups returns how long a prefix may be that all groups have what they need for, in blocks.
func (n *Namespace) MatchGroups(groups ...Group) int {
	longest := 0
	for g := range groups {
		if length := len(groups[g].Keys); g == 0 || length < longest {
			longest = length
		}
	}
	enough := make([]int, longest+1) // by length of the prefix: groups that have what they need
	for _, g := range groups {
		run := 0 // blocks that are there without a gap
		for k, f := range n.Match(g.Keys).Blocks[:longest] {
			if run++; !f.There() {
				run = 0
			}
			if run == k+1 || g.Last > 0 && run >= g.Last {
				enough[k+1]++
			}
		}
	}
	for longest > 0 && enough[longest] < len(groups) {
		longest--
	}
	return longest
}

// Load copies blocks to a place, and verifies each meanwhile, so that a block that is Done is the
// one that was stored; the others are told by their outcomes, and what lies in their slots
// afterwards is undefined. ctx bounds all of it: what is not there by then is Late. A block on a
// disk waits, at most 30 s, for room that others are about to give back; NoRoom: none is coming. A
// slot that is there twice is engine.ErrBounds. keys and to.Slots must not change before the end.
func (n *Namespace) Load(ctx context.Context, keys []Key, to Place) *Op {
	op := newOp(len(keys))
	size, err := to.check(len(keys), n.c.cfg.Memory.Extent)
	if err == nil {
		err = to.once()
	}
	if to.Copy {
		op.class = engine.Prefetch // of reads from disks, which Loads promote
	}
	_ = n.c.run(ctx, "load", op, err, func(ctx context.Context) {
		n.load(ctx, op, keys, &to, size)
		close(op.copied)
	})
	return op
}

// load is the story of a Load. What it has found stays where it is, by a pin, until the transfer
// that reads it has ended.
func (n *Namespace) load(ctx context.Context, op *Op, keys []Key, to *Place, size uint32) {
	c, x := n.c, n.c.index
	began := time.Now()
	if !to.Copy {
		n.use(keys)
	}

	// Pin, bring, copy and verify, a batch while the one before is copied and verified. The lists
	// of a batch are parts of these.
	held := make([]uint32, len(keys)) // entries; none: not, or no more
	var (
		which  = make([]uint32, 0, len(keys)) // numbers of the keys
		slots  = make([]uint32, 0, len(keys))
		theirs = make([]uint32, 0, len(keys))
		before batch
	)
	endBefore := func() {
		c.loaded(ctx, op, before, held)
		before = batch{}
	}
	raised := 0 // keys of which the tier below was asked for those that are not here
	for k := 0; k < len(keys); {
		end := min(k+c.batchOf(size), len(keys))
		if raised < end {
			raised = min(len(keys), k+c.raiseOf(size))
			op.fromDisk = n.raise(ctx, keys[k:raised]) || op.fromDisk
		}
		n.pin(op, keys, held, k, end, size)
		testpoint.At("cache: found")
		release := endBefore
		if before.transfer == nil {
			release = nil
		}
		c.swapIn(ctx, op, held, k, end, size, release)
		begin := len(which)
		for ; k < end; k++ {
			i := held[k]
			switch {
			case i == none:
			case ctx.Err() != nil:
				op.outcomes[k] = Late
				c.unpin(i)
			default:
				which = append(which, uint32(k))
				slots = append(slots, x.entry(i).slot)
				theirs = append(theirs, to.Slots[k])
			}
		}
		testpoint.At("cache: pinned")
		now := batch{which: which[begin:]}
		if len(now.which) > 0 {
			err := n.awaitRate(ctx, len(now.which), size)
			if err == nil {
				now.transfer, err = c.move(ctx, to.class(op.class), engine.Write, slots[begin:],
					theirs[begin:], to, engine.Route{})
			}
			if err != nil {
				op.fail(ctx, fmt.Errorf("load: %w", err), now.which)
				c.unpinAll(held, now.which)
			} else {
				now.verify(c, held)
			}
		}
		endBefore()
		before = now
	}
	endBefore()
	var again []uint32 // numbers of the keys whose blocks went, as for those of a Replace
	for k, o := range op.outcomes {
		if o == Undone && op.tries < triesMax {
			again = append(again, uint32(k))
			continue
		} else if o == Undone {
			op.outcomes[k] = Missing
		}
		if !to.Copy {
			c.stats.loads[op.outcomes[k]].Add(1)
		}
	}
	if len(again) > 0 {
		n.loadAgain(ctx, op, keys, to, size, again)
	}
	if !to.Copy {
		n.sample(op, uint64(size), time.Since(began))
	}
}

// triesMax is how often a Load looks for a block anew that went before it was read: each time
// another one may have taken its place.
const triesMax = 8

// loadAgain is load for some of the keys.
func (n *Namespace) loadAgain(ctx context.Context, op *Op, keys []Key, to *Place, size uint32,
	which []uint32) {
	part, at := newOp(len(which)), *to
	part.class, part.tries, part.short = op.class, op.tries+1, op.short
	mine := make([]Key, len(which))
	at.Slots = make([]uint32, len(which))
	for j, k := range which {
		mine[j], at.Slots[j] = keys[k], to.Slots[k]
	}
	n.load(ctx, part, mine, &at, size)
	for j, k := range which {
		op.outcomes[k] = part.outcomes[j]
	}
	op.fromDisk = op.fromDisk || part.fromDisk
	if op.err == nil {
		op.err = part.err
	}
}

// pin finds the blocks of a part of a Load, and has them stay where they are.
func (n *Namespace) pin(op *Op, keys []Key, held []uint32, begin, end int, size uint32) {
	n.c.index.each(n.id, keys[begin:end], false, func(_ *shard, k int, i uint32, _ uint64) {
		k += begin
		held[k] = none
		if i == none {
			op.outcomes[k] = Missing
			return
		}
		switch e := n.c.index.entry(i); {
		case e.state == filling:
			op.outcomes[k] = Pending
		case e.state != present || n.c.expired(i):
			op.outcomes[k] = Missing
		case e.size != size:
			op.outcomes[k] = Unlike
		default:
			e.pins++
			held[k] = i
		}
	})
}

// batchOf is how many blocks one transfer moves. Two are under way at a time, of which neither may
// take more than a part of the memory for what comes from a disk.
func (c *Cache) batchOf(size uint32) int {
	each := uint64(size)
	if c.cfg.Seal != nil { // as much as a stage takes
		each = uint64(granules(each+seal.Overhead)) * granule
	}
	return int(max(1, min(batchBytes, c.cfg.Memory.Bytes/8)/each))
}

// batch is what one transfer of an operation moves.
type batch struct {
	transfer *engine.Transfer // nil: there is none
	which    []uint32         // numbers of the keys
	slots    []uint32         // of a Store: of these
	damaged  chan []uint32    // of a Load: those of them whose bytes are not those that were stored
}

// verify computes the sums of a batch of a Load in a goroutine, while it is copied.
func (b *batch) verify(c *Cache, held []uint32) {
	which, damaged := b.which, make(chan []uint32, 1)
	b.damaged = damaged
	go func() {
		var list []uint32
		for _, k := range which {
			if !c.verify(held[k]) {
				list = append(list, k)
			}
		}
		damaged <- list
	}()
}

// loaded waits for a batch of a Load.
func (c *Cache) loaded(ctx context.Context, op *Op, b batch, held []uint32) {
	if b.transfer == nil {
		return
	}
	err, proved := c.finish(ctx, b.transfer)
	damaged := <-b.damaged
	if err != nil {
		op.fail(ctx, fmt.Errorf("load: %w", err), b.which)
	} else {
		for _, k := range b.which {
			op.outcomes[k] = Done
		}
		size := uint64(c.index.entry(held[b.which[0]]).size)
		c.stats.loadedBytes.Add(uint64(len(b.which)-len(damaged)) * size)
	}
	for _, k := range damaged {
		op.outcomes[k] = Damaged
		if c.condemn(held[k]) { // its place on a disk may have been another's as it was read
			op.outcomes[k] = Undone
		}
	}
	if proved {
		c.unpinAll(held, b.which)
		return
	}
	c.keep(b.transfer, func(proved bool) {
		if proved {
			c.unpinAll(held, b.which)
		}
	})
}

func (c *Cache) unpinAll(held, which []uint32) {
	for _, k := range which {
		c.unpin(held[k])
	}
}

// verify reports whether the bytes of a pinned entry are those that were stored.
func (c *Cache) verify(i uint32) bool {
	e := c.index.entry(i)
	if c.cfg.VerifyFirst {
		s := c.index.shardFor(i)
		s.mu.Lock()
		done := e.flags&verified != 0
		s.mu.Unlock()
		if done {
			return true
		}
	}
	sum, err := c.sum(e.slot, e.size)
	if err != nil || sum != e.crc {
		return false
	}
	if c.cfg.VerifyFirst {
		s := c.index.shardFor(i)
		s.mu.Lock()
		e.flags |= verified
		s.mu.Unlock()
	}
	return true
}

// sum is the CRC-32C of a slot. Memory that is gone, as somebody cut the file, is an error.
func (c *Cache) sum(slot, size uint32) (sum uint32, err error) {
	defer hostmem.CatchFault(&err, hostmem.PanicOnFault())
	return digest.CRC32C(c.memory.bytesOf(slot, size)), nil
}

// condemn discards a pinned block whose bytes are not those that were stored, unless it was removed
// meanwhile, or another Load has found the same. It reports whether its key has another block.
func (c *Cache) condemn(i uint32) (replaced bool) {
	x, s := c.index, c.index.shardFor(i)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := x.entry(i)
	if e.state == present {
		c.emit(i, DamagedBlock)
		c.discard(s, i)
	}
	now := x.find(s, x.hash(&e.key, e.space), &e.key, e.space)
	return now != none && now != i
}
