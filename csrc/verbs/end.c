/* SPDX-License-Identifier: Apache-2.0 */
/* The end of queue pairs: drained, given up, and given back. */
#define _GNU_SOURCE
#include "pair.h"

#include <errno.h>

/* How long to wait after ibv_destroy_qp has failed before the next attempt. */
#define AGAIN_NS 200000000u

/* One late look of sl_verbs_watch in so many counts. */
#define LATE_MAX 8

/* Notes the outcome of ibv_destroy_qp: on success l has no qp any more. Under the lock. */
static int destroyed(struct sl_verbs_pair *l, struct ibv_qp *qp, int error)
{
	l->destroy_error = qp ? sl_verbs_ended(l->port, error) : 0;
	l->qp = l->destroy_error ? qp : NULL;
	return -l->destroy_error;
}

/*
 * The queue pair reports no more completions: destroys it, after which nothing goes out or lands
 * over it. While the device refuses that, nothing that was posted is over.
 */
static void give_up_queue_pair(struct sl_verbs_pair *l)
{
	struct ibv_qp *qp = l->qp;

	sl_verbs_take_receives(l->port);
	if (destroyed(l, qp, qp ? sl_verbs.ibv_destroy_qp(qp) : 0) != 0) {
		l->deadline = sl_verbs_now() + AGAIN_NS;
		return;
	}
	sl_verbs_posted_unproved(l);
	sl_verbs_pair_drained(l);
}

void sl_verbs_tick(struct sl_verbs_context *c, uint64_t now)
{
	struct sl_verbs_traffic *t = c->traffic;

	if (t->draining) /* what came back while this process stood still */
		(void)sl_verbs_step(c);
	for (struct sl_verbs_conn *n = t->conns.next; t->draining && n != &t->conns; n = n->next)
		for (uint32_t i = 0; i < SL_VERBS_PAIRS; i++) {
			struct sl_verbs_pair *l = n->pairs[i];

			if (l && l->state == SL_VERBS_DRAINING && now > l->deadline)
				give_up_queue_pair(l);
		}
}

void sl_verbs_watch(struct sl_verbs_context *c, uint64_t now)
{
	uint64_t beat = c->config.stall_ns / SL_VERBS_WATCHES;
	struct sl_verbs_traffic *t = c->traffic;
	/*
	 * A late look shows that this process did not run, so the device need not have been silent.
	 * On a machine where all looks are late one in LATE_MAX counts, so that each wait ends.
	 */
	int late = now - t->watched > 4 * beat;

	if (!c->config.stall_ns || now - t->watched < beat)
		return;
	t->watched = now;
	if (late && ++t->late % LATE_MAX == 0)
		late = 0;
	(void)sl_verbs_step(c);
	for (struct sl_verbs_conn *n = t->conns.next; n != &t->conns; n = n->next)
		for (uint32_t i = 0; i < SL_VERBS_PAIRS; i++) {
			struct sl_verbs_pair *l = n->pairs[i];

			if (!l || !l->posted.first)
				continue;
			if (l->returned != l->returned_before || !l->idle_looks) {
				l->returned_before = l->returned;
				l->idle_looks = 1;
			} else if (!late && l->idle_looks++ >= SL_VERBS_WATCHES) {
				sl_verbs_fail_pair(l, IBV_WC_RESP_TIMEOUT_ERR);
			}
		}
}

/* Waits until nothing is posted, or the device refuses to destroy it. Under the lock. */
static int drain(struct sl_verbs_pair *l)
{
	struct sl_verbs_context *c = l->conn->context;

	sl_verbs_fail_pair(l, 0);
	if (l->destroy_error) {
		if (l->state == SL_VERBS_DRAINING) /* once more */
			give_up_queue_pair(l);
		return -l->destroy_error;
	}
	while (l->state == SL_VERBS_DRAINING && !l->destroy_error) {
		sl_verbs_step(c);
		sl_verbs_tick(c, sl_verbs_now());
		if (l->state == SL_VERBS_DRAINING && !l->destroy_error)
			(void)sl_verbs_wait(c, sl_verbs_now() + 200000);
	}
	return -l->destroy_error;
}

/* Destroys a drained queue pair. Called under the lock, which it lets go meanwhile. */
static int destroy(struct sl_verbs_pair *l)
{
	struct sl_verbs_context *c = l->conn->context;
	struct ibv_qp *qp = l->qp;
	int rc;

	if (l->number)
		sl_verbs_take_receives(l->port);
	l->qp = NULL;
	sl_verbs_unlock(c);
	rc = qp ? sl_verbs.ibv_destroy_qp(qp) : 0;
	sl_verbs_enter(c);
	rc = destroyed(l, qp, rc);
	if (rc == 0 && l->number) {
		sl_verbs_take_receives(l->port); /* where the device still has some */
		sl_verbs_delist(l);
	}
	return rc;
}

int sl_verbs_finish_pair(struct sl_verbs_pair *l)
{
	struct sl_verbs_context *c = l->conn->context;
	int rc;

	sl_verbs_enter(c);
	/* Its device is closed, which proves nothing. */
	if (l->qp && atomic_load(&c->traffic->stop)) {
		sl_verbs_unlock(c);
		return -EBUSY;
	}
	l->awaited = 1;
	if (l->news) { /* the caller knows */
		l->news = 0;
		c->traffic->news--;
	}
	rc = drain(l);
	if (rc == 0 || l->state == SL_VERBS_FAILED)
		rc = destroy(l);
	l->awaited = 0;
	sl_verbs_pump_queued(c); /* others may take its requests */
	sl_verbs_unlock(c);
	return rc;
}

int sl_verbs_pair_end(struct sl_verbs_conn *n, uint32_t pair)
{
	int rc = 0;

	if (pair >= SL_VERBS_PAIRS)
		return -ERANGE;
	pthread_mutex_lock(&n->setup);
	if (n->pairs[pair])
		rc = sl_verbs_finish_pair(n->pairs[pair]);
	pthread_mutex_unlock(&n->setup);
	return rc;
}
