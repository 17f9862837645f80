// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"encoding/binary"
	"math"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
	"github.com/sluicehq/sluice/kv/cluster/placement"
)

// Cost is what a Load of a chain would take, by what this process has measured.
type Cost struct {
	Blocks int           // of nodes that may be asked; the others would be missed
	Bytes  uint64        // of those, with blocks as large as those that were moved last
	Time   time.Duration // until the last of them is there
	// Measured: Time follows from Loads of these nodes, and of the tiers that Match has found.
	// Otherwise some of it is what other nodes take, or what 1 GiB/s would.
	Measured bool
}

// Source is a node of which a Load would ask some blocks, one behind the other, first.
type Source struct {
	Node   string
	Blocks int
	Bytes  uint64
	Time   time.Duration // that the node takes for all that it is asked for
	at     int           // place in the layout
}

// Cost returns what a Load of a chain would take now, and appends its sources to dst, in the order
// of the keys. It takes it that the nodes have all of them, asks nobody, and waits for nothing.
func (s *Space) Cost(dst []Source, keys []cache.Key) (c Cost, sources []Source) {
	lay := s.c.layout.Load()
	w := s.way(lay, keys)
	defer w.free()
	c.Measured, sources = true, dst
	for k := range w.runs {
		r := &w.runs[k]
		if !r.chosen {
			continue
		}
		last := len(sources) - 1
		if last < len(dst) || sources[last].at != r.source {
			took, _, measured := lay.nodes[r.source].expect(w.bytes[r.source])
			c.Measured = c.Measured && measured
			c.Time = max(c.Time, took)
			sources = append(sources, Source{Node: lay.nodes[r.source].name, Time: took,
				at: r.source})
			last++
		}
		n, bytes := r.to-r.from, sum(r.bytes)
		sources[last].Blocks += n
		sources[last].Bytes += bytes
		c.Blocks += n
		c.Bytes += bytes
	}
	c.Time = s.c.whole(c.Bytes, c.Time)
	return c, sources
}

// even is how a whole Load stands in a curve that takes as long as the slowest node.
const even = time.Second

// whole returns how long a Load of several nodes takes of which the slowest takes so long. They and
// this process may be in each other's way.
func (c *Cluster) whole(bytes uint64, slowest time.Duration) time.Duration {
	more, _, known := c.wholes.at(float64(bytes))
	if !known {
		return slowest
	}
	return time.Duration(float64(slowest) * min(max(more/float64(even), 0.5), 4))
}

// slowest returns how long the slowest of the nodes is expected to take.
func (w *way) slowest() (took time.Duration, bytes uint64) {
	for _, o := range w.asked {
		one, _, _ := w.lay.nodes[o].expect(w.bytes[o])
		took, bytes = max(took, one), bytes+sum(w.bytes[o])
	}
	return took, bytes
}

// Estimate asks the nodes that have the blocks what a Load of them would cost, as
// serve.Space.Estimate does. Time is until the last node is done; Times are of the slowest node of
// each tier, as this process has measured it where it has.
func (s *Space) Estimate(ctx context.Context, keys []cache.Key) (cache.Estimate, error) {
	l := s.c.limit(ctx)
	defer l.free()
	_, at, err := s.find(l.nodes, keys)
	if err != nil {
		return cache.Estimate{}, err
	}
	all := cache.Estimate{Measured: true}
	parts := map[*node][]cache.Key{}
	for k, n := range at {
		if n == nil {
			all.Missing++
			continue
		}
		parts[n] = append(parts[n], keys[k])
	}
	var mu sync.Mutex
	var nodes sync.WaitGroup
	for n, mine := range parts {
		nodes.Go(func() {
			var e cache.Estimate
			_, err := s.ask(l, n, func(_ *conn, space *serve.Space) (err error) {
				e, err = space.Estimate(l.nodes, mine)
				return err
			})
			if err != nil || !isOf(&e, len(mine)) {
				e = cache.Estimate{Missing: len(mine), Measured: true}
			}
			for t, bytes := range e.Bytes {
				took, _, measured := n.expect(tierBytes(cache.Tier(t), bytes))
				if measured && bytes > 0 {
					e.Times[t] = took
				}
			}
			mu.Lock()
			defer mu.Unlock()
			for t := range e.Bytes {
				all.Blocks[t] += e.Blocks[t]
				all.Bytes[t] += e.Bytes[t]
				all.Times[t] = max(all.Times[t], e.Times[t])
			}
			all.Missing += e.Missing
			all.Disks = append(all.Disks, e.Disks...)
			all.Time = max(all.Time, e.Times[cache.Memory]+e.Times[cache.Disk])
			all.Measured = all.Measured && e.Measured
		})
	}
	nodes.Wait()
	return all, nil
}

// isOf reports whether an estimate of a node is of so many blocks.
func isOf(e *cache.Estimate, blocks int) bool {
	for _, n := range [...]int{e.Blocks[cache.Memory], e.Blocks[cache.Disk], e.Missing} {
		if n < 0 || n > blocks {
			return false
		}
		blocks -= n
	}
	return blocks == 0
}

func tierBytes(t cache.Tier, bytes uint64) (b [2]uint64) {
	b[t] = bytes
	return b
}

// assumedRate is what Cost takes, in bytes a second, before a Load of any node was measured.
const assumedRate = 1 << 30

// expect returns how long a node usually takes for a Load of so many bytes of each tier, and how
// long one of the longest of its last Loads would have taken.
func (n *node) expect(bytes [2]uint64) (took, late time.Duration, measured bool) {
	usual, most, measured := 0.0, 0.0, true
	for t, b := range bytes {
		if b == 0 && (t == int(cache.Disk) || bytes[cache.Disk] > 0) {
			continue
		}
		mine, longest, known := n.curves[t].at(float64(b))
		if !known {
			measured = false
			if mine, longest, known = n.c.curves[t].at(float64(b)); !known {
				mine += float64(b) / assumedRate * 1e9
				longest = mine
			}
		}
		usual, most = usual+mine, most+longest
	}
	// How busy the node is now, against how it was in those Loads: what it says of itself makes it
	// twice as good or as bad at most, and nothing if it always says the same.
	f := min(max((1+n.busy(0))/(1+n.usual.get()), 0.5), 2)
	const top = math.MaxInt64 / 8 // of what others multiply
	return time.Duration(min(usual*f, top)), time.Duration(min(most*f, top)), measured
}

// busy returns how many requests the node works on: as it has told, or those of this process, of
// which so many are the caller's.
func (n *node) busy(mine int64) float64 {
	return float64(max(n.running.Load()-mine, n.told.Load(), 0))
}

// learn has the estimates count one Load of a node: of so many bytes, 0 for a question.
func (n *node) learn(bytes [2]uint64, took time.Duration, busy float64) {
	if bytes[cache.Memory] > 0 && bytes[cache.Disk] > 0 { // how much of it each took is not known
		return
	}
	t := cache.Memory
	if bytes[cache.Disk] > 0 {
		t = cache.Disk
	}
	n.curves[t].add(bytes[t], took)
	n.c.curves[t].add(bytes[t], took)
	n.usual.add(busy)
}

// mean is a moving mean.
type mean struct{ bits atomic.Uint64 }

func (m *mean) get() float64 { return math.Float64frombits(m.bits.Load()) }

// add counts one measurement. Of two at a time one may be lost.
func (m *mean) add(v float64) {
	now := m.get()
	m.bits.Store(math.Float64bits(now + (v-now)/8))
}

// curve is how long Loads take by their bytes: the median of the last ones of about each size, and
// straight lines between those.
type curve struct {
	points atomic.Pointer[[]point]
	mu     sync.Mutex
	recent [65]*recent // by the bits of a size: about as large
}

// point is a size and its times, in bytes and nanoseconds.
type point struct{ bytes, took, late float64 }

// recent are the last Loads of about one size.
type recent struct {
	bytes, took [recentMax]float64
	n           int
	point       point
}

const (
	recentMax = 16
	// The longest of fewer than lateMin Loads says little: one is late then that takes lateUnknown
	// times the median.
	lateMin     = 8
	lateUnknown = 10
)

func (c *curve) add(bytes uint64, took time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	size := bits.Len64(bytes)
	r := c.recent[size]
	if r == nil {
		r = &recent{}
		c.recent[size] = r
	}
	r.bytes[r.n%recentMax], r.took[r.n%recentMax] = float64(bytes), float64(took)
	r.n++
	b, t := r.bytes, r.took // copies
	n := min(r.n, recentMax)
	slices.Sort(b[:n])
	slices.Sort(t[:n])
	r.point = point{b[n/2], t[n/2], t[n-1]}
	if n < lateMin {
		r.point.late = lateUnknown * t[n/2]
	}
	var points []point
	for _, r := range c.recent {
		if r != nil {
			points = append(points, r.point)
		}
	}
	c.points.Store(&points)
}

// at returns the times of a size. Where no larger Load was measured they grow as the largest one
// has taken more than the smallest, and known says that there was more than questions.
func (c *curve) at(bytes float64) (took, late float64, known bool) {
	list := c.points.Load()
	if list == nil {
		return 0, 0, false
	}
	p := *list
	k, end := 0, len(p)
	for k < end {
		if mid := (k + end) / 2; p[mid].bytes < bytes {
			k = mid + 1
		} else {
			end = mid
		}
	}
	if k == 0 {
		return p[0].took, p[0].late, true
	}
	a, b := p[k-1], point{}
	if k < len(p) {
		b = p[k]
	} else if a.bytes == 0 {
		return a.took, a.late, false
	} else {
		a, b = p[0], a
		if a.bytes == b.bytes || a.took > b.took {
			a = point{}
		}
	}
	part := (bytes - a.bytes) / (b.bytes - a.bytes)
	return a.took + part*(b.took-a.took), a.late + part*max(b.late-a.late, 0), true
}

// known is what a process knows of the blocks of a namespace.
type known struct {
	size   atomic.Uint64          // bytes of a block that was moved last
	onDisk [1 << 13]atomic.Uint64 // hashes of blocks that Match has found on disks alone
	owned  [1 << 8]owned
	told   [1 << 11]atomic.Pointer[told] // by routers
}

// told is a node that has a block, as a router says.
type told struct {
	block cache.Key
	node  uint64
}

// noteHolder keeps which node has a block, as a router says.
func (n *known) noteHolder(block cache.Key, node uint64) {
	n.told[hashOf(&block)>>53].Store(&told{block, node})
}

// appendHolder appends the node that a router has told of for a block, if there is one.
func (n *known) appendHolder(dst []uint64, block cache.Key) []uint64 {
	if t := n.told[hashOf(&block)>>53].Load(); t != nil && t.block == block {
		dst = append(dst, t.node)
	}
	return dst
}

// owned is who owns a segment, in the layout of a number.
type owned struct {
	mu     sync.Mutex // guards what follows
	layout uint64
	head   cache.Key
	copies int // 0: it is of none
	list   []int
}

// owners appends the nodes that own a segment to dst; where n is not nil, it keeps them.
func (n *known) owners(dst []int, lay *layout, head cache.Key, copies int) []int {
	if n == nil {
		return placement.Owners(dst, lay.bids, head, copies)
	}
	o := &n.owned[hashOf(&head)>>56]
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.layout != lay.number || o.head != head || o.copies != copies {
		o.layout, o.head, o.copies = lay.number, head, copies
		o.list = placement.Owners(o.list[:0], lay.bids, head, copies)
	}
	return append(dst, o.list...)
}

func hashOf(key *cache.Key) uint64 {
	return (binary.LittleEndian.Uint64(key[:])*0x9e3779b97f4a7c15 ^
		binary.LittleEndian.Uint64(key[8:])) * 0xbf58476d1ce4e5b9
}

func (n *known) find(key *cache.Key) (at *atomic.Uint64, hash uint64) {
	hash = hashOf(key) | 1
	return &n.onDisk[hash>>51], hash
}

// note takes in where a block is.
func (n *known) note(key *cache.Key, f cache.Found) {
	at, hash := n.find(key)
	if f.There() && f&cache.InMemory == 0 {
		at.Store(hash)
	} else if at.Load() == hash {
		at.Store(0)
	}
}

// bytes returns how many bytes a Load of blocks of a size would move from each tier.
func (n *known) bytes(keys []cache.Key, size uint64) (b [2]uint64) {
	disk := 0
	for k := range keys {
		if at, hash := n.find(&keys[k]); at.Load() == hash {
			disk++
		}
	}
	b[cache.Memory], b[cache.Disk] = uint64(len(keys)-disk)*size, uint64(disk)*size
	return b
}
