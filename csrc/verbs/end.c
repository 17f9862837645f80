/* SPDX-License-Identifier: Apache-2.0 */
/* The end of lanes: drained, given up, and given back. */
#define _GNU_SOURCE
#include "lane.h"

#include <errno.h>

/* How often a lane is looked at in the time after which it has failed. */
#define WATCHES 8

/* The driver is gone, or has lost some: without a queue pair nothing goes out either. */
static void give_up_queue_pair(struct sl_verbs_lane *l)
{
	sl_verbs_take_receives(l->port);
	if (l->qp)
		(void)sl_verbs.ibv_destroy_qp(l->qp);
	l->qp = NULL;
	sl_verbs_abandon(l);
	sl_verbs_drained(l);
}

void sl_verbs_tick(struct sl_verbs_context *c, uint64_t now)
{
	struct sl_verbs_traffic *t = c->traffic;

	for (struct sl_verbs_conn *n = t->conns.next; t->draining && n != &t->conns; n = n->next)
		for (uint32_t i = 0; i < SL_VERBS_LANES; i++) {
			struct sl_verbs_lane *l = n->lanes[i];

			if (l && l->state == SL_VERBS_DRAINING && now > l->deadline)
				give_up_queue_pair(l);
		}
}

void sl_verbs_watch(struct sl_verbs_context *c, uint64_t now)
{
	uint64_t most = c->config.stall_ns;
	struct sl_verbs_traffic *t = c->traffic;

	if (!most || now - t->watched < most / WATCHES)
		return;
	t->watched = now;
	for (struct sl_verbs_conn *n = t->conns.next; n != &t->conns; n = n->next)
		for (uint32_t i = 0; i < SL_VERBS_LANES; i++) {
			struct sl_verbs_lane *l = n->lanes[i];

			if (!l || !l->posted.first)
				continue;
			if (!l->still || l->returned != l->watched) {
				l->watched = l->returned;
				l->still = now;
			} else if (now - l->still > most) {
				sl_verbs_fail_lane(l, IBV_WC_RESP_TIMEOUT_ERR);
			}
		}
}

void sl_verbs_finish_lane(struct sl_verbs_lane *l)
{
	struct sl_verbs_context *c = l->conn->context;
	struct ibv_qp *qp;

	sl_verbs_enter(c);
	l->quiet = 1;
	if (l->news) { /* whoever ends it knows */
		l->news = 0;
		c->traffic->news--;
	}
	sl_verbs_fail_lane(l, 0);
	while (l->state == SL_VERBS_DRAINING) {
		sl_verbs_step(c);
		sl_verbs_tick(c, sl_verbs_now());
		if (l->state == SL_VERBS_DRAINING)
			(void)sl_verbs_wait(c, sl_verbs_now() + 200000);
	}
	if (l->number)
		sl_verbs_take_receives(l->port);
	qp = l->qp;
	l->qp = NULL;
	sl_verbs_unlock(c);
	if (qp)
		(void)sl_verbs.ibv_destroy_qp(qp);
	sl_verbs_enter(c);
	if (l->number) {
		sl_verbs_take_receives(l->port); /* where the device still has some */
		sl_verbs_delist(l);
	}
	l->quiet = 0;
	sl_verbs_feed(c); /* what was to go over it may go over others */
	sl_verbs_unlock(c);
}

int sl_verbs_lane_end(struct sl_verbs_conn *n, uint32_t lane)
{
	if (lane >= SL_VERBS_LANES)
		return -ERANGE;
	pthread_mutex_lock(&n->setup);
	if (n->lanes[lane])
		sl_verbs_finish_lane(n->lanes[lane]);
	pthread_mutex_unlock(&n->setup);
	return 0;
}
