/* SPDX-License-Identifier: Apache-2.0 */
#include "pieces.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* So much memory stays for the next use: the descriptors of the largest usual batch. */
#define KEEP (128u << 10)

int sl_pages_sound(const struct sl_pages *p)
{
	uint64_t end;

	return p->count > 0 && p->count <= SL_PIECES_MAX && p->entry > 0 &&
	       !__builtin_mul_overflow((uint64_t)UINT32_MAX, p->local_stride, &end) &&
	       !__builtin_add_overflow(end, p->local_base, &end) && !__builtin_add_overflow(end, p->entry, &end) &&
	       !__builtin_mul_overflow((uint64_t)UINT32_MAX, p->remote_stride, &end) &&
	       !__builtin_add_overflow(end, p->remote_base, &end) && !__builtin_add_overflow(end, p->entry, &end);
}

static size_t size_of(const struct sl_pieces *s)
{
	if (s->descs)
		return s->count * sizeof(*s->descs);
	return ((s->local_index != NULL) + (s->remote_index != NULL)) * s->count * sizeof(uint32_t);
}

int sl_pieces_reserve(struct sl_pieces *s, const struct sl_pieces *form)
{
	size_t size = size_of(form);
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

void sl_pieces_take(struct sl_pieces *s, const struct sl_pieces *form)
{
	void *copy = s->copy;
	size_t size = s->copy_size;

	*s = *form;
	s->copy = copy;
	s->copy_size = size;
}

void sl_pieces_keep(struct sl_pieces *s)
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

void sl_pieces_free(struct sl_pieces *s)
{
	free(s->copy);
	s->copy = NULL;
	s->copy_size = 0;
}

void sl_pieces_trim(struct sl_pieces *s)
{
	if (s->copy_size > KEEP)
		sl_pieces_free(s);
}
