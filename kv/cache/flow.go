// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/engine"
)

// Flow says when the blocks of a namespace go to the disks.
type Flow uint8

// The flows.
const (
	WriteThrough Flow = iota // as they are stored
	// WriteBack: when they are among the eighth of the blocks of their namespace that leaves memory
	// next, and less than an eighth of the memory, or of the quota, is free. Blocks that the disks
	// cannot take in time leave memory without having been written (Stats.Unwritten).
	WriteBack
	MemoryOnly // never; blocks that are on a disk leave it
	flows_
)

var flowNames = [flows_]string{"write-through", "write-back", "memory-only"}

// String returns the flow's name, as ParseFlow reads it.
func (f Flow) String() string { return flowNames[min(f, flows_-1)] }

// ParseFlow reads the name of a flow; empty: WriteThrough.
func ParseFlow(name string) (Flow, error) {
	if f := slices.Index(flowNames[:], name); f >= 0 {
		return Flow(f), nil
	}
	if name == "" {
		return WriteThrough, nil
	}
	return 0, fmt.Errorf("flow %q: there are write-through, write-back and memory-only", name)
}

// flows are the clock of the cache, and the state of the work that follows it.
//
// The clock counts seconds since the host was booted, so no jump of the wall clock changes the age
// of a block. A stamp is the second in which a block was used last. Stamps lie in the memory file:
// the age counts on over a restart. A block that Open finds on a disk alone has an age by the wall
// clock instead: its record has the time of its last use before it was written. A time in the
// future counts as an age of 0.
type flows struct {
	timing       sync.Mutex    // of the keeper's work, which tests have done, too
	now          atomic.Uint32 // the clock
	wake         chan struct{} // has the keeper work before the next second
	useless      [tiers]atomic.Int64
	sweepAt      uint32 // entry; the keeper's, as the next one
	catchAt      uint32
	catchAgain   atomic.Bool
	offeredBytes atomic.Int64 // of the blocks on their way to the disks
}

// clockBase is the clock's value when the host boots: blocks may be older than that.
const clockBase = 1 << 30

const (
	sweepMax = 64 << 10 // entries that the keeper looks at in a second
	trimMax  = 4 << 10  // blocks that one change of a quota lets go at once
	ttlMax   = 10 * 365 * 24 * time.Hour
)

func bootSeconds() uint32 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return clockBase // it does not fail
	}
	return clockBase + uint32(ts.Sec)
}

func (c *Cache) openFlows() {
	c.catchAt = uint32(len(c.memory.entries)) // there is nothing to catch up with
	c.wake = make(chan struct{}, 1)
	c.prefetching = make(chan struct{}, 1)
	c.retention = make([]map[uint32]retention, len(c.index.shards))
	c.paces.paces = make([]pace, len(c.cfg.Disks))
	c.now.Store(c.readClock())
}

func (c *Cache) readClock() uint32 {
	if c.cfg.clock != nil {
		return c.cfg.clock()
	}
	return bootSeconds()
}

// stampOf converts the time in a disk's record to a stamp.
func (c *Cache) stampOf(wall uint32) uint32 {
	if wall == 0 {
		return c.now.Load()
	}
	return uint32(max(int64(c.now.Load())-time.Now().Unix()+int64(wall), 1))
}

// wallOf is the second of the wall clock in which a pinned block was used last.
func (c *Cache) wallOf(i uint32) uint32 {
	s := c.index.shardFor(i)
	s.mu.Lock()
	defer s.mu.Unlock()
	return uint32(time.Now().Unix()) - c.ageOf(i)
}

func (c *Cache) ageOf(i uint32) uint32 {
	now, stamp := c.now.Load(), c.memory.stamps[i]
	if stamp > now { // of another clock
		return 0
	}
	return now - stamp
}

func (s *space) flow() Flow { return Flow(s.flowNow.Load()) }

func (c *Cache) space(id uint16) *space { return &c.spaces.list[id] }

func (c *Cache) flowOf(i uint32) Flow { return c.space(c.index.entry(i).space).flow() }

// expired reports whether a block was not used for longer than its namespace's TTL. One that a hint
// retains is not expired. The caller holds the shard's lock.
func (c *Cache) expired(i uint32) bool {
	e := c.index.entry(i)
	ttl := c.space(e.space).ttl.Load()
	return ttl != 0 && c.ageOf(i) > ttl && !c.isRetained(i)
}

// Check says what Set would refuse of options.
func (o *NamespaceOptions) Check() error {
	switch {
	case o.Priority < 0 || o.Priority >= priorities:
		return fmt.Errorf("priority %d, from 0 to %d: %w", o.Priority, priorities-1,
			engine.ErrBounds)
	case o.Flow >= flows_:
		return fmt.Errorf("flow %d: %w", o.Flow, engine.ErrBounds)
	case o.TTL < 0 || o.TTL > ttlMax:
		return fmt.Errorf("TTL %v, from 0 to %v: %w", o.TTL, ttlMax, engine.ErrBounds)
	}
	return nil
}

// Set changes all options of the namespace but its geometry, which is ignored. Blocks over the new
// quota leave at once: up to 4,096 a tier before Set returns, the others in the background.
func (n *Namespace) Set(o NamespaceOptions) error {
	if _, err := n.c.set(func(k int) bool { return k == int(n.id) }, &o); err != nil {
		return fmt.Errorf("namespace %q: %w", n.name, err)
	}
	return nil
}

// Set is Namespace.Set for all namespaces of a name, whatever their geometry. It returns how many
// there are.
func (c *Cache) Set(name string, o NamespaceOptions) (int, error) {
	n, err := c.set(func(k int) bool { return c.spaces.list[k].name() == name }, &o)
	if err != nil {
		return 0, fmt.Errorf("namespace %q: %w", name, err)
	}
	return n, nil
}

func (c *Cache) set(which func(k int) bool, o *NamespaceOptions) (n int, err error) {
	if err := o.Check(); err != nil {
		return 0, err
	}
	if !c.enter() {
		return 0, fmt.Errorf("cache: %w", engine.ErrClosed)
	}
	defer c.exit()
	c.spaces.mu.Lock()
	for k := range c.spaces.list {
		if c.spaces.list[k].known && which(k) {
			c.assign(k, *o)
			n++
		}
	}
	c.spaces.mu.Unlock()
	c.trim(trimMax)
	c.wakeKeeper()
	return n, nil
}

// wakeKeeper makes keepTime work now, not at its next tick.
func (c *Cache) wakeKeeper() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// keepTime is the keeper's goroutine: it advances the clock, and does the work of each second.
func (c *Cache) keepTime() {
	t := time.NewTicker(time.Second)
	defer t.Stop()
	for {
		select {
		case <-c.life.Done():
			return
		case <-c.wake:
			c.timing.Lock()
			for c.trim(trimMax) && c.life.Err() == nil {
			}
			c.writeBack()
			c.timing.Unlock()
			c.freed() // a quota may be larger
		case <-t.C:
			c.second(c.readClock())
		}
	}
}

// second is the story of a second of the cache's clock. Its work is bounded.
func (c *Cache) second(now uint32) {
	c.timing.Lock()
	defer c.timing.Unlock()
	c.now.Store(now)
	c.endRetentions()
	c.sweep()
	c.catchUp()
	c.trim(trimMax)
	c.writeBack()
	c.emptyAgain()
	c.emitLost()
}

// sweep visits a part of the table. It forgets expired blocks, and takes blocks of namespaces that
// are in memory only from the disks.
func (c *Cache) sweep() {
	if !c.spaces.any(func(s *space) bool {
		return s.ttl.Load() != 0 || s.flow() == MemoryOnly && s.blocks[Disk].Load() > 0
	}) {
		return
	}
	c.walk(&c.sweepAt, func(s *shard, i uint32) bool {
		switch e := c.index.entry(i); {
		case e.state != present || e.pins > 0:
		case c.expired(i):
			c.stats.expired.Add(1)
			c.discard(s, i)
		case e.record != none && c.flowOf(i) == MemoryOnly && !c.keeps(i, Disk):
			c.leaveDisk(s, i)
		}
		return true
	})
	if c.sweepAt == uint32(len(c.index.memory.entries)) {
		c.sweepAt = 0
	}
}

// walk visits a part of the table from an entry on, under the locks of the shards, and not beyond
// its end, nor the entry at which visit returns false.
func (c *Cache) walk(at *uint32, visit func(s *shard, i uint32) bool) {
	const portion = 1 << 10 // entries for which a shard is locked once
	all := uint32(len(c.index.memory.entries))
	more := true
	for end := min(all, *at+sweepMax); more && *at < end; {
		s := c.index.shardFor(*at)
		stop := min(*at+portion, s.first+s.n, end)
		s.mu.Lock()
		for more && *at < stop {
			if more = visit(s, *at); more {
				*at++
			}
		}
		s.mu.Unlock()
	}
}

// catchUp offers to the disks what a process before has left in memory alone, of namespaces that
// write through, in parts for which the disks have room. It begins anew when a namespace is opened
// of which there is something.
func (c *Cache) catchUp() {
	if c.catchAgain.Swap(false) {
		c.catchAt = 0
	}
	c.walk(&c.catchAt, func(_ *shard, i uint32) bool {
		e := c.index.entry(i)
		if e.slot != none && c.flowOf(i) == WriteThrough && !c.space(e.space).unopened.Load() {
			c.offer(i, nil)
		}
		return len(c.writes) < writesMax/2
	})
}

// trim lets blocks of lanes go that are over their quota: up to most of each tier. It reports
// whether there is more to do, and something that may go.
func (c *Cache) trim(most int) (more bool) {
	for t := range tiers {
		n := 0
		for id, l := range *c.spaces.lanes.Load() {
			for l.over(t) > 0 && n < most && c.evictOwn(t, id) {
				n++
			}
		}
		more = more || n == most
	}
	return more
}

// writeBack offers the oldest blocks to the disks whose namespaces write back, where memory is
// short.
func (c *Cache) writeBack() {
	if !c.spaces.any(func(s *space) bool { return s.flow() == WriteBack }) {
		return
	}
	room := c.places.stats()
	for id, l := range *c.spaces.lanes.Load() {
		quota, has := l.quota[Memory].Load(), uint64(l.bytes[Memory].Load())
		if room.Bytes < room.Room/8*7 && (quota == 0 || has < quota/8*7) {
			continue
		}
		for k := range c.index.shards {
			s := &c.index.shards[k]
			s.mu.Lock()
			if id < len(s.lanes) && s.lanes[id][Memory] != nil {
				s.lanes[id][Memory].oldest(func(i uint32) {
					if c.flowOf(i) == WriteBack && len(c.writes) < writesMax/2 {
						c.offer(i, nil)
					}
				})
			}
			s.mu.Unlock()
		}
	}
}

// overrun returns why a Store of so many blocks must be refused: blocks that wait for the disks
// hold three quarters of the memory.
func (c *Cache) overrun(id uint16, blocks int, length uint32) error {
	room := c.places.stats()
	if room.Bytes+uint64(blocks)*uint64(length)*granule <= room.Room {
		return nil
	}
	waiting, bytes := c.offered.Load(), c.offeredBytes.Load()
	if c.space(id).flow() == WriteThrough && (waiting > writesMax/4*3 ||
		bytes > int64(c.cfg.Memory.Bytes/4*3)) {
		return fmt.Errorf("%d blocks of %d bytes wait for the disks: %w", waiting, bytes,
			engine.ErrBusy)
	}
	return nil
}

var errNoDisk = errors.New("the cache has no disk that the namespace may use")
