// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

/*
#cgo CFLAGS: -O2 -std=c11 -Wall -Wextra
#cgo noescape sl_twin_move
#cgo nocallback sl_twin_move
#include "digest.h"
#include "twin.h"
*/
import "C"

import "unsafe"

// Native says whether the twin runs in C.
const Native = true

// The arguments are read by C, and by kernels, as they are: equal sizes in both directions,
// equal offsets.
const (
	_ = uint(unsafe.Sizeof(args{}) - unsafe.Sizeof(C.struct_sl_move{}))
	_ = uint(unsafe.Sizeof(C.struct_sl_move{}) - unsafe.Sizeof(args{}))
	_ = uint(unsafe.Sizeof(argsPart{}) - unsafe.Sizeof(C.struct_sl_part{}))
	_ = uint(unsafe.Sizeof(C.struct_sl_part{}) - unsafe.Sizeof(argsPart{}))
	_ = uint(unsafe.Sizeof(tally{}) - unsafe.Sizeof(C.struct_sl_tally{}))
	_ = uint(unsafe.Sizeof(C.struct_sl_tally{}) - unsafe.Sizeof(tally{}))
	_ = uint(unsafe.Offsetof(args{}.flags) - unsafe.Offsetof(C.struct_sl_move{}.flags))
	_ = uint(unsafe.Offsetof(C.struct_sl_move{}.flags) - unsafe.Offsetof(args{}.flags))
	_ = uint(unsafe.Offsetof(args{}.srcPlaces) - unsafe.Offsetof(C.struct_sl_move{}.src_places))
	_ = uint(unsafe.Offsetof(C.struct_sl_move{}.src_places) - unsafe.Offsetof(args{}.srcPlaces))
	_ = uint(unsafe.Sizeof(nested{}) - unsafe.Sizeof(C.struct_sl_nested{}))
	_ = uint(unsafe.Sizeof(C.struct_sl_nested{}) - unsafe.Sizeof(nested{}))
	_ = uint(unsafe.Offsetof(nest{}.dstPer) - unsafe.Offsetof(C.struct_sl_nest{}.dst_per))
	_ = uint(unsafe.Offsetof(C.struct_sl_nest{}.dst_per) - unsafe.Offsetof(nest{}.dstPer))
	_ = uint(C.SL_LOOPS_MAX - LoopsMax)
	_ = uint(C.SL_DST_WIDE - dstWide)
	_ = uint(C.SL_SRC_WIDE - srcWide)
	_ = uint(C.SL_FAR_DST - farDst)
	_ = uint(C.SL_PARTS_MAX - PartsMax)
	_ = uint(C.SL_AHEAD - ahead)
	_ = uint(C.SL_ROWS_THREADS - rowsThreads)
	_ = uint(C.SL_ASYNC_THREADS - asyncThreads)
)

// The arguments of the kernel that digests: equal sizes in both directions, equal offsets.
const (
	_ = uint(unsafe.Sizeof(cellsArgs{}) - unsafe.Sizeof(C.struct_sl_cells{}))
	_ = uint(unsafe.Sizeof(C.struct_sl_cells{}) - unsafe.Sizeof(cellsArgs{}))
	_ = uint(unsafe.Offsetof(cellsArgs{}.by) - unsafe.Offsetof(C.struct_sl_cells{}.by))
	_ = uint(unsafe.Offsetof(C.struct_sl_cells{}.by) - unsafe.Offsetof(cellsArgs{}.by))
	_ = uint(unsafe.Offsetof(cellsArgs{}.threads) - unsafe.Offsetof(C.struct_sl_cells{}.threads))
	_ = uint(unsafe.Offsetof(C.struct_sl_cells{}.threads) - unsafe.Offsetof(cellsArgs{}.threads))
	_ = uint(unsafe.Sizeof(digestArgs{}) - unsafe.Sizeof(C.struct_sl_digest{}))
	_ = uint(unsafe.Sizeof(C.struct_sl_digest{}) - unsafe.Sizeof(digestArgs{}))
	_ = uint(unsafe.Sizeof(digestTotal{}) - unsafe.Sizeof(C.struct_sl_digest_total{}))
	_ = uint(unsafe.Sizeof(C.struct_sl_digest_total{}) - unsafe.Sizeof(digestTotal{}))
	_ = uint(C.SL_DIGEST_THREADS - digestThreads)
	_ = uint(digestThreads - C.SL_DIGEST_THREADS)
	_ = uint(C.SL_CELL_THREADS - cellThreads)
	_ = uint(cellThreads - C.SL_CELL_THREADS)
	_ = uint(C.SL_CELL_LOADS - cellLoads)
	_ = uint(cellLoads - C.SL_CELL_LOADS)
)

// move moves entries [first, first+n) and adds to the tally.
//
// Implements: void sl_twin_move(const struct sl_move *m, sl_u64 first, sl_u64 n, ...)
func move(m *Move, a *args, first, n uint64, t *tally) {
	one, two := &m.Parts[0], &Part{}
	if len(m.Parts) > 1 {
		two = &m.Parts[1]
	}
	C.sl_twin_move((*C.struct_sl_move)(unsafe.Pointer(a)), C.sl_u64(first), C.sl_u64(n),
		pointer(one.Dst), pointer(one.Src), pointer(two.Dst), pointer(two.Src),
		m.Dst.pointer(), m.Src.pointer(), (*C.struct_sl_tally)(unsafe.Pointer(t)))
}

// pointer is typed, so that cgo does not look for Go pointers in what it points to.
func pointer(mem []byte) *C.uchar { return (*C.uchar)(unsafe.Pointer(unsafe.SliceData(mem))) }

// pointer is NULL where there is no list; an empty one has an address all the same.
func (x *Index) pointer() *C.uchar {
	if x.U64 != nil {
		return (*C.uchar)(unsafe.Pointer(unsafe.SliceData(x.U64)))
	}
	return (*C.uchar)(unsafe.Pointer(unsafe.SliceData(x.U32)))
}
