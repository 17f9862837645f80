// SPDX-License-Identifier: Apache-2.0

package cuda

// lookupThreads is SL_LOOKUP_THREADS of sparse.h.
const lookupThreads = 640

// lookupArgs is struct sl_lookup of sparse.h, which both kernels of lookups take.
type lookupArgs struct {
	tags, stamps, beyond, clocks  uint64
	sets, entries, blocks, starts uint64
	slots, counts                 uint64
	missSlots, missFrom, missAt   uint64
	bad                           uint64
	groups, all                   uint32
	count, n, shift, blocksN      uint32
}

// lookupBad is struct sl_lookup_bad.
type lookupBad struct{ set, entry uint64 }
