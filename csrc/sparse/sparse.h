/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which entries of a sequence and layer (a set) lie in which slots. Table in sparse.go says how.
 */
#ifndef SLUICE_SPARSE_H
#define SLUICE_SPARSE_H

#include <stdint.h>

enum { SL_SPARSE_WAYS = 16 };

#define SL_SPARSE_NONE UINT32_MAX

enum sl_sparse_way { SL_SPARSE_BEST, SL_SPARSE_PLAIN, SL_SPARSE_AVX2, SL_SPARSE_AVX512 };

struct sl_sparse_table {
	uint32_t *tags;	  /* by set, group and way: the entry; NONE: empty */
	uint16_t *stamps; /* by set, group and way: the set's clock when it was used last */
	uint8_t *beyond;  /* by set and group: entries that went past it; 255: so many or more */
	uint16_t *clocks; /* by set */
	uint32_t groups;  /* of a set, at least two */
};

struct sl_sparse_misses {
	uint32_t *slots; /* into which the entries are to be brought */
	uint32_t *from;	 /* where they lie; NONE: behind what 32 bits can count */
	uint32_t *place; /* in entries: the first that asked for it */
	uint16_t *used;	 /* one for each group of a set: 0 before and behind */
};

struct sl_sparse_batch {
	const uint32_t *sets;	 /* each once */
	const uint32_t *entries; /* n for each set; NONE: none */
	const uint32_t *blocks;	 /* of all sets */
	const uint32_t *starts;	 /* where each set's blocks begin, and the last ones end */
	uint32_t *slots;	 /* written: of each entry, counted over all sets; NONE of NONE */
	uint32_t *counts;	 /* written: misses of each set */
	uint32_t count, n, shift;
};

/*
 * Looks the entries of each set up, and gives those that are not there the slots of those that have
 * not been used for longest, and that it does not ask for. Entry i lies at blocks[i >> shift] <<
 * shift | i & (1 << shift) - 1 of its set; one behind the last block is refused before anything has
 * changed: -1 - its index. The lists of misses have room for all entries, and a set has at least n
 * slots. Returns the number of misses.
 */
int64_t sl_sparse_lookup(struct sl_sparse_table *t, const struct sl_sparse_batch *b,
			 const struct sl_sparse_misses *m, int way);

/* 1: this processor has the instructions. */
int sl_sparse_has(int way);

#endif
