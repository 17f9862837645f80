/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The end of a queue pair: failed and drained (pair.c), given up if the NIC does not give back its
 * requests in time, and destroyed. What is proved: when ibv_destroy_qp has returned 0, no request
 * of it, and none of the peer's over it, can land any more.
 */
#define _GNU_SOURCE
#include "pair.h"

#include <errno.h>

/* How long after a failed ibv_destroy_qp the next attempt follows. */
#define RETRY_NS 200000000u

/* One late check of sl_verbs_fail_stalled in so many counts. */
#define LATE_MAX 8

/* Notes the outcome of ibv_destroy_qp: on success l has no qp any more. Under the lock. */
static int note_destroyed(struct sl_verbs_pair *l, struct ibv_qp *qp, int error)
{
	l->destroy_error = qp ? sl_verbs_end_error(l->rail, error) : 0;
	l->qp = l->destroy_error ? qp : NULL;
	return -l->destroy_error;
}

/*
 * The queue pair reports no more completions: destroys it, after which nothing goes out or lands
 * over it. While the device refuses that, nothing that was posted is over.
 */
static void give_up_pair(struct sl_verbs_pair *l)
{
	struct ibv_qp *qp = l->qp;

	sl_verbs_take_receives(l->rail);
	if (note_destroyed(l, qp, qp ? sl_verbs.ibv_destroy_qp(qp) : 0) != 0) {
		l->deadline = sl_verbs_now() + RETRY_NS;
		return;
	}
	sl_verbs_keep_all_unproved(l);
	sl_verbs_pair_drained(l);
}

void sl_verbs_give_up_draining(struct sl_verbs_context *c, uint64_t now)
{
	struct sl_verbs_traffic *t = c->traffic;

	if (t->draining) /* completions may have come while this process was stopped */
		(void)sl_verbs_step(c);
	for (struct sl_verbs_conn *n = t->conns.next; t->draining && n != &t->conns; n = n->next)
		for (uint32_t i = 0; i < SL_VERBS_PAIRS; i++) {
			struct sl_verbs_pair *l = n->pairs[i];

			if (l && l->state == SL_VERBS_DRAINING && now > l->deadline)
				give_up_pair(l);
		}
}

void sl_verbs_fail_stalled(struct sl_verbs_context *c, uint64_t now)
{
	uint64_t interval = c->config.stall_ns / SL_VERBS_STALL_CHECKS;
	struct sl_verbs_traffic *t = c->traffic;
	/*
	 * A late check shows that this process did not run, so the device need not have been
	 * silent. Where all checks are late, one in LATE_MAX counts, so that each wait ends.
	 */
	int late = now - t->stall_checked > 4 * interval;

	if (!c->config.stall_ns || now - t->stall_checked < interval)
		return;
	t->stall_checked = now;
	if (late && ++t->late_checks % LATE_MAX == 0)
		late = 0;
	(void)sl_verbs_step(c);
	for (struct sl_verbs_conn *n = t->conns.next; n != &t->conns; n = n->next)
		for (uint32_t i = 0; i < SL_VERBS_PAIRS; i++) {
			struct sl_verbs_pair *l = n->pairs[i];

			if (!l || !l->posted.first)
				continue;
			if (l->returned != l->returned_before || !l->idle_checks) {
				l->returned_before = l->returned;
				l->idle_checks = 1;
			} else if (!late && l->idle_checks++ >= SL_VERBS_STALL_CHECKS) {
				sl_verbs_fail_pair(l, IBV_WC_RESP_TIMEOUT_ERR);
			}
		}
}

/* Waits until nothing is posted, or the device refuses to destroy it. Under the lock. */
static int drain_pair(struct sl_verbs_pair *l)
{
	struct sl_verbs_context *c = l->conn->context;

	sl_verbs_fail_pair(l, 0);
	if (l->destroy_error) {
		if (l->state == SL_VERBS_DRAINING)
			give_up_pair(l);
		return -l->destroy_error;
	}
	while (l->state == SL_VERBS_DRAINING && !l->destroy_error) {
		sl_verbs_step(c);
		sl_verbs_give_up_draining(c, sl_verbs_now());
		if (l->state == SL_VERBS_DRAINING && !l->destroy_error)
			(void)sl_verbs_wait(c, sl_verbs_now() + 200000);
	}
	return -l->destroy_error;
}

/* Destroys a drained queue pair. Called under the lock, which it lets go meanwhile. */
static int destroy_qp(struct sl_verbs_pair *l)
{
	struct sl_verbs_context *c = l->conn->context;
	struct ibv_qp *qp = l->qp;
	int rc;

	if (l->number)
		sl_verbs_take_receives(l->rail);
	l->qp = NULL;
	sl_verbs_unlock(c);
	rc = qp ? sl_verbs.ibv_destroy_qp(qp) : 0;
	sl_verbs_lock(c);
	rc = note_destroyed(l, qp, rc);
	if (rc == 0 && l->number) {
		sl_verbs_take_receives(l->rail); /* a device may keep them also after that */
		sl_verbs_delist(l);
	}
	return rc;
}

int sl_verbs_destroy_pair(struct sl_verbs_pair *l)
{
	struct sl_verbs_context *c = l->conn->context;
	int rc;

	sl_verbs_lock(c);
	/* The context closes, and the device that kept l is closed: nothing proves an end. */
	if (l->qp && atomic_load(&c->traffic->stop)) {
		sl_verbs_unlock(c);
		return -EBUSY;
	}
	l->end_awaited = 1;
	if (l->unreported) { /* no news: the caller ends it */
		l->unreported = 0;
		c->traffic->news_waiting--;
	}
	rc = drain_pair(l);
	if (rc == 0 || l->state == SL_VERBS_FAILED)
		rc = destroy_qp(l);
	l->end_awaited = 0;
	sl_verbs_post_queued(c); /* other queue pairs may take its requests */
	sl_verbs_unlock(c);
	return rc;
}

int sl_verbs_pair_end(struct sl_verbs_conn *n, uint32_t pair)
{
	int rc = 0;

	if (pair >= SL_VERBS_PAIRS)
		return -ERANGE;
	pthread_mutex_lock(&n->setup_lock);
	if (n->pairs[pair])
		rc = sl_verbs_destroy_pair(n->pairs[pair]);
	pthread_mutex_unlock(&n->setup_lock);
	return rc;
}
