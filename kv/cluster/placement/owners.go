// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"encoding/binary"
	"math/bits"

	"github.com/sluicehq/sluice/kv/cache"
)

// Key names a block, and a segment by its first block. The key of a block names all the blocks
// before it too, so that the same segment of two chains has the same key.
type Key = cache.Key

// Node is a member of the cluster.
type Node struct {
	// ID is the node's identity: the same for as long as the node has its blocks, and different for
	// each node. It decides which segments the node owns.
	ID uint64
	// Weight is the node's share of the segments, relative to the other nodes' weights. A node of
	// weight 0 owns nothing, but may still have blocks: it drains.
	Weight uint32
}

// segmentMax is the length of every segment from block 32 of a chain on.
const segmentMax = 32

// SegmentOf returns the number of the segment that has block i of a chain, and the index of the
// first block of that segment. Segments have 1, 1, 2, 4, 8, 16, 32, 32, … blocks: the first blocks
// are shared by many chains, so that they are spread one by one over the nodes, and the later ones
// are found on few nodes. i must not be negative.
func SegmentOf(i int) (segment, first int) {
	if i < segmentMax {
		segment = bits.Len(uint(i))
	} else {
		segment = i/segmentMax + 5
	}
	return segment, FirstOf(segment)
}

// FirstOf returns the index in the chain of the first block of a segment. FirstOf(segment+1) is
// the end of the segment.
func FirstOf(segment int) int {
	switch {
	case segment == 0:
		return 0
	case segment <= 6:
		return 1 << (segment - 1)
	}
	return (segment - 5) * segmentMax
}

// Owners appends to dst the indices in nodes of the n nodes that own a segment, the best first, and
// returns the extended slice. There are fewer if fewer nodes have a weight. The first n owners of a
// segment are the same for every greater n, and the order of nodes does not matter.
//
// This is weighted rendezvous hashing: each node has a pseudo-random cost for the segment, drawn
// from an exponential distribution with the node's weight as its rate, and the lowest costs win.
// When a node leaves or loses weight, only its own segments move, and each goes to the next owner
// in the order; when a node joins or gains weight, segments move to that node only.
func Owners(dst []int, nodes []Node, segment Key, n int) []int {
	var few [8]bid
	best := few[:0]
	seed := mix(binary.LittleEndian.Uint64(segment[:]) ^
		mix(binary.LittleEndian.Uint64(segment[8:])))
	for i, node := range nodes {
		if node.Weight == 0 {
			continue
		}
		hash := mix(seed ^ mix(node.ID))
		if len(best) == n && n > 0 && hash < best[n-1].hash && node.Weight <= best[n-1].Weight {
			continue // without comparing costs: most nodes end here
		}
		b := bid{hash: hash, node: i, Node: node}
		if len(best) < n {
			best = append(best, b)
		} else if n > 0 && b.before(&best[n-1]) {
			best[n-1] = b
		} else {
			continue
		}
		for k := len(best) - 1; k > 0 && best[k].before(&best[k-1]); k-- {
			best[k], best[k-1] = best[k-1], best[k]
		}
	}
	for _, b := range best {
		dst = append(dst, b.node)
	}
	return dst
}

// bid is what a node has drawn for a segment. Its cost is -log2(hash/2^64) / Weight.
type bid struct {
	Node
	hash uint64
	node int
}

// before reports whether b is a better owner than c: it has the lower cost. The comparison is exact
// and in integers, so that nodes of different processors come to the same order.
func (b *bid) before(c *bid) bool {
	if b.Weight == c.Weight {
		if b.hash != c.hash {
			return b.hash > c.hash
		}
		return b.ID < c.ID
	}
	bHigh, bLow := bits.Mul64(negLog2(b.hash), uint64(c.Weight))
	cHigh, cLow := bits.Mul64(negLog2(c.hash), uint64(b.Weight))
	switch {
	case bHigh != cHigh:
		return bHigh < cHigh
	case bLow != cLow:
		return bLow < cLow
	}
	return b.ID < c.ID
}

// logBits: negLog2 interpolates between so many steps. The shares of the nodes are off by less
// than 0.2 % for that.
const logBits = 8

// logs has log2(1 + i/2^logBits) in units of 2^-56, computed bit by bit: squaring a number doubles
// its logarithm.
var logs = func() (table [1<<logBits + 1]uint64) {
	for i := range table[:1<<logBits] {
		x := uint64(1<<63) + uint64(i)<<(63-logBits) // from 1 to 2, in units of 2^-63
		for range 56 {
			table[i] <<= 1
			high, low := bits.Mul64(x, x)
			if high>>63 != 0 {
				table[i] |= 1
				x = high
			} else {
				x = high<<1 | low>>63
			}
		}
	}
	table[1<<logBits] = 1 << 56
	return table
}()

// negLog2 returns -log2(h/2^64) in units of 2^-56. It never falls when h falls; for 0 it returns
// what it does for 1.
func negLog2(h uint64) uint64 {
	zeros := bits.LeadingZeros64(h | 1)
	mantissa := (h | 1) << zeros << 1
	step := mantissa >> (64 - logBits)
	high, _ := bits.Mul64(logs[step+1]-logs[step], mantissa<<logBits)
	return uint64(zeros+1)<<56 - logs[step] - high
}

// mix is the finaliser of splitmix64: every bit of the result depends on every bit of x.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
