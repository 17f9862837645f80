/* SPDX-License-Identifier: Apache-2.0 */
/* One look at what came back, and what has room then. */
#include "pair.h"

void sl_verbs_pump_queued(struct sl_verbs_context *c)
{
	struct sl_verbs_conn *n = c->traffic->pump_queue, *next;

	c->traffic->pump_queue = NULL;
	for (; n; n = next) {
		next = n->next_queued;
		n->in_pump_queue = 0;
		sl_verbs_pump(n); /* it comes back into the list when there is no room */
	}
}

unsigned sl_verbs_step(struct sl_verbs_context *c)
{
	unsigned n = 0;

	for (uint32_t i = 0; i < c->ports_len; i++)
		if (c->ports[i]->pairs)
			n += sl_verbs_take_completions(c->ports[i]);
	if (n && c->traffic->pump_queue)
		sl_verbs_pump_queued(c);
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

void sl_verbs_undrive(struct sl_verbs_context *c)
{
	if (atomic_exchange(&c->traffic->standing_back, 0))
		sl_verbs_wake_thread(c);
}
