/* SPDX-License-Identifier: Apache-2.0 */
/* What callers do about a batch that is under way: end it, or move the worker for it. */
#define _GNU_SOURCE
#include "worker.h"

/* How long a caller waits for the owner of memory before it sleeps. */
#define PATIENCE_NS 50000u

static struct sl_ucx_batch *find(struct sl_ucx_conn *n, uint64_t tag)
{
	for (struct sl_ucx_batch *b = n->live.prev; b != &n->live; b = b->prev) {
		if (b->tag == tag)
			return b;
	}
	return NULL;
}

void sl_ucx_cancel(struct sl_ucx_conn *n, uint64_t tag)
{
	struct sl_ucx_batch *b;

	sl_ucx_lock(n->worker);
	b = find(n, tag);
	if (b && !b->cancelled && !(b->issued && b->write)) {
		sl_ucx_give_up(b, SL_UCX_ABORTED);
		sl_ucx_rouse(n->worker);
	}
	sl_ucx_unlock(n->worker);
}

/* A batch needs the answers of its owner, which come within microseconds or not soon. */
static int wait_for_owner(struct sl_ucx_conn *n, uint64_t tag)
{
	struct sl_ucx_worker *w = n->worker;
	uint64_t until = sl_ucx_now() + PATIENCE_NS, now = 0;
	struct sl_ucx_batch *b;
	int moved = 0;

	/* Found anew each time: while the lock is let go of it may end. */
	while ((b = find(n, tag)) != NULL && b->status == 0 && now < until) {
		atomic_fetch_add_explicit(&w->drives, 1, memory_order_relaxed);
		w->polled = 1;
		moved |= sl_ucx_step(w) != 0;
		w->polled = 0;
		now = sl_ucx_now();
		if (atomic_load(&w->waiting)) {
			sl_ucx_unlock(w);
			sl_ucx_let_in(w);
			sl_ucx_lock(w);
		}
	}
	return moved ? SL_UCX_HELPED | (find(n, tag) ? SL_UCX_AGAIN : 0) : 0;
}

int sl_ucx_help(struct sl_ucx_conn *n, uint64_t tag)
{
	struct sl_ucx_worker *w = n->worker;
	uint64_t ended;
	int done = 0;

	sl_ucx_lock(w);
	ended = w->ring->head;
	if (n->state != SL_UCX_ENDED)
		done = wait_for_owner(n, tag);
	if (w->ring->head != ended) /* whatever batch that was, and whatever UCX says of it */
		done |= SL_UCX_HELPED;
	sl_ucx_unlock(w);
	if (done)
		sl_ucx_let_in(w);
	return done;
}
