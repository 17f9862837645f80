// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/binary"
	"errors"
	"math"
	"math/bits"

	"github.com/sluicehq/sluice/driver"
)

// repeatMin is how many ranges in a row are worth a repeat.
const repeatMin = 4

// appendRanges appends how many ranges there are, and then in turn some that are written out and
// some that repeat earlier ones, in gaps and lengths: the blocks of a request lie alike in each
// layer, so that they are written once. A gap is that from the end of the range before, doubled,
// and one more where the length is not that of the range before but follows.
func appendRanges(dst []byte, ranges driver.Ranges) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(ranges)))
	seen := make([]int32, 1<<bits.Len(uint(len(ranges)))) // by hash: ranges up to there, 0: none
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

func previous(ranges driver.Ranges, i int) (r driver.Range) {
	if i > 0 {
		r = ranges[i-1]
	}
	return r
}

func gap(ranges driver.Ranges, i int) uint64 {
	before := previous(ranges, i)
	return ranges[i].Off - before.Off - before.Len
}

// hashRanges is of as many ranges as a repeat has at least.
func hashRanges(ranges driver.Ranges, at int) (h uint64) {
	for i := at; i < min(at+repeatMin, len(ranges)); i++ {
		h = (h ^ gap(ranges, i)) * 0x9E3779B97F4A7C15
		h = (h ^ ranges[i].Len ^ h>>32) * 0x9E3779B97F4A7C15
	}
	return h >> 32
}

// repeated returns how many ranges from at on lie as those from an earlier one on; -1: there is
// none.
func repeated(ranges driver.Ranges, from, at int) (n int) {
	for from >= 0 && at+n < len(ranges) && gap(ranges, at+n) == gap(ranges, from+n) &&
		ranges[at+n].Len == ranges[from+n].Len {
		n++
	}
	return n
}

// ranges reads what appendRanges has written.
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
			n, far := previous(list, len(list)).Len, r.uvarint(math.MaxUint64)
			if far&1 == 1 {
				n = r.uvarint(math.MaxInt64)
			}
			list = r.behind(list, far>>1, n)
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
			list = r.behind(list, gap(list, from), list[from].Len)
		}
	}
	return list
}

// behind appends the range that lies so far behind the last one.
func (r *reader) behind(list driver.Ranges, far, n uint64) driver.Ranges {
	before := previous(list, len(list))
	end := before.Off + before.Len
	if far > math.MaxInt64-end || n > math.MaxInt64-end-far {
		r.fail(errors.New("has ranges that are too large"))
	}
	if r.err != nil {
		return list
	}
	return append(list, driver.Range{Off: end + far, Len: n})
}
