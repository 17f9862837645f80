/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies between two spans of memory. Every function returns 0 or -errno, never prints,
 * keeps no state, allocates nothing and never calls back. They are static, since two
 * packages compile them. Runs of at least stream_from bytes are stored past the caches.
 */
#ifndef SLUICE_COPY_H
#define SLUICE_COPY_H

#include "../sluice.h"
#include "stream.h"

#include <errno.h>
#include <string.h>

/*
 * How far ahead scattered entries are fetched. Where the pieces of a batch lie
 * is known, so the misses of several can be under way at a time. Fetching the
 * entry ahead line by line, between the lines that are copied, is worth a factor
 * of two over fetching it at once: that only waits for fill buffers.
 */
#define SL_AHEAD 4
/* Above this the hardware prefetcher follows by itself. */
#define SL_FETCH_MAX 4096
#define SL_LINE 64

static inline int sl_copy_within(uint64_t off, uint64_t len, uint64_t size)
{
	return off <= size && len <= size - off;
}

/* What is copied next but some: fetched, not touched. len 0: nothing. */
struct sl_ahead {
	const uint8_t *src, *dst;
	uint64_t len;
};

/*
 * Inlined, and its tail by words: a call would wait for room in the store buffer,
 * which the stores of earlier entries fill while they miss. That is 80 of 180 ns.
 */
static inline __attribute__((always_inline)) void
sl_copy_run(uint8_t *restrict dst, const uint8_t *restrict src, uint64_t len, struct sl_ahead a,
	    uint64_t stream_from)
{
	uint64_t i = 0, fetched = a.len < len ? a.len : len;

	if (len > SL_FETCH_MAX || a.len > SL_FETCH_MAX || a.len == 0) {
		if (len < stream_from)
			memcpy(dst, src, len);
		else
			sl_copy_stream(dst, src, len);
		return;
	}
	for (; i + SL_LINE <= fetched; i += SL_LINE) {
		__builtin_prefetch(a.src + i, 0);
		__builtin_prefetch(a.dst + i, 0);
		memcpy(dst + i, src + i, SL_LINE);
	}
	__builtin_prefetch(a.src + fetched - 1, 0);
	__builtin_prefetch(a.dst + fetched - 1, 0);
	for (; i + 8 <= len; i += 8)
		memcpy(dst + i, src + i, 8);
	for (; i < len; i++)
		dst[i] = src[i];
}

/*
 * Copies n descriptors. to_remote says that local offsets name the source. Adjacent
 * descriptors become one copy. -ERANGE: a descriptor leaves a span, and nothing was copied.
 */
static __attribute__((noinline, unused)) int
sl_copy_descs(uint8_t *local, uint64_t local_len, uint8_t *remote, uint64_t remote_len,
	      const struct sl_desc *d, size_t n, int to_remote, uint64_t stream_from)
{
	for (size_t i = 0; i < n; i++)
		if (!sl_copy_within(d[i].local, d[i].len, local_len) ||
		    !sl_copy_within(d[i].remote, d[i].len, remote_len))
			return -ERANGE;
	for (size_t i = 0; i < n;) {
		uint64_t l = d[i].local, r = d[i].remote, len = d[i].len;
		size_t j = i + 1;

		while (j < n && d[j].local == l + len && d[j].remote == r + len)
			len += d[j++].len;
		uint8_t *dst = to_remote ? remote + r : local + l;
		const uint8_t *src = to_remote ? local + l : remote + r;
		struct sl_ahead a = {0};

		if (j + SL_AHEAD - 1 < n) {
			const struct sl_desc *f = &d[j + SL_AHEAD - 1];

			a.src = to_remote ? local + f->local : remote + f->remote;
			a.dst = to_remote ? remote + f->remote : local + f->local;
			a.len = f->len;
		}
		sl_copy_run(dst, src, len, a, stream_from);
		i = j;
	}
	sl_copy_fence(stream_from);
	return 0;
}

/* Read once: a list that changes meanwhile moves no byte past a check. */
static inline uint64_t sl_copy_slot(const uint32_t *list, uint64_t i)
{
	return list ? __atomic_load_n(&list[i], __ATOMIC_RELAXED) : i;
}

/*
 * Copies entries [first, first + n) of a pattern without loops. A list may be NULL: then
 * slot i is i. -ERANGE: an entry leaves a span; what went before it was copied.
 */
static __attribute__((noinline, unused)) int
sl_copy_pages(uint8_t *local, uint64_t local_len, uint8_t *remote, uint64_t remote_len,
		  const uint32_t *local_index, uint64_t local_base, uint64_t local_stride,
		  const uint32_t *remote_index, uint64_t remote_base, uint64_t remote_stride,
		  uint64_t entry_len, size_t first, size_t n, int to_remote,
		  uint64_t stream_from)
{
	uint8_t *dst = to_remote ? remote : local, *src = to_remote ? local : remote;
	uint64_t dst_len = to_remote ? remote_len : local_len,
		 src_len = to_remote ? local_len : remote_len;
	const uint32_t *di = to_remote ? remote_index : local_index,
		       *si = to_remote ? local_index : remote_index;
	uint64_t db = to_remote ? remote_base : local_base,
		 sb = to_remote ? local_base : remote_base;
	uint64_t ds = to_remote ? remote_stride : local_stride,
		 ss = to_remote ? local_stride : remote_stride;
	size_t end = first + n;
	int rc = 0;

	for (size_t i = first; i < end;) {
		uint64_t d = db + sl_copy_slot(di, i) * ds, s = sb + sl_copy_slot(si, i) * ss,
			 len = entry_len;
		size_t j = i + 1;

		while (j < end && db + sl_copy_slot(di, j) * ds == d + len &&
		       sb + sl_copy_slot(si, j) * ss == s + len) {
			len += entry_len;
			j++;
		}
		if (!sl_copy_within(d, len, dst_len) || !sl_copy_within(s, len, src_len)) {
			rc = -ERANGE;
			break;
		}
		struct sl_ahead a = {0};

		if (j + SL_AHEAD - 1 < end) {
			a.src = src + sb + sl_copy_slot(si, j + SL_AHEAD - 1) * ss;
			a.dst = dst + db + sl_copy_slot(di, j + SL_AHEAD - 1) * ds;
			a.len = entry_len;
		}
		sl_copy_run(dst + d, src + s, len, a, stream_from);
		i = j;
	}
	sl_copy_fence(stream_from);
	return rc;
}

/* A side of a pattern, as driver.Side without its list. */
struct sl_copy_side {
	uint64_t base, stride, step;
	uint32_t first, per;
};

/* The same bytes as driver.Loop. */
struct sl_copy_loop {
	uint32_t n;
	uint64_t local, remote;
};

/* Walks the runs of a pattern in order. The first of each pair is the local one. */
struct sl_copy_walk {
	const struct sl_copy_side *sides;
	const uint32_t *lists[2];
	const struct sl_copy_loop *loops;
	uint64_t run, left; /* bytes of a run, runs left */
	uint64_t entry, base[2], at[2];
	uint32_t turn[3];
	int loop_count;
};

static inline void sl_copy_entry(struct sl_copy_walk *w)
{
	for (int s = 0; s < 2; s++) {
		const struct sl_copy_side *d = &w->sides[s];
		uint64_t slot = w->entry, in = 0;

		if (d->per > 1) {
			in = (slot + d->first) % d->per;
			slot = (slot + d->first) / d->per;
		}
		w->base[s] = d->base + sl_copy_slot(w->lists[s], slot) * d->stride + in * d->step;
	}
}

static inline void sl_copy_place(struct sl_copy_walk *w)
{
	w->at[0] = w->base[0];
	w->at[1] = w->base[1];
	for (int k = 0; k < w->loop_count; k++) {
		w->at[0] += w->turn[k] * w->loops[k].local;
		w->at[1] += w->turn[k] * w->loops[k].remote;
	}
}

static inline void sl_copy_start(struct sl_copy_walk *w, uint64_t first)
{
	for (int k = w->loop_count - 1; k >= 0; k--) {
		w->turn[k] = first % w->loops[k].n;
		first /= w->loops[k].n;
	}
	w->entry = first;
	sl_copy_entry(w);
	sl_copy_place(w);
}

/* Goes on to the next run. */
static inline void sl_copy_step(struct sl_copy_walk *w)
{
	int k = w->loop_count - 1;

	w->left--;
	if (w->left == 0)
		return;
	if (k >= 0 && ++w->turn[k] < w->loops[k].n) { /* mostly */
		w->at[0] += w->loops[k].local;
		w->at[1] += w->loops[k].remote;
		return;
	}
	while (k >= 0) {
		w->turn[k] = 0;
		if (--k >= 0 && ++w->turn[k] < w->loops[k].n)
			break;
	}
	if (k < 0) {
		w->entry++;
		sl_copy_entry(w);
	}
	sl_copy_place(w);
}

struct sl_copy_piece {
	uint64_t at[2], len;
};

/* Takes the next piece, of runs that adjoin on both sides. len is 0 when none is left. */
static inline struct sl_copy_piece sl_copy_take(struct sl_copy_walk *w)
{
	struct sl_copy_piece p = {{w->at[0], w->at[1]}, 0};

	while (w->left > 0 && w->at[0] == p.at[0] + p.len && w->at[1] == p.at[1] + p.len) {
		p.len += w->run;
		sl_copy_step(w);
	}
	return p;
}

/*
 * Copies runs [first, first + n) of any pattern, of which there are so many: entries come
 * one after the other, the loops of each as driver.Pattern has them. A list may be NULL.
 * -ERANGE: a run leaves a span; what went before it was copied.
 */
static __attribute__((noinline, unused)) int
sl_copy_nest(uint8_t *local, uint64_t local_len, uint8_t *remote, uint64_t remote_len,
	     const struct sl_copy_side *sides, const uint32_t *local_list,
	     const uint32_t *remote_list, const struct sl_copy_loop *loops, int loop_count,
	     uint64_t run, uint64_t first, uint64_t n, int to_remote, uint64_t stream_from)
{
	struct sl_copy_walk w = {
		.sides = sides, .lists = {local_list, remote_list}, .loops = loops,
		.run = run, .left = n, .loop_count = loop_count,
	};
	struct sl_copy_piece next[SL_AHEAD];
	uint8_t *mem[2] = {local, remote};
	int to = to_remote ? 1 : 0, from = 1 - to, rc = 0;

	if (n == 0)
		return 0;
	sl_copy_start(&w, first);
	for (int i = 0; i < SL_AHEAD; i++)
		next[i] = sl_copy_take(&w);
	for (unsigned i = 0;; i++) {
		struct sl_copy_piece p = next[i % SL_AHEAD], a;

		if (p.len == 0)
			break;
		if (!sl_copy_within(p.at[0], p.len, local_len) ||
		    !sl_copy_within(p.at[1], p.len, remote_len)) {
			rc = -ERANGE;
			break;
		}
		a = sl_copy_take(&w);
		next[i % SL_AHEAD] = a;
		sl_copy_run(mem[to] + p.at[to], mem[from] + p.at[from], p.len,
			    (struct sl_ahead){mem[from] + a.at[from], mem[to] + a.at[to], a.len},
			    stream_from);
	}
	sl_copy_fence(stream_from);
	return rc;
}

#endif
