/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sums cells of KV cache, as the package comment of digest.go defines it. The function keeps
 * no state, allocates nothing and never calls back.
 */
#ifndef SLUICE_DIGEST_H
#define SLUICE_DIGEST_H

#include <stdint.h>

/* Cells and Key of digest.go, without the list and the key's words. */
struct sl_digest_cells {
	uint64_t base, stride, step; /* where entry i begins, as driver.Side */
	uint64_t first, per;
	uint64_t count;	      /* entries */
	uint64_t coord, turn; /* of the first cell; from an entry to the next */
	/* Axes of an entry, the outer first: cells; bytes and coordinate from one to the next. */
	uint64_t n[2], by[2], on[2];
	uint64_t cell; /* bytes */
	uint64_t s[2];
};

/* How the words are multiplied. Every way has the same result. */
enum sl_digest_way {
	SL_DIGEST_BEST,
	SL_DIGEST_PLAIN,
	SL_DIGEST_AVX2,
	SL_DIGEST_AVX512,
	SL_DIGEST_NEON,
};

/*
 * Sums all cells into out: two sums and a count. list may be NULL: then slot i is i. keys has a
 * pair of words for each 8 bytes of a cell and begun ones, of the first lane and then of the
 * second. -ERANGE: a cell leaves the memory, and no byte outside was read; -EFAULT: the memory is
 * gone; -ENOTSUP: this processor does not have the way. Then out is as it was.
 */
int sl_digest(const uint8_t *mem, uint64_t len, const uint32_t *list,
	      const struct sl_digest_cells *cells, const uint64_t *keys, int way, uint64_t out[3]);

#endif
