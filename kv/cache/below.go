// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// Below is a tier below those of a cache, such as an object store; see kv/tier/object. The cache
// gives it copies of blocks that are about to leave, and reads what it does not have itself. It
// names a namespace by its Digest. All methods may be called by any goroutine.
type Below interface {
	// Find says what the tier has of each block, in the order of the keys. It does not wait: while
	// the tier cannot be used it finds nothing.
	Find(space [16]byte, keys []Key) []BelowBlock
	// Read reads blocks that Find has found, each into a buffer of its Size, and reports which are
	// there. A block whose bytes are not those that were written, or that Remove has forgotten
	// meanwhile, is not. It returns when ctx ends, or after a limit of its own, and writes to no
	// buffer afterwards.
	Read(ctx context.Context, space [16]byte, keys []Key, into [][]byte) []bool
	// Wants reports whether the tier takes a block of so many bytes now, and counts them where a
	// budget bounds it. again: it was used again since it was stored. It does not wait.
	Wants(space [16]byte, key Key, size uint32, again bool) bool
	// Write takes a copy of a block that it Wants. It may wait for earlier ones.
	Write(ctx context.Context, space [16]byte, key Key, b BelowBlock, bytes []byte) error
	// Remove forgets blocks. Once it has returned nil no later process finds them.
	Remove(ctx context.Context, space [16]byte, keys []Key) error
	Stats() BelowStats
}

// BelowBlock is what a tier below knows of a block.
type BelowBlock struct {
	Size uint32 // bytes; 0: it does not have the block
	CRC  uint32 // CRC-32C of them
	Used uint32 // the second of the wall clock in which the block was used last in the cache
}

// BelowStats are the counts of a tier below. Those of blocks that moved only grow.
type BelowStats struct {
	Objects int    `json:"objects"`
	Blocks  int    `json:"blocks"`
	Bytes   uint64 `json:"bytes"` // of the objects
	Room    uint64 `json:"room"`
	Read    uint64 `json:"read"`             // blocks
	Written uint64 `json:"written"`          // blocks
	Damaged uint64 `json:"damaged"`          // blocks whose bytes were not those that were written
	Lost    uint64 `json:"lost"`             // blocks that could not be written, or whose object is gone
	Refused uint64 `json:"refused"`          // blocks beyond the budget of what is written
	Retries uint64 `json:"retries"`          // requests
	Error   string `json:"error,omitempty"`  // of the last request that failed
	Unused  string `json:"unused,omitempty"` // why it is left alone now; "": it is not
}

const (
	// raiseBytes is how much is read from the tier below at a time: long enough that several
	// requests run at once.
	raiseBytes = 64 << 20
	// In a second so many blocks are looked at, about, and so many bytes are given to the tier
	// below, of so many blocks at a time.
	lowerMax   = 64 << 10
	lowerBytes = 256 << 20
	lowerBatch = 1 << 10
)

// belows are the state of what moves to and from the tier below.
type belows struct {
	lowering sync.Mutex // of lower, which tests call, too
	lowerAt  int        // shard that is looked at next

	raiseMu sync.Mutex
	raising map[blockID]chan struct{} // blocks that an operation brings; closed as it has ended

	writeMu sync.Mutex
	writing blockID       // block that the tier below is being given, if any
	wrote   chan struct{} // closed once it has been; nil: there is none
}

// findBelow finds blocks in the tier below that have not expired. nil: there is no such tier.
func (c *Cache) findBelow(id uint16, keys []Key) []BelowBlock {
	if c.cfg.Below == nil || len(keys) == 0 {
		return nil
	}
	found := c.cfg.Below.Find(c.spaces.digest(id), keys)
	ttl, now := int64(c.space(id).ttl.Load()), time.Now().Unix()
	for k := range found {
		if ttl != 0 && now-int64(found[k].Used) > ttl {
			found[k] = BelowBlock{}
		}
	}
	return found
}

// matchBelow marks the blocks that the tier below alone has.
func (n *Namespace) matchBelow(keys []Key, blocks []Found) {
	if n.c.cfg.Below == nil {
		return
	}
	var which []int
	var wanted []Key
	for k, f := range blocks {
		if f == Nowhere {
			which, wanted = append(which, k), append(wanted, keys[k])
		}
	}
	for j, b := range n.c.findBelow(n.id, wanted) {
		if b.Size > 0 {
			blocks[which[j]] = InObject
		}
	}
}

// raise is the story of what comes up: it brings blocks that the tier below alone has into memory,
// where there is room for them, and reports whether there were some. What it cannot bring the
// caller does not find.
func (n *Namespace) raise(ctx context.Context, keys []Key) (some bool) {
	c := n.c
	if c.cfg.Below == nil || ctx.Err() != nil {
		return false
	}
	var wanted []Key
	coming := map[Key]bool{} // perhaps from the tier below
	c.index.each(n.id, keys, false, func(_ *shard, k int, i uint32, _ uint64) {
		f := Nowhere
		if i != none {
			f = c.found(i)
		}
		if coming[keys[k]] = f == Coming; f == Nowhere || f == Coming {
			wanted = append(wanted, keys[k])
		}
	})
	found := c.findBelow(n.id, wanted)

	// Those that another operation brings this one waits for, once it has brought its own.
	var mine []Key
	var blocks []BelowBlock
	var others []chan struct{}
	ended := make(chan struct{})
	c.raiseMu.Lock()
	for k, b := range found {
		id := blockID{wanted[k], n.id}
		switch other := c.raising[id]; {
		case other == ended: // the key is there twice
		case other != nil:
			others = append(others, other)
		case b.Size > 0 && uint64(b.Size) <= c.cfg.Memory.Extent && !coming[wanted[k]]:
			c.raising[id] = ended
			mine, blocks = append(mine, wanted[k]), append(blocks, b)
		}
	}
	c.raiseMu.Unlock()

	for from := 0; from < len(mine) && ctx.Err() == nil; { // those of one length at a time
		size, to := blocks[from].Size, from
		for to < len(mine) && to-from < c.raiseOf(size) && blocks[to].Size == size {
			to++
		}
		n.raisePart(ctx, mine[from:to], blocks[from:to], size)
		from = to
	}

	c.raiseMu.Lock()
	for _, key := range mine {
		delete(c.raising, blockID{key, n.id})
	}
	c.raiseMu.Unlock()
	close(ended)
	for _, other := range others {
		select {
		case <-other:
		case <-ctx.Done():
		}
	}
	return len(mine)+len(others) > 0
}

// raiseOf is how many blocks are read at a time.
func (c *Cache) raiseOf(size uint32) int {
	return max(c.batchOf(size), int(min(raiseBytes, c.cfg.Memory.Bytes/4)/uint64(size)))
}

// raisePart is raise for blocks of one length.
func (n *Namespace) raisePart(ctx context.Context, keys []Key, blocks []BelowBlock, size uint32) {
	c, x := n.c, n.c.index
	news := c.coming()
	slots, endClaim := c.reserve(n.id, len(keys), size)
	for len(slots) == 0 && c.offered.Load() > 0 && ctx.Err() == nil { // what goes to disks is held
		select {
		case <-news:
		case <-ctx.Done():
		}
		endClaim()
		news = c.coming()
		slots, endClaim = c.reserve(n.id, len(keys), size)
	}
	keys = keys[:len(slots)]

	// An entry for each, as of a Store: another Store of the key finds it Pending.
	held := make([]uint32, len(keys))
	x.each(n.id, keys, false, func(s *shard, k int, i uint32, hash uint64) {
		held[k] = none
		if i != none && x.entry(i).state == present && c.expired(i) {
			c.stats.expired.Add(1)
			c.discard(s, i)
			i = x.find(s, hash, &keys[k], n.id)
		}
		if i == none {
			if held[k] = c.newEntry(s, &keys[k], n.id); held[k] != none {
				x.put(s, hash, held[k])
			}
		}
		if held[k] == none {
			c.places.giveBack(slots[k])
			return
		}
		e := x.entry(held[k])
		e.state, e.pins, e.size, e.slot, e.crc = filling, 1, size, slots[k], blocks[k].CRC
		c.places.own(e.slot, held[k])
		c.spaces.count(n.id, Memory, 1, int64(size))
	})
	endClaim()

	var which []int // numbers of the keys that have an entry
	var wanted []Key
	var into [][]byte
	for k := range keys {
		if held[k] != none {
			which, wanted = append(which, k), append(wanted, keys[k])
			into = append(into, c.memory.bytesOf(slots[k], size))
		}
	}
	if len(which) == 0 {
		return
	}
	there := c.cfg.Below.Read(ctx, c.spaces.digest(n.id), wanted, into)

	// Commit from the end of the chain on, so that its head goes last. A Remove that came meanwhile
	// has made the tier below forget the block before Read ended, or finds the entry here. The Load
	// verifies the bytes.
	for j := len(which) - 1; j >= 0; j-- {
		k := which[j]
		i := held[k]
		if !there[j] {
			c.abandon(held, []uint32{uint32(k)})
			c.places.giveBack(slots[k])
			continue
		}
		s := x.shardFor(i)
		s.mu.Lock()
		e := x.entry(i)
		e.state = leaving
		if e.flags&unwanted == 0 {
			c.memory.stamps[i] = c.now.Load()
			x.commit(i)
			e.state = present
			c.emit(i, Stored)
			c.enqueue(s, i, Memory)
			if c.flowOf(i) == WriteThrough {
				c.offer(i, nil)
			}
		}
		c.unpinLocked(s, i)
		s.mu.Unlock()
	}
	c.freed()
}

// removeBelow has the tier below forget blocks that the cache itself has no more, too, also one
// that it is being given.
func (c *Cache) removeBelow(ctx context.Context, id uint16, keys []Key) error {
	if c.cfg.Below == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, diskLimit)
	defer cancel()
	c.writeMu.Lock()
	writing, wrote := c.writing, c.wrote
	c.writeMu.Unlock()
	if wrote != nil && writing.space == id && slices.Contains(keys, writing.key) {
		select {
		case <-wrote:
		case <-ctx.Done():
			return fmt.Errorf("a restart may find a block that the tier below is being given: %w",
				context.Cause(ctx))
		}
	}
	return c.cfg.Below.Remove(ctx, c.spaces.digest(id), keys)
}

// giveBelow gives the tier below a block, unless another one has its key, or none.
func (c *Cache) giveBelow(ctx context.Context, n *Namespace, i uint32, used uint32) error {
	e, wrote := c.index.entry(i), make(chan struct{})
	c.writeMu.Lock() // before it looks: who makes the block leave looks for this afterwards
	c.writing, c.wrote = blockID{e.key, e.space}, wrote
	c.writeMu.Unlock()
	defer func() {
		c.writeMu.Lock()
		c.wrote = nil
		c.writeMu.Unlock()
		close(wrote)
	}()
	s := c.index.shardFor(i)
	s.mu.Lock()
	there := e.state == present && e.flags&unwanted == 0
	s.mu.Unlock()
	testpoint.At("cache: lowers")
	if !there || !c.verify(i) {
		return nil
	}
	return c.cfg.Below.Write(ctx, n.Digest(), e.key, BelowBlock{e.size, e.crc, used},
		c.memory.bytesOf(e.slot, e.size))
}

// lowerer is the goroutine that gives the tier below what is about to leave.
func (c *Cache) lowerer() {
	t := time.NewTicker(time.Second)
	defer t.Stop()
	for {
		select {
		case <-c.life.Done():
			return
		case <-t.C:
			c.lower()
		}
	}
}

// lowered is a block that the tier below is to have.
type lowered struct {
	key   Key
	space uint16
	used  uint32 // see BelowBlock
}

// lower is the story of what goes down: of the blocks among the eighth that leaves next of the last
// tier that the cache has itself, while less than an eighth of that, or of a quota, is free. Blocks
// that leave sooner than the tier below takes them are lost, as without it.
func (c *Cache) lower() {
	c.lowering.Lock()
	defer c.lowering.Unlock()
	last, room := Memory, c.places.stats()
	if len(c.disks) > 0 {
		last, room = Disk, TierStats{}
		for _, d := range c.disks {
			t := d.places.stats()
			room.Bytes, room.Room = room.Bytes+t.Bytes, room.Room+t.Room
		}
	}
	var list []lowered
	seen, bytes := 0, 0
	for range c.index.shards {
		if seen >= lowerMax || bytes >= lowerBytes {
			break
		}
		s := &c.index.shards[c.lowerAt]
		c.lowerAt = (c.lowerAt + 1) % len(c.index.shards)
		s.mu.Lock()
		for id, l := range *c.spaces.lanes.Load() {
			quota, has := l.quota[last].Load(), uint64(l.bytes[last].Load())
			if id >= len(s.lanes) || s.lanes[id][last] == nil ||
				room.Bytes < room.Room/8*7 && (quota == 0 || has < quota/8*7) {
				continue
			}
			s.lanes[id][last].oldest(func(i uint32) {
				seen++
				e := c.index.entry(i)
				if e.state == present && bytes < lowerBytes && c.flowOf(i) != MemoryOnly &&
					!c.expired(i) && c.cfg.Below.Wants(
					c.spaces.digest(e.space), e.key, e.size, e.marks[last]&^useless != 0) {
					bytes += int(e.size)
					used := uint32(time.Now().Unix()) - c.ageOf(i)
					list = append(list, lowered{e.key, e.space, used})
				}
			})
		}
		s.mu.Unlock()
	}
	slices.SortStableFunc(list, func(a, b lowered) int { return cmp.Compare(a.space, b.space) })
	for from, to := 0, 0; from < len(list) && c.life.Err() == nil; from = to {
		for to < len(list) && to-from < lowerBatch && list[to].space == list[from].space {
			to++
		}
		if c.lowerPart(list[from:to]) != nil {
			return // again in a second
		}
	}
}

// lowerPart gives the tier below blocks of one namespace. It reads them from the disks as a
// Prefetch does, so behind all Loads; those leave memory again before all others.
func (c *Cache) lowerPart(part []lowered) error {
	if err := c.start(); err != nil {
		return err
	}
	defer c.end()
	ctx, cancel := context.WithTimeout(c.life, diskLimit)
	defer cancel()
	c.spaces.mu.Lock()
	n := c.open(int(part[0].space))
	c.spaces.mu.Unlock()
	defer n.Close()
	keys := make([]Key, len(part))
	for k, b := range part {
		keys[k] = b.key
	}
	op := newOp(len(keys))
	op.class = engine.Prefetch
	held := make([]uint32, len(keys))
	otherSize := func(int64) error { return ErrNoRoom }
	var all error
	n.bring(ctx, op, keys, n.sizes(keys), held, otherSize, func(k int) {
		op.outcomes[k] = Done
		if all == nil {
			all = c.giveBelow(ctx, n, held[k], part[k].used)
		}
		c.unpin(held[k])
		held[k] = none
	})
	if op.err != nil && !errors.Is(op.err, ErrNoRoom) {
		all = errors.Join(all, fmt.Errorf("read blocks for the tier below: %w", op.err))
	}
	return all
}
