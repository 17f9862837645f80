// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/sluicehq/sluice/engine"
)

// HintKind is the statement that a hint makes about its blocks.
type HintKind uint8

// The hints. All tiers obey them; none moves a byte that a Load waits for.
const (
	// HintSessionEnd: they will not be used soon. They leave before all other blocks, also those of
	// a lower priority, until they are used again.
	HintSessionEnd HintKind = iota
	// HintRetain keeps them in the cache for Hint.For: in memory, or on a disk that has them. It
	// takes their bytes of the same budget as a Pin does; blocks beyond it are refused. Once more
	// sets the time anew. It ends with the process of the cache, and with Remove.
	HintRetain
	// HintRelease ends HintRetain.
	HintRelease
	// HintDemote has them leave memory as soon as a disk has them and nothing uses them.
	HintDemote
	// HintPrefetch is Prefetch, for at most a minute, in the background. It is refused while a
	// 16th of Config.OpsMax of Prefetches run or wait.
	HintPrefetch
	hintKinds
)

// Hint is knowledge of a program about blocks that no policy can have.
type Hint struct {
	Kind HintKind
	For  time.Duration // of HintRetain: whole seconds, up to an hour
}

// HintResult counts the blocks of a hint.
type HintResult struct {
	Applied int `json:"applied"`
	Missing int `json:"missing"` // the cache does not have them
	Refused int `json:"refused"` // by a budget, or a queue that is full
}

const (
	hintKeysMax       = 64 << 10
	retainMax         = time.Hour // who is gone does not release what it has retained
	prefetchHintLimit = time.Minute
)

// Hint has the cache heed a hint. It waits for nothing. The error says why blocks were refused;
// those that were not are done as asked.
func (n *Namespace) Hint(keys []Key, h Hint) (r HintResult, err error) {
	c, x := n.c, n.c.index
	seconds := math.Ceil(h.For.Seconds())
	switch {
	case len(keys) > hintKeysMax:
		err = fmt.Errorf("%d keys, at most %d: %w", len(keys), hintKeysMax, engine.ErrBounds)
	case h.Kind >= hintKinds:
		err = fmt.Errorf("hint %d: %w", h.Kind, engine.ErrNotSupported)
	case h.Kind == HintRetain && (h.For < time.Second || h.For > retainMax): // another unit?
		err = fmt.Errorf("retain for %v: a second at least, and up to %v at a time: %w", h.For,
			retainMax, engine.ErrBounds)
	case h.Kind == HintDemote && (len(c.cfg.Disks) == 0 || c.space(n.id).flow() == MemoryOnly):
		err = errNoDisk
	}
	if err != nil {
		return HintResult{Refused: len(keys)}, fmt.Errorf("hint: %w", err)
	}
	if err := c.begin(); err != nil { // behind its end nobody takes what HintDemote offers
		return HintResult{Refused: len(keys)}, fmt.Errorf("hint: %w", err)
	}
	defer c.ops.Done()
	// from the end of the chain on, so that its head goes last
	x.each(n.id, keys, true, func(s *shard, _ int, i uint32, _ uint64) {
		if !c.has(i) {
			r.Missing++
			return
		}
		var refused error
		switch h.Kind {
		case HintSessionEnd:
			for t := range tiers {
				if x.entry(i).flags&(queued<<t) != 0 {
					c.queuesOf(s, i, t).letGoFirst(i)
				}
			}
		case HintRetain:
			refused = c.retain(i, c.now.Load()+uint32(seconds))
		case HintRelease:
			c.unretain(i)
		case HintDemote:
			refused = c.demote(s, i)
		}
		if refused != nil {
			r.Refused++
			err = fmt.Errorf("hint: %w", refused)
			return
		}
		r.Applied++
	})
	if h.Kind == HintRetain {
		c.stats.refusedHints.Add(uint64(r.Refused))
	}
	if h.Kind == HintPrefetch && r.Missing > 0 { // of which the tier below may have some
		for _, f := range n.Match(keys).Blocks {
			if f == InObject {
				r.Applied, r.Missing = r.Applied+1, r.Missing-1
			}
		}
	}
	if h.Kind == HintPrefetch && r.Applied > 0 {
		most := int32(max(1, c.cfg.OpsMax/16)) // nothing bounds the hints of a client by their end
		_, err := n.beginPrefetch(context.Background(), keys, prefetchHintLimit, most)
		if err != nil {
			return HintResult{Missing: r.Missing, Refused: r.Applied}, fmt.Errorf("hint: %w", err)
		}
	}
	return r, err
}

// demote takes a block out of memory once a disk has it. The caller holds the shard's lock.
func (c *Cache) demote(s *shard, i uint32) error {
	e := c.index.entry(i)
	if e.slot == none {
		return nil
	}
	e.flags |= demoting
	if c.offer(i, nil); e.record == none && e.flags&writing == 0 {
		e.flags &^= demoting
		return fmt.Errorf("%d blocks wait for the disks: %w", c.offered.Load(), engine.ErrBusy)
	}
	c.leaveForDisk(s, i)
	return nil
}

// leaveForDisk has a block leave memory that HintDemote was for, where a disk has it and nothing
// uses it. The caller holds the shard's lock.
func (c *Cache) leaveForDisk(s *shard, i uint32) {
	e := c.index.entry(i)
	if e.flags&demoting == 0 || e.pins > 0 || e.state != present || e.record == none ||
		e.flags&queued == 0 {
		return
	}
	e.flags &^= demoting
	c.leaveMemory(s, i)
}
