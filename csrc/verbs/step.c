/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One step of a context, by its thread or by a caller: takes completions, and posts what has room.
 */
#include "pair.h"

void sl_verbs_post_queued(struct sl_verbs_context *c)
{
	struct sl_verbs_conn *n = c->traffic->queued_conns, *next;

	c->traffic->queued_conns = NULL;
	for (; n; n = next) {
		next = n->next_queued;
		n->queued = 0;
		sl_verbs_post_waiting(n); /* it queues n again when there is no room */
	}
}

unsigned sl_verbs_step(struct sl_verbs_context *c)
{
	unsigned n = 0;

	for (uint32_t i = 0; i < c->rails_len; i++)
		if (c->rails[i]->traffic)
			n += sl_verbs_take_completions(c->rails[i]);
	if (n && c->traffic->queued_conns)
		sl_verbs_post_queued(c);
	return n;
}

void sl_verbs_drive(struct sl_verbs_context *c)
{
	struct sl_verbs_traffic *t = c->traffic;

	atomic_fetch_add_explicit(&t->drives, 1, memory_order_relaxed);
	if (pthread_mutex_trylock(&c->lock))
		return;
	sl_verbs_step(c);
	sl_verbs_unlock(c);
}

void sl_verbs_resume_thread(struct sl_verbs_context *c)
{
	if (atomic_exchange(&c->traffic->standing_back, 0))
		sl_verbs_wake_thread(c);
}
