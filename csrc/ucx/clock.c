/* SPDX-License-Identifier: Apache-2.0 */
/* The clock of all workers. A test can move it on, and need not sleep for what is to take long. */
#include "worker.h"

#include <time.h>

/* How far tests have moved it on. */
static atomic_uint_fast64_t ahead;

uint64_t sl_ucx_now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec +
	       atomic_load_explicit(&ahead, memory_order_relaxed);
}

uint64_t sl_ucx_monotonic(uint64_t at)
{
	return at - atomic_load_explicit(&ahead, memory_order_relaxed);
}

/* The tick comes under the same lock, so that no thread takes the time for a standstill before. */
void sl_ucx_elapse(struct sl_ucx_context *c, uint64_t ns)
{
	for (uint32_t i = 0; i < c->config.workers; i++)
		sl_ucx_lock(&c->workers[i]);
	atomic_fetch_add(&ahead, ns);
	for (uint32_t i = 0; i < c->config.workers; i++) {
		struct sl_ucx_worker *w = &c->workers[i];

		sl_ucx_tick(w, sl_ucx_now(), 1);
		pthread_cond_broadcast(&w->changed); /* to what waits for a time that has come */
		sl_ucx_wake_thread(w);
		sl_ucx_unlock(w);
	}
}

uint32_t sl_ucx_sends(struct sl_ucx_conn *n)
{
	uint32_t sends;

	sl_ucx_lock(n->worker);
	sends = n->sends;
	sl_ucx_unlock(n->worker);
	return sends;
}
