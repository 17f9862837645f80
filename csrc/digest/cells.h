/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the ways to sum: a list of cells, and the pairs of words of one. */
#ifndef SLUICE_DIGEST_CELLS_H
#define SLUICE_DIGEST_CELLS_H

#include "digest.h"
#include "mix.h"

#include <string.h>

struct cell {
	const uint8_t *at;
	uint64_t coord;
};

/* Common to all cells of a call. */
struct shape {
	uint64_t size, s[2];     /* size: bytes of a cell */
	const uint64_t *keys[2]; /* by lane */
};

/*
 * Adds n cells to two sums, and fetches the cell that stands ahead places behind each: there are
 * n + ahead. Fetching line by line between the lines that are summed keeps more misses under way
 * than fetching a cell at once. ahead 0: it fetches none.
 */
typedef void sum_cells(const struct cell *list, uint64_t n, uint64_t ahead, const struct shape *c,
		       uint64_t sums[2]);

static inline uint64_t little(uint64_t x)
{
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
	return __builtin_bswap64(x);
#else
	return x;
#endif
}

/* Adds the pairs of words of a cell from byte i on. The last pair is padded with zeros. */
static inline void pairs(const uint8_t *at, uint64_t i, const struct shape *c, uint64_t nh[2])
{
	uint64_t m;

	for (; i + 8 <= c->size; i += 8) {
		memcpy(&m, at + i, 8);
		m = little(m);
		nh[0] += sl_product(m, c->keys[0][i / 8]);
		nh[1] += sl_product(m, c->keys[1][i / 8]);
	}
	if (i == c->size)
		return;
	m = 0;
	for (uint64_t j = c->size; j > i; j--)
		m = m << 8 | at[j - 1];
	nh[0] += sl_product(m, c->keys[0][i / 8]);
	nh[1] += sl_product(m, c->keys[1][i / 8]);
}

/* Adds a cell whose lanes are known. */
static inline void put(const uint64_t nh[2], uint64_t coord, const struct shape *c,
		       uint64_t sums[2])
{
	sums[0] += sl_mixed(nh[0], c->s[0], coord);
	sums[1] += sl_mixed(nh[1], c->s[1], coord);
}

/* NULL: this processor does not have the way. */
sum_cells *sl_digest_choose(int way);

#endif
