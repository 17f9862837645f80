// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
	"math"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/files"
	"github.com/sluicehq/sluice/internal/testpoint"
	"github.com/sluicehq/sluice/kv/seal"
)

// DiskConfig is one file of the tier on disks.
type DiskConfig struct {
	// Path of the file; the engine needs a backend for files, such as posix.
	Path string
	// Bytes for blocks: the file has them from its making on. One that has fewer gets more, and
	// keeps its blocks; one that has more is made anew.
	Bytes uint64
	// Extent is as MemoryConfig.Extent. Default: that of the memory.
	Extent uint64
	// Blocks is how many blocks it may hold. Default: as many as the file has that is there, else
	// Bytes by 64 KiB.
	Blocks uint64
	// BytesADay bounds what is written in any 24 hours, restarts included; 0: nothing does. When
	// more than half of it is used up, only blocks that were used again are written.
	BytesADay uint64
	// Durable has a block count as stored on the disk only once it would survive a loss of power.
	Durable bool
	// SlowAfter: a disk none of whose reads and writes has ended for so long, while there are some,
	// is not used until one ends. Default 5 s.
	SlowAfter time.Duration

	seal       *seal.Keys // of the Config
	keepBlocks bool       // Blocks is a default: a file that is there keeps its own number
}

// The file of a disk, in little-endian:
//
//	0        header: magic, version, shape, id, CRC-32C
//	2 KiB    what is left of the day's bytes, and when that was
//	4 KiB    records of 64 bytes, or of 128 where they are sealed
//	data     extents, at a multiple of 2 MiB: the page cache keeps records, and not blocks
//
// A record is written behind the bytes of its block, and is empty before they change. It has a CRC
// with the file's id and its own number, so that it is of use in its place alone.
const (
	diskMagic   = "sluiceKD"
	diskVersion = 2
	atBudget    = 2 << 10
	recordBytes = 64 // of one that is not sealed
)

// record is what a disk knows of one block.
type record struct {
	key   Key
	space [16]byte // digest of the namespace
	crc   uint32
	size  uint32
	place uint32
	at    uint32 // the second of the wall clock in which the block was used last; 0: not known
}

// disk is an open file.
type disk struct {
	header
	number uint16
	cfg    DiskConfig
	f      *os.File
	made   bool       // there was no file
	seal   *seal.Keys // nil: what it has is plain
	region *engine.Region
	places *slots
	stages chan *stage   // that are free
	fresh  string        // why the content of the file was not used
	jobs   chan *job     // for its writer
	wake   chan struct{} // has records emptied

	// recording is held while records are written or emptied, also by who waits for the disk: by
	// the two goroutines of it alone.
	recording sync.Mutex

	mu       sync.Mutex // not held across a call of the kernel
	where    []uint32   // by number of the record: the place of its block; none: it is free
	free     []uint32   // numbers of free records, the last one first
	budget   budget
	health   health
	emptying map[blockID]uint32 // records that a restart may find, of blocks that are not there
	emptyErr error              // of the last try to empty them
	lost     []*stage           // in which something may still move
}

// blockID names a block in all of the cache.
type blockID struct {
	key   Key
	space uint16
}

// budget is a bucket of bytes that may be written. A day's bytes are an eighth that may go at once,
// and the rest as time goes by.
type budget struct {
	day  float64 // bytes; 0: no bound
	left float64
	at   time.Time
}

func (b *budget) refill(now time.Time) {
	passed := min(max(now.Sub(b.at), 0), 24*time.Hour) // the clock may jump
	b.left = min(b.left+b.day*7/8*passed.Hours()/24, b.day/8)
	b.at = now
}

// bytes is how a file keeps it.
func (b *budget) bytes() []byte {
	p := binary.LittleEndian.AppendUint64(nil, math.Float64bits(b.left))
	return binary.LittleEndian.AppendUint64(p, uint64(b.at.UnixNano()))
}

// affords reports whether so many bytes may be written now.
func (b *budget) affords(now time.Time, bytes uint64, again bool) bool {
	if b.day == 0 {
		return true
	}
	b.refill(now)
	return b.left >= float64(bytes) && (again || b.left > b.day/16)
}

// health is what the errors of a disk lead to: after some in a row the tier does without it for a
// while, and tries it again then. One that does not answer is not asked for more until it does.
type health struct {
	failed  int // in a row
	last    error
	without time.Time // until when it is not used
	running int       // reads and writes
	since   time.Time // when one of them ended, or the first of them began
}

const (
	failuresMax = 3
	restOfADisk = 10 * time.Second
	// diskLimit is how long a write may take; a read may as long as its Load.
	diskLimit = 30 * time.Second
)

func openDisk(ctx context.Context, number int, cfg DiskConfig) (_ *disk, err error) {
	// requests of a process that was killed hold the lock until the kernel has ended them
	f, made, err := openOwn(ctx, cfg.Path, func(*os.File) int { return 0 })
	if err != nil {
		return nil, fmt.Errorf("open the file of a disk: %w", err)
	}
	d := &disk{number: uint16(number), cfg: cfg, f: f, made: made, seal: cfg.seal,
		header: header{magic: diskMagic, version: diskVersion, shape: shape{entries: cfg.Blocks,
			extent: cfg.Extent, bytes: cfg.Bytes, kept: cfg.keepBlocks, grows: true,
			table: headerBytes, each: recordBytes}},
		jobs: make(chan *job, 1), wake: make(chan struct{}, 1), emptying: map[blockID]uint32{}}
	if d.openStages(); d.seal != nil {
		d.version, d.each = sealedVersion, sealedRecord
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("disk %s: %w", cfg.Path, err), d.close(true))
		}
	}()
	if cfg.Durable {
		// A process that was killed may have left records that were not synced, or, where a sync
		// failed, never will be: their blocks count as durable as soon as they are found. So sync,
		// and read what the disk has.
		if err := unix.Fdatasync(int(f.Fd())); err != nil {
			return nil, os.NewSyscallError("fdatasync", err)
		}
		if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
			return nil, os.NewSyscallError("posix_fadvise", err)
		}
	}
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	var had uint64
	if info.Size() > 0 {
		if had, d.fresh, err = d.check(f); err != nil {
			return nil, err
		}
	}
	// also of a file that is made anew; of a new one it is nothing, and that for long
	var p [16]byte
	if _, err := f.ReadAt(p[:], atBudget); err != nil && err != io.EOF {
		return nil, err
	}
	d.budget = budget{day: float64(cfg.BytesADay),
		left: math.Float64frombits(binary.LittleEndian.Uint64(p[:])),
		at:   time.Unix(0, int64(binary.LittleEndian.Uint64(p[8:])))}
	if !(d.budget.left >= 0) { // also no number
		d.budget.left = 0
	}
	if had == 0 {
		if err := hasRoom(f, d.fileBytes()); err != nil { // before what is there goes
			return nil, err
		}
		// Its header is written last; until then it has the first bytes of one, by which it is a
		// cache's, and the budget.
		d.id = newID()
		first := make([]byte, headerBytes)
		copy(first, diskMagic)
		copy(first[atBudget:], d.budget.bytes())
		if _, err := f.WriteAt(first, 0); err != nil {
			return nil, err
		}
		if err := f.Truncate(headerBytes); err != nil {
			return nil, err
		}
		if err := f.Sync(); err != nil {
			return nil, err
		}
		testpoint.At("cache: disk begun")
		info, err = f.Stat()
	}
	if err == nil && had != d.bytes {
		err = d.grow(info.Size())
	}
	if err != nil {
		return nil, err
	}
	d.where, d.places = make([]uint32, d.entries), newSlots(d.bytes, d.extent)
	return d, nil
}

// grow has a file of so many bytes have those of its header, which it writes.
func (d *disk) grow(from int64) error {
	err := reserveBytes(d.f, d.fileBytes())
	if errors.Is(err, unix.EOPNOTSUPP) {
		err = d.f.Truncate(int64(d.fileBytes()))
	}
	if err != nil {
		return errors.Join(err, d.f.Truncate(from))
	}
	if _, err := d.f.WriteAt(d.encode(), 0); err != nil {
		return err
	}
	if err := d.f.Sync(); err != nil {
		return err
	}
	return syncEntry(d.f)
}

// syncEntry makes the name of a new file durable; a test replaces it.
var syncEntry = files.SyncEntry

// saveBudget has the file know what is left of the day's bytes, before any of those are written
// that were counted by now. The disk's writer calls it.
func (d *disk) saveBudget() error {
	d.mu.Lock()
	b := d.budget
	d.mu.Unlock()
	if b.day == 0 {
		return nil
	}
	d.begins()
	testpoint.At("cache: counts")
	_, err := d.f.WriteAt(b.bytes(), atBudget)
	d.ends(err, err != nil)
	return err
}

func (d *disk) sumOf(p []byte, n uint32) uint32 {
	var place [20]byte
	copy(place[:], d.id[:])
	binary.LittleEndian.PutUint32(place[16:], n)
	return crc32.Update(crc32.Checksum(place[:], castagnoli), castagnoli, p[:d.each-4])
}

// attach calls visit with each record of the file, which says whether it takes the block.
func (d *disk) attach(visit func(n uint32, r *record) bool) error {
	p, room := make([]byte, 1<<20), make([]byte, recordFields)
	opened, unopened, why := 0, []uint32(nil), error(nil)
	for n := uint32(0); uint64(n) < d.entries; {
		part := p[:min(uint64(len(p)), (d.entries-uint64(n))*d.each)]
		if _, err := d.f.ReadAt(part, d.recordAt(n)); err != nil {
			return err
		}
		for ; len(part) > 0; part, n = part[d.each:], n+1 {
			d.where[n] = none
			if binary.LittleEndian.Uint32(part[d.each-4:]) != d.sumOf(part, n) {
				continue
			}
			p, err := d.readRecord(n, part, room)
			if err != nil {
				unopened, why = append(unopened, n), err
				continue
			}
			opened++
			r := record{key: Key(p[:16]), space: [16]byte(p[16:32]),
				crc:   binary.LittleEndian.Uint32(p[32:]),
				size:  binary.LittleEndian.Uint32(p[36:]),
				place: binary.LittleEndian.Uint32(p[40:]),
				at:    binary.LittleEndian.Uint32(p[44:])}
			if r.size == 0 || !d.places.claim(r.place, d.length(uint64(r.size)), 0) {
				if err := d.empty(n); err != nil { // no Remove would
					return err
				}
				continue
			}
			if d.where[n] = r.place; !visit(n, &r) {
				if err := d.empty(n); err != nil {
					return err
				}
				d.release(n)
			}
		}
	}
	if opened == 0 && len(unopened) > 0 {
		return d.unopened(len(unopened), why)
	}
	// What was sealed by a key that has left the file is not to come back with it: its block may be
	// removed or replaced meanwhile, and its place another's.
	for _, n := range unopened {
		if err := d.empty(n); err != nil {
			return err
		}
	}
	d.health.last = why
	d.places.claimed()
	d.free = d.free[:0] // those that were cleared above are in it
	for n := len(d.where) - 1; n >= 0; n-- {
		if d.where[n] == none {
			d.free = append(d.free, uint32(n))
		}
	}
	return nil
}

// empty has no restart find a record.
func (d *disk) empty(n uint32) error {
	_, err := d.f.WriteAt(make([]byte, d.each), d.recordAt(n))
	return err
}

// recordAt is where in the file a record is.
func (d *disk) recordAt(n uint32) int64 { return headerBytes + int64(n)*int64(d.each) }

// mustEmpty notes a record that a restart may find, though it is not to. It is emptied before the
// next job of the writer begins: so there is one of a block at most, and record and place may have
// their next use.
func (d *disk) mustEmpty(b blockID, n uint32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.emptying[b] = n
}

// stays ends mustEmpty: the block is there.
func (d *disk) stays(b blockID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.emptying, b)
}

// unemptied is how many records of some blocks a restart may find, and why, if that is known.
func (d *disk) unemptied(space uint16, keys []Key) (n int, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.emptying) == 0 {
		return 0, nil
	}
	for k := range keys {
		if _, ok := d.emptying[blockID{keys[k], space}]; ok {
			n++
		}
	}
	return n, d.emptyErr
}

// emptySoon has records emptied.
func (d *disk) emptySoon() {
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// emptyRecords empties the records of what has left a disk. The goroutines of the disk call it.
func (c *Cache) emptyRecords(d *disk) (err error) {
	d.recording.Lock()
	defer d.recording.Unlock()
	d.mu.Lock()
	records := maps.Clone(d.emptying)
	d.mu.Unlock()
	if len(records) == 0 {
		return nil
	}
	for b, n := range records {
		d.begins()
		testpoint.At("cache: leaves its disk")
		err = d.empty(n)
		d.ends(err, err != nil)
		if err != nil {
			break
		}
		testpoint.At("cache: cleared")
		d.stays(b) // it is empty
	}
	d.mu.Lock()
	d.emptyErr = err
	d.mu.Unlock()
	c.arrived()
	return err
}

// emptyAgain has records emptied that could not be, and who waits for it look at the disk.
func (c *Cache) emptyAgain() {
	for _, d := range c.disks {
		d.mu.Lock()
		n := len(d.emptying)
		d.mu.Unlock()
		if n > 0 {
			d.emptySoon()
			c.arrived()
		}
	}
}

// reserve takes a place for a block, a record, and what both cost of the budget. affords is false
// where it is that which there is too little of.
func (d *disk) reserve(size uint64, again bool) (place, n uint32, affords, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.budget.affords(time.Now(), d.costOf(size), again) {
		return 0, 0, false, false
	}
	var one [1]uint32
	if len(d.free) == 0 || d.places.reserve(d.length(size), one[:]) == 0 {
		return 0, 0, true, false
	}
	d.budget.left -= float64(d.costOf(size))
	n = d.free[len(d.free)-1]
	d.free = d.free[:len(d.free)-1]
	d.where[n] = one[0]
	return one[0], n, true, true
}

// release ends the use of a record and of its place.
func (d *disk) release(n uint32) {
	d.mu.Lock()
	place := d.where[n]
	d.where[n] = none
	d.free = append(d.free, n)
	d.mu.Unlock()
	d.places.giveBack(place)
}

func (d *disk) placeOf(n uint32) uint32 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.where[n]
}

func (d *disk) write(n uint32, r *record) error {
	p := make([]byte, d.each)
	copy(p, r.key[:])
	copy(p[16:], r.space[:])
	binary.LittleEndian.PutUint32(p[32:], r.crc)
	binary.LittleEndian.PutUint32(p[36:], r.size)
	binary.LittleEndian.PutUint32(p[40:], r.place)
	binary.LittleEndian.PutUint32(p[44:], r.at)
	if d.seal != nil {
		d.seal.Seal(p[:0], p[:recordFields], d.about(n))
	}
	binary.LittleEndian.PutUint32(p[d.each-4:], d.sumOf(p, n))
	_, err := d.f.WriteAt(p, d.recordAt(n))
	return err
}

// usable reports whether the tier uses the disk now.
func (d *disk) usable() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	return now.After(d.health.without) && d.silent(now) == 0
}

// silent is for how long a disk has not answered, where that is too long. The caller holds the
// lock.
func (d *disk) silent(now time.Time) time.Duration {
	if past := now.Sub(d.health.since); d.health.running > 0 && past > d.cfg.SlowAfter {
		return past
	}
	return 0
}

// unused says why the tier does not use the disk now; nil: it does.
func (d *disk) unused() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	if silent := d.silent(now); silent > 0 {
		return fmt.Errorf("disk %s has not answered for %v", d.cfg.Path,
			silent.Round(time.Millisecond))
	}
	if rest := d.health.without.Sub(now); rest > 0 {
		return fmt.Errorf("disk %s is tried again in %v, after: %w", d.cfg.Path,
			rest.Round(time.Millisecond), d.health.last)
	}
	return nil
}

// begins counts a read or a write in.
func (d *disk) begins() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.health.running++; d.health.running == 1 {
		d.health.since = time.Now()
	}
}

// ends counts it out: it worked, where err is nil. answered: it was the disk that ended it.
func (d *disk) ends(err error, answered bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	silent := d.silent(now)
	d.health.running--
	if !answered {
		return
	}
	d.health.since = now
	if err == nil && silent > 0 {
		err = fmt.Errorf("it did not answer for %v", silent.Round(time.Millisecond))
	}
	if err == nil {
		d.health.failed = 0
	}
	d.failedLocked(err)
}

// failed counts an error of a disk. That a transfer had no turn by its class is none.
func (d *disk) failed(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.failedLocked(err)
}

func (d *disk) failedLocked(err error) {
	if err == nil || errors.Is(err, engine.ErrExpired) || errors.Is(err, engine.ErrBusy) {
		return
	}
	d.health.failed++
	d.health.last = err
	if d.health.failed >= failuresMax {
		d.health.without = time.Now().Add(restOfADisk)
	}
}

// close keeps the file, but one that Open has made and not opened.
func (d *disk) close(failed bool) error {
	if err := d.closeStages(); err != nil {
		return err
	}
	if d.region != nil {
		if err := d.region.Close(); err != nil {
			return err
		}
	}
	return closeOwn(d.f, failed && d.made)
}

// attachDisk takes the records of a disk in, behind those of the memory.
func (c *Cache) attachDisk(d *disk) (err error) {
	if err := d.attach(func(n uint32, r *record) bool { return c.adopt(d, n, r) }); err != nil {
		return err
	}
	d.region, err = c.cfg.Engine.RegisterPrivate(fmt.Sprintf("cache disk %x", d.id[:8]),
		driver.Segment{Kind: driver.File, Len: d.bytes, FD: int(d.f.Fd()), FileOff: d.dataOff()})
	if err == nil {
		_, err = c.placeOn(d, granule)
	}
	return err
}

// placeOn is where blocks of a length lie on a disk, for a transfer. An engine whose connection to
// the file was lost, since it had given a transfer up, makes another one.
func (c *Cache) placeOn(d *disk, size uint32) (Place, error) {
	self, err := c.cfg.Engine.Self()
	if err != nil {
		return Place{}, err
	}
	remote, err := self.Remote(d.region.Name())
	return Place{Peer: self, Remote: remote, Stride: granule, Run: d.run(size)}, err
}

// adopt takes a block on a disk in, if no other disk has it, and memory none with other bytes.
func (c *Cache) adopt(d *disk, n uint32, r *record) bool {
	id, ok := c.spaces.adopt(r.space)
	if !ok {
		return false
	}
	x := c.index
	hash := x.hash(&r.key, id)
	s := x.shardOf(hash)
	s.mu.Lock()
	defer s.mu.Unlock()
	i := x.find(s, hash, &r.key, id)
	if i == none {
		if i = x.add(s, hash, &r.key, id); i == none {
			return false
		}
		e := x.entry(i)
		e.crc, e.size, e.state = r.crc, r.size, present
		c.memory.stamps[i] = c.stampOf(r.at)
	}
	e := x.entry(i)
	if e.record != none || e.crc != r.crc || e.size != r.size {
		return false
	}
	c.onDisk(s, i, d, n)
	return true
}

// onDisk notes where on a disk a block is. The caller holds the shard's lock.
func (c *Cache) onDisk(s *shard, i uint32, d *disk, n uint32) {
	e := c.index.entry(i)
	e.disk, e.record = d.number, n
	d.places.own(d.placeOf(n), i)
	c.enqueue(s, i, Disk)
	c.spaces.count(e.space, Disk, 1, int64(e.size))
}

// diskWrite is a block that is to go to a disk; it is pinned.
type diskWrite struct {
	i     uint32
	op    *Op   // that waits for it; nil: none
	lane  *lane // that has let it in, where one has
	claim int64
}

// awaitWrite has an operation wait for the write of a block, where one is under way. The caller
// holds the shard's lock.
func (c *Cache) awaitWrite(s *shard, i uint32, op *Op) {
	if c.index.entry(i).flags&writing == 0 {
		return
	}
	if s.waiting == nil {
		s.waiting = map[uint32][]*Op{}
	}
	op.left.Add(1)
	s.waiting[i] = append(s.waiting[i], op)
}

// offer gives a block in memory to a disk to write. The caller holds the shard's lock. Where too
// many wait already the disk does not take it: a later use offers it again.
func (c *Cache) offer(i uint32, op *Op) {
	e := c.index.entry(i)
	if len(c.disks) == 0 || e.flags&writing != 0 || e.record != none || e.state != present {
		return
	}
	e.pins++
	e.flags |= writing
	if op != nil {
		op.left.Add(1)
	}
	c.offered.Add(1)
	c.offeredBytes.Add(int64(e.size))
	select {
	case c.writes <- diskWrite{i: i, op: op}:
	default:
		c.offeredBytes.Add(-int64(e.size))
		if c.offered.Add(-1) == 0 {
			c.arrived()
		}
		c.stats.unwritten.Add(1)
		e.pins--
		e.flags &^= writing
		op.written()
	}
}
