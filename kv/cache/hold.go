// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// holds are the state of Pins, which keep blocks in memory, and of Retain hints, which keep them in
// any tier. Both draw on one budget: whole granules of each block, for each Pin and for a hint.
type holds struct {
	heldBytes   atomic.Int64
	prefetches  atomic.Int32           // that run, or wait for prefetching
	retention   []map[uint32]retention // by shard, whose lock guards it, and entry
	prefetching chan struct{}          // has room for one
	fetch       atomic.Pointer[fetch]  // the last read of a Prefetch
}

// fetch is a read of a Prefetch from a disk.
type fetch struct {
	t      *engine.Transfer
	blocks []uint32 // entries that it reads, or that are read behind it, in order
}

// retention is how long a hint keeps a block.
type retention struct {
	until uint32 // of the cache's clock
	bytes int64  // of the budget
}

// reserveHold counts bytes against the budgets of a namespace and of the cache for what a Pin or a
// hint keeps, or says which budget is used up.
func (c *Cache) reserveHold(id uint16, bytes int64) error {
	s := c.space(id)
	most := int64(s.holdMax.Load())
	if most == 0 {
		most = int64(c.cfg.Memory.Bytes / 8)
	}
	if all := c.heldBytes.Add(bytes); all > int64(c.cfg.HoldMax) {
		c.heldBytes.Add(-bytes)
		return fmt.Errorf("%d bytes more than the %d that the cache holds, at most %d: %w", bytes,
			all-bytes, c.cfg.HoldMax, ErrNoRoom)
	}
	if all := s.holds.Add(bytes); all > most {
		s.holds.Add(-bytes)
		c.heldBytes.Add(-bytes)
		return fmt.Errorf("%d bytes more than the %d that the namespace holds, at most %d: %w",
			bytes, all-bytes, most, ErrNoRoom)
	}
	return nil
}

func (c *Cache) endHold(id uint16, bytes int64) {
	c.space(id).holds.Add(-bytes)
	c.heldBytes.Add(-bytes)
}

// keeps reports whether a block must stay in a tier. One that is retained may leave where another
// tier has it. The caller holds the shard's lock.
func (c *Cache) keeps(i uint32, t Tier) bool {
	e := c.index.entry(i)
	if t == Memory {
		return e.pins > 0 || e.record == none && c.isRetained(i)
	}
	return e.onlyHere() || !c.disks[e.disk].usable() || e.slot == none && c.isRetained(i)
}

// isRetained reports whether a hint keeps a block; the keeper ends that.
func (c *Cache) isRetained(i uint32) bool { return c.index.entry(i).flags&retained != 0 }

func (c *Cache) shardNumber(i uint32) uint32 { return i / c.index.shards[0].n }

// retain keeps a block until a second. The caller holds the shard's lock.
func (c *Cache) retain(i, until uint32) error {
	e := c.index.entry(i)
	r := retention{until, int64(granules(uint64(e.size))) * granule}
	if e.flags&retained == 0 {
		if err := c.reserveHold(e.space, r.bytes); err != nil {
			return err
		}
	}
	e.flags |= retained
	m := &c.retention[c.shardNumber(i)]
	if *m == nil {
		*m = map[uint32]retention{}
	}
	(*m)[i] = r
	return nil
}

// unretain ends retain. The caller holds the shard's lock.
func (c *Cache) unretain(i uint32) {
	e := c.index.entry(i)
	if e.flags&retained == 0 {
		return
	}
	m := c.retention[c.shardNumber(i)]
	c.endHold(e.space, m[i].bytes)
	delete(m, i)
	e.flags &^= retained
	c.freed()
}

// endRetentions ends those whose time has come.
func (c *Cache) endRetentions() {
	for k := range c.index.shards {
		s := &c.index.shards[k]
		s.mu.Lock()
		for i, r := range c.retention[k] {
			if r.until < c.now.Load() {
				c.unretain(i)
			}
		}
		s.mu.Unlock()
	}
}

// ErrPinEnded is the error of a Pin that was closed, or whose time is over.
var ErrPinEnded = errors.New("the pin has ended")

// Pin keeps blocks in memory, in their places. Its methods may be called by any goroutine.
type Pin struct {
	n        *Namespace
	outcomes []Outcome
	blocks   [][]byte
	slots    []uint32 // none: not there
	done     chan struct{}

	mu       sync.Mutex
	held     []uint32 // entries; none: not there; a draft has none
	bytes    int64    // of the budget
	endClaim func()   // of a draft; nil: of blocks
	views    int      // that run, and Holds
	ended    bool
	timer    *time.Timer
}

// Pin has blocks stay in memory until Close, or until ttl has passed, if that is not 0; those that
// are on a disk alone it reads first. It counts as a use. Each block is verified; Outcomes says
// which ones are there: Done. Where the blocks are more than HoldMax of the namespace or of the
// cache lets Pins and Retain hints keep, the error is ErrNoRoom, and nothing is pinned.
func (n *Namespace) Pin(ctx context.Context, keys []Key, ttl time.Duration) (*Pin, error) {
	c := n.c
	if ttl < 0 {
		return nil, fmt.Errorf("pin for %v: %w", ttl, engine.ErrBounds)
	}
	if err := c.start(); err != nil {
		return nil, fmt.Errorf("pin: %w", err)
	}
	defer c.end()
	ctx, cancel := c.within(ctx)
	defer cancel()
	p := &Pin{n: n, blocks: make([][]byte, len(keys)), held: make([]uint32, len(keys)),
		slots: slices.Repeat([]uint32{none}, len(keys)), done: make(chan struct{})}

	// Reserve the budget. Blocks that are stored or removed meanwhile are not pinned.
	op := newOp(len(keys))
	n.raise(ctx, keys)
	sizes := n.sizes(keys)
	for _, size := range sizes {
		p.bytes += int64(granules(uint64(size))) * granule
	}
	if err := c.reserveHold(n.id, p.bytes); err != nil {
		return nil, fmt.Errorf("pin: %w", err)
	}
	n.use(keys)
	resize := func(more int64) error {
		if more > 0 {
			if err := c.reserveHold(n.id, more); err != nil {
				return err
			}
		} else {
			c.endHold(n.id, -more)
		}
		p.bytes += more
		return nil
	}
	n.bring(ctx, op, keys, sizes, p.held, resize, func(k int) {
		i := p.held[k]
		if !c.verify(i) {
			op.outcomes[k] = Damaged
			if c.condemn(i) {
				op.outcomes[k] = Undone
			}
			c.unpin(i)
			p.held[k] = none
			return
		}
		e := c.index.entry(i)
		op.outcomes[k] = Done
		p.slots[k], p.blocks[k] = e.slot, c.memory.bytesOf(e.slot, e.size)
	})
	p.outcomes = op.outcomes
	if op.err != nil && !slices.Contains(op.outcomes, Done) {
		p.Close()
		return nil, fmt.Errorf("pin: %w", op.err)
	}
	if ttl > 0 {
		p.mu.Lock()
		p.timer = time.AfterFunc(ttl, p.Close)
		p.mu.Unlock()
	}
	return p, nil
}

// Draft has room in memory for blocks of one length that the program fills a piece at a time, as of
// a sequence that grows: they are no blocks of the cache, whatever is in them, and may be written
// to until Close. A Store whose place is that of the draft makes some of them. It draws on HoldMax
// and the quota, as long as it is open.
func (n *Namespace) Draft(blocks int, size uint64) (*Pin, error) {
	c := n.c
	length := granules(size)
	if size == 0 || size > c.cfg.Memory.Extent || blocks <= 0 ||
		uint64(blocks) > c.cfg.Memory.Bytes/granule/uint64(length) {
		return nil, fmt.Errorf("draft of %d blocks of %d bytes: the cache has %d, an extent %d: %w",
			blocks, size, c.cfg.Memory.Bytes, c.cfg.Memory.Extent, engine.ErrBounds)
	}
	if err := c.start(); err != nil {
		return nil, fmt.Errorf("draft: %w", err)
	}
	defer c.end()
	p := &Pin{n: n, outcomes: slices.Repeat([]Outcome{Done}, blocks), done: make(chan struct{}),
		bytes: int64(blocks) * int64(length) * granule}
	err := c.overrun(n.id, blocks, length)
	if err == nil {
		err = c.reserveHold(n.id, p.bytes)
	}
	if err != nil {
		return nil, fmt.Errorf("draft: %w", err)
	}
	if p.slots, p.endClaim = c.reserve(n.id, blocks, uint32(size)); len(p.slots) < blocks {
		p.Close()
		return nil, fmt.Errorf("draft of %d blocks: there is room for %d: %w", blocks,
			len(p.slots), ErrNoRoom)
	}
	for _, slot := range p.slots {
		p.blocks = append(p.blocks, c.memory.bytesOf(slot, uint32(size)))
	}
	return p, nil
}

// Place says where the blocks lie in the memory of the cache, for transfers of this process that
// end before the pin does (Hold): Slots are pages of Stride bytes, of those that are pinned. Run is
// the length of the first of them. Only a draft's pages may be written to: the others are of blocks
// that all users of the cache read.
func (p *Pin) Place() (Place, error) {
	c := p.n.c
	if err := c.begin(); err != nil {
		return Place{}, err
	}
	defer c.exit()
	self, err := c.cfg.Engine.Self()
	if err != nil {
		return Place{}, err
	}
	at := Place{Peer: self, Stride: granule, Slots: slices.Clone(p.slots)}
	if k := slices.Index(p.outcomes, Done); k >= 0 {
		at.Run = uint64(len(p.blocks[k]))
	}
	at.Remote, err = self.Remote(c.region.Name())
	return at, err
}

// Outcomes says of each block whether it is pinned: Done.
func (p *Pin) Outcomes() []Outcome { return p.outcomes }

// Done is closed when the pin has ended, and no View runs any more.
func (p *Pin) Done() <-chan struct{} { return p.done }

// View calls f with the bytes of the blocks in their places, nil for one that is not pinned. They
// must not be written to. They stay valid until f returns, even if the pin ends meanwhile: no limit
// ends f, which keeps its part of the budget, and for which Cache.Close waits. With a ttl of 0 they
// stay valid until Close of the Pin or of the Cache.
func (p *Pin) View(f func(blocks [][]byte) error) error {
	c := p.n.c
	if err := c.begin(); err != nil {
		return err
	}
	defer c.ops.Done()
	release, err := p.Hold()
	if err != nil {
		return err
	}
	defer release()
	return f(p.blocks)
}

// Hold keeps the blocks in their places for a transfer from or to them until release, which is
// called once; also if the pin ends meanwhile. Cache.Close does not wait for it: it looks for the
// proof that the transfer has ended.
func (p *Pin) Hold() (release func(), err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return nil, ErrPinEnded
	}
	p.views++
	return func() {
		p.mu.Lock()
		p.views--
		last := p.ended && p.views == 0
		p.mu.Unlock()
		if last {
			p.release()
		}
	}, nil
}

// Close ends the pin. It does not wait for a View, whose blocks stay for as long.
func (p *Pin) Close() {
	p.mu.Lock()
	if p.timer != nil {
		p.timer.Stop()
	}
	last := !p.ended && p.views == 0
	p.ended = true
	p.mu.Unlock()
	if last {
		p.release()
	}
}

// release gives the blocks up. Nothing reads them any more.
func (p *Pin) release() {
	c := p.n.c
	defer close(p.done)
	if !c.enter() {
		return
	}
	defer c.exit()
	for _, i := range p.held {
		if i != none {
			c.unpin(i)
		}
	}
	if p.endClaim != nil {
		c.places.giveBackAll(p.slots)
		p.endClaim()
		c.freed()
	}
	c.endHold(p.n.id, p.bytes)
	c.wakeKeeper() // its quota may be over
}

// sizes are those of the blocks that are there; 0 for the others.
func (n *Namespace) sizes(keys []Key) []uint32 {
	x := n.c.index
	sizes := make([]uint32, len(keys))
	x.each(n.id, keys, false, func(_ *shard, k int, i uint32, _ uint64) {
		if n.c.has(i) {
			sizes[k] = x.entry(i).size
		}
	})
	return sizes
}

// use counts a chain as used, from its end on, so that its head goes last.
func (n *Namespace) use(keys []Key) {
	n.c.index.each(n.id, keys, true, func(s *shard, _ int, i uint32, _ uint64) {
		if n.c.has(i) {
			n.c.touch(s, i)
		}
	})
}

// bring pins blocks and reads those from the disks that are on them alone, a batch of one length at
// a time; those of size 0 are Missing. held has their entries then, none for blocks that are not
// there, whose outcomes say why. ready is called for each that is. One that goes before is looked
// for anew, as another may have taken its place; of another size if resize says nil.
func (n *Namespace) bring(ctx context.Context, op *Op, keys []Key, sizes, held []uint32,
	resize func(more int64) error, ready func(k int)) {
	part := func(k, end int) {
		testpoint.At("cache: sized")
		n.pin(op, keys, held, k, end, sizes[k])
		testpoint.At("cache: held")
		n.c.swapIn(ctx, op, held, k, end, sizes[k], nil)
		for ; k < end; k++ {
			if held[k] != none {
				ready(k)
			}
		}
	}
	for k := 0; k < len(keys); {
		size, end := sizes[k], k+1
		if size == 0 {
			held[k], op.outcomes[k] = none, Missing
			k++
			continue
		}
		for end < len(keys) && sizes[end] == size && end-k < n.c.batchOf(size) {
			end++
		}
		part(k, end)
		for ; k < end; k++ {
			for try := 0; try < triesMax && n.anew(op, keys, sizes, k, resize); try++ {
				part(k, k+1)
			}
			if o := op.outcomes[k]; o == Undone || o == Unlike {
				op.outcomes[k] = Missing
			}
		}
	}
}

// anew reports whether the key of a block that went before it was read has one again.
func (n *Namespace) anew(op *Op, keys []Key, sizes []uint32, k int,
	resize func(more int64) error) bool {
	if o := op.outcomes[k]; o != Undone && o != Unlike {
		return false
	}
	size := n.sizes(keys[k : k+1])[0]
	op.outcomes[k] = Undone
	if size == 0 {
		return false
	}
	more := int64(granules(uint64(size))) - int64(granules(uint64(sizes[k])))
	if err := resize(more * granule); err != nil {
		op.outcomes[k] = NoRoom
		return false
	}
	sizes[k] = size
	return true
}

// Prefetch reads blocks from the disks into memory, for a Load to come, one Prefetch at a time. It
// brings at most a quarter of the memory, or of the namespace's quota; blocks beyond are NoRoom. A
// block that was brought is among the first that leave, until it is used. It is Done unverified:
// the Load verifies it. ctx bounds it. A quarter of Config.OpsMax may run or wait; others are
// refused with engine.ErrBusy.
func (n *Namespace) Prefetch(ctx context.Context, keys []Key) *Op {
	op, _ := n.beginPrefetch(ctx, keys, 0, int32(max(1, n.c.cfg.OpsMax/4)))
	return op
}

// beginPrefetch starts a Prefetch where fewer than most run. It ends after limit, if that is not 0.
func (n *Namespace) beginPrefetch(ctx context.Context, keys []Key, limit time.Duration,
	most int32) (*Op, error) {
	op, c := newOp(len(keys)), n.c
	op.class = engine.Prefetch
	var busy error
	if waiting := c.prefetches.Add(1); waiting > most {
		busy = fmt.Errorf("%d others wait: %w", waiting-1, engine.ErrBusy)
	}
	keys = slices.Clone(keys)
	err := c.run(ctx, "prefetch", op, busy, func(ctx context.Context) {
		defer c.prefetches.Add(-1)
		if limit > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, limit)
			defer cancel()
		}
		n.prefetch(ctx, op, keys)
		close(op.copied)
	})
	if err != nil {
		c.prefetches.Add(-1)
	}
	return op, err
}

func (n *Namespace) prefetch(ctx context.Context, op *Op, keys []Key) {
	c := n.c
	most := c.cfg.Memory.Bytes / 4
	if quota := c.spaces.at(c.spaces.lane(n.id)).quota[Memory].Load(); quota > 0 {
		most = min(most, quota/4)
	}
	c.queued.Add(1)
	c.freed() // who waits for room is to see that this one holds none
	select {
	case c.prefetching <- struct{}{}:
		c.queued.Add(-1)
		defer func() { <-c.prefetching }()
	case <-ctx.Done():
		c.queued.Add(-1)
		for k := range op.outcomes {
			op.outcomes[k] = Late
		}
		return
	}
	n.raise(ctx, keys)
	sizes, found := n.sizes(keys), n.Match(keys).Blocks
	left, end := int64(most), 0
	reserve := func(more int64) error {
		if more > left {
			return ErrNoRoom
		}
		left -= more
		return nil
	}
	for ; end < len(keys); end++ {
		if found[end]&InMemory != 0 {
			continue
		}
		if reserve(int64(granules(uint64(sizes[end])))*granule) != nil {
			break
		}
	}
	for k := end; k < len(keys); k++ {
		op.outcomes[k] = NoRoom
	}
	// Keep the first ones until the last have come: these would take their room, as none is used.
	held := make([]uint32, end)
	n.bring(ctx, op, keys[:end], sizes[:end], held, reserve, func(k int) {
		if op.outcomes[k] = Done; found[k]&InMemory != 0 {
			c.unpin(held[k])
			held[k] = none
		}
	})
	for _, i := range held {
		if i != none {
			c.unpin(i)
		}
	}
}
