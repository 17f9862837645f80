// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"slices"
)

const (
	// DigestMax bounds the blocks that one digest names.
	DigestMax = 1 << 16
	// DigestBytesMax bounds an encoded digest.
	DigestBytesMax = digestHeader + HotMax*hotBytes + DigestMax*hashBytesMax

	digestVersion = 1
	digestHeader  = 1 + 4*8 + 4 + 2 + 4 + 4
	hotBytes      = 16 + 2
	hashBits      = 48
	hashBytesMax  = 7 // of a uvarint of hashBits
)

// ErrDigest is wrapped by every error about bytes that are no digest: the sender has another
// version of this package, or the bytes are damaged.
var ErrDigest = errors.New("bad digest")

// Digest tells other nodes which blocks a node has beyond what its ownership says, which hot
// segments have more than one owner, and how loaded the node is.
//
// A digest is a change against the one before, or a part of a snapshot, which begins anew. A block
// stands in it as a hash of 48 bits. To add a block twice, or to remove one that was not added,
// does nothing.
type Digest struct {
	Node       uint64
	Generation uint64 // of the node's process: a later one is greater
	// Seq is the number of a change, each one more than that of the change before. In a snapshot it
	// is the number of the last change before the snapshot began.
	Seq     uint64
	Part    uint32 // of a snapshot, from 1; 0: this is a change
	Load    uint64 // see Heat.Load
	Hot     []Hot  // all hot segments, in place of those of the digest before
	Added   []uint64
	Removed []uint64 // like Added strictly ascending
}

// hashOf is a block's hash in a digest. Keys may be counts, as in tests and traces.
func hashOf(block Key) uint64 {
	return mix(binary.LittleEndian.Uint64(block[:])^
		mix(binary.LittleEndian.Uint64(block[8:])+0x9e3779b97f4a7c15)) >> (64 - hashBits)
}

// Append appends the encoded digest to b. Ascending hashes stand as their differences.
func (d *Digest) Append(b []byte) []byte {
	b = append(b, digestVersion)
	for _, x := range []uint64{d.Node, d.Generation, d.Seq, d.Load} {
		b = binary.LittleEndian.AppendUint64(b, x)
	}
	b = binary.LittleEndian.AppendUint32(b, d.Part)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(d.Hot)))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(d.Added)))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(d.Removed)))
	for _, hot := range d.Hot {
		b = binary.LittleEndian.AppendUint16(append(b, hot.Segment[:]...), hot.Owners)
	}
	for _, hashes := range [][]uint64{d.Added, d.Removed} {
		next := uint64(0) // the least that the next hash can be
		for _, hash := range hashes {
			b = binary.AppendUvarint(b, hash-next)
			next = hash + 1
		}
	}
	return b
}

// DecodeDigest decodes what Append has encoded. It allocates for no more than b can contain, and
// each digest has one encoding.
func DecodeDigest(b []byte) (*Digest, error) {
	if len(b) < digestHeader {
		return nil, fmt.Errorf("%d bytes, want at least %d: %w", len(b), digestHeader, ErrDigest)
	}
	if b[0] != digestVersion {
		return nil, fmt.Errorf("version %d, want %d: run the same version on all nodes: %w", b[0],
			digestVersion, ErrDigest)
	}
	word := func(i int) uint64 { return binary.LittleEndian.Uint64(b[1+8*i:]) }
	d := &Digest{Node: word(0), Generation: word(1), Seq: word(2), Load: word(3),
		Part: binary.LittleEndian.Uint32(b[33:])}
	hot := int(binary.LittleEndian.Uint16(b[37:]))
	added := uint64(binary.LittleEndian.Uint32(b[39:]))
	removed := uint64(binary.LittleEndian.Uint32(b[43:]))
	b = b[digestHeader:]
	if hot > HotMax || added+removed > DigestMax ||
		uint64(hot)*hotBytes+added+removed > uint64(len(b)) {
		return nil, fmt.Errorf("%d hot segments, %d+%d blocks in %d bytes, at most %d and %d: %w",
			hot, added, removed, len(b), HotMax, DigestMax, ErrDigest)
	}
	for range hot {
		h := Hot{Key(b[:16]), binary.LittleEndian.Uint16(b[16:])}
		if h.Owners < 2 {
			return nil, fmt.Errorf("a hot segment with %d owners: %w", h.Owners, ErrDigest)
		}
		d.Hot = append(d.Hot, h)
		b = b[hotBytes:]
	}
	hashes := func(n uint64) ([]uint64, error) {
		list, next := make([]uint64, 0, n), uint64(0)
		for range n {
			gap, size := binary.Uvarint(b)
			if size <= 0 || size > 1 && b[size-1] == 0 || gap >= 1<<hashBits-next {
				return nil, fmt.Errorf("block %d of %d: %w", len(list), n, ErrDigest)
			}
			list = append(list, next+gap)
			next += gap + 1
			b = b[size:]
		}
		return list, nil
	}
	var err error
	if d.Added, err = hashes(added); err != nil {
		return nil, err
	}
	if d.Removed, err = hashes(removed); err != nil {
		return nil, err
	}
	if len(b) > 0 {
		return nil, fmt.Errorf("%d bytes too many: %w", len(b), ErrDigest)
	}
	return d, nil
}

// Journal makes the digests of a node from the blocks that come and go. A Journal is not safe for
// concurrent use.
type Journal struct {
	node, generation, seq uint64
	changes               map[uint64]bool // by hash since the last Cut; true: added
	lost                  bool            // more than DigestMax changes came
}

// NewJournal returns the Journal of a node. generation must be greater than in every process that
// the node ran before.
func NewJournal(node, generation uint64) *Journal {
	return &Journal{node: node, generation: generation, changes: make(map[uint64]bool)}
}

// Add notes that the node has a block now, Remove that it has it no longer. Both report whether
// there is room for more: if not, Cut should come first.
func (j *Journal) Add(block Key) bool { return j.note(hashOf(block), true) }

// Remove is the opposite of Add.
func (j *Journal) Remove(block Key) bool { return j.note(hashOf(block), false) }

func (j *Journal) note(hash uint64, added bool) bool {
	if _, known := j.changes[hash]; !known && len(j.changes) == DigestMax {
		j.lost = true
		return false
	}
	j.changes[hash] = added
	return len(j.changes) < DigestMax
}

// Cut returns the changes since the last Cut, to be sent to every other node. If there were too
// many, numbers are left out, and other nodes ask for a snapshot.
func (j *Journal) Cut(load uint64, hot []Hot) *Digest {
	if j.seq++; j.lost {
		j.seq++
	}
	d := &Digest{Node: j.node, Generation: j.generation, Seq: j.seq, Load: load, Hot: hot}
	for hash, added := range j.changes {
		if added {
			d.Added = append(d.Added, hash)
		} else {
			d.Removed = append(d.Removed, hash)
		}
	}
	slices.Sort(d.Added)
	slices.Sort(d.Removed)
	clear(j.changes)
	j.lost = false
	return d
}

// Snapshot returns the digests, one or more, that tell a node all blocks. Digests that Cut returns
// meanwhile may be sent between its parts, but each in the order in which it was made. load and hot
// are as for Cut.
func (j *Journal) Snapshot(load uint64, hot []Hot, blocks iter.Seq[Key]) iter.Seq[*Digest] {
	return func(yield func(*Digest) bool) {
		d := Digest{Node: j.node, Generation: j.generation, Seq: j.seq, Part: 1, Load: load,
			Hot: hot}
		part := func() bool {
			slices.Sort(d.Added)
			d.Added = slices.Compact(d.Added)
			sent := d
			d.Part, d.Added = d.Part+1, nil
			return yield(&sent)
		}
		for block := range blocks {
			if d.Added = append(d.Added, hashOf(block)); len(d.Added) == DigestMax && !part() {
				return
			}
		}
		if d.Part == 1 || len(d.Added) > 0 {
			part()
		}
	}
}
