/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory for records of work requests. It is kept until the context is freed, since a late
 * completion may name a record that is free.
 */
#include "pair.h"

#include <errno.h>
#include <stdlib.h>

struct sl_verbs_record_slab {
	struct sl_verbs_record_slab *next;
	struct sl_verbs_record records[];
};

int sl_verbs_reserve_records(struct sl_verbs_context *c, uint32_t n)
{
	struct sl_verbs_traffic *t = c->traffic;
	struct sl_verbs_record_slab *s = calloc(1, sizeof(*s) + n * sizeof(s->records[0]));

	if (!s)
		return -ENOMEM;
	s->next = t->record_slabs;
	t->record_slabs = s;
	for (uint32_t i = 0; i < n; i++) {
		s->records[i].next = t->free_records;
		t->free_records = &s->records[i];
	}
	return 0;
}

struct sl_verbs_record *sl_verbs_new_record(struct sl_verbs_context *c)
{
	struct sl_verbs_traffic *t = c->traffic;
	struct sl_verbs_record *r;

	if (!t->free_records && sl_verbs_reserve_records(c, SL_VERBS_CHAIN) != 0)
		return NULL;
	r = t->free_records;
	t->free_records = r->next;
	*r = (struct sl_verbs_record){0};
	return r;
}

void sl_verbs_free_record(struct sl_verbs_context *c, struct sl_verbs_record *r)
{
	r->pair = NULL;
	r->next = c->traffic->free_records;
	c->traffic->free_records = r;
}

void sl_verbs_free_record_slabs(struct sl_verbs_context *c)
{
	while (c->traffic->record_slabs) {
		struct sl_verbs_record_slab *s = c->traffic->record_slabs;

		c->traffic->record_slabs = s->next;
		free(s);
	}
	c->traffic->free_records = NULL;
}
