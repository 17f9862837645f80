// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"encoding/binary"
	"hash/crc32"
	"math/bits"
	"sync"
	"sync/atomic"
)

// none is no entry, and no place.
const none = 1<<32 - 1

// state of an entry.
type state uint8

const (
	vacant  state = iota // it knows no block
	filling              // a Store copies the bytes into the slot
	present              // the bytes are in memory, on a disk, or both
	leaving              // it was removed or is damaged: it goes with the last pin
)

// flags of an entry.
const (
	verified = 1 << iota // its CRC was found right since the cache was opened
	queued               // it has a place in the order of its lane in memory
	_                    // queued<<Disk: the same on its disk
	unwanted             // it was removed while its bytes came
	reading              // a Load brings it from its disk
	writing              // it was offered to the disks
	retained             // a hint keeps it in the cache, see hold.go
	demoting             // a hint wants it out of memory once a disk has it
)

// index finds the entry of a key. It is cut into shards, each with a lock, a part of the entries
// and an order in which they leave of its own: a key's hash says in which one it is.
type index struct {
	memory *memory
	shards []shard
	shift  uint // of a hash: what is left is the shard's number; 64: there is one
	seed   uint64
}

type shard struct {
	mu    sync.Mutex
	first uint32 // entry
	n     uint32 // entries
	free  uint32 // the first one that knows nothing, chained by links[Memory].next
	live  int    // entries that know a block
	// by hash: the low 24 bits are an entry's number in the shard plus one, the high ones a part of
	// the hash; 0: nothing. At most 4/5 of it is in use.
	table []uint32
	lanes [][tiers]*laneOrder // by lane, see namespaces
	// by entry: Stores that wait for a write to a disk which others have offered
	waiting map[uint32][]*Op

	fetched byte // see fetch
	_       [64]byte
}

const (
	shardsMax    = 64
	shardEntries = 32 << 10  // so many at least, that the order of one is about that of all
	entriesMax   = 900 << 20 // an eighth more are less than 1<<24 a shard: see shard.table
)

// tableOf is how many entries a file has for so many blocks: shards are not filled evenly.
func tableOf(blocks uint64) (entries uint64, shards int) {
	shards = 1
	for shards < shardsMax && blocks/uint64(2*shards) >= shardEntries {
		shards *= 2
	}
	each := blocks / uint64(shards)
	if shards > 1 {
		each += each / 8
	}
	return uint64(shards) * (each + 1), shards
}

// shardsOf is how many shards a file of so many entries has.
func shardsOf(entries uint64) (shards int) {
	shards = 1
	for shards < shardsMax && entries >= uint64(2*shards)*(shardEntries+shardEntries/8+1) {
		shards *= 2
	}
	return shards
}

func newIndex(m *memory) *index {
	shards := shardsOf(uint64(len(m.entries)))
	x := &index{memory: m, shards: make([]shard, shards),
		shift: uint(64 - bits.Len(uint(shards-1))),
		seed:  binary.NativeEndian.Uint64(m.id[:])}
	each := uint32(len(m.entries) / shards)
	for k := range x.shards {
		s := &x.shards[k]
		s.first, s.n = uint32(k)*each, each
		n := 4
		for uint32(n)*4/5 < each {
			n *= 2
		}
		s.table = make([]uint32, n)
	}
	return x
}

// hash is of a key in a namespace. Keys may be counts, as tests and traces have them.
func (x *index) hash(key *Key, space uint16) uint64 {
	a := binary.NativeEndian.Uint64(key[:])
	b := binary.NativeEndian.Uint64(key[8:])
	hi, lo := bits.Mul64(a^x.seed, b^0x9e3779b97f4a7c15^uint64(space)<<48)
	hi, lo = bits.Mul64(hi^lo^a, 0xd6e8feb86659fd93)
	return hi ^ lo
}

func (x *index) shardOf(hash uint64) *shard {
	if len(x.shards) == 1 {
		return &x.shards[0]
	}
	return &x.shards[hash>>x.shift]
}

// shardFor is the shard of an entry.
func (x *index) shardFor(i uint32) *shard { return &x.shards[i/x.shards[0].n] }

func (x *index) entry(i uint32) *entry { return &x.memory.entries[i] }

const inShard = 1<<24 - 1

// find returns the entry of a key, none if there is none. The caller holds the shard's lock.
func (x *index) find(s *shard, hash uint64, key *Key, space uint16) uint32 {
	mask := uint32(len(s.table) - 1)
	tag := uint32(hash>>16) &^ inShard
	for at := uint32(hash); ; at++ {
		w := s.table[at&mask]
		if w == 0 {
			return none
		}
		if w&^inShard == tag {
			i := s.first + w&inShard - 1
			if e := &x.memory.entries[i]; e.key == *key && e.space == space {
				return i
			}
		}
	}
}

// add takes an entry for a key that is not there; none: the shard has no more.
func (x *index) add(s *shard, hash uint64, key *Key, space uint16) uint32 {
	i := x.take(s, key, space)
	if i != none {
		x.put(s, hash, i)
	}
	return i
}

// take is add for an entry that find does not return until put.
func (x *index) take(s *shard, key *Key, space uint16) uint32 {
	i := s.free
	if i == none {
		return none
	}
	e := x.entry(i)
	s.free = e.links[Memory].next
	*e = entry{key: *key, space: space, slot: none, record: none}
	s.live++
	return i
}

// put has find return an entry, unless it returns another one for its key already.
func (x *index) put(s *shard, hash uint64, i uint32) bool {
	mask := uint32(len(s.table) - 1)
	tag := uint32(hash>>16) &^ inShard
	at := uint32(hash) & mask
	for ; s.table[at] != 0; at = (at + 1) & mask {
		if w := s.table[at]; w&^inShard == tag {
			e, o := x.entry(i), x.entry(s.first+w&inShard-1)
			if o.key == e.key && o.space == e.space {
				return false
			}
		}
	}
	s.table[at] = tag | (i - s.first + 1)
	return true
}

// drop forgets an entry, which find may return or not.
func (x *index) drop(s *shard, i uint32) {
	e := x.entry(i)
	x.hide(s, x.hash(&e.key, e.space), i)
	s.chain(x, i)
	s.live--
}

// hide ends put. What stood behind the entry in the table moves up, so that find passes no hole.
func (x *index) hide(s *shard, hash uint64, i uint32) {
	mask := uint32(len(s.table) - 1)
	at := uint32(hash)
	for s.table[at&mask]&inShard != i-s.first+1 {
		if s.table[at&mask] == 0 { // it is not there
			return
		}
		at++
	}
	hole := at
	for next := at + 1; ; next++ {
		w := s.table[next&mask]
		if w == 0 {
			break
		}
		o := x.entry(s.first + w&inShard - 1)
		if home := uint32(x.hash(&o.key, o.space)); (next-home)&mask >= (next-hole)&mask {
			s.table[hole&mask] = w
			hole = next
		}
	}
	s.table[hole&mask] = 0
}

// chain makes an entry a free one.
func (s *shard) chain(x *index, i uint32) {
	e := x.entry(i)
	*e = entry{slot: none, record: none}
	e.links[Memory].next = s.free
	s.free = i
}

// keyOrder is the keys of a request by their shards: those of shard n are from starts[n] on.
type keyOrder struct {
	hashes []uint64 // by number of the key
	keys   []uint32 // numbers of keys
	starts [shardsMax + 1]uint32
}

// keyOrders are kept for the next request.
var keyOrders = sync.Pool{New: func() any { return new(keyOrder) }}

func (x *index) orderOf(space uint16, keys []Key, tailFirst bool) *keyOrder {
	o := keyOrders.Get().(*keyOrder)
	if cap(o.keys) < len(keys) {
		o.hashes, o.keys = make([]uint64, len(keys)), make([]uint32, len(keys))
	}
	o.hashes, o.keys = o.hashes[:len(keys)], o.keys[:len(keys)]
	clear(o.starts[:])
	for k := range keys {
		h := x.hash(&keys[k], space)
		o.hashes[k] = h
		o.starts[h>>x.shift+1]++
	}
	for n := range x.shards {
		o.starts[n+1] += o.starts[n]
	}
	next := o.starts
	for k := range keys {
		if tailFirst {
			k = len(keys) - 1 - k
		}
		n := o.hashes[k] >> x.shift
		o.keys[next[n]] = uint32(k)
		next[n]++
	}
	return o
}

// each visits the keys of a namespace, those of one shard under one lock and in their order, or
// from the last one on: where tailFirst is set. i is the entry of the key, or none.
func (x *index) each(space uint16, keys []Key, tailFirst bool,
	visit func(s *shard, k int, i uint32, hash uint64)) {
	o := x.orderOf(space, keys, tailFirst)
	for n := range x.shards {
		mine := o.keys[o.starts[n]:o.starts[n+1]]
		if len(mine) == 0 {
			continue
		}
		s := &x.shards[n]
		s.mu.Lock()
		for at, k := range mine {
			if at%ahead == 0 {
				x.fetch(s, o, mine[at:min(at+ahead, len(mine))])
			}
			visit(s, int(k), x.find(s, o.hashes[k], &keys[k], space), o.hashes[k])
		}
		s.mu.Unlock()
	}
	keyOrders.Put(o)
}

// ahead is how many keys are fetched at a time: their misses of the processor's cache run together.
const ahead = 16

// fetch reads what find will read for at most so many keys, of which none waits for another.
func (x *index) fetch(s *shard, o *keyOrder, part []uint32) {
	mask := uint32(len(s.table) - 1)
	var words [ahead]uint32
	for k, key := range part {
		words[k] = s.table[uint32(o.hashes[key])&mask] & inShard
	}
	read := byte(0)
	for _, w := range words[:len(part)] {
		if w != 0 {
			read ^= x.memory.entries[s.first+w-1].key[0]
		}
	}
	s.fetched = read // so that the reads are not left out
}

// print is what a policy knows a key by that has left.
func (x *index) print(i uint32) uint32 {
	e := x.entry(i)
	return uint32(x.hash(&e.key, e.space) >> 8)
}

// commit makes an entry one that outlives the process: its bytes are in the slot.
func (x *index) commit(i uint32) {
	e := x.entry(i)
	atomic.StoreUint32(&e.sum, x.memory.sumOf(i, e))
}

// withdraw ends commit, before anything of the entry or its bytes changes.
func (x *index) withdraw(i uint32) { atomic.StoreUint32(&x.entry(i).sum, 0) }

// has is what a namespace has in a tier.
type has struct{ blocks, bytes int64 }

// attach takes over what a process before has committed, and returns what that is by namespace.
// valid says which there are. Each shard does its own.
func (x *index) attach(places *slots, valid func(space uint16) bool,
	visit func(s *shard, i uint32)) []has {
	found := make([]has, spacesMax)
	var mu sync.Mutex
	var all sync.WaitGroup
	for k := range x.shards {
		all.Go(func() {
			mine := x.attachShard(&x.shards[k], places, valid, visit)
			mu.Lock()
			defer mu.Unlock()
			for id, h := range mine {
				found[id].blocks += h.blocks
				found[id].bytes += h.bytes
			}
		})
	}
	all.Wait()
	return found
}

func (x *index) attachShard(s *shard, places *slots, valid func(uint16) bool,
	visit func(s *shard, i uint32)) []has {
	found := make([]has, spacesMax)
	s.free = none
	const chunk = 1 << 10 // entries, for which the places are locked once
	good := make([]uint32, 0, chunk)
	for end := s.n; end > 0; {
		begin := end - min(end, chunk)
		good = good[:0]
		for k := end; k > begin; k-- {
			i := s.first + k - 1
			e := x.entry(i)
			if e.sum == 0 || e.sum != x.memory.sumOf(i, e) || e.size == 0 || !valid(e.space) {
				s.chain(x, i)
				continue
			}
			hash := x.hash(&e.key, e.space)
			if x.shardOf(hash) != s || !x.put(s, hash, i) {
				s.chain(x, i)
				continue
			}
			*e = entry{key: e.key, sum: e.sum, crc: e.crc, size: e.size, slot: e.slot,
				space: e.space, state: present, record: none}
			s.live++
			good = append(good, i)
		}
		places.mu.Lock()
		for k, i := range good {
			e := x.entry(i)
			if !places.claim(e.slot, granules(uint64(e.size)), i) {
				good[k] = none
				x.withdraw(i)
				x.drop(s, i)
			}
		}
		places.mu.Unlock()
		for _, i := range good {
			if i != none {
				visit(s, i)
				h := &found[x.entry(i).space]
				h.blocks++
				h.bytes += int64(x.entry(i).size)
			}
		}
		end = begin
	}
	return found
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)
