// SPDX-License-Identifier: Apache-2.0

package rdma

import "github.com/sluicehq/sluice/driver"

// span is a range that the NICs are to know: of host memory, or of a device's.
type span struct {
	bytes      []byte // host memory; nil: a device's, which has an address alone
	base, size uint64
	device     int // ordinal; onHost: host memory
}

const onHost = -1

func spanOf(seg *driver.Segment) span {
	if seg.Kind == driver.HBM {
		return span{base: seg.Addr, size: seg.Len, device: seg.Device}
	}
	return span{bytes: seg.Mem, base: addressOf(seg.Mem), size: seg.Len, device: onHost}
}

func (s *span) end() uint64 { return s.base + s.size }

// holds reports whether all of another range lies within.
func (s *span) holds(other *span) bool {
	return s.device == other.device && s.base <= other.base && s.end() >= other.end()
}
