// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"bytes"
	"cmp"
	"slices"
	"time"
)

// TickInterval is how often a node should call Heat.Tick. Digests may be sent more often.
const TickInterval = time.Minute

const (
	// HotMax bounds the segments with more than one owner that one node may announce.
	HotMax = 256

	// heatSegments is how many segments a Heat tells apart. It misses at most this part of its
	// node's reads of a segment, which is far less than what makes a segment hot.
	heatSegments = 1024
	// A segment gets more owners once it is more than this part of a node's mean load, and was read
	// so often. A single session does not read that often within a TickInterval: copies of what one
	// session reads again and again would cost more than they level.
	hotShare = 2
	hotReads = 32
	// It gets so many that none has more than this part of the mean load for it, but each has been
	// read often enough to be worth a copy.
	ownerShare = 16
	ownerReads = 8
)

// Heat decides how many owners the segments of a node have. It counts what is read from the node,
// and compares the most read segments with the mean load of all nodes: what is much in a small
// cluster is little in a large one. Counts are halved at every tick.
//
// Only the first owner of a segment adds and takes away owners. Its memory is bounded. A Heat is
// not safe for concurrent use.
type Heat struct {
	counts map[Key]count
	load   uint64 // blocks read, halved at every tick
	last   uint64 // load as of the last tick
}

// count has what was read of a segment, halved at every tick.
type count struct {
	blocks uint64
	reads  uint32
	owners uint16 // that this node announces; less than 2: it announces nothing
}

// Hot is a segment that has more than one owner. They are the first so many of Owners.
type Hot struct {
	Segment Key
	Owners  uint16
}

// Change says that a segment has got more owners, to which the first owner must send a copy, or
// fewer, so that the copies of the others are surplus.
type Change struct {
	Segment  Key
	From, To int
}

// NewHeat returns a Heat that has seen no reads.
func NewHeat() *Heat { return &Heat{counts: make(map[Key]count)} }

// Read counts that blocks of a segment were read from this node, by itself or another node.
func (h *Heat) Read(segment Key, blocks int) {
	h.load += uint64(blocks)
	c := h.counts[segment]
	c.blocks, c.reads = c.blocks+uint64(blocks), c.reads+1
	h.counts[segment] = c
	if len(h.counts) >= 2*heatSegments+HotMax {
		h.prune()
	}
}

// prune forgets the less read segments. It is the algorithm of Misra and Gries, applied once for
// many reads: subtracting the same from all counts keeps those that are read most.
func (h *Heat) prune() {
	blocks := make([]uint64, 0, len(h.counts))
	for _, c := range h.counts {
		blocks = append(blocks, c.blocks)
	}
	slices.Sort(blocks)
	less := blocks[len(blocks)-heatSegments]
	for segment, c := range h.counts {
		if c.blocks > less {
			c.reads -= uint32(uint64(c.reads) * less / c.blocks)
			c.blocks -= less
		} else if c.owners > 1 {
			c.blocks, c.reads = 0, 0
		} else {
			delete(h.counts, segment)
			continue
		}
		h.counts[segment] = c
	}
}

// Load returns the blocks that were read from this node, as of the last Tick. Nodes must call Tick
// equally often for their loads to be comparable.
func (h *Heat) Load() uint64 { return h.last }

// Tick decides for the segments of which node self is the first owner, and halves the counts. mean
// is the mean load of the nodes, self among them; others returns how many owners another node
// announces for a segment (see View.Owners). The changes stand in the order of the reads.
func (h *Heat) Tick(nodes []Node, self, mean uint64, others func(Key) int) (changes []Change) {
	type entry struct {
		segment Key
		count
	}
	entries := make([]entry, 0, len(h.counts))
	for segment, c := range h.counts {
		if c.owners > 1 || others(segment) > 1 ||
			c.blocks > mean/hotShare && c.reads >= hotReads {
			entries = append(entries, entry{segment, c})
		}
	}
	slices.SortFunc(entries, func(a, b entry) int {
		return cmp.Or(cmp.Compare(b.blocks, a.blocks), bytes.Compare(a.segment[:], b.segment[:]))
	})
	possible := 0
	for _, n := range nodes {
		if n.Weight > 0 {
			possible++
		}
	}
	announced := 0 // segments with more than one owner, those that are yet to come included
	for _, e := range entries {
		if e.owners > 1 {
			announced++
		}
	}
	var first []int
	for _, e := range entries {
		c, known := e.count, others(e.segment)
		first = Owners(first[:0], nodes, e.segment, 1)
		switch {
		case len(first) == 0 || nodes[first[0]].ID != self:
			// Another node decides now. Until it has announced its number, readers need this one's.
			if c.owners--; known >= int(c.owners) || c.owners < 2 || c.owners > e.owners {
				c.owners = 0
			}
		default:
			// Whatever is announced, no more than all nodes have been read.
			owners := min(max(int(c.owners), known, 1), possible)
			// The readers spread over the owners, so this owner sees one part in so many.
			blocks, reads := c.blocks*uint64(owners), int(c.reads)*owners
			want := int(min(blocks*ownerShare/max(mean, 1), uint64(possible)))
			want = min(want, reads/ownerReads)
			now := owners
			if want > owners {
				now = want
			} else if owners > 1 && 2*want <= owners {
				now--
			}
			if e.owners < 2 && announced >= HotMax {
				now = 1
			}
			if now != owners {
				changes = append(changes, Change{e.segment, owners, now})
				c.blocks, c.reads = blocks/uint64(now), uint32(reads/now)
			}
			c.owners = uint16(now)
		}
		if c.owners > 1 && e.owners < 2 {
			announced++
		} else if c.owners < 2 && e.owners > 1 {
			announced--
		}
		h.counts[e.segment] = c
	}
	h.last, h.load = h.load, h.load/2
	for segment, c := range h.counts {
		c.blocks, c.reads = c.blocks/2, c.reads/2
		if h.counts[segment] = c; c.blocks == 0 && c.owners < 2 {
			delete(h.counts, segment)
		}
	}
	return changes
}

// Owners returns how many owners this node has decided that a segment has, or 0. What another node
// says stands in View.Owners; the greater number counts.
func (h *Heat) Owners(segment Key) int {
	if c := h.counts[segment]; c.owners > 1 {
		return int(c.owners)
	}
	return 0
}

// Hot returns the segments with more than one owner that this node must announce, ordered by key.
func (h *Heat) Hot() (hot []Hot) {
	for segment, c := range h.counts {
		if c.owners > 1 {
			hot = append(hot, Hot{segment, c.owners})
		}
	}
	slices.SortFunc(hot, func(a, b Hot) int { return bytes.Compare(a.Segment[:], b.Segment[:]) })
	return hot
}

// Choose returns which of its owners a node asks for a segment: itself if it is one, else a node
// that it asks for another segment of the same chain anyway, else one by draw, which should be
// different for each request. Of no owners, where no node has a weight, it returns -1.
func Choose(owners []int, self int, asked []int, draw uint64) int {
	if slices.Contains(owners, self) {
		return self
	}
	for _, node := range owners {
		if slices.Contains(asked, node) {
			return node
		}
	}
	if len(owners) == 0 {
		return -1
	}
	return owners[mix(draw)%uint64(len(owners))]
}

// Rank returns the place of a node among the first n owners of a segment, from 0, or -1 if it is
// not among them. What a node has of a segment where its rank is -1 is surplus: an owner has it
// too, so that it should be the first to be evicted, and copies of a rank above 0 the next.
func Rank(nodes []Node, node uint64, segment Key, n int) int {
	var few [8]int
	for rank, i := range Owners(few[:0], nodes, segment, n) {
		if nodes[i].ID == node {
			return rank
		}
	}
	return -1
}
