// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bufio"
	"bytes"
	"compress/flate"
	"encoding/binary"
	"errors"
	"math"

	"github.com/sluicehq/sluice/driver"
)

// rangesBytes bounds the packed ranges of a region.
const rangesBytes = 4 << 20

// packRanges returns the gap before each range and its length, deflated: the blocks of a request
// lie alike in each layer, so that most of it is said once.
func packRanges(ranges driver.Ranges) []byte {
	plain := make([]byte, 0, 4*len(ranges))
	end := uint64(0)
	for _, r := range ranges {
		plain = binary.AppendUvarint(plain, r.Off-end)
		plain = binary.AppendUvarint(plain, r.Len)
		end = r.Off + r.Len
	}
	var packed bytes.Buffer
	w, _ := flate.NewWriter(&packed, flate.DefaultCompression) // there is such a level
	_, _ = w.Write(plain)                                      // a Buffer takes all
	_ = w.Close()
	return packed.Bytes()
}

// ranges reads what packRanges has packed, behind their number. However much it unpacks to, no more
// is read than so many ranges need.
func (r *reader) ranges() driver.Ranges {
	count := r.uvarint(driver.RangesMax)
	if r.ranged += count; r.ranged > driver.RangesMax {
		r.fail(errors.New("has too many ranges"))
	}
	packed := r.block(rangesBytes)
	if r.err != nil {
		return nil
	}
	if count == 0 || count > uint64(len(packed))*rangesAByte {
		r.fail(errors.New("has ranges that its bytes cannot name"))
		return nil
	}
	in := bufio.NewReader(flate.NewReader(bytes.NewReader(packed)))
	list := make(driver.Ranges, 0, count)
	end := uint64(0)
	for range count {
		gap, err := binary.ReadUvarint(in)
		var n uint64
		if err == nil {
			n, err = binary.ReadUvarint(in)
		}
		if err != nil || gap > math.MaxInt64-end || n > math.MaxInt64-end-gap {
			r.fail(errors.New("has ranges that end early, or are too large"))
			return nil
		}
		list = append(list, driver.Range{Off: end + gap, Len: n})
		end += gap + n
	}
	if _, err := in.ReadByte(); err == nil {
		r.fail(errors.New("has more ranges than it says"))
	}
	return list
}

// rangesAByte is more than one byte of a deflated list comes to.
const rangesAByte = 600
