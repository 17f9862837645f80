// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

/*
#include "digest.h"
#include "gather.h"
#include "sparse.h"
*/
import "C"

import "unsafe"

// The kernels read the arguments as they lie in Go: args, nested and tally have the sizes and
// offsets of their structs in gather.h. Each pair of lines is one equality, in both directions.
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
	_ = uint(C.SL_FAR_DST - farDst)
	_ = uint(C.SL_PARTS_MAX - len(args{}.part))
	_ = uint(C.SL_AHEAD - ahead)
	_ = uint(C.SL_ROWS_THREADS - rowsThreads)
	_ = uint(C.SL_ASYNC_THREADS - asyncThreads)
)

// The same for the kernel that digests, and digest.h.
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

// The same for the kernels that look up, and sparse.h.
const (
	_ = uint(unsafe.Sizeof(lookupArgs{}) - unsafe.Sizeof(C.struct_sl_lookup{}))
	_ = uint(unsafe.Sizeof(C.struct_sl_lookup{}) - unsafe.Sizeof(lookupArgs{}))
	_ = uint(unsafe.Offsetof(lookupArgs{}.slots) - unsafe.Offsetof(C.struct_sl_lookup{}.slots))
	_ = uint(unsafe.Offsetof(C.struct_sl_lookup{}.slots) - unsafe.Offsetof(lookupArgs{}.slots))
	_ = uint(unsafe.Offsetof(lookupArgs{}.bad) - unsafe.Offsetof(C.struct_sl_lookup{}.bad))
	_ = uint(unsafe.Offsetof(C.struct_sl_lookup{}.bad) - unsafe.Offsetof(lookupArgs{}.bad))
	_ = uint(unsafe.Offsetof(lookupArgs{}.shift) - unsafe.Offsetof(C.struct_sl_lookup{}.shift))
	_ = uint(unsafe.Offsetof(C.struct_sl_lookup{}.shift) - unsafe.Offsetof(lookupArgs{}.shift))
	_ = uint(unsafe.Sizeof(lookupBad{}) - unsafe.Sizeof(C.struct_sl_lookup_bad{}))
	_ = uint(unsafe.Sizeof(C.struct_sl_lookup_bad{}) - unsafe.Sizeof(lookupBad{}))
	_ = uint(C.SL_LOOKUP_THREADS - lookupThreads)
	_ = uint(lookupThreads - C.SL_LOOKUP_THREADS)
)
