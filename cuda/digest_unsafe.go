// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

/*
#include "digest.h"
*/
import "C"

import "unsafe"

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
