// SPDX-License-Identifier: Apache-2.0

package weights

import "math"

// DType is the type of a tensor's elements, as safetensors names it: "BF16".
type DType string

// bits of one element.
var bits = map[DType]uint64{
	"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
	"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
	"F8_E5M2FNUZ": 8,
	"U16":         16, "I16": 16, "F16": 16, "BF16": 16,
	"U32": 32, "I32": 32, "F32": 32,
	"U64": 64, "I64": 64, "F64": 64, "C64": 64,
}

// Bits returns how many one element has; 0: the type is not known.
func (d DType) Bits() uint64 { return bits[d] }

// size returns the bytes of a tensor; not ok: more than there can be, or no whole number. As in
// safetensors itself, dimensions count from the first: a 0 makes nothing of those that follow.
func (d DType) size(shape []uint64) (n uint64, ok bool) {
	n = 1
	for _, dim := range append(shape[:len(shape):len(shape)], bits[d]) {
		if dim != 0 && n > math.MaxUint64/dim {
			return 0, false
		}
		n *= dim
	}
	return n / 8, n%8 == 0 && n/8 <= math.MaxInt64
}
