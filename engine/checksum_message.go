// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/sluicehq/sluice/driver"
)

// A request: kind and tag, the token of the memory, then flags and ranges. The answer repeats
// the tag. Integers are little-endian.
const (
	sumTagBytes = 8
	sumFixed    = 1 + sumTagBytes + 2 + 1 + 4
	sumTokenMax = 256
	sumPattern  = 8 + 8 + 8 // of pages: length, base, stride
	sumEntry    = 8 + 8     // of descriptors: offset, length
	sumWholeMax = sumBytes  // bytes that one request may ask for

	sumPaged  = 1
	sumListed = 2
)

// sumDescsMax and sumPagesMax are how many ranges a request, and its answer, have room for.
func sumDescsMax(messageMax int) int { return (messageMax - sumFixed - sumTokenMax) / sumEntry }
func sumPagesMax(messageMax int) int {
	return (messageMax - sumFixed - sumTokenMax - sumPattern) / 4
}

// appendRequest writes a request with a place for the tag.
func (s *summing) appendRequest(b, token []byte) ([]byte, error) {
	if len(token) > sumTokenMax {
		return nil, fmt.Errorf("checksum: a token of %d bytes: %w", len(token), ErrBounds)
	}
	b = binary.LittleEndian.AppendUint64(append(b, isSum), 0)
	b = append(binary.LittleEndian.AppendUint16(b, uint16(len(token))), token...)
	if p := s.pages; p != nil {
		flags := byte(sumPaged)
		far := &p.Remote
		if far.List != nil {
			flags |= sumListed
		}
		b = binary.LittleEndian.AppendUint32(append(b, flags), uint32(p.Count))
		b = binary.LittleEndian.AppendUint64(b, p.Run)
		b = binary.LittleEndian.AppendUint64(b, far.Base)
		b = binary.LittleEndian.AppendUint64(b, far.Stride)
		for _, slot := range far.List {
			b = binary.LittleEndian.AppendUint32(b, slot)
		}
		return b, nil
	}
	b = binary.LittleEndian.AppendUint32(append(b, 0), uint32(len(s.descs)))
	for i := range s.descs {
		b = binary.LittleEndian.AppendUint64(b, s.descs[i].Remote)
		b = binary.LittleEndian.AppendUint64(b, s.descs[i].Len)
	}
	return b, nil
}

// sumRequest is a request that was read, and checked but for the memory's bounds.
type sumRequest struct {
	token  []byte
	count  int
	paged  bool
	entry  uint64 // of a pattern
	base   uint64
	stride uint64
	list   []byte // indices, or descriptors; nil: a pattern without
}

// parse reads what follows the tag.
func (r *sumRequest) parse(b []byte) error {
	const fixed = sumFixed - 1 - sumTagBytes
	if len(b) < fixed {
		return ErrCorrupt
	}
	n := int(binary.LittleEndian.Uint16(b))
	b = b[2:]
	if n > sumTokenMax || len(b) < n+5 {
		return ErrCorrupt
	}
	r.token, b = b[:n], b[n:]
	flags, count := b[0], binary.LittleEndian.Uint32(b[1:])
	b = b[5:]
	r.paged, r.count = flags&sumPaged != 0, int(count)
	size := sumEntry
	if r.paged {
		if len(b) < sumPattern {
			return ErrCorrupt
		}
		r.entry, r.base, r.stride = binary.LittleEndian.Uint64(b),
			binary.LittleEndian.Uint64(b[8:]), binary.LittleEndian.Uint64(b[16:])
		b, size = b[sumPattern:], 4
		if flags&sumListed == 0 {
			size = 0
		}
	}
	// Without a list the count is bounded by what an answer holds.
	if flags > sumPaged|sumListed || flags == sumListed || count == 0 || count > 1<<20 ||
		len(b) != r.count*size {
		return ErrCorrupt
	}
	if size > 0 {
		r.list = b
	}
	return nil
}

// at returns range i of the request; ok: it lies in a memory of that size.
func (r *sumRequest) at(i int, size uint64) (off, n uint64, ok bool) {
	if !r.paged {
		off, n = binary.LittleEndian.Uint64(r.list[sumEntry*i:]),
			binary.LittleEndian.Uint64(r.list[sumEntry*i+8:])
		return off, n, off <= size && n <= size-off
	}
	index := uint64(i)
	if r.list != nil {
		index = uint64(binary.LittleEndian.Uint32(r.list[4*i:]))
	}
	n = r.entry
	if n > size || r.base > size-n || index > 0 && r.stride > (size-n-r.base)/index {
		return 0, 0, false
	}
	return r.base + index*r.stride, n, true
}

// castagnoli has an instruction on amd64 and arm64.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// ranges returns how many ranges a batch has, and where each lies on this side and on the peer's.
func (s *summing) ranges() int {
	if s.pages != nil {
		return s.pages.Count
	}
	return len(s.descs)
}

func (s *summing) at(i int) driver.Desc {
	if s.pages != nil {
		return s.pages.Desc(i)
	}
	return s.descs[i]
}

// compare looks at the peer's sums; nil: they are ours.
func (s *summing) compare(theirs []byte, peer string) error {
	n := s.ranges()
	if len(theirs) != 4*n {
		return fmt.Errorf("an answer with %d bytes of sums, want %d: %w", len(theirs), 4*n,
			ErrCorrupt)
	}
	mem := s.local.seg.Mem
	for i := range n {
		d := s.at(i)
		if crc32.Checksum(mem[d.Local:d.Local+d.Len], castagnoli) != binary.LittleEndian.Uint32(
			theirs[4*i:]) {
			return &CorruptError{Op: s.op, Peer: peer, Region: s.remote.name, Offset: d.Remote,
				Len: d.Len}
		}
	}
	return nil
}
