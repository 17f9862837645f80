// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package sparse

/*
#cgo CFLAGS: -O2 -std=gnu11 -Wall -Wextra
#cgo noescape lookup
#cgo nocallback lookup
#include "sparse.h"

// A struct of Go's with pointers to Go's memory may not be passed to C; the pointers may.
static int64_t lookup(uint32_t *tags, uint16_t *stamps, uint8_t *beyond, uint16_t *clocks,
		      uint32_t groups, const uint32_t *sets, const uint32_t *entries,
		      const uint32_t *blocks, const uint32_t *starts, uint32_t *slots,
		      uint32_t *counts, uint32_t count, uint32_t n, uint32_t shift, uint32_t *into,
		      uint32_t *from, uint32_t *place, uint16_t *used, int way)
{
	struct sl_sparse_table t = {tags, stamps, beyond, clocks, groups};
	struct sl_sparse_batch b = {sets,  entries, blocks, starts, slots, counts,
				    count, n,	    shift};
	struct sl_sparse_misses m = {into, from, place, used};

	return sl_sparse_lookup(&t, &b, &m, way);
}
*/
import "C"

import "unsafe"

func lookupBest(t *Table, b *Batch, m *Misses) int { return lookupC(C.SL_SPARSE_BEST, t, b, m) }

func lookupC(way C.int, t *Table, b *Batch, m *Misses) int {
	word := func(list []uint32) *C.uint32_t {
		return (*C.uint32_t)(unsafe.Pointer(unsafe.SliceData(list)))
	}
	half := func(list []uint16) *C.uint16_t {
		return (*C.uint16_t)(unsafe.Pointer(unsafe.SliceData(list)))
	}
	return int(C.lookup(word(t.tags), half(t.stamps),
		(*C.uint8_t)(unsafe.Pointer(unsafe.SliceData(t.beyond))), half(t.clocks),
		C.uint32_t(t.groups), word(b.Sets), word(b.Entries), word(b.Blocks), word(b.Starts),
		word(b.Slots), word(b.Counts), C.uint32_t(len(b.Sets)),
		C.uint32_t(len(b.Entries)/len(b.Sets)), C.uint32_t(b.Shift), word(m.Slots), word(m.From),
		word(m.Place), half(m.used), way))
}

// ways are those that this processor has the instructions for, by name.
func ways() map[string]func(*Table, *Batch, *Misses) int {
	list := map[string]func(*Table, *Batch, *Misses) int{}
	for name, way := range map[string]C.int{"plain": C.SL_SPARSE_PLAIN, "avx2": C.SL_SPARSE_AVX2,
		"avx512": C.SL_SPARSE_AVX512} {
		if C.sl_sparse_has(way) != 0 {
			list[name] = func(t *Table, b *Batch, m *Misses) int { return lookupC(way, t, b, m) }
		}
	}
	return list
}
