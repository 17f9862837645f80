/* SPDX-License-Identifier: Apache-2.0 */
/* What a batch consists of: descriptors, or a pattern with its lists. */
#ifndef SLUICE_PIECES_H
#define SLUICE_PIECES_H

#include "sluice.h"

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

/* 0: there are too many, or an offset of the pattern could overflow. */
int sl_pages_sound(const struct sl_pages *p);

/* Memory for a copy of what form names, before anything is begun. -ENOMEM: as before. */
int sl_pieces_reserve(struct sl_pieces *s, const struct sl_pieces *form);
/* Names what form does, and keeps the memory that it has. */
void sl_pieces_take(struct sl_pieces *s, const struct sl_pieces *form);
/* Copies what the caller's arrays hold, into what was reserved. */
void sl_pieces_keep(struct sl_pieces *s);
/* Gives memory back that few batches need. */
void sl_pieces_trim(struct sl_pieces *s);
void sl_pieces_free(struct sl_pieces *s);

#endif
