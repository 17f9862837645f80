// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"math"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/engine"
)

// paces are the measured rates of disks and copies.
type paces struct {
	paces []pace        // of each disk
	copy  meanRate      // of whole Loads from memory, which verify while they copy
	loads atomic.Uint32 // of which one of sixteen is measured
}

// pace is the measured rate of one disk, and its queue.
type pace struct {
	reads   meanRate
	waiting atomic.Int64 // bytes that are read from it now
}

// meanRate is a moving mean of bytes a second; 0: nothing was measured.
type meanRate struct{ bits atomic.Uint64 }

func (r *meanRate) get() float64 { return math.Float64frombits(r.bits.Load()) }

// add counts one measurement. Of two at a time one may be lost.
func (r *meanRate) add(bytes uint64, took time.Duration) {
	if took <= 0 {
		return
	}
	now := float64(bytes) / took.Seconds()
	if mean := r.get(); mean > 0 {
		now = mean + (now-mean)/8
	}
	r.bits.Store(math.Float64bits(now))
}

// Rates that Estimate takes before it has measured any.
const (
	diskAssumed = 1 << 30
	copyAssumed = 4 << 30
)

func (r *meanRate) orElse(assumed float64) (mean float64, measured bool) {
	if mean = r.get(); mean > 0 {
		return mean, true
	}
	return assumed, false
}

// timedRead is finish of a read from a disk, and open of what it has brought. One of a Prefetch,
// which waits behind those of Loads, does not measure the disk.
func (c *Cache) timedRead(ctx context.Context, d *disk, t *engine.Transfer, class engine.Class,
	bytes uint64, open func() error) (err error, proved bool) {
	p := &c.paces.paces[d.number]
	p.waiting.Add(int64(bytes))
	defer p.waiting.Add(-int64(bytes))
	began := time.Now()
	if err, proved = c.finish(ctx, t); err == nil {
		err = open()
	}
	if err == nil && class == engine.SwapIn {
		p.reads.add(bytes, time.Since(began))
	}
	return err, proved
}

// sample learns from one Load of sixteen, but not from one that has waited for a disk or for the
// rate of its namespace, that failed, or of little.
func (n *Namespace) sample(op *Op, size uint64, took time.Duration) {
	if n.c.loads.Add(1)%16 != 1 || op.fromDisk || op.err != nil ||
		n.c.spaces.rates[n.id].Load() != nil {
		return
	}
	var bytes uint64
	for _, o := range op.outcomes {
		if o == Done {
			bytes += size
		}
	}
	if bytes >= 256<<10 {
		n.c.copy.add(bytes, took)
	}
}

// Estimate is the cost of a Load of blocks.
type Estimate struct {
	Blocks  [2]int           // by the tier that they would come from
	Bytes   [2]uint64        // of those
	Missing int              // blocks: not there, or on a disk that is left alone now
	Time    time.Duration    // of all
	Times   [2]time.Duration // of each tier: for the disks reading and copying
	Disks   []DiskEstimate   // those that are read from
	// Measured: all rates are moving means. Otherwise some are assumed: 1 GiB/s of a disk, 4 GiB/s
	// of copies.
	Measured bool
}

// DiskEstimate is the part of one disk.
type DiskEstimate struct {
	Path  string
	Bytes uint64
	Queue uint64        // bytes that others read from it now, before these
	Time  time.Duration // of reading
}

// Estimate returns the cost of a Load of blocks, by the rates that were measured, and the queue of
// each disk now. It moves nothing, and is no use of the blocks.
func (n *Namespace) Estimate(keys []Key) (e Estimate) {
	c, x := n.c, n.c.index
	if !c.enter() {
		e.Missing = len(keys)
		return e
	}
	defer c.exit()
	usable := make([]bool, len(c.disks))
	for k, d := range c.disks {
		usable[k] = d.usable()
	}
	byDisk := make([]uint64, len(c.disks))
	x.each(n.id, keys, false, func(_ *shard, _ int, i uint32, _ uint64) {
		if !c.has(i) {
			e.Missing++
			return
		}
		b := x.entry(i)
		t := Memory
		if b.slot == none {
			if t = Disk; !usable[b.disk] {
				e.Missing++
				return
			}
			byDisk[b.disk] += uint64(b.size)
		}
		e.Blocks[t]++
		e.Bytes[t] += uint64(b.size)
	})
	took := func(bytes uint64, r float64) time.Duration {
		return time.Duration(min(float64(bytes)/r*float64(time.Second), math.MaxInt64/4))
	}
	copying, measured := c.copy.orElse(copyAssumed)
	for k, bytes := range byDisk {
		if bytes == 0 {
			continue
		}
		p := &c.paces.paces[k]
		r, known := p.reads.orElse(diskAssumed)
		queue := uint64(max(0, p.waiting.Load()))
		d := DiskEstimate{c.disks[k].cfg.Path, bytes, queue, took(queue+bytes, r)}
		measured = measured && known
		e.Disks = append(e.Disks, d)
		e.Times[Disk] += d.Time
	}
	e.Measured = measured
	e.Times[Memory] = took(e.Bytes[Memory], copying)
	e.Times[Disk] += took(e.Bytes[Disk], copying)
	e.Time = e.Times[Memory] + e.Times[Disk]
	return e
}

// Slower reports for each tier whether its blocks would come later than a model that computes so
// many blocks a second has computed them.
func (e *Estimate) Slower(blocksASecond float64) (slower [2]bool) {
	for t := range tiers {
		slower[t] = e.Times[t].Seconds()*blocksASecond > float64(e.Blocks[t])
	}
	return slower
}
