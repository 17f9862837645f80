// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/binary"
	"errors"
	"math"
	"math/bits"

	"github.com/sluicehq/sluice/driver"
)

// repeatMin is the least number of ranges in a row that appendRanges writes as a repeat.
const repeatMin = 4

// appendRanges appends the number of ranges, and then alternates between ranges that are written
// out and a repeat of earlier ones. Two ranges are alike if they have the same length and the same
// gap to the range before: so the blocks of a request, which lie alike in every layer, are written
// once.
//
//	ranges: count, then as long as ranges are left: literals, repeat
//	literals: number, then for each: 2 * gap, or 2 * gap + 1 and a length other than that before
//	repeat: number of ranges, and how many ranges earlier they stand (only if ranges are left)
func appendRanges(dst []byte, ranges driver.Ranges) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(ranges)))
	seen := make([]int32, 1<<bits.Len(uint(len(ranges)))) // by hash: 1 + index of a range, or 0
	for at := 0; at < len(ranges); {
		begin, from, n := at, 0, 0
		for ; at < len(ranges); at++ {
			last := &seen[hashRanges(ranges, at)%uint64(len(seen))]
			from = int(*last) - 1
			if n = repeated(ranges, from, at); n >= repeatMin {
				break
			}
			*last = int32(at) + 1
		}
		dst = binary.AppendUvarint(dst, uint64(at-begin))
		for i := begin; i < at; i++ {
			if before := previous(ranges, i); ranges[i].Len == before.Len {
				dst = binary.AppendUvarint(dst, gap(ranges, i)<<1)
			} else {
				dst = binary.AppendUvarint(dst, gap(ranges, i)<<1|1)
				dst = binary.AppendUvarint(dst, ranges[i].Len)
			}
		}
		if at < len(ranges) {
			dst = binary.AppendUvarint(binary.AppendUvarint(dst, uint64(n)), uint64(at-from))
			at += n
		}
	}
	return dst
}

// previous returns the range before range i, or an empty one at 0.
func previous(ranges driver.Ranges, i int) (r driver.Range) {
	if i > 0 {
		r = ranges[i-1]
	}
	return r
}

// gap returns the distance of range i from the end of the one before.
func gap(ranges driver.Ranges, i int) uint64 {
	before := previous(ranges, i)
	return ranges[i].Off - before.Off - before.Len
}

// hashRanges returns a hash of the gaps and lengths of the repeatMin ranges from index at on.
func hashRanges(ranges driver.Ranges, at int) (h uint64) {
	for i := at; i < min(at+repeatMin, len(ranges)); i++ {
		h = (h ^ gap(ranges, i)) * 0x9E3779B97F4A7C15
		h = (h ^ ranges[i].Len ^ h>>32) * 0x9E3779B97F4A7C15
	}
	return h >> 32
}

// repeated returns how many ranges from index at on are like those from index from on. It returns 0
// if from is negative.
func repeated(ranges driver.Ranges, from, at int) (n int) {
	for from >= 0 && at+n < len(ranges) && gap(ranges, at+n) == gap(ranges, from+n) &&
		ranges[at+n].Len == ranges[from+n].Len {
		n++
	}
	return n
}

// ranges decodes what appendRanges has written.
func (r *reader) ranges() driver.Ranges {
	count := r.uvarint(driver.RangesMax)
	if r.ranged += count; r.ranged > driver.RangesMax {
		r.fail(errors.New("has too many ranges"))
	}
	if r.err != nil {
		return nil
	}
	list := make(driver.Ranges, 0, count)
	for r.err == nil && uint64(len(list)) < count {
		for range r.uvarint(count - uint64(len(list))) {
			n, code := previous(list, len(list)).Len, r.uvarint(math.MaxUint64)
			if code&1 == 1 {
				n = r.uvarint(math.MaxInt64)
			}
			list = r.appendRange(list, code>>1, n)
		}
		left := count - uint64(len(list))
		if r.err != nil || left == 0 {
			break
		}
		n, back := int(r.uvarint(left)), int(r.uvarint(uint64(len(list))))
		if n == 0 || back == 0 {
			r.fail(errors.New("has a repeat of no ranges"))
		}
		for ; r.err == nil && n > 0; n-- {
			from := len(list) - back
			list = r.appendRange(list, gap(list, from), list[from].Len)
		}
	}
	return list
}

// appendRange appends a range of n bytes that begins gap bytes behind the end of the last one.
func (r *reader) appendRange(list driver.Ranges, gap, n uint64) driver.Ranges {
	before := previous(list, len(list))
	end := before.Off + before.Len
	if gap > math.MaxInt64-end || n > math.MaxInt64-end-gap {
		r.fail(errors.New("has ranges that are too large"))
	}
	if r.err != nil {
		return list
	}
	return append(list, driver.Range{Off: end + gap, Len: n})
}
