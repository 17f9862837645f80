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
SL_DEV struct place fetch(const struct sl_move *m, const struct sl_nest *nest, sl_u64 e)
{
	struct place plain = {e, e, 0, 0}, at = nest ? unroll(nest, (sl_u32)e) : plain;
	sl_u32 there = e < m->count;
	sl_u64 dst = at.dst, src = at.src;

	sl_index(&at.dst, m->dst_index, dst, m->flags & SL_DST_WIDE, there && m->dst_index);
	sl_index(&at.src, m->src_index, src, m->flags & SL_SRC_WIDE, there && m->src_index);
	return at;
}

/* The index that means: leave it out. */
SL_DEV sl_u64 none(sl_u64 list, sl_u32 wide) { return list && !wide ? 0xffffffffull : SL_SKIP; }

/* Says whether entry e is to be moved, and counts it if not and asked to. */
SL_DEV sl_u32 judge(const struct sl_move *m, sl_u64 e, const struct place *at, sl_u32 count)
{
	struct sl_tally *all = (struct sl_tally *)m->tally;

	if (e >= m->count)
		return 0;
	if (at->dst < m->dst_places && at->src < m->src_places)
		return 1;
	if (!count)
		return 0;
	if (at->dst == none(m->dst_index, m->flags & SL_DST_WIDE) ||
	    at->src == none(m->src_index, m->flags & SL_SRC_WIDE)) {
		sl_add(&all->skipped, 1);
		return 0;
	}
	sl_add(&all->bad, 1);
	sl_least(&all->first_bad, e);
	return 0;
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
		  const sl_u32 width, sl_u32 count)
{
	const sl_u32 window = WARP * width, windows = WORDS * 4 / width / ROWS;
	sl_u32 lane = sl_tid() % WARP, word[WORDS] = {0};
	sl_u32 warps = sl_gdim() * (sl_bdim() / WARP),
	       warp = sl_bid() * (sl_bdim() / WARP) + sl_tid() / WARP;
	sl_u64 e = (sl_u64)warp * ROWS;
	struct place at[ROWS];

	SL_UNROLL for (sl_u32 i = 0; i < ROWS; i++) at[i] = fetch(m, nest, e + i);
	for (; e < m->count; e += (sl_u64)warps * ROWS) {
		struct row row[ROWS];

		SL_UNROLL for (sl_u32 i = 0; i < ROWS; i++) row[i] =
		    aim(m, p, &at[i], judge(m, e + i, &at[i], count && !lane), lane * width);
		for (sl_u32 base = 0; base < p->entry + LINE; base += windows * window) {
			SL_UNROLL for (sl_u32 k = 0; k < ROWS * windows; k++) {
				const struct row *x = &row[k / windows];
				sl_u32 off = base + k % windows * window;

				sl_load(&word[k * width / 4], x->src + off, width,
					x->from + off < x->end);
			}
			SL_UNROLL for (sl_u32 i = 0; i < ROWS; i++) at[i] =
			    fetch(m, nest, e + (sl_u64)warps * ROWS + i);
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
	SL_ROLL
	for (sl_u32 k = 0; k < m.parts; k++) {
		struct sl_part p = choose(&m, k);

		if (p.width == 16)
			sweep(&m, 0, &p, 16, k == 0);
		else if (p.width == 8)
			sweep(&m, 0, &p, 8, k == 0);
		else
			sweep(&m, 0, &p, 4, k == 0);
	}
}

/* The same for nests, of one part. */
SL_KERNEL(SL_ROWS_THREADS) sl_move_nest(struct sl_nested n)
{
	struct sl_part p = n.move.part[0];

	if (p.width == 16)
		sweep(&n.move, &n.nest, &p, 16, 1);
	else if (p.width == 8)
		sweep(&n.move, &n.nest, &p, 8, 1);
	else
		sweep(&n.move, &n.nest, &p, 4, 1);
}

#ifdef SL_BULK
/* Where a thread stands in its ring: the slot, and how often it came by, modulo 2. */
struct turn {
	sl_u32 at, phase;
};

SL_DEV void pass_by(struct turn *t, sl_u32 first, sl_u32 slots, sl_u32 size)
{
	t->at += size;
	if (t->at == first + slots * size) {
		t->at = first;
		t->phase ^= 1;
	}
}

/*
 * By bulk copies through shared memory: an entry is one operation each way. Each thread has
 * a ring of its own, loads ahead into all slots but SL_LAG, and needs no other thread.
 */
SL_KERNEL(SL_BULK_THREADS) sl_move_bulk(struct sl_move m)
{
	sl_u32 entry =
	    m.parts > 1 && m.part[1].entry > m.part[0].entry ? m.part[1].entry : m.part[0].entry;
	sl_u32 size = SL_SLOT_HEAD + entry, first = sl_ring() + sl_tid() * m.slots * size,
	       ahead = 0;
	sl_u64 step = (sl_u64)sl_gdim() * sl_bdim();
	struct turn in = {first, 0}, out = {first, 0};

	for (sl_u32 i = 0; i < m.slots; i++)
		sl_ring_barrier(first + i * size);
	sl_ring_fence();
	SL_ROLL
	for (sl_u32 k = 0; k < m.parts; k++) {
		struct sl_part p = choose(&m, k);
		sl_u64 e = (sl_u64)sl_bid() * sl_bdim() + sl_tid();
		struct place at = fetch(&m, 0, e);

		while (e < m.count || ahead) {
			for (; e < m.count && ahead < m.slots - SL_LAG; e += step) {
				struct place now = at;

				at = fetch(&m, 0, e + step);
				if (!judge(&m, e, &now, k == 0))
					continue;
				sl_ring_reuse();
				sl_ring_keep(in.at + 8, p.dst + now.dst * p.dst_stride);
				sl_ring_load(in.at + SL_SLOT_HEAD, p.src + now.src * p.src_stride,
					     p.entry, in.at);
				pass_by(&in, first, m.slots, size);
				ahead++;
			}
			if (!ahead)
				continue;
			sl_ring_wait(out.at, out.phase);
			sl_ring_store(sl_ring_kept(out.at + 8), out.at + SL_SLOT_HEAD, p.entry);
			pass_by(&out, first, m.slots, size);
			ahead--;
		}
	}
	sl_ring_drain();
}
#endif
