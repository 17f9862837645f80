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

	// Blocks is how many blocks the cache can know: 68 bytes of the memory file each. Default: the
	// bytes of all tiers by 64 KiB.
	Blocks uint64

	// Policy says which block goes first. Default S3FIFO.
	Policy Policy

	// VerifyFirst has the CRC-32C of a block in memory verified by its first load only after it was
	// stored by another process or came from a disk. Default: by each load.
	VerifyFirst bool

	// OpsMax bounds the loads and stores that run at a time; what is more is refused with
	// engine.ErrBusy. Default 1,024.
	OpsMax int

	// HoldMax bounds the bytes of memory slots that Pins and Retain hints of all namespaces keep.
	// Default: half of the memory.
	HoldMax uint64

	// TurnoverMin has a Store that needs room refused with Busy while blocks leave memory after
	// less than this, in the mean of the last second. Default 0: none is.
	TurnoverMin time.Duration

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
	Bytes  uint64        // of those
	Took   time.Duration // to know them
	Fresh  string        // why the file that was there was not used; "": it was, or there was none
}

// Open opens a cache, with what a process before left in the memory file. While that process still
// ends, Open waits until ctx ends; the error is engine.ErrBusy then.
func Open(ctx context.Context, cfg Config) (*Cache, error) {
	err := cfg.complete()
	if err == nil && cfg.Engine == nil {
		err = errors.New("no engine")
	}
	if err != nil {
		return nil, fmt.Errorf("open cache: %w: %w", err, engine.ErrBounds)
	}
	begin := time.Now()
	entries, shards := tableOf(cfg.Blocks)
	m, err := openMemory(ctx, cfg.Memory.Path, shape{entries: entries, extent: cfg.Memory.Extent,
		bytes: cfg.Memory.Bytes})
	if err != nil {
		return nil, fmt.Errorf("open cache: %w", err)
	}
	c := &Cache{cfg: cfg, memory: m, places: newSlots(cfg.Memory.Bytes, cfg.Memory.Extent),
		room: make(chan struct{}, cfg.OpsMax), writes: make(chan diskWrite, writesMax),
		written: make(chan struct{}), news: make(chan struct{})}
	c.life, c.stop = context.WithCancel(context.Background())
	c.index = newIndex(m, shards)
	c.openFlows()
	c.spaces = openSpaces(m)
	c.attached.Fresh = m.found
	for id, h := range c.index.attach(c.places, c.spaces.valid, c.enqueue) {
		c.spaces.count(uint16(id), Memory, h.blocks, h.bytes)
		c.attached.Blocks += int(h.blocks)
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
		if slices.ContainsFunc(cfg.Disks[:k], func(o DiskConfig) bool { return o.Path == d.Path }) {
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
			d.SlowAfter = 2 * time.Second
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
	if cfg.HoldMax > m.Bytes || cfg.TurnoverMin < 0 {
		return fmt.Errorf("HoldMax %d of %d bytes of memory, TurnoverMin %v", cfg.HoldMax, m.Bytes,
			cfg.TurnoverMin)
	}
	return cfg.Policy.check()
}

// Attached says what Open found.
func (c *Cache) Attached() Attached { return c.attached }

// Close ends all operations, and closes the files, which keep their blocks. What is called
// afterwards finds nothing. An error that is engine.ErrUnproven says that the engine has given up a
// transfer which may still reach the memory: it stays mapped and locked until the process ends.
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
	<-c.written
	c.ops.Wait() // for what the writer keeps
	c.gate.Lock()
	defer c.gate.Unlock()
	c.shut = true
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

// start counts an operation in; end counts it out.
func (c *Cache) start() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return fmt.Errorf("cache: %w", engine.ErrClosed)
	}
	select {
	case c.room <- struct{}{}:
		c.ops.Add(1)
		return nil
	default:
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
	for {
		found += c.places.reserve(length, dst[found:])
		if found == len(dst) {
			return found
		}
		place, was, ok := c.evict()
		if !ok {
			return found
		}
		if was != length {
			c.emptyExtent(nil, place, was)
		}
	}
}

// evict lets the block go whose turn it is: one of no more use, else of a namespace that is over
// its quota, else of the lowest priority.
func (c *Cache) evict() (place, length uint32, ok bool) {
	first := c.hand.Add(1)
	lanes := c.spaces.order(Memory)
	for _, useless := range []bool{true, false} {
		if useless && c.useless[Memory].Load() == 0 {
			continue
		}
		for _, lane := range lanes {
			for k := range c.index.shards {
				s := &c.index.shards[(int(first)+k)%len(c.index.shards)]
				if place, length, ok = c.evictFrom(s, lane, useless); ok {
					return place, length, true
				}
			}
		}
	}
	return 0, 0, false
}

func (c *Cache) evictFrom(s *shard, lane int, useless bool) (place, length uint32, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return c.evictLocked(s, lane, useless)
}

// victim removes the block of a lane and shard from its order in a tier that is to go next; useless
// are those of no more use alone. none: there is none. The caller holds the shard's lock.
func (c *Cache) victim(s *shard, lane int, t Tier, useless bool) uint32 {
	if lane >= len(s.lanes) || s.lanes[lane][t] == nil {
		return none
	}
	keep := func(i uint32) bool { return c.keeps(i, t) }
	if useless {
		return s.lanes[lane][t].firstVictim(keep)
	}
	return s.lanes[lane][t].victim(keep, c.index.print)
}

// evictLocked lets a block of a lane and shard go. The caller holds the shard's lock.
func (c *Cache) evictLocked(s *shard, lane int, useless bool) (place, length uint32, ok bool) {
	x := c.index
	i := c.victim(s, lane, Memory, useless)
	if i == none {
		return 0, 0, false
	}
	e := x.entry(i)
	c.turnover.Add(uint64(granules(uint64(e.size))) * granule)
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
// may be cut anew, for blocks of another length.
func (c *Cache) emptyExtent(d *disk, place, length uint32) {
	places, tier := c.places, Memory
	if d != nil {
		places, tier = d.places, Disk
	}
	owners, ok := places.empties(place, length)
	if !ok {
		return
	}
	for _, i := range owners {
		s := c.index.shardFor(i)
		s.mu.Lock()
		e := c.index.entry(i)
		var g gone
		switch {
		case d == nil && e.flags&queued != 0 && !c.keeps(i, Memory) &&
			e.slot/places.each == place/places.each:
			c.queues(s, c.spaces.lane(e.space), tier).remove(i)
			e.flags &^= queued
			c.stats.evicted[Memory].Add(1)
			c.leaveMemory(s, i)
		case d != nil && e.state == present && e.record != none && c.disks[e.disk] == d &&
			!c.keeps(i, Disk) && d.placeOf(e.record)/places.each == place/places.each:
			c.queues(s, c.spaces.lane(e.space), tier).remove(i)
			c.stats.evicted[Disk].Add(1)
			g = c.leaveDisk(s, i)
		}
		s.mu.Unlock()
		g.clear()
	}
	places.emptied(place)
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

// leaveAll forgets a block that no queue has and nothing holds, and whose disk knows it no more.
// The caller holds the shard's lock.
func (c *Cache) leaveAll(s *shard, i uint32) {
	if c.index.entry(i).slot != none {
		c.leaveMemory(s, i)
	} else {
		c.index.drop(s, i)
	}
}

// Remove forgets blocks: from its return on no restart finds them. One that is loaded at this
// moment keeps its slot until nothing reads it.
func (n *Namespace) Remove(keys []Key) {
	c := n.c
	if !c.enter() {
		return
	}
	defer c.exit()
	var records []gone
	var recorded []uint32
	c.index.each(n.id, keys, false, func(s *shard, _ int, i uint32, _ uint64) {
		if i == none {
			return
		}
		switch e := c.index.entry(i); e.state {
		case present:
			if e.flags&recording != 0 {
				recorded = append(recorded, i)
				e.pins++ // so that the entry stays what it is
			}
			records = append(records, c.discard(s, i))
		case filling:
			e.flags |= unwanted
		}
	})
	for _, g := range records {
		g.clear()
	}
	for _, i := range recorded { // the record on the disk goes as soon as it is written
		s := c.index.shardFor(i)
		for still := true; still; {
			news := c.coming()
			s.mu.Lock()
			if still = c.index.entry(i).flags&recording != 0; !still {
				c.unpinLocked(s, i)
			}
			s.mu.Unlock()
			if still {
				<-news
			}
		}
	}
}

// discard has a block that is present go: from its disk at once, and from memory now or with its
// last pin. The caller holds the shard's lock, and clears the record behind it.
func (c *Cache) discard(s *shard, i uint32) (g gone) {
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
		g = c.leaveDisk(s, i)
	}
	if e.pins == 0 {
		c.leaveAll(s, i)
	}
	return g
}

func newID() (id [16]byte) {
	_, _ = rand.Read(id[:]) // never fails: it ends the program instead
	return id
}
