// SPDX-License-Identifier: Apache-2.0

package exchange

import (
	"encoding/binary"
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

// A request for sums: kind and tag, the token of the memory, then flags and ranges. The answer
// repeats the tag.
const (
	SumTag      = 8       // bytes of a tag
	SumTokenMax = 256     // bytes
	SumMax      = 2 << 20 // bytes that one request may ask for

	sumFixed   = 1 + SumTag + 2 + 1 + 4
	sumPattern = 8 + 8 + 8 // of a pattern: length, base, stride
	sumDesc    = 8 + 8     // of a descriptor: offset, length

	sumPaged  = 1
	sumListed = 2
)

// SumDescsMax and SumEntriesMax are how many ranges a request, and its answer, have room for.
func SumDescsMax(messageMax int) int { return (messageMax - sumFixed - SumTokenMax) / sumDesc }

// SumEntriesMax is SumDescsMax for the entries of a pattern.
func SumEntriesMax(messageMax int) int {
	return (messageMax - sumFixed - SumTokenMax - sumPattern) / 4
}

// AppendSum appends a request for the far ends of descriptors, or (not nil) of a pattern's entries,
// with a place for the tag: SetSumTag. It returns ErrBounds for a token longer than SumTokenMax.
func AppendSum(b, token []byte, descs []driver.Desc, p *driver.Pattern) ([]byte, error) {
	if len(token) > SumTokenMax {
		return nil, fmt.Errorf("checksum: a token of %d bytes: %w", len(token), driver.ErrBounds)
	}
	b = binary.LittleEndian.AppendUint64(append(b, IsSum), 0)
	b = append(binary.LittleEndian.AppendUint16(b, uint16(len(token))), token...)
	if p != nil {
		flags := byte(sumPaged)
		if p.Remote.List != nil {
			flags |= sumListed
		}
		b = binary.LittleEndian.AppendUint32(append(b, flags), uint32(p.Count))
		b = binary.LittleEndian.AppendUint64(b, p.Run)
		b = binary.LittleEndian.AppendUint64(b, p.Remote.Base)
		b = binary.LittleEndian.AppendUint64(b, p.Remote.Stride)
		for _, index := range p.Remote.List {
			b = binary.LittleEndian.AppendUint32(b, index)
		}
		return b, nil
	}
	b = binary.LittleEndian.AppendUint32(append(b, 0), uint32(len(descs)))
	for i := range descs {
		b = binary.LittleEndian.AppendUint64(b, descs[i].Remote)
		b = binary.LittleEndian.AppendUint64(b, descs[i].Len)
	}
	return b, nil
}

// SetSumTag puts the tag into a request that is about to go.
func SetSumTag(request []byte, tag uint64) { binary.LittleEndian.PutUint64(request[1:], tag) }

// SumBody is what follows a request's tag.
func SumBody(request []byte) []byte { return request[1+SumTag:] }

// Sum is a request that was read, and checked but for the memory's bounds.
type Sum struct {
	Token []byte
	Count int // ranges

	paged  bool
	entry  uint64
	base   uint64
	stride uint64
	list   []byte // indices, or descriptors; nil: entries that count up
}

// Parse reads what follows the tag.
func (s *Sum) Parse(b []byte) error {
	const fixed = sumFixed - 1 - SumTag
	if len(b) < fixed {
		return driver.ErrCorrupt
	}
	n := int(binary.LittleEndian.Uint16(b))
	b = b[2:]
	if n > SumTokenMax || len(b) < n+5 {
		return driver.ErrCorrupt
	}
	s.Token, b = b[:n], b[n:]
	flags, count := b[0], binary.LittleEndian.Uint32(b[1:])
	b = b[5:]
	s.paged, s.Count = flags&sumPaged != 0, int(count)
	size := sumDesc
	if s.paged {
		if len(b) < sumPattern {
			return driver.ErrCorrupt
		}
		s.entry, s.base, s.stride = binary.LittleEndian.Uint64(b),
			binary.LittleEndian.Uint64(b[8:]), binary.LittleEndian.Uint64(b[16:])
		b, size = b[sumPattern:], 4
		if flags&sumListed == 0 {
			size = 0
		}
	}
	// Without a list the count is bounded by what an answer holds.
	if flags > sumPaged|sumListed || flags == sumListed || count == 0 || count > 1<<20 ||
		len(b) != s.Count*size {
		return driver.ErrCorrupt
	}
	if size > 0 {
		s.list = b
	}
	return nil
}

// At returns range i of the request; ok: it lies in a memory of that size.
func (s *Sum) At(i int, size uint64) (off, n uint64, ok bool) {
	if !s.paged {
		off, n = binary.LittleEndian.Uint64(s.list[sumDesc*i:]),
			binary.LittleEndian.Uint64(s.list[sumDesc*i+8:])
		return off, n, off <= size && n <= size-off
	}
	index := uint64(i)
	if s.list != nil {
		index = uint64(binary.LittleEndian.Uint32(s.list[4*i:]))
	}
	n = s.entry
	if n > size || s.base > size-n || index > 0 && s.stride > (size-n-s.base)/index {
		return 0, 0, false
	}
	return s.base + index*s.stride, n, true
}
