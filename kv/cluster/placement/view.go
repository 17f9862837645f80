// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"errors"
	"fmt"
	"slices"
)

const (
	// NodesMax bounds the other nodes whose digests a View has.
	NodesMax = 1000
	// BlocksMax bounds the room of a View: a hash chooses among 2^26 buckets.
	BlocksMax = 200e6

	// An entry of the table is the number of a node and a fingerprint of a block.
	fingerBits = 22
	fingerMask = 1<<fingerBits - 1
	numbersMax = 1 << (32 - fingerBits)

	bucketEntries = 4
	// holdersMax bounds the nodes that the table knows for a block: the entries of one block can
	// stand in two buckets only.
	holdersMax = 4
	// kicksMax bounds how many entries an insertion moves. At the greatest load, 90 %, it is not
	// reached in practice.
	kicksMax = 256
	// loadMax bounds what a node can claim, so that sums do not overflow.
	loadMax = 1 << 48
	// sweepBuckets is how many buckets each Apply clears of the entries of nodes that have gone.
	sweepBuckets = 4096
)

// The reasons for which Apply refuses a digest.
var (
	// ErrGap: a digest before this one is missing. Ask the node for a snapshot.
	ErrGap = errors.New("a digest is missing: ask the node for a snapshot")
	// ErrStale: the digest is of a process of the node before, or was applied already. Ignore it.
	ErrStale = errors.New("the digest is out of date")
	// ErrNodes: there are too many nodes. Forget those that have left the cluster.
	ErrNodes = fmt.Errorf("digests of more than %d nodes: forget those that have left", NodesMax)
)

// View has what the digests of the other nodes have told. What it says of a block may be out of
// date, and for few blocks wrong: a node that is asked and does not have the block says so.
//
// All nodes share one cuckoo table of 4-byte entries, so that one look at two buckets finds all
// holders of a block. Its memory is fixed; what has no room is not found. Hot segments come on top,
// at most HotMax of each node. A View is not safe for concurrent use, except that methods that
// change nothing may run concurrently with each other.
type View struct {
	buckets [][bucketEntries]uint32 // 0: free
	limit   int                     // entries that may be used
	used    int                     // entries of nodes that have not gone
	dropped uint64
	random  uint64 // decides which entry moves

	peers   map[uint64]*peer // by ID
	numbers [numbersMax]numberState
	live    [numbersMax]*peer // by number
	dead    int               // numbers
	swept   int               // the bucket where the next sweep begins
	unswept int               // buckets to be swept until no entry of a dead number is left

	hot map[Key][]announcement
}

type numberState uint8

const (
	unusedNumber numberState = iota
	liveNumber
	deadNumber // there may be entries of it, which count as free
)

// peer is what the View knows of another node.
type peer struct {
	node            uint64
	generation, seq uint64
	snapshot        uint64 // Seq of the snapshot whose parts come
	part            uint32 // of it, the last one that came
	number          uint32 // in the table
	entries         int
	load            uint64
	hot             []Hot
}

type announcement struct {
	node   uint64
	owners uint16
}

// NewView returns a View with room for so many blocks, up to BlocksMax, counting a block once for
// each node that has it. Where most blocks have three or four holders it knows fewer of them.
func NewView(blocks int) *View {
	buckets := (min(max(blocks, 1000), BlocksMax)+8)/9*10/bucketEntries + 1
	return &View{
		buckets: make([][bucketEntries]uint32, buckets),
		limit:   buckets * bucketEntries / 10 * 9,
		random:  1,
		peers:   make(map[uint64]*peer),
		hot:     make(map[Key][]announcement),
	}
}

// Apply takes in a digest of another node, which must not be changed afterwards. After ErrGap the
// View still has what it had of the node, but the node must send a snapshot before its next digest
// is of use.
//
// The caller takes a digest only from the node that it names: one of somebody else makes those of
// the node itself out of date. And a node begins with a snapshot on each new connection, as nothing
// tells that the last parts of one were lost with the connection before.
func (v *View) Apply(d *Digest) error {
	v.sweep(sweepBuckets)
	p := v.peers[d.Node]
	switch {
	case p != nil && d.Generation < p.generation,
		p != nil && d.Generation == p.generation && d.Part == 1 && d.Seq < p.seq:
		return ErrStale
	case d.Part == 1:
		if p == nil && len(v.peers) == NodesMax {
			return ErrNodes
		}
		v.Forget(d.Node)
		p = &peer{node: d.Node, generation: d.Generation, seq: d.Seq, snapshot: d.Seq,
			number: v.newNumber()}
		v.peers[d.Node], v.live[p.number] = p, p
	case p == nil || d.Generation != p.generation:
		return ErrGap
	case d.Part > 1:
		if d.Seq != p.snapshot || d.Part != p.part+1 {
			return ErrGap
		}
	case d.Seq <= p.seq:
		return ErrStale
	case d.Seq != p.seq+1:
		return ErrGap
	default:
		p.seq = d.Seq
	}
	if d.Part > 0 {
		p.part = d.Part
	}
	for _, hash := range d.Removed {
		v.remove(p, hash)
	}
	for _, hash := range d.Added {
		v.add(p, hash)
	}
	v.announce(d.Node, p, d.Hot)
	p.load = d.Load
	return nil
}

// Forget drops what the View has of a node, which has left the cluster.
func (v *View) Forget(node uint64) {
	p := v.peers[node]
	if p == nil {
		return
	}
	v.announce(node, p, nil)
	v.used -= p.entries
	delete(v.peers, node)
	v.live[p.number] = nil
	if p.entries == 0 { // there is nothing to sweep
		v.numbers[p.number] = unusedNumber
		return
	}
	v.numbers[p.number] = deadNumber
	v.dead++
	v.unswept = len(v.buckets)
}

// announce replaces the hot segments of a node.
func (v *View) announce(node uint64, p *peer, hot []Hot) {
	for _, h := range p.hot {
		rest := slices.DeleteFunc(v.hot[h.Segment], func(a announcement) bool {
			return a.node == node
		})
		if v.hot[h.Segment] = rest; len(rest) == 0 {
			delete(v.hot, h.Segment)
		}
	}
	for _, h := range hot {
		v.hot[h.Segment] = append(v.hot[h.Segment], announcement{node, h.Owners})
	}
	p.hot = hot
}

// Owners returns how many owners another node has announced for a segment, or 0.
func (v *View) Owners(segment Key) (owners int) {
	for _, a := range v.hot[segment] {
		owners = max(owners, int(a.owners))
	}
	return owners
}

// MeanLoad returns the mean load of a node, of which this one has load own. The loads of the others
// are those of their last digests.
func (v *View) MeanLoad(own uint64) uint64 {
	for _, p := range v.peers {
		own += min(p.load, loadMax)
	}
	return own / uint64(len(v.peers)+1)
}

// Holders appends to dst the nodes, at most four, that have told that they have a block, and
// returns the extended slice. It finds a wrong one for about 2 blocks of a million.
func (v *View) Holders(dst []uint64, block Key) []uint64 {
	finger, one, two := v.places(hashOf(block))
	for _, bucket := range [2]uint64{one, two} {
		for _, entry := range v.buckets[bucket] {
			if entry&fingerMask == finger && v.isLive(entry) {
				dst = append(dst, v.live[entry>>fingerBits].node)
			}
		}
		if one == two {
			break
		}
	}
	return dst
}

// Entries returns how many blocks the View finds, counting a block once for each node, and how many
// it found no room for since it was made.
func (v *View) Entries() (entries int, dropped uint64) { return v.used, v.dropped }

// Bytes returns the memory of the table.
func (v *View) Bytes() int { return len(v.buckets) * bucketEntries * 4 }

// places returns the fingerprint of a hash and its two buckets. The fingerprint is the low bits,
// the first bucket comes from the others.
func (v *View) places(hash uint64) (finger uint32, one, two uint64) {
	finger = uint32(hash) & fingerMask
	one = (hash >> fingerBits) * uint64(len(v.buckets)) >> (hashBits - fingerBits)
	return finger, one, v.other(finger, one)
}

// other returns the second bucket of a fingerprint from the first, and the first from the second.
func (v *View) other(finger uint32, bucket uint64) uint64 {
	n := uint64(len(v.buckets))
	sum := (mix(uint64(finger)) >> 32) * n >> 32 // of both buckets, modulo n
	if sum < bucket {
		sum += n
	}
	return sum - bucket
}

// isLive reports whether an entry is of a node that has not gone.
func (v *View) isLive(entry uint32) bool { return v.numbers[entry>>fingerBits] == liveNumber }

func (v *View) add(p *peer, hash uint64) {
	finger, one, two := v.places(hash)
	entry := p.number<<fingerBits | finger
	holders := 0
	for _, bucket := range [2]uint64{one, two} {
		for _, e := range v.buckets[bucket] {
			if e == entry {
				return
			}
			if e&fingerMask == finger && v.isLive(e) {
				holders++
			}
		}
		if one == two {
			break
		}
	}
	if holders >= holdersMax || v.used >= v.limit {
		v.dropped++
		return
	}
	p.entries++
	v.used++
	if v.put(one, entry) || v.put(two, entry) {
		return
	}
	// Both buckets are full: the entry takes the place of another, which goes to its other bucket,
	// and so on until a bucket has room.
	bucket := two
	for range kicksMax {
		v.random = v.random*6364136223846793005 + 1442695040888963407
		at := &v.buckets[bucket][v.random>>62]
		entry, *at = *at, entry
		bucket = v.other(entry&fingerMask, bucket)
		if v.put(bucket, entry) {
			return
		}
	}
	v.live[entry>>fingerBits].entries--
	v.used--
	v.dropped++
}

// put puts an entry into a bucket if that has room.
func (v *View) put(bucket uint64, entry uint32) bool {
	for i, e := range v.buckets[bucket] {
		if !v.isLive(e) {
			v.buckets[bucket][i] = entry
			return true
		}
	}
	return false
}

func (v *View) remove(p *peer, hash uint64) {
	finger, one, two := v.places(hash)
	entry := p.number<<fingerBits | finger
	for _, bucket := range [2]uint64{one, two} {
		for i, e := range v.buckets[bucket] {
			if e == entry {
				v.buckets[bucket][i] = 0
				p.entries--
				v.used--
				return
			}
		}
	}
}

// newNumber returns a number of which the table has no entries.
func (v *View) newNumber() uint32 {
	for {
		for n := uint32(1); n < numbersMax; n++ { // 0 with fingerprint 0 is a free entry
			if v.numbers[n] == unusedNumber {
				v.numbers[n] = liveNumber
				return n
			}
		}
		v.sweep(len(v.buckets))
	}
}

// sweep clears entries of dead numbers from the next n buckets. When it has been round, those
// numbers can be used again.
func (v *View) sweep(n int) {
	if v.dead == 0 {
		return
	}
	for range min(n, v.unswept) {
		for i, e := range v.buckets[v.swept] {
			if v.numbers[e>>fingerBits] == deadNumber {
				v.buckets[v.swept][i] = 0
			}
		}
		if v.swept++; v.swept == len(v.buckets) {
			v.swept = 0
		}
		v.unswept--
	}
	if v.unswept > 0 {
		return
	}
	for number, state := range v.numbers {
		if state == deadNumber {
			v.numbers[number] = unusedNumber
		}
	}
	v.dead = 0
}
