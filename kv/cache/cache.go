// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/seal"
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

	// Seal encrypts what is on Disks: a file of before it was set, or unset, is made anew. A block
	// takes seal.Overhead bytes more there, so a page where its length is a multiple of 4 KiB. Nil:
	// it is plain, as Memory is in any case.
	Seal *seal.Keys

	// Below is a tier below these, where there is one. It stays the caller's: close it after the
	// cache.
	Below Below

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

	stuck    []*engine.Transfer // without a proof when the cache was closed; guarded by mu
	ops      sync.WaitGroup     // operations
	proofs   sync.WaitGroup     // searches for a proof, which the writer of a disk begins, too
	room     chan struct{}      // one for each operation that may run
	mu       sync.Mutex
	closed   bool
	stop     context.CancelCauseFunc
	life     context.Context // ends with Close
	attached Attached
	news     chan struct{} // closed and made anew when blocks came from a disk, or all are on one

	flows
	holds
	paces
	listeners
	sleepers
	belows
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
// ends, Open waits until ctx ends; the error is engine.ErrBusy then, and names the process.
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
	c := &Cache{cfg: cfg, room: make(chan struct{}, cfg.OpsMax),
		writes: make(chan diskWrite, writesMax), written: make(chan struct{}),
		news: make(chan struct{}), belows: belows{raising: map[blockID]chan struct{}{}}}
	c.life, c.stop = context.WithCancelCause(context.Background())
	if err := c.openFiles(ctx, kept); err != nil {
		c.stop(engine.ErrClosed)
		return nil, errors.Join(fmt.Errorf("open cache: %w", err), c.closeFiles(true))
	}
	c.attached.Took = time.Since(begin)
	go c.writer()
	c.ops.Go(c.keepTime)
	if cfg.Below != nil {
		c.ops.Go(c.lowerer)
	}
	return c, nil
}

// openFiles opens the disks, which may fail for want of room, then the memory, and takes over what
// both have.
func (c *Cache) openFiles(ctx context.Context, keepEntries bool) error {
	order, err := c.cfg.lockOrder()
	if err != nil {
		return err
	}
	for _, k := range order {
		d, err := openDisk(ctx, k, c.cfg.Disks[k])
		if err != nil {
			return err
		}
		c.disks = append(c.disks, d)
	}
	slices.SortFunc(c.disks, func(a, b *disk) int { return cmp.Compare(a.number, b.number) })
	entries, _ := tableOf(c.cfg.Blocks)
	m, err := openMemory(ctx, c.cfg.Memory.Path, shape{entries: entries,
		extent: c.cfg.Memory.Extent, bytes: c.cfg.Memory.Bytes, kept: keepEntries})
	if err != nil {
		return err
	}
	c.memory, c.index, c.spaces = m, newIndex(m), openSpaces(m)
	c.places = newSlots(m.bytes, m.extent)
	c.openFlows()
	c.attached.Fresh, c.attached.Room = m.found, len(m.entries)
	c.attached.BasePages = m.basePages
	for id, h := range c.index.attach(c.places, c.spaces.valid,
		func(s *shard, i uint32) { c.enqueue(s, i, Memory) }) {
		c.spaces.count(uint16(id), Memory, h.blocks, h.bytes)
		c.attached.Blocks += int(h.blocks)
		if h.blocks > 0 {
			c.spaces.list[id].unopened.Store(true)
		}
	}
	c.places.claimed()
	c.attached.Bytes = c.places.stats().Bytes
	c.region, err = c.cfg.Engine.RegisterPrivate("cache "+fmt.Sprintf("%x", m.id[:8]),
		driver.Segment{Kind: driver.DRAM, Len: uint64(len(m.data)), Mem: m.data})
	if err != nil {
		return err
	}
	for _, d := range c.disks {
		if err := c.attachDisk(d); err != nil {
			return fmt.Errorf("disk %s: %w", d.cfg.Path, err)
		}
	}
	return nil
}

// extentMax bounds an extent, and so a block.
const extentMax = 2 << 30

// Check says what Open would refuse of a Config, but that it has no Engine.
func (cfg Config) Check() error {
	return cfg.complete()
}

// complete sets the defaults, and says what cannot be.
func (cfg *Config) complete() error {
	m := &cfg.Memory
	m.Extent = cmp.Or(m.Extent, min(max(m.Bytes>>8, 2<<20), 256<<20))
	err := fit("memory file", m.Path, &m.Bytes, &m.Extent)
	all := m.Bytes
	cfg.Disks = slices.Clone(cfg.Disks)
	paths := []string{m.Path}
	for k := range cfg.Disks {
		d := &cfg.Disks[k]
		if slices.Contains(paths, d.Path) {
			err = cmp.Or(err, fmt.Errorf("disk %s is there twice", d.Path))
		}
		paths = append(paths, d.Path)
		least, what := m.Extent, "disk "+d.Path+": Extent"
		if d.seal = cfg.Seal; d.seal != nil {
			least, what = least+granule, what+" of sealed blocks"
		}
		d.Extent = cmp.Or(d.Extent, least)
		err = cmp.Or(err, fit("disk", d.Path, &d.Bytes, &d.Extent),
			bounded(what, d.Extent, least, extentMax))
		d.keepBlocks = d.Blocks == 0
		d.Blocks = cmp.Or(d.Blocks, max(d.Bytes>>16, 16))
		if d.SlowAfter <= 0 {
			d.SlowAfter = 5 * time.Second
		}
		err = cmp.Or(err, bounded("disk "+d.Path+": Blocks", d.Blocks, 1, entriesMax),
			bounded("disk "+d.Path+": SlowAfter", d.SlowAfter, time.Millisecond, math.MaxInt64))
		all += d.Bytes
	}
	cfg.Blocks = cmp.Or(cfg.Blocks, max(all>>16, 16))
	cfg.Policy = cmp.Or(cfg.Policy, S3FIFO)
	cfg.OpsMax = cmp.Or(cfg.OpsMax, 1024)
	cfg.HoldMax = cmp.Or(cfg.HoldMax, m.Bytes/2)
	return cmp.Or(err, bounded("Blocks", cfg.Blocks, 1, entriesMax),
		bounded("OpsMax", cfg.OpsMax, 1, 1<<20), bounded("HoldMax", cfg.HoldMax, 1, m.Bytes),
		cfg.Policy.check())
}

// fit rounds the bytes of a tier to whole extents.
func fit(tier, path string, bytes, extent *uint64) error {
	if path == "" {
		return fmt.Errorf("no path of a %s", tier)
	}
	if err := bounded(tier+" "+path+": Extent", *extent, 1, extentMax); err != nil {
		return err
	}
	*extent = (*extent + granule - 1) &^ (granule - 1)
	if err := bounded(tier+" "+path+": Bytes", *bytes, *extent, (none-2)<<12-1); err != nil {
		return fmt.Errorf("%w; an Extent is the least", err)
	}
	*bytes -= *bytes % *extent
	return nil
}

// bounded is an error where a number is not from least to most.
func bounded[N int | uint64 | time.Duration](what string, n, least, most N) error {
	if n < least || n > most {
		return fmt.Errorf("%s %v: from %v to %v", what, n, least, most)
	}
	return nil
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
		c.stop(engine.ErrClosed)
		c.ops.Wait()
		close(c.writes)
	}
	err := errors.New("a disk has not answered")
	select {
	case <-c.written:
		err = nil
		c.proofs.Wait() // now that nobody begins one
	case <-time.After(closeLimit):
	}
	if err != nil {
		return fmt.Errorf("close cache: %w for %v: %w", err, closeLimit, engine.ErrUnproven)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.closeFiles(false); err != nil {
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

// closeFiles closes what Open has opened, and may be called again where it fails. failed: Open has,
// and removes what it has made.
func (c *Cache) closeFiles(failed bool) error {
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
		if err := c.disks[len(c.disks)-1].close(failed); err != nil {
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
	return m.close(failed)
}

// enter keeps the files open until exit. It returns false if they are closed.
func (c *Cache) enter() bool { return c.begin() == nil }

func (c *Cache) exit() { c.ops.Done() }

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
	c.freed()
	c.ops.Done()
}

func newID() (id [16]byte) {
	_, _ = rand.Read(id[:]) // never fails: it ends the program instead
	return id
}
