/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Records of work requests. They are kept until the context goes: what a late completion names is
 * there.
 */
#include "pair.h"

#include <errno.h>
#include <stdlib.h>

struct sl_verbs_slab {
	struct sl_verbs_slab *next;
	struct sl_verbs_record records[];
};

int sl_verbs_reserve_records(struct sl_verbs_context *c, uint32_t n)
{
	struct sl_verbs_traffic *t = c->traffic;
	struct sl_verbs_slab *s = calloc(1, sizeof(*s) + n * sizeof(s->records[0]));

	if (!s)
		return -ENOMEM;
	s->next = t->slabs;
	t->slabs = s;
	for (uint32_t i = 0; i < n; i++) {
		s->records[i].next = t->records;
		t->records = &s->records[i];
	}
	return 0;
}

struct sl_verbs_record *sl_verbs_record(struct sl_verbs_context *c)
{
	struct sl_verbs_traffic *t = c->traffic;
	struct sl_verbs_record *r;

	if (!t->records && sl_verbs_reserve_records(c, SL_VERBS_CHAIN) != 0)
		return NULL;
	r = t->records;
	t->records = r->next;
	*r = (struct sl_verbs_record){0};
	return r;
}

void sl_verbs_recycle(struct sl_verbs_context *c, struct sl_verbs_record *r)
{
	r->pair = NULL;
	r->next = c->traffic->records;
	c->traffic->records = r;
}

void sl_verbs_free_records(struct sl_verbs_context *c)
{
	while (c->traffic->slabs) {
		struct sl_verbs_slab *s = c->traffic->slabs;

		c->traffic->slabs = s->next;
		free(s);
	}
	c->traffic->records = NULL;
}
