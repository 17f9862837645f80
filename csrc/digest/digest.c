/* SPDX-License-Identifier: Apache-2.0 */
#include "../guard.h"
#include "cells.h"

#include <errno.h>

#define BATCH 64	/* cells listed before they are summed */
#define AHEAD_MAX 16	/* cells */
#define AHEAD 4096	/* bytes; of longer cells the hardware fetches what follows */

/* Cells on their way from the walk to the sums. */
struct batch {
	sum_cells *sum;
	struct shape shape;
	uint64_t ahead, n, sums[2];
	struct cell list[BATCH + AHEAD_MAX];
};

static void sum_batch(struct batch *b)
{
	b->sum(b->list, BATCH, b->ahead, &b->shape, b->sums);
	b->n -= BATCH;
	memcpy(b->list, b->list + BATCH, b->n * sizeof(b->list[0]));
}

/* Sums what is left. The last cell is fetched again in place of those that would follow. */
static void sum_rest(struct batch *b)
{
	uint64_t n = b->n < b->ahead ? 0 : b->n - b->ahead;

	b->sum(b->list, n, b->ahead, &b->shape, b->sums);
	b->sum(b->list + n, b->n - n, 0, &b->shape, b->sums);
}

/* Adds n * by to *at; 0: it overflows. */
static int reach(uint64_t *at, uint64_t n, uint64_t by)
{
	uint64_t more;

	return !__builtin_mul_overflow(n, by, &more) && !__builtin_add_overflow(*at, more, at);
}

/* Where entry i begins; 0: it overflows. The list is read once: it may change meanwhile. */
static int entry(const struct sl_digest_cells *c, const uint32_t *list, uint64_t i, uint64_t *at)
{
	uint64_t slot = i, in = 0;

	if (c->per > 1) {
		in = (c->first + i) % c->per;
		slot = (c->first + i) / c->per;
	}
	if (list)
		slot = __atomic_load_n(&list[slot], __ATOMIC_RELAXED);
	*at = c->base;
	return reach(at, slot, c->stride) && reach(at, in, c->step);
}

/* Sums the cells of the entry that begins there. */
static void walk(struct batch *b, const struct sl_digest_cells *c, struct cell at)
{
	for (uint64_t i = 0; i < c->n[0]; i++) {
		struct cell row = at;

		for (uint64_t j = 0; j < c->n[1]; j++) {
			b->list[b->n++] = row;
			if (b->n == BATCH + b->ahead)
				sum_batch(b);
			row.at += c->by[1];
			row.coord += c->on[1];
		}
		at.at += c->by[0];
		at.coord += c->on[0];
	}
}

static __attribute__((noinline)) int digest(const uint8_t *mem, uint64_t len, const uint32_t *list,
					    const struct sl_digest_cells *cells,
					    const uint64_t *keys, int way, uint64_t out[3])
{
	const struct sl_digest_cells c = *cells;
	uint64_t extent = c.cell, at;
	struct batch b;

	b.sum = sl_digest_choose(way);
	if (!b.sum)
		return -ENOTSUP;
	b.shape = (struct shape){c.cell, {c.s[0], c.s[1]}, {keys, keys + (c.cell + 7) / 8}};
	b.ahead = AHEAD / c.cell < AHEAD_MAX ? AHEAD / c.cell : AHEAD_MAX;
	b.n = b.sums[0] = b.sums[1] = 0;
	if (!reach(&extent, c.n[0] - 1, c.by[0]) || !reach(&extent, c.n[1] - 1, c.by[1]))
		return -ERANGE;
	for (uint64_t i = 0; i < c.count; i++) {
		if (!entry(&c, list, i, &at) || at > len || extent > len - at)
			return -ERANGE;
		walk(&b, &c, (struct cell){mem + at, c.coord + i * c.turn});
	}
	sum_rest(&b);
	out[0] = b.sums[0];
	out[1] = b.sums[1];
	out[2] = c.count * c.n[0] * c.n[1];
	return 0;
}

int sl_digest(const uint8_t *mem, uint64_t len, const uint32_t *list,
	      const struct sl_digest_cells *cells, const uint64_t *keys, int way, uint64_t out[3])
{
	struct sl_guard g;
	int rc;

	sl_guard_over(&g, mem, len, NULL, 0);
	if (setjmp(g.back))
		return -EFAULT;
	sl_guard_arm(&g);
	rc = digest(mem, len, list, cells, keys, way, out);
	sl_guard_disarm();
	return rc;
}
