/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernel that digests cells of KV cache, as package csrc/digest defines it and sums them on the
 * CPU; its arithmetic is that of csrc/digest/mix.h. Blocks are persistent, as those of gather.cu.
 * Up to SL_CELL_THREADS threads of a warp share a cell, each of which has SL_CELL_LOADS loads
 * under way, so that a warp asks for whole sectors of several cells at once.
 *
 * Every entry is held against the memory before a byte of it is read: a list of slots may hold
 * anything. What lies outside is counted and left out.
 */
#include "digest.h"

#define SL_DIGEST_FUNCTION SL_DEV
#include "../csrc/digest/mix.h"

/* Where a cell lies, and its coordinate. */
struct cell {
	sl_u64 at, coord;
	sl_u32 inside; /* of the memory */
};

SL_DEV struct cell find(const struct sl_cells *c, sl_u64 number)
{
	sl_u64 grid = c->n[0] * c->n[1], entry = number / grid, in_entry = number % grid;
	sl_u64 row = in_entry / c->n[1], column = in_entry % c->n[1];
	sl_u64 slot = (c->first + entry) / c->per;
	sl_u64 off = (c->first + entry) % c->per * c->step; /* no more than room */
	struct cell x = {0, c->coord + entry * c->turn + row * c->on[0] + column * c->on[1], 0};

	if (c->list)
		slot = ((const sl_u32 *)c->list)[slot];
	if (slot < c->slots && slot * c->stride <= c->room - off) {
		x.at = c->at + slot * c->stride + off + row * c->by[0] + column * c->by[1];
		x.inside = 1;
	}
	return x;
}

/* With `on` alone: loads a whole piece. width is known when this is compiled. */
SL_DEV void take(sl_u32 *word, sl_u64 at, sl_u32 piece, const sl_u32 width, sl_u32 on)
{
	SL_UNROLL for (sl_u32 i = 0; i < piece; i += width < 4 ? 4 : width) {
		if (width >= 4) {
			sl_load(&word[i / 4], at + i, width, on);
		} else if (on) {
			word[i / 4] = 0;
			SL_UNROLL for (sl_u32 b = 0; b < 4; b++)
				word[i / 4] |= sl_load1(at + i + b) << b * 8;
		}
	}
}

/* Adds a pair of words to both lanes. */
SL_DEV void multiply(const struct sl_cells *c, sl_u64 m, sl_u32 pair, sl_u64 *nh)
{
	sl_u64 key[2];

	sl_load_key(key, c->keys + 16 * (sl_u64)pair);
	nh[0] += sl_product(m, key[0]);
	nh[1] += sl_product(m, key[1]);
}

/* The bytes of a cell that make no whole piece. The last pair of words is padded with zeros. */
SL_DEV void sum_rest(const struct sl_cells *c, sl_u64 at, sl_u32 from, const sl_u32 width,
		     sl_u64 *nh)
{
	SL_ROLL
	for (; from < c->cell; from += 8) {
		sl_u32 n = c->cell - from < 8 ? c->cell - from : 8, word = 0;
		sl_u64 m = 0;

		SL_ROLL
		for (sl_u32 i = 0; i < n; i += width >= 4 && i + 4 <= n ? 4 : 1) {
			if (width >= 4 && i + 4 <= n)
				sl_load(&word, at + from + i, 4, 1);
			else
				word = sl_load1(at + from + i);
			m |= (sl_u64)word << i * 8;
		}
		multiply(c, m, from / 8, nh);
	}
}

/* What this thread has of the lanes of a cell. */
SL_DEV void sum_cell(const struct sl_cells *c, sl_u64 at, const sl_u32 width, sl_u64 *nh)
{
	const sl_u32 piece = width == 16 ? 16 : 8;
	sl_u32 n = c->cell / piece, step = sl_pieces(c->threads), i = sl_piece(c->threads, n);
	sl_u32 word[SL_CELL_LOADS][4] = {{0}};

	SL_ROLL
	for (; i < n; i += SL_CELL_LOADS * step) {
		SL_UNROLL for (sl_u32 k = 0; k < SL_CELL_LOADS; k++)
			take(word[k], at + (i + k * step) * piece, piece, width, i + k * step < n);
		SL_UNROLL for (sl_u32 k = 0; k < SL_CELL_LOADS; k++) {
			if (i + k * step >= n)
				continue;
			SL_UNROLL for (sl_u32 w = 0; w < piece / 4; w += 2)
				multiply(c, (sl_u64)word[k][w + 1] << 32 | word[k][w],
					 (i + k * step) * (piece / 8) + w / 2, nh);
		}
	}
	if (sl_tid() % c->threads == 0)
		sum_rest(c, at, n * piece, width, nh);
}

/* All threads of a warp take as many turns, since they speak with one another. */
SL_DEV void sweep_cells(const struct sl_cells *c, const sl_u32 width, struct sl_digest_total *mine)
{
	sl_u64 thread = (sl_u64)sl_bid() * sl_bdim() + sl_tid();
	sl_u64 groups = (sl_u64)sl_gdim() * sl_bdim() / c->threads;
	sl_u64 turns = (c->cells + groups - 1) / groups;

	SL_ROLL
	for (sl_u64 turn = 0; turn < turns; turn++) {
		sl_u64 number = turn * groups + thread / c->threads, nh[2] = {0, 0};
		struct cell x = {0, 0, 0};

		if (number < c->cells) {
			x = find(c, number);
			if (x.inside)
				sum_cell(c, x.at, width, nh);
		}
		nh[0] = sl_together(nh[0], c->threads);
		nh[1] = sl_together(nh[1], c->threads);
		if (number >= c->cells || sl_tid() % c->threads)
			continue;
		mine->sum[0] += x.inside ? sl_mixed(nh[0], c->s[0], x.coord) : 0;
		mine->sum[1] += x.inside ? sl_mixed(nh[1], c->s[1], x.coord) : 0;
		mine->outside += !x.inside;
	}
}

SL_KERNEL(SL_DIGEST_THREADS) sl_digest_cells(struct sl_digest d)
{
	struct sl_digest_total *total = (struct sl_digest_total *)d.total, mine = {{0, 0}, 0};

	SL_ROLL
	for (sl_u32 i = 0; i < d.n; i++) {
		const struct sl_cells *c = (const struct sl_cells *)d.list + i;

		if (c->width == 16)
			sweep_cells(c, 16, &mine);
		else if (c->width == 8)
			sweep_cells(c, 8, &mine);
		else if (c->width == 4)
			sweep_cells(c, 4, &mine);
		else
			sweep_cells(c, 1, &mine);
	}
	sl_add(&total->sum[0], mine.sum[0]);
	sl_add(&total->sum[1], mine.sum[1]);
	if (mine.outside)
		sl_add(&total->outside, mine.outside);
}
