/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a batch consists of: descriptors, or a pattern with its lists. All of it is static, since
 * several packages compile it.
 */
#ifndef SLUICE_PIECES_H
#define SLUICE_PIECES_H

#include "sluice.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Most pieces of a batch: a number is reported as an int32_t. */
#define SL_PIECES_MAX INT32_MAX

struct sl_pieces {
	/* In the caller's arrays until submit returns, then in copy. */
	const struct sl_desc *descs; /* NULL: of pages */
	struct sl_pages pages;
	const struct sl_nest *nest; /* of pages that are not plain, or NULL */
	uint32_t runs; /* of an entry; holds after submit, too */
	const uint32_t *local_index, *remote_index;
	uint32_t count;
	void *copy;
	size_t copy_size;
};

/* Where an entry begins: base + list[(first + i) / per] * stride + ((first + i) % per) * step. */
static inline uint64_t sl_entry(uint32_t i, const uint32_t *list, uint64_t base,
				uint64_t stride, uint32_t first, uint32_t per, uint64_t step)
{
	uint32_t in = 0;

	if (per > 1) {
		in = (uint32_t)(((uint64_t)first + i) % per);
		i = (uint32_t)(((uint64_t)first + i) / per);
	}
	return base + (list ? list[i] : i) * stride + in * step;
}

/* Run i of a pattern that is not plain. Not inlined: plain ones must not pay for it. */
static __attribute__((noinline, unused)) struct sl_desc sl_run(const struct sl_pieces *s,
							       uint32_t i)
{
	const struct sl_pages *p = &s->pages;
	const struct sl_nest *t = s->nest;
	uint32_t entry = i / t->runs, run = i % t->runs;
	struct sl_desc d = {
		.local = sl_entry(entry, s->local_index, p->local_base, p->local_stride,
				  t->local_first, t->local_per, t->local_step),
		.remote = sl_entry(entry, s->remote_index, p->remote_base, p->remote_stride,
				   t->remote_first, t->remote_per, t->remote_step),
		.len = p->entry,
		.local_key = p->local_key,
		.remote_key = p->remote_key,
	};

	for (uint32_t k = t->loops; k > 0 && run > 0; k--) {
		const struct sl_loop *l = &t->loop[k - 1];

		d.local += run % l->n * l->local;
		d.remote += run % l->n * l->remote;
		run /= l->n;
	}
	return d;
}

/* The piece to report in an error: of a pattern its entry, and not the run. */
static inline int32_t sl_reported_piece(const struct sl_pieces *s, int32_t i)
{
	return s->runs > 1 && i >= 0 ? i / (int32_t)s->runs : i;
}

static inline struct sl_desc sl_piece(const struct sl_pieces *s, uint32_t i)
{
	const struct sl_pages *p = &s->pages;

	if (s->descs)
		return s->descs[i];
	if (s->nest)
		return sl_run(s, i);
	return (struct sl_desc){
	    .local = p->local_base + (s->local_index ? s->local_index[i] : i) * p->local_stride,
	    .remote =
		p->remote_base + (s->remote_index ? s->remote_index[i] : i) * p->remote_stride,
	    .len = p->entry,
	    .local_key = p->local_key,
	    .remote_key = p->remote_key,
	};
}

static inline int sl_within(uint64_t off, uint64_t len, uint64_t size)
{
	return off <= size && len <= size - off;
}

/* So much memory stays for the next use: the descriptors of the largest usual batch. */
#define SL_PIECES_KEEP (128u << 10)

/* Adds n * step to *end; 0: it overflows. */
static inline int sl_reach(uint64_t *end, uint64_t n, uint64_t step)
{
	uint64_t more;

	return !__builtin_mul_overflow(n, step, &more) && !__builtin_add_overflow(*end, more, end);
}

/* How many numbers a list has. */
static inline uint32_t sl_slots(uint64_t count, uint32_t first, uint32_t per)
{
	return (uint32_t)(per > 1 ? (first + count + per - 1) / per : count);
}

/* Strides below this overflow with no number. */
#define SL_STRIDE_USUAL (1u << 31)

/*
 * Whether no offset of a side overflows, of entries of so many bytes from the first to the last. A
 * list that changes afterwards leads to a place that is compared with the memory's size.
 */
static inline int sl_side_sound(uint64_t end, uint64_t base, uint64_t stride, const uint32_t *list,
				uint32_t slots)
{
	uint64_t last = list ? 0 : slots - 1;

	if (stride <= SL_STRIDE_USUAL)
		last = UINT32_MAX;
	for (uint32_t i = 0; list && stride > SL_STRIDE_USUAL && i < slots; i++)
		last = list[i] > last ? list[i] : last;
	return sl_reach(&end, last, stride) && sl_reach(&end, 1, base);
}

/* 0: there are too many, or none. */
static inline int sl_count_sound(const struct sl_pages *p)
{
	return p->count > 0 && p->count <= SL_PIECES_MAX && p->entry > 0;
}

/* 0: there are too many, or an offset of the pattern could overflow. */
static inline int sl_pages_sound(const struct sl_pages *p, const uint32_t *local,
				 const uint32_t *remote)
{
	return sl_count_sound(p) &&
	       sl_side_sound(p->entry, p->local_base, p->local_stride, local,
			     (uint32_t)p->count) &&
	       sl_side_sound(p->entry, p->remote_base, p->remote_stride, remote,
			     (uint32_t)p->count);
}

/* The last entry that any slot holds. */
static inline uint64_t sl_last_in(uint64_t count, uint32_t first, uint32_t per)
{
	return per > 1 ? (first + count < per ? first + count : per) - 1 : 0;
}

/* The same, of a pattern that is not plain. */
static inline int sl_nest_sound(const struct sl_pages *p, const struct sl_nest *nest,
				const uint32_t *local_list, const uint32_t *remote_list)
{
	uint64_t local = p->entry, remote = p->entry, runs = 1;

	if (!sl_count_sound(p) || nest->loops > SL_LOOPS_MAX)
		return 0;
	for (uint32_t k = 0; k < nest->loops; k++) {
		const struct sl_loop *l = &nest->loop[k];

		if (l->n == 0 || __builtin_mul_overflow(runs, (uint64_t)l->n, &runs) ||
		    runs > SL_PIECES_MAX || !sl_reach(&local, l->n - 1, l->local) ||
		    !sl_reach(&remote, l->n - 1, l->remote))
			return 0;
	}
	return runs == nest->runs && runs * p->count <= SL_PIECES_MAX &&
	       sl_reach(&local, sl_last_in(p->count, nest->local_first, nest->local_per),
			nest->local_step) &&
	       sl_reach(&remote, sl_last_in(p->count, nest->remote_first, nest->remote_per),
			nest->remote_step) &&
	       sl_side_sound(local, p->local_base, p->local_stride, local_list,
			     sl_slots(p->count, nest->local_first, nest->local_per)) &&
	       sl_side_sound(remote, p->remote_base, p->remote_stride, remote_list,
			     sl_slots(p->count, nest->remote_first, nest->remote_per));
}

/*
 * Makes *s name what a caller submits: count descriptors, or, where pages is not NULL, a pattern
 * with its lists. 0: there are too many pieces, or an offset of the pattern could overflow.
 */
static inline int sl_pieces_init(struct sl_pieces *s, const struct sl_desc *descs, size_t count,
				 const struct sl_pages *pages, const struct sl_nest *nest,
				 const uint32_t *local, const uint32_t *remote)
{
	if (!pages) {
		*s = (struct sl_pieces){.descs = descs, .count = (uint32_t)count};
		return count <= SL_PIECES_MAX;
	}
	*s = (struct sl_pieces){.pages = *pages,
				.nest = nest,
				.runs = nest ? nest->runs : 1,
				.local_index = local,
				.remote_index = remote};
	s->count = (uint32_t)(pages->count * s->runs);
	return nest ? sl_nest_sound(pages, nest, local, remote)
		    : sl_pages_sound(pages, local, remote);
}

static inline uint32_t sl_local_slots(const struct sl_pieces *s)
{
	return s->nest ? sl_slots(s->pages.count, s->nest->local_first, s->nest->local_per)
		       : s->count;
}

static inline uint32_t sl_remote_slots(const struct sl_pieces *s)
{
	return s->nest ? sl_slots(s->pages.count, s->nest->remote_first, s->nest->remote_per)
		       : s->count;
}

static inline size_t sl_pieces_size(const struct sl_pieces *s)
{
	size_t n = 0;

	if (s->descs)
		return s->count * sizeof(*s->descs);
	n += s->local_index ? sl_local_slots(s) : 0;
	n += s->remote_index ? sl_remote_slots(s) : 0;
	return n * sizeof(uint32_t) + (s->nest ? sizeof(*s->nest) : 0);
}

/* Allocates memory for a copy of the arrays of spec. -ENOMEM: s is as before. */
static inline int sl_pieces_reserve(struct sl_pieces *s, const struct sl_pieces *spec)
{
	size_t size = sl_pieces_size(spec);
	void *grown;

	if (s->copy_size >= size)
		return 0;
	grown = realloc(s->copy, size);
	if (!grown)
		return -ENOMEM;
	s->copy = grown;
	s->copy_size = size;
	return 0;
}

/* Makes s name the arrays of spec, but keep its memory for a copy. */
static inline void sl_pieces_take(struct sl_pieces *s, const struct sl_pieces *spec)
{
	void *copy = s->copy;
	size_t size = s->copy_size;

	*s = *spec;
	s->copy = copy;
	s->copy_size = size;
}

/* Copies the caller's arrays into the memory that was reserved. */
static inline void sl_pieces_keep(struct sl_pieces *s)
{
	uint32_t *lists = s->copy;

	if (s->count == 0)
		return;
	if (s->descs) {
		memcpy(s->copy, s->descs, s->count * sizeof(*s->descs));
		s->descs = s->copy;
		return;
	}
	if (s->nest) {
		memcpy(s->copy, s->nest, sizeof(*s->nest));
		s->nest = s->copy;
		lists = (uint32_t *)((uint8_t *)s->copy + sizeof(*s->nest));
	}
	if (s->local_index) {
		memcpy(lists, s->local_index, sl_local_slots(s) * sizeof(*lists));
		s->local_index = lists;
		lists += sl_local_slots(s);
	}
	if (s->remote_index) {
		memcpy(lists, s->remote_index, sl_remote_slots(s) * sizeof(*lists));
		s->remote_index = lists;
	}
}

static inline void sl_pieces_free(struct sl_pieces *s)
{
	free(s->copy);
	s->copy = NULL;
	s->copy_size = 0;
}

/* Gives memory back that few batches need. */
static inline void sl_pieces_trim(struct sl_pieces *s)
{
	if (s->copy_size > SL_PIECES_KEEP)
		sl_pieces_free(s);
}

#endif
