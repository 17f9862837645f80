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

/* Pieces of a batch: their numbers are told as int32_t. */
#define SL_PIECES_MAX INT32_MAX

struct sl_pieces {
	/* In the caller's arrays until submit returns, then in copy. */
	const struct sl_desc *descs; /* NULL: of pages */
	struct sl_pages pages;
	const uint32_t *local_index, *remote_index;
	uint32_t count;
	void *copy;
	size_t copy_size;
};

static inline struct sl_desc sl_piece(const struct sl_pieces *s, uint32_t i)
{
	const struct sl_pages *p = &s->pages;

	if (s->descs)
		return s->descs[i];
	return (struct sl_desc){
		.local = p->local_base + (s->local_index ? s->local_index[i] : i) * p->local_stride,
		.remote = p->remote_base + (s->remote_index ? s->remote_index[i] : i) * p->remote_stride,
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

/* 0: there are too many, or an offset of the pattern could overflow. */
static inline int sl_pages_sound(const struct sl_pages *p)
{
	uint64_t end;

	return p->count > 0 && p->count <= SL_PIECES_MAX && p->entry > 0 &&
	       !__builtin_mul_overflow((uint64_t)UINT32_MAX, p->local_stride, &end) &&
	       !__builtin_add_overflow(end, p->local_base, &end) && !__builtin_add_overflow(end, p->entry, &end) &&
	       !__builtin_mul_overflow((uint64_t)UINT32_MAX, p->remote_stride, &end) &&
	       !__builtin_add_overflow(end, p->remote_base, &end) && !__builtin_add_overflow(end, p->entry, &end);
}

static inline size_t sl_pieces_size(const struct sl_pieces *s)
{
	if (s->descs)
		return s->count * sizeof(*s->descs);
	return ((s->local_index != NULL) + (s->remote_index != NULL)) * s->count * sizeof(uint32_t);
}

/* Memory for a copy of what form names, before anything is begun. -ENOMEM: as before. */
static inline int sl_pieces_reserve(struct sl_pieces *s, const struct sl_pieces *form)
{
	size_t size = sl_pieces_size(form);
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

/* Names what form does, and keeps the memory that it has. */
static inline void sl_pieces_take(struct sl_pieces *s, const struct sl_pieces *form)
{
	void *copy = s->copy;
	size_t size = s->copy_size;

	*s = *form;
	s->copy = copy;
	s->copy_size = size;
}

/* Copies what the caller's arrays hold, into what was reserved. */
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
	if (s->local_index) {
		memcpy(lists, s->local_index, s->count * sizeof(*lists));
		s->local_index = lists;
		lists += s->count;
	}
	if (s->remote_index) {
		memcpy(lists, s->remote_index, s->count * sizeof(*lists));
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
