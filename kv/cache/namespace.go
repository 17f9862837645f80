// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/sluicehq/sluice/engine"
)

// Key names the content of a block within its namespace: the tokens in it and all before them. It
// is the hash that the serving engine has, or KeyOf of it where that is no 16 bytes.
type Key [16]byte

// KeyOf makes a Key of a hash, or of any bytes that name a block.
func KeyOf(name []byte) Key {
	sum := sha256.Sum256(name)
	return Key(sum[:16])
}

// NamespaceOptions say what a namespace is and may have.
type NamespaceOptions struct {
	// Geometry is the digest of what two processes must agree on to share a block: the model, its
	// layout, the salt of a tenant. Namespaces of one name and different geometries share nothing.
	Geometry [32]byte
	// BytesASecond bounds what Loads and Stores copy together; 0: nothing does. 8 MiB may come at
	// once. What has to wait for longer than its ctx is Late.
	BytesASecond uint64
	// Priority: blocks of a lower one go first. From 0 to 7.
	Priority int
	// Quota bounds the bytes in a tier; 0: the tier does.
	Quota [2]uint64
	// Flow says when blocks go to the disks. Default WriteThrough.
	Flow Flow
	// TTL: a block that was neither used nor stored for longer is not found any more, and goes.
	// Whole seconds; 0: there is no such time.
	TTL time.Duration
	// HoldMax bounds the bytes of slots that Pins and Retain hints of the namespace keep. Default:
	// an eighth of the memory.
	HoldMax uint64
}

// Namespace is a set of blocks that only those find who name it.
type Namespace struct {
	c      *Cache
	id     uint16
	name   string
	closed sync.Once
}

// DigestOf is the digest by which a cache knows a namespace.
func DigestOf(name string, geometry [32]byte) [16]byte {
	sum := sha256.Sum256(append(geometry[:], name...))
	return [16]byte(sum[:16])
}

// Name returns the name; "": a disk knows its digest alone.
func (n *Namespace) Name() string { return n.name }

// Digest returns what DigestOf has made of its name and its geometry.
func (n *Namespace) Digest() [16]byte { return n.c.spaces.digest(n.id) }

// Close says that the program uses the Namespace no more. The name of one that has no blocks makes
// way for a new one then, once the cache has 1,024. It is not needed otherwise. Pins of it must
// have ended, and its operations.
func (n *Namespace) Close() {
	n.closed.Do(func() {
		n.c.spaces.mu.Lock()
		defer n.c.spaces.mu.Unlock()
		n.c.spaces.list[n.id].users--
	})
}

// space is a namespace as all of the cache knows it.
type space struct {
	shown  atomic.Pointer[string] // the name; nil: none yet
	digest [16]byte
	lane   atomic.Int32 // it changes under the locks of all shards
	own    int          // the lane that it has, or had, for its quota; 0: none
	known  bool
	users  int // Namespaces that are not closed
	blocks [tiers]atomic.Int64
	bytes  [tiers]atomic.Int64
	// A process before has left blocks in memory, and nobody has opened the namespace since, so
	// that its flow is not known.
	unopened atomic.Bool

	flowNow atomic.Uint32
	ttl     atomic.Uint32 // seconds; 0: none
	holdMax atomic.Uint64 // bytes; 0: an eighth of the memory
	holds   atomic.Int64  // bytes
}

func (s *space) name() string {
	if name := s.shown.Load(); name != nil {
		return *name
	}
	return ""
}

// lane is whose blocks leave in one order: a namespace that has a quota has its own, the others of
// one priority share one.
type lane struct {
	priority atomic.Int32
	quota    [tiers]atomic.Uint64 // 0: none
	bytes    [tiers]atomic.Int64
	claiming [tiers]sync.Mutex
	claimed  [tiers]atomic.Int64 // bytes that were let in, and are not in bytes yet
}

// spaces are all namespaces and lanes.
type spaces struct {
	memory *memory
	mu     sync.Mutex
	list   [spacesMax]space
	lanes  atomic.Pointer[[]*lane] // it only grows
	rates  byteRates
}

const priorities = 8

func newLane(priority int, quota [2]uint64) *lane {
	l := &lane{}
	l.set(priority, quota)
	return l
}

func (l *lane) set(priority int, quota [2]uint64) {
	l.priority.Store(int32(priority))
	for t := range tiers {
		l.quota[t].Store(quota[t])
	}
}

// openSpaces reads the names in the memory file. Each belongs to the shared lane of priority 0
// until the program opens it.
func openSpaces(m *memory) *spaces {
	sp := &spaces{memory: m}
	var shared []*lane
	for p := range priorities {
		shared = append(shared, newLane(p, [2]uint64{}))
	}
	sp.lanes.Store(&shared)
	for id := range sp.list {
		p := sp.record(id)
		n := binary.LittleEndian.Uint32(p[32:])
		if n == 0 || n > spaceNameMax || binary.LittleEndian.Uint32(p[36:]) != sp.sumOf(p, n) ||
			!utf8.Valid(p[40:40+n]) {
			continue
		}
		s := &sp.list[id]
		copy(s.digest[:], p)
		name := string(p[40 : 40+n])
		s.known = true
		s.shown.Store(&name)
	}
	return sp
}

const spaceNameMax = spaceBytes - 40

// record is the place of a namespace in the file: digest, length of the name, CRC, name.
func (sp *spaces) record(id int) []byte {
	return sp.memory.mapped[headerBytes+id*spaceBytes:][:spaceBytes]
}

// sumOf is the CRC of a record whose name has n bytes.
func (sp *spaces) sumOf(p []byte, n uint32) uint32 {
	sum := crc32.Checksum(sp.memory.id[:], castagnoli)
	sum = crc32.Update(sum, castagnoli, p[:36])
	return crc32.Update(sum, castagnoli, p[40:40+n])
}

func (sp *spaces) valid(id uint16) bool { return int(id) < spacesMax && sp.list[id].known }

// digest is what a disk knows a namespace by.
func (sp *spaces) digest(id uint16) [16]byte { return sp.list[id].digest }

// adopt returns the namespace of a digest that a disk has, which may have no name yet.
func (sp *spaces) adopt(digest [16]byte) (id uint16, ok bool) {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	k, known := sp.number(digest)
	if k < 0 {
		return 0, false
	}
	if !known {
		sp.list[k].digest, sp.list[k].known = digest, true
	}
	return uint16(k), true
}

// number is that of a namespace, or one that a new namespace may have: that of none, or of one
// which has no blocks, and which nobody uses. -1: there is none. The caller holds the lock.
func (sp *spaces) number(digest [16]byte) (k int, known bool) {
	k, idle := -1, -1
	for n := range sp.list {
		s := &sp.list[n]
		switch {
		case s.known && s.digest == digest:
			return n, true
		case !s.known:
			if k < 0 {
				k = n
			}
		case s.users == 0 && s.blocks[Memory].Load()+s.blocks[Disk].Load() == 0 &&
			s.holds.Load() == 0:
			idle = n
		}
	}
	if k < 0 && idle >= 0 {
		k = idle
		clear(sp.record(k)) // blocks that come are none of its name at the next start
		s := &sp.list[k]
		s.digest, s.known = [16]byte{}, false
		s.shown.Store(nil)
	}
	return k, false
}

// any reports whether there is one.
func (sp *spaces) any(f func(s *space) bool) bool {
	for k := range sp.list {
		if f(&sp.list[k]) {
			return true
		}
	}
	return false
}

// at is a lane by its number.
func (sp *spaces) at(lane int) *lane { return (*sp.lanes.Load())[lane] }

func (sp *spaces) lane(id uint16) int { return int(sp.list[id].lane.Load()) }

// count adds to what a namespace has in a tier.
func (sp *spaces) count(id uint16, t Tier, blocks, bytes int64) {
	s := &sp.list[id]
	s.blocks[t].Add(blocks)
	s.bytes[t].Add(bytes)
	sp.at(int(s.lane.Load())).bytes[t].Add(bytes)
}

// order lists the lanes that have blocks in one of some tiers, by whose turn it is to let one go.
func (sp *spaces) order(in ...Tier) []int {
	lanes := *sp.lanes.Load()
	sum := func(of func(t Tier) int64) (all int64) {
		for _, t := range in {
			all += of(t)
		}
		return all
	}
	bytes := func(l *lane) int64 { return sum(func(t Tier) int64 { return l.bytes[t].Load() }) }
	var buf [priorities]int
	list := buf[:0]
	for k, l := range lanes {
		if bytes(l) > 0 {
			list = append(list, k)
		}
	}
	slices.SortFunc(list, func(a, b int) int {
		x, y := lanes[a], lanes[b]
		return cmp.Or(-cmp.Compare(sum(x.over), sum(y.over)),
			cmp.Compare(x.priority.Load(), y.priority.Load()), -cmp.Compare(bytes(x), bytes(y)))
	})
	return list
}

// over is by how many bytes a lane is over its quota.
func (l *lane) over(t Tier) int64 {
	quota := min(l.quota[t].Load(), math.MaxInt64)
	if quota == 0 {
		return 0
	}
	return max(0, l.bytes[t].Load()-int64(quota))
}

// Namespace opens a namespace, which may have blocks already, by a name in UTF-8. A cache has at
// most 1,024; ErrNoRoom says that all have blocks, or are open. Opening it again changes its
// options, as Set does, but what is over its quota goes later.
func (c *Cache) Namespace(name string, o NamespaceOptions) (*Namespace, error) {
	if !c.enter() {
		return nil, fmt.Errorf("namespace %q: cache: %w", name, engine.ErrClosed)
	}
	defer c.exit()
	if name == "" || len(name) > spaceNameMax || !utf8.ValidString(name) {
		return nil, fmt.Errorf("namespace %q: a name has from 1 to %d bytes, in UTF-8: %w", name,
			spaceNameMax, engine.ErrBounds)
	}
	if err := o.Check(); err != nil {
		return nil, fmt.Errorf("namespace %q: %w", name, err)
	}
	sp, digest := c.spaces, DigestOf(name, o.Geometry)
	sp.mu.Lock()
	defer sp.mu.Unlock()
	id, _ := sp.number(digest)
	if id < 0 {
		return nil, fmt.Errorf("namespace %q: the cache has %d already, which have blocks or are "+
			"open: close one that has none, or remove its blocks: %w", name, spacesMax, ErrNoRoom)
	}
	if sp.list[id].name() == "" {
		sp.write(id, name, digest)
	}
	c.assign(id, o)
	c.wakeKeeper()
	return c.open(id), nil
}

// open counts a user of a namespace in. The caller holds the lock of the spaces.
func (c *Cache) open(id int) *Namespace {
	s := &c.spaces.list[id]
	s.users++
	return &Namespace{c: c, id: uint16(id), name: s.name()}
}

// write makes a namespace one that outlives the process.
func (sp *spaces) write(id int, name string, digest [16]byte) {
	p := sp.record(id)
	clear(p)
	copy(p, digest[:])
	binary.LittleEndian.PutUint32(p[32:], uint32(len(name)))
	copy(p[40:], name)
	binary.LittleEndian.PutUint32(p[36:], sp.sumOf(p, uint32(len(name))))
	s := &sp.list[id]
	s.digest, s.known = digest, true
	s.shown.Store(&name)
}

// assign gives a namespace the lane that its options ask for; its blocks move over. The caller
// holds the lock of the spaces.
func (c *Cache) assign(id int, o NamespaceOptions) {
	sp, s := c.spaces, &c.spaces.list[id]
	s.flowNow.Store(uint32(o.Flow))
	if s.unopened.Swap(false) {
		c.catchAgain.Store(true)
	}
	s.ttl.Store(uint32((o.TTL + time.Second - 1) / time.Second))
	s.holdMax.Store(o.HoldMax)
	x := c.index
	for k := range x.shards {
		x.shards[k].mu.Lock()
		defer x.shards[k].mu.Unlock()
	}
	sp.limit(id, o.BytesASecond)
	lanes := *sp.lanes.Load()
	from, to := int(s.lane.Load()), o.Priority
	switch {
	case o.Quota == [2]uint64{}:
	case s.own > 0:
		to = s.own
		lanes[to].set(o.Priority, o.Quota)
	default:
		lanes = append(slices.Clone(lanes), newLane(o.Priority, o.Quota))
		to = len(lanes) - 1
		s.own = to
		sp.lanes.Store(&lanes)
	}
	if from == to {
		return
	}
	s.lane.Store(int32(to))
	for t := range tiers {
		n := s.bytes[t].Load()
		lanes[from].bytes[t].Add(-n)
		lanes[to].bytes[t].Add(n)
	}
	if s.blocks[Memory].Load()+s.blocks[Disk].Load() == 0 {
		return
	}
	for k := range x.shards {
		sh := &x.shards[k]
		for i := sh.first; i < sh.first+sh.n; i++ {
			e := x.entry(i)
			if e.space != uint16(id) {
				continue
			}
			for t := range tiers {
				if e.flags&(queued<<t) != 0 {
					c.queues(sh, from, t).remove(i)
					c.queues(sh, to, t).insert(i)
				}
			}
		}
	}
}

// admit reports how many of so many blocks a lane may add to a tier, for which blocks of its own
// go. Where a quota bounds it their bytes are claimed, which the caller ends once they count.
func (c *Cache) admit(id int, t Tier, blocks int, size uint64) (int, int64) {
	l := c.spaces.at(id)
	l.claiming[t].Lock()
	defer l.claiming[t].Unlock()
	quota := min(l.quota[t].Load(), math.MaxInt64)
	if quota == 0 {
		return blocks, 0
	}
	blocks = int(min(uint64(blocks), quota/size))
	for blocks > 0 {
		has := uint64(l.bytes[t].Load() + l.claimed[t].Load())
		if has+uint64(blocks)*size <= quota {
			break
		}
		if !c.evictOwn(t, id) {
			blocks = int(min(uint64(blocks), (quota-min(quota, has))/size))
			break
		}
	}
	claimed := int64(blocks) * int64(size)
	l.claimed[t].Add(claimed)
	return blocks, claimed
}
