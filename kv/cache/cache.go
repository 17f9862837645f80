// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// Tier is where a block lies.
type Tier uint8

// The tiers.
const (
	Memory Tier = iota
	Disk
	tiers
)

// String returns "memory" or "disk".
func (t Tier) String() string { return [...]string{"memory", "disk"}[min(t, Disk)] }

// Config is what Open needs.
type Config struct {
	// Engine moves the bytes. It stays the caller's: close the cache before it.
	Engine *engine.Engine

	// Memory is the tier in memory.
	Memory MemoryConfig

	// Disks are the tier behind it, where there is one: what is stored goes there as well, and what
	// had to leave the memory is read from there.
	Disks []DiskConfig

	// Blocks is how many blocks the cache can know: 68 bytes of the memory file each. Default: as
	// many as the memory file has that is there, so that it stays of use when a disk is added; else
	// the bytes of all tiers by 64 KiB.
	Blocks uint64

	// Policy says which block goes first. Default S3FIFO.
	Policy Policy

	// VerifyFirst has the CRC-32C of a block in memory verified by its first load only after it was
	// stored by another process or came from a disk. Default: by each load.
	VerifyFirst bool

	// CompareKnown has a Store of a key that the cache has read the bytes, too: a block whose
	// CRC-32C is another one is a Conflict, and the cache's stays. One for which there is no room
	// to read it is Known. Default: it is Known unread, as kernels that do not repeat their results
	// make other bytes for a key.
	CompareKnown bool

	// OpsMax bounds the loads and stores that run at a time; what is more is refused with
	// engine.ErrBusy. Default 1,024.
	OpsMax int

	// HoldMax bounds the bytes of memory slots that Pins and Retain hints of all namespaces keep.
	// Default: half of the memory.
	HoldMax uint64

	clock func() uint32 // of tests: seconds; nil: that of the kernel, which a ticker reads
}

// MemoryConfig is the tier in memory.
type MemoryConfig struct {
	// Path of the file that holds the blocks, on /dev/shm or a hugetlbfs: a program that was killed
	// finds them there when it starts again.
	Path string
	// Bytes for blocks.
	Bytes uint64
	// Extent is the unit in which Bytes are cut for blocks of one length, and as long as a block
	// may be. Default: a 256th of Bytes, from 2 MiB to 256 MiB.
	Extent uint64
}

// Cache is an open cache. All methods may be called by any goroutine.
type Cache struct {
	cfg    Config
	memory *memory
	region *engine.Region
	index  *index
	places *slots // of memory
	spaces *spaces
	hand   atomic.Uint32 // shard from which the next block goes
	stats  counters

	disks   []*disk
	writes  chan diskWrite
	written chan struct{} // closed when the writer has ended
	offered atomic.Int64  // blocks on their way to the disks
	turn    int           // disk that is asked first for room, by the writer

	gate     sync.RWMutex       // read: the files are open
	shut     bool               // they are not; guarded by gate
	stuck    []*engine.Transfer // without a proof when the cache was closed; guarded by mu
	ops      sync.WaitGroup     // operations, and searches for a proof
	room     chan struct{}      // one for each operation that may run
	mu       sync.Mutex
	closed   bool
	stop     context.CancelFunc
	life     context.Context // ends with Close
	attached Attached
	news     chan struct{} // closed and made anew when blocks came from a disk, or all are on one

	flows
	holds
	paces
	listeners
}

// Attached says what Open found.
type Attached struct {
	Blocks int           // in memory
	Room   int           // blocks that the cache can know, see Config.Blocks
	Bytes  uint64        // of those
	Took   time.Duration // to know them
	Fresh  string        // why the file that was there was not used; "": it was, or there was none

	// BasePages says that the memory file is new, and that the kernel had no huge pages for all of
	// it before ctx ended: disks read into those at twice the rate. Linux 6.1 has them for
	// /dev/shm, others where that is mounted with huge=advise, or on a hugetlbfs.
	BasePages bool
}

// Open opens a cache, with what a process before left in the memory file. While that process still
// ends, Open waits until ctx ends; the error is engine.ErrBusy then.
func Open(ctx context.Context, cfg Config) (*Cache, error) {
	kept := cfg.Blocks == 0
	err := cfg.complete()
	if err == nil && cfg.Engine == nil {
		err = errors.New("no engine")
	}
	if err != nil {
		return nil, fmt.Errorf("open cache: %w: %w", err, engine.ErrBounds)
	}
	begin := time.Now()
	entries, _ := tableOf(cfg.Blocks)
	m, err := openMemory(ctx, cfg.Memory.Path, shape{entries: entries, extent: cfg.Memory.Extent,
		bytes: cfg.Memory.Bytes, kept: kept})
	if err != nil {
		return nil, fmt.Errorf("open cache: %w", err)
	}
	c := &Cache{cfg: cfg, memory: m, places: newSlots(cfg.Memory.Bytes, cfg.Memory.Extent),
		room: make(chan struct{}, cfg.OpsMax), writes: make(chan diskWrite, writesMax),
		written: make(chan struct{}), news: make(chan struct{})}
	c.life, c.stop = context.WithCancel(context.Background())
	c.index = newIndex(m)
	c.openFlows()
	c.spaces = openSpaces(m)
	c.attached.Fresh, c.attached.Room = m.found, len(m.entries)
	c.attached.BasePages = m.basePages
	for id, h := range c.index.attach(c.places, c.spaces.valid, c.enqueue) {
		c.spaces.count(uint16(id), Memory, h.blocks, h.bytes)
		c.attached.Blocks += int(h.blocks)
		if h.blocks > 0 {
			c.spaces.list[id].left.Store(leftOver)
		}
	}
	c.places.claimed()
	c.attached.Bytes = c.places.bytesInUse()
	c.region, err = cfg.Engine.RegisterPrivate("cache "+fmt.Sprintf("%x", m.id[:8]), driver.Segment{
		Kind: driver.DRAM, Len: uint64(len(m.data)), Mem: m.data})
	if err == nil {
		err = c.openDisks(ctx)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open cache: %w", err), c.closeFiles())
	}
	c.attached.Took = time.Since(begin)
	go c.writer()
	c.ops.Go(c.keepTime)
	return c, nil
}

// extentMax bounds an extent, and so a block.
const extentMax = 2 << 30

// Check says what Open would refuse of a Config, but that it has no Engine.
func (cfg Config) Check() error {
	cfg.Disks = slices.Clone(cfg.Disks)
	return cfg.complete()
}

func (cfg *Config) complete() error {
	m := &cfg.Memory
	if m.Path == "" {
		return errors.New("no path of the memory file")
	}
	if m.Extent == 0 {
		m.Extent = min(max(m.Bytes>>8, 2<<20), 256<<20)
	}
	if m.Extent > extentMax {
		return fmt.Errorf("extents of %d bytes: at most %d", m.Extent, uint64(extentMax))
	}
	m.Extent = (m.Extent + granule - 1) &^ (granule - 1)
	m.Bytes -= m.Bytes % m.Extent
	if m.Bytes == 0 || m.Bytes>>12 >= none-2 {
		return fmt.Errorf("%d bytes of memory in extents of %d: one at least, and 16 TiB at most",
			m.Bytes, m.Extent)
	}
	all := m.Bytes
	for k := range cfg.Disks {
		d := &cfg.Disks[k]
		if d.Path == "" {
			return fmt.Errorf("disk %d has no path", k)
		}
		same := func(o DiskConfig) bool { return o.Path == d.Path }
		if d.Path == m.Path || slices.ContainsFunc(cfg.Disks[:k], same) {
			return fmt.Errorf("disk %s is there twice", d.Path)
		}
		if d.Extent == 0 {
			d.Extent = m.Extent
		}
		if d.Extent > extentMax {
			return fmt.Errorf("disk %s: extents of %d bytes: at most %d", d.Path, d.Extent,
				uint64(extentMax))
		}
		d.Extent = (d.Extent + granule - 1) &^ (granule - 1)
		if d.Extent < m.Extent {
			return fmt.Errorf("disk %s: extents of %d bytes, below the %d of the memory, of which "+
				"a block may be as long", d.Path, d.Extent, m.Extent)
		}
		d.Bytes -= d.Bytes % d.Extent
		if d.Bytes == 0 || d.Bytes>>12 >= none-2 {
			return fmt.Errorf("disk %s: %d bytes in extents of %d: one at least, and 16 TiB at "+
				"most", d.Path, d.Bytes, d.Extent)
		}
		if d.SlowAfter <= 0 {
			d.SlowAfter = 5 * time.Second
		}
		if d.SlowAfter < time.Millisecond {
			return fmt.Errorf("disk %s: it is slow after %v: a millisecond at least", d.Path,
				d.SlowAfter)
		}
		if d.Blocks == 0 {
			d.Blocks = max(d.Bytes>>16, 16)
		}
		if d.Blocks > entriesMax {
			return fmt.Errorf("disk %s: %d blocks: at most %d", d.Path, d.Blocks,
				uint64(entriesMax))
		}
		all += d.Bytes
	}
	if cfg.Blocks == 0 {
		cfg.Blocks = max(all>>16, 16)
	}
	if cfg.Blocks > entriesMax {
		return fmt.Errorf("%d blocks: at most %d", cfg.Blocks, uint64(entriesMax))
	}
	if cfg.Policy == "" {
		cfg.Policy = S3FIFO
	}
	if cfg.OpsMax == 0 {
		cfg.OpsMax = 1024
	}
	if cfg.OpsMax < 1 || cfg.OpsMax > 1<<20 {
		return fmt.Errorf("OpsMax %d: from 1 to %d", cfg.OpsMax, 1<<20)
	}
	if cfg.HoldMax == 0 {
		cfg.HoldMax = m.Bytes / 2
	}
	if cfg.HoldMax > m.Bytes {
		return fmt.Errorf("HoldMax %d of %d bytes of memory", cfg.HoldMax, m.Bytes)
	}
	return cfg.Policy.check()
}

// Attached says what Open found.
func (c *Cache) Attached() Attached { return c.attached }

// closeLimit is how long Close waits for a write of a record; a test shortens it.
var closeLimit = diskLimit

// Close ends all operations, and closes the files, which keep their blocks. What is called
// afterwards finds nothing. An error that is engine.ErrUnproven says that the engine has given up a
// transfer which may still reach the memory, or that a disk has not ended a write within 30 s: the
// files stay locked, and the memory mapped, until the process or another Close ends.
func (c *Cache) Close() error {
	c.mu.Lock()
	first := !c.closed
	c.closed = true
	c.mu.Unlock()
	if first {
		c.stop()
		c.ops.Wait()
		close(c.writes)
	}
	err := errors.New("a disk has not answered")
	select {
	case <-c.written:
		err = nil
		c.ops.Wait() // for what the writer keeps
	case <-time.After(closeLimit):
	}
	c.gate.Lock()
	defer c.gate.Unlock()
	c.shut = true
	if err != nil {
		return fmt.Errorf("close cache: %w for %v: %w", err, closeLimit, engine.ErrUnproven)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.closeFiles(); err != nil {
		return fmt.Errorf("close cache: %w", err)
	}
	return nil
}

// Drain waits until all blocks that were stored are on the disks, or will not be.
func (c *Cache) Drain(ctx context.Context) error {
	for {
		news := c.coming()
		n := c.offered.Load()
		if n == 0 {
			return nil
		}
		select {
		case <-news:
		case <-ctx.Done():
			return fmt.Errorf("drain: %d blocks are not on a disk yet: %w", n, context.Cause(ctx))
		}
	}
}

// closeFiles closes what Open has opened, and may be called again where it fails.
func (c *Cache) closeFiles() error {
	for _, t := range c.stuck {
		soon, cancel := context.WithTimeout(context.Background(), abortLimit)
		err := t.Abort(soon)
		cancel()
		if err != nil && !errors.Is(err, engine.ErrUnproven) {
			return fmt.Errorf("%w: %w", engine.ErrUnproven, err)
		}
		_ = t.Close()
		c.stuck = c.stuck[1:]
	}
	for len(c.disks) > 0 {
		if err := c.disks[len(c.disks)-1].close(); err != nil {
			return err
		}
		c.disks = c.disks[:len(c.disks)-1]
	}
	if c.region != nil {
		if err := c.region.Close(); err != nil {
			return err
		}
		c.region = nil
	}
	if c.memory == nil {
		return nil
	}
	m := c.memory
	c.memory = nil
	return m.close()
}

// enter has the files stay open until exit; false: they are closed.
func (c *Cache) enter() bool {
	c.gate.RLock()
	if c.shut {
		c.gate.RUnlock()
		return false
	}
	return true
}

func (c *Cache) exit() { c.gate.RUnlock() }

// begin counts a call in, for which Close waits; c.ops.Done counts it out.
func (c *Cache) begin() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return fmt.Errorf("cache: %w", engine.ErrClosed)
	}
	c.ops.Add(1)
	return nil
}

// start counts an operation in, of which OpsMax may run; end counts it out.
func (c *Cache) start() error {
	if err := c.begin(); err != nil {
		return err
	}
	select {
	case c.room <- struct{}{}:
		return nil
	default:
		c.ops.Done()
		return fmt.Errorf("cache: %d operations run: %w", cap(c.room), engine.ErrBusy)
	}
}

func (c *Cache) end() {
	<-c.room
	c.ops.Done()
}

// queues are the order of a lane's blocks in a shard. The caller holds the shard's lock.
func (c *Cache) queues(s *shard, lane int, t Tier) *laneOrder {
	for len(s.lanes) <= lane {
		s.lanes = append(s.lanes, [tiers]*laneOrder{})
	}
	q := &s.lanes[lane][t]
	if *q == nil {
		l := links{c.index.memory.entries, t}
		*q = &laneOrder{queues: c.cfg.Policy.make(l), links: l, useless: emptyList,
			count: &c.useless[t]}
	}
	return *q
}

// enqueue gives a block its place in the order of its lane. The caller holds the shard's lock.
func (c *Cache) enqueue(s *shard, i uint32) {
	e := c.index.entry(i)
	c.queues(s, c.spaces.lane(e.space), Memory).insert(i, c.index.print(i))
	e.flags |= queued
}

// touch counts a use of a block in each tier that has it. One that is on no disk is offered again.
// The caller holds the shard's lock.
func (c *Cache) touch(s *shard, i uint32) {
	e := c.index.entry(i)
	lane := c.spaces.lane(e.space)
	c.memory.stamps[i] = c.now.Load()
	e.flags &^= demoting
	if e.record != none {
		c.queues(s, lane, Disk).touch(i)
	}
	if e.flags&queued != 0 {
		c.queues(s, lane, Memory).touch(i)
		if c.flowOf(i) == WriteThrough {
			c.offer(i, nil)
		}
	}
}

// makeRoom reserves places in memory for blocks of a length, and lets others go for them. It
// returns how many it found.
func (c *Cache) makeRoom(length uint32, dst []uint32) (found int) {
	kept := keptExtents{length: length}
	for {
		found += c.places.reserve(length, dst[found:])
		if found == len(dst) || len(kept.list) >= keptExtentsMax {
			return found
		}
		place, was, ok := c.evict(&kept)
		if !ok {
			return found
		}
		if was != length {
			c.emptyExtent(nil, place, was, &kept)
		}
	}
}

// keptExtents are the extents that could not be emptied for blocks of a length, as something in
// them is kept: no other block in them goes for one of that length. Each has cost one block, so
// there are keptExtentsMax at most before makeRoom gives up.
type keptExtents struct {
	length uint32
	list   []diskExtent
}

// diskExtent is an extent of a disk, or of memory where that is nil.
type diskExtent struct {
	d *disk
	n uint32
}

const keptExtentsMax = 8

// has reports whether a block is in one of the extents. The caller holds its shard's lock.
func (k *keptExtents) has(c *Cache, i uint32, t Tier) bool {
	if k == nil || len(k.list) == 0 {
		return false
	}
	e := c.index.entry(i)
	if granules(uint64(e.size)) == k.length {
		return false
	}
	if t == Memory {
		return slices.Contains(k.list, diskExtent{nil, e.slot / c.places.each})
	}
	d := c.disks[e.disk]
	return slices.Contains(k.list, diskExtent{d, d.placeOf(e.record) / d.places.each})
}

// evict lets the block go whose turn it is: one of no more use, else of a namespace that is over
// its quota, else of the lowest priority.
func (c *Cache) evict(kept *keptExtents) (place, length uint32, ok bool) {
	first := c.hand.Add(1)
	lanes := c.spaces.order(Memory)
	for _, useless := range []bool{true, false} {
		if useless && c.useless[Memory].Load() == 0 {
			continue
		}
		for _, lane := range lanes {
			for k := range c.index.shards {
				s := &c.index.shards[(int(first)+k)%len(c.index.shards)]
				s.mu.Lock()
				place, length, ok = c.evictLocked(s, lane, useless, kept)
				s.mu.Unlock()
				if ok {
					return place, length, true
				}
			}
		}
	}
	return 0, 0, false
}

// victim removes the block of a lane and shard from its order in a tier that is to go next; useless
// are those of no more use alone. none: there is none. The caller holds the shard's lock.
func (c *Cache) victim(s *shard, lane int, t Tier, useless bool, kept *keptExtents) uint32 {
	if lane >= len(s.lanes) || s.lanes[lane][t] == nil {
		return none
	}
	keep := func(i uint32) bool { return c.keeps(i, t) || kept.has(c, i, t) }
	if useless {
		return s.lanes[lane][t].firstVictim(keep)
	}
	return s.lanes[lane][t].victim(keep, c.index.print)
}

// evictLocked lets a block of a lane and shard go. The caller holds the shard's lock.
func (c *Cache) evictLocked(s *shard, lane int, useless bool, kept *keptExtents) (place,
	length uint32, ok bool) {
	x := c.index
	i := c.victim(s, lane, Memory, useless, kept)
	if i == none {
		return 0, 0, false
	}
	e := x.entry(i)
	if e.record == none && c.flowOf(i) == WriteBack {
		c.stats.unwritten.Add(1)
	}
	place, length = e.slot, granules(uint64(e.size))
	e.flags &^= queued
	c.stats.evicted[Memory].Add(1)
	c.leaveMemory(s, i)
	return place, length, true
}

// leaveMemory ends a block's place in memory; its queue has let it go already, and nothing holds
// it. The caller holds the shard's lock.
func (c *Cache) leaveMemory(s *shard, i uint32) {
	e := c.index.entry(i)
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

// emptyExtent lets all blocks of an extent of a disk go, or of memory where that is nil, so that it
// may be cut anew, for blocks of another length. Where one of them is kept none goes.
func (c *Cache) emptyExtent(d *disk, place, length uint32, kept *keptExtents) {
	places, tier := c.places, Memory
	if d != nil {
		places, tier = d.places, Disk
	}
	extent := diskExtent{d, place / places.each}
	owners, ok := places.empties(place, length)
	if !ok {
		return
	}
	defer places.emptied(place)
	for _, leaves := range []bool{false, true} { // look at all of them first
		for _, i := range owners {
			if i == reservedSlot {
				kept.list = append(kept.list, extent)
				return
			}
			s := c.index.shardFor(i)
			s.mu.Lock()
			e := c.index.entry(i)
			in, may := false, false
			if d == nil {
				in = e.slot != none && e.slot/places.each == extent.n
				may = in && e.flags&queued != 0 && !c.keeps(i, Memory)
			} else {
				in = e.record != none && c.disks[e.disk] == d &&
					d.placeOf(e.record)/places.each == extent.n
				may = in && e.state == present && !c.keeps(i, Disk)
			}
			if may && leaves {
				c.queues(s, c.spaces.lane(e.space), tier).remove(i)
				c.stats.evicted[tier].Add(1)
				if d == nil {
					e.flags &^= queued
					c.leaveMemory(s, i)
				} else {
					c.leaveDisk(s, i)
				}
			}
			s.mu.Unlock()
			if in && !may {
				kept.list = append(kept.list, extent)
				return
			}
		}
	}
}

// unpin ends the use of an entry.
func (c *Cache) unpin(i uint32) {
	s := c.index.shardFor(i)
	s.mu.Lock()
	c.unpinLocked(s, i)
	s.mu.Unlock()
}

// unpinLocked is unpin for who holds the shard's lock.
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
}

// leaveAll forgets a block that no queue has and nothing holds, and that is on no disk. The caller
// holds the shard's lock.
func (c *Cache) leaveAll(s *shard, i uint32) {
	if c.index.entry(i).slot != none {
		c.leaveMemory(s, i)
	} else {
		c.index.drop(s, i)
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

	// Also of those that had left a disk before.
	limit := time.NewTimer(diskLimit)
	defer limit.Stop()
	var all error
	for _, d := range c.disks {
		for {
			news := c.coming()
			left, err := d.unemptied(n.id, keys)
			if left == 0 {
				break
			}
			if err == nil {
				err = d.unused()
			}
			if err == nil {
				select {
				case <-news:
					continue
				case <-c.life.Done():
					err = engine.ErrClosed
				case <-limit.C:
					err = context.DeadlineExceeded
					limit.Reset(0)
				}
			}
			all = errors.Join(all, fmt.Errorf("remove: a restart may find %d blocks on disk %s: %w",
				left, d.cfg.Path, err))
			break
		}
	}
	return all
}

// discard has a block that is present go: from its disk at once, and from memory now or with its
// last pin. The caller holds the shard's lock.
func (c *Cache) discard(s *shard, i uint32) {
	e := c.index.entry(i)
	c.emit(i, Removed)
	c.unretain(i)
	c.index.withdraw(i)
	e.state = leaving
	if e.flags&queued != 0 {
		c.queues(s, c.spaces.lane(e.space), Memory).remove(i)
		e.flags &^= queued
	}
	if e.record != none {
		c.queues(s, c.spaces.lane(e.space), Disk).remove(i)
		c.leaveDisk(s, i)
	}
	if e.pins == 0 {
		c.leaveAll(s, i)
	}
}

func newID() (id [16]byte) {
	_, _ = rand.Read(id[:]) // never fails: it ends the program instead
	return id
}
