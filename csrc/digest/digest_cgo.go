// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package digest

/*
#cgo CFLAGS: -O2 -std=c11 -Wall -Wextra
#cgo noescape sl_digest
#cgo nocallback sl_digest
#include "digest.h"
#include <errno.h>
*/
import "C"

import (
	"unsafe"

	"github.com/sluicehq/sluice/driver"
)

// How C multiplies the words: enum sl_digest_way.
const (
	best   = C.SL_DIGEST_BEST
	plain  = C.SL_DIGEST_PLAIN
	avx2   = C.SL_DIGEST_AVX2
	avx512 = C.SL_DIGEST_AVX512
	neon   = C.SL_DIGEST_NEON
)

func sum(mem []byte, c *Cells, k *Key) (Digest, error) { return sumBy(best, mem, c, k) }

// Implements: int sl_digest(const uint8_t *mem, uint64_t len, ...)
func sumBy(way int, mem []byte, c *Cells, k *Key) (Digest, error) {
	cells := C.struct_sl_digest_cells{
		base: C.uint64_t(c.At.Base), stride: C.uint64_t(c.At.Stride), step: C.uint64_t(c.At.Step),
		first: C.uint64_t(c.At.First), per: C.uint64_t(c.At.Per), count: C.uint64_t(c.Count),
		coord: C.uint64_t(c.Coord), turn: C.uint64_t(c.Turn), cell: C.uint64_t(k.cell),
		n:  [2]C.uint64_t{C.uint64_t(c.Outer.N), C.uint64_t(c.Axis.N)},
		by: [2]C.uint64_t{C.uint64_t(c.Outer.By), C.uint64_t(c.Axis.By)},
		on: [2]C.uint64_t{C.uint64_t(c.Outer.On), C.uint64_t(c.Axis.On)},
		s:  [2]C.uint64_t{C.uint64_t(k.s[0]), C.uint64_t(k.s[1])},
	}
	var out [3]C.uint64_t
	rc := C.sl_digest((*C.uint8_t)(unsafe.Pointer(unsafe.SliceData(mem))), C.uint64_t(len(mem)),
		(*C.uint32_t)(unsafe.Pointer(unsafe.SliceData(c.At.List))), &cells,
		(*C.uint64_t)(unsafe.Pointer(unsafe.SliceData(k.words))), C.int(way), &out[0])
	switch rc {
	case 0:
		return Digest{uint64(out[0]), uint64(out[1]), uint64(out[2])}, nil
	case -C.ENOTSUP:
		return Digest{}, driver.ErrUnavailable
	case -C.EFAULT:
		return Digest{}, driver.ErrFault
	}
	return Digest{}, driver.ErrBounds
}
