/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernels that move scattered entries: dst[dst_index[i]] = src[src_index[i]]. One list
 * makes a gather or a scatter of it. Blocks are persistent: the grid is what the caller's
 * budget allows, and each warp or thread takes entries until there are none.
 *
 * No index makes a kernel fault: what is skipped or out of range is counted. Threads do
 * not speak with one another, so that a test may run them one by one on the CPU.
 */
#include "gather.h"

#define WARP 32u
#define LINE 128u
#define ROWS 2u   /* entries that a warp has under way */
#define WORDS 16u /* registers of four bytes that a lane has for them */

/* Where an entry lies: its place of each side, and how many bytes behind the beginning of it. */
struct place {
	sl_u64 dst, src, dst_off, src_off;
};

/* Where run e of a nest lies, without a list. By 32 bits: a division takes its time. */
SL_DEV struct place unroll(const struct sl_nest *nest, sl_u32 e)
{
	sl_u32 entry = e / nest->runs, run = e % nest->runs;
	sl_u32 dst = nest->dst_first + entry, src = nest->src_first + entry;
	struct place at = {dst / nest->dst_per, src / nest->src_per,
			   dst % nest->dst_per * nest->dst_step,
			   src % nest->src_per * nest->src_step};

	SL_UNROLL for (int k = SL_LOOPS_MAX - 1; k >= 0; k--) {
		sl_u32 round = run % nest->loop[k];

		run /= nest->loop[k];
		at.dst_off += round * nest->dst_loop[k];
		at.src_off += round * nest->src_loop[k];
	}
	return at;
}

/*
 * Reads the indices of entry e, or of the entry of run e. Nothing looks at them yet, so that
 * they can be under way. nest is known when this is compiled.
 */
SL_DEV struct place fetch(const struct sl_move *m, const struct sl_nest *nest, sl_u32 e)
{
	struct place plain = {e, e, 0, 0}, at = nest ? unroll(nest, e) : plain;
	sl_u32 there = e < (sl_u32)m->count;
	sl_u64 dst = at.dst, src = at.src;

	sl_index(&at.dst, m->dst_index, dst, m->flags & SL_DST_WIDE, there && m->dst_index);
	sl_index(&at.src, m->src_index, src, m->flags & SL_SRC_WIDE, there && m->src_index);
	return at;
}

/* The index that means: leave it out. */
SL_DEV sl_u64 none(sl_u64 list, sl_u32 wide) { return list && !wide ? 0xffffffffull : SL_SKIP; }

/*
 * Says whether entry e is to be moved, and counts it if not and asked to. The tally may lie behind
 * the bus: what is skipped, which may be many, is counted in a register and told at the end.
 */
SL_DEV sl_u32 judge(const struct sl_move *m, sl_u32 e, const struct place *at, sl_u32 *skipped,
		    sl_u32 count)
{
	struct sl_tally *all = (struct sl_tally *)m->tally;

	if (e >= (sl_u32)m->count)
		return 0;
	if (at->dst < m->dst_places && at->src < m->src_places)
		return 1;
	if (!count)
		return 0;
	if (at->dst == none(m->dst_index, m->flags & SL_DST_WIDE) ||
	    at->src == none(m->src_index, m->flags & SL_SRC_WIDE)) {
		++*skipped;
		return 0;
	}
	sl_add(&all->bad, 1);
	sl_least(&all->first_bad, e);
	return 0;
}

SL_DEV void tell(const struct sl_move *m, sl_u32 skipped)
{
	if (skipped)
		sl_add(&((struct sl_tally *)m->tally)->skipped, skipped);
}

/* By value and by choice: an index into the arguments would put them in local memory. */
SL_DEV struct sl_part choose(const struct sl_move *m, sl_u32 k)
{
	return k ? m->part[1] : m->part[0];
}

/* One entry of a part, as a lane sees it. */
struct row {
	sl_u64 dst, src; /* where the lane's first bytes would be, had the entry no beginning */
	sl_u32 from;     /* the lane's first byte, counted from the entry's; wraps before it */
	sl_u32 end;      /* of the entry; 0: it is not moved */
};

SL_DEV struct row aim(const struct sl_move *m, const struct sl_part *p, const struct place *at,
		      sl_u32 go, sl_u32 lane_at)
{
	sl_u64 dst = p->dst + at->dst * p->dst_stride + at->dst_off;
	sl_u64 src = p->src + at->src * p->src_stride + at->src_off;
	sl_u32 peel = (sl_u32)(m->flags & SL_FAR_DST ? dst : src) % LINE;
	struct row r = {dst + lane_at - peel, src + lane_at - peel, lane_at - peel,
			go ? p->entry : 0};

	return r;
}

/*
 * Moves all entries of a part, two at a time by each warp. A lane takes `width` bytes of
 * each window of 32 * width; the first window begins at a line of 128 bytes, so that each
 * load (or store, where the destination is far) asks the bus for whole lines. All loads of
 * the rows are issued before the first store, and the indices of the next rows between. Of a
 * nest, a row is a run.
 */
SL_DEV void sweep(const struct sl_move *m, const struct sl_nest *nest, const struct sl_part *p,
		  sl_u32 *skipped, const sl_u32 width, sl_u32 count)
{
	const sl_u32 window = WARP * width, windows = WORDS * 4 / width / ROWS;
	sl_u32 lane = sl_tid() % WARP, word[WORDS] = {0};
	sl_u32 warps = sl_gdim() * (sl_bdim() / WARP),
	       warp = sl_bid() * (sl_bdim() / WARP) + sl_tid() / WARP;
	sl_u32 e = warp * ROWS;
	struct place at[ROWS];

	SL_UNROLL for (sl_u32 i = 0; i < ROWS; i++) at[i] = fetch(m, nest, e + i);
	for (; e < (sl_u32)m->count; e += warps * ROWS) {
		struct row row[ROWS];

		SL_UNROLL for (sl_u32 i = 0; i < ROWS; i++)
		{
			sl_u32 go = judge(m, e + i, &at[i], skipped, count && !lane);

			row[i] = aim(m, p, &at[i], go, lane * width);
		}
		for (sl_u32 base = 0; base < p->entry + LINE; base += windows * window) {
			SL_UNROLL for (sl_u32 k = 0; k < ROWS * windows; k++) {
				const struct row *x = &row[k / windows];
				sl_u32 off = base + k % windows * window;

				sl_load(&word[k * width / 4], x->src + off, width,
					x->from + off < x->end);
			}
			SL_UNROLL for (sl_u32 i = 0; i < ROWS; i++) at[i] =
			    fetch(m, nest, e + warps * ROWS + i);
			SL_UNROLL for (sl_u32 k = 0; k < ROWS * windows; k++) {
				const struct row *x = &row[k / windows];
				sl_u32 off = base + k % windows * window;

				sl_store(x->dst + off, &word[k * width / 4], width,
					 x->from + off < x->end);
			}
		}
	}
}

/* Through registers: a lane has 2 x 32 bytes under way, a warp two whole entries of up to 896. */
SL_KERNEL(SL_ROWS_THREADS) sl_move_rows(struct sl_move m)
{
	sl_u32 skipped = 0;

	SL_ROLL
	for (sl_u32 k = 0; k < m.parts; k++) {
		struct sl_part p = choose(&m, k);

		if (p.width == 16)
			sweep(&m, 0, &p, &skipped, 16, k == 0);
		else if (p.width == 8)
			sweep(&m, 0, &p, &skipped, 8, k == 0);
		else
			sweep(&m, 0, &p, &skipped, 4, k == 0);
	}
	tell(&m, skipped);
}

/* The same for nests, of one part. */
SL_KERNEL(SL_ROWS_THREADS) sl_move_nest(struct sl_nested n)
{
	struct sl_part p = n.move.part[0];
	sl_u32 skipped = 0;

	if (p.width == 16)
		sweep(&n.move, &n.nest, &p, &skipped, 16, 1);
	else if (p.width == 8)
		sweep(&n.move, &n.nest, &p, &skipped, 8, 1);
	else
		sweep(&n.move, &n.nest, &p, &skipped, 4, 1);
	tell(&n.move, skipped);
}

/* The entry that a warp comes to next, whose indices it has begun to read. */
struct reader {
	struct place at;
	sl_u32 e;
};

SL_DEV struct row next(const struct sl_move *m, const struct sl_part *p, sl_u32 *skipped,
		       struct reader *r, sl_u32 step, const sl_u32 width, sl_u32 count)
{
	sl_u32 lane = sl_tid() % WARP, go = judge(m, r->e, &r->at, skipped, count && !lane);
	struct row row = aim(m, p, &r->at, go, lane * width);

	r->e += step;
	r->at = fetch(m, 0, r->e);
	return row;
}

/* A lane has the same 16 bytes of every 512 of a slot, whatever the width. */
#define COLUMN 16u

/* Bytes of a slot for an entry of a part. */
SL_DEV sl_u32 slot_of(const struct sl_part *p)
{
	return (p->entry + LINE + WARP * p->width - 1) / (WARP * p->width) * WARP * COLUMN;
}

/*
 * Moves all entries of a part by asynchronous copies into shared memory, which take no registers:
 * each warp has SL_AHEAD entries under way, the oldest in `slot` once nothing more is `wanted`.
 * Where an entry goes is read and judged once more when it has come. No lane touches what is
 * another one's.
 */
SL_DEV void stream(const struct sl_move *m, const struct sl_part *p, sl_u32 *skipped, sl_u32 size,
		   const sl_u32 width, sl_u32 count)
{
	sl_u32 first = sl_ring() + sl_tid() / WARP * SL_AHEAD * size + sl_tid() % WARP * COLUMN,
	       slot = first, wanted = SL_AHEAD, step = sl_gdim() * (sl_bdim() / WARP);
	struct reader in, out;
	struct row r;

	in.e = sl_bid() * (sl_bdim() / WARP) + sl_tid() / WARP;
	in.at = fetch(m, 0, in.e);
	out = in;
	SL_ROLL
	while (out.e < (sl_u32)m->count) {
		if (!wanted) {
			r = next(m, p, skipped, &out, step, width, 0);
			sl_ahead_wait();
			SL_ROLL
			for (sl_u32 off = 0, at = slot; off < p->entry + LINE;
			     off += WARP * width, at += WARP * COLUMN)
				sl_onward(r.dst + off, at, width, r.from + off < r.end);
			wanted++;
		}
		r = next(m, p, skipped, &in, step, width, count);
		SL_ROLL
		for (sl_u32 off = 0, at = slot; off < p->entry + LINE;
		     off += WARP * width, at += WARP * COLUMN)
			sl_ahead(at, r.src + off, width, r.from + off < r.end);
		sl_ahead_group();
		wanted--;
		slot = slot + size == first + SL_AHEAD * size ? first : slot + size;
	}
}

/* By asynchronous copies. */
SL_KERNEL(SL_ASYNC_THREADS) sl_move_async(struct sl_move m)
{
	sl_u32 size = slot_of(&m.part[0]), other = m.parts > 1 ? slot_of(&m.part[1]) : 0,
	       skipped = 0;

	size = other > size ? other : size;
	SL_ROLL
	for (sl_u32 k = 0; k < m.parts; k++) {
		struct sl_part p = choose(&m, k);

		if (p.width == 16)
			stream(&m, &p, &skipped, size, 16, k == 0);
		else if (p.width == 8)
			stream(&m, &p, &skipped, size, 8, k == 0);
		else
			stream(&m, &p, &skipped, size, 4, k == 0);
	}
	tell(&m, skipped);
}
