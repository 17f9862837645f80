/* SPDX-License-Identifier: Apache-2.0 */
/* Lanes: the life of a queue pair. */
#define _GNU_SOURCE
#include "lane.h"

#include <errno.h>

/* How long a queue pair in the error state may take to give back its requests. */
#define DRAIN_NS 1000000000u
/* An owner's has one, or none where the driver takes no request in that state; and a device that is gone says nothing. */
#define MARK_NS 100000000u
/* How often a lane is looked at in the time after which it has failed. */
#define WATCHES 8

static struct sl_verbs_lane **bucket(struct sl_verbs_port *p, uint32_t number)
{
	return &p->lanes->buckets[number % SL_VERBS_BUCKETS];
}

struct sl_verbs_lane *sl_verbs_lane_of(struct sl_verbs_port *p, uint32_t number)
{
	struct sl_verbs_lane *l = *bucket(p, number);

	while (l && l->number != number)
		l = l->chain;
	return l;
}

void sl_verbs_enlist(struct sl_verbs_lane *l)
{
	struct sl_verbs_lane **at = bucket(l->port, l->number);

	l->chain = *at;
	*at = l;
	l->port->lanes->len++;
}

/* Completions do not find it any more. */
static void forget(struct sl_verbs_lane *l)
{
	struct sl_verbs_lane **at;

	if (!l->number)
		return;
	at = bucket(l->port, l->number);
	while (*at != l)
		at = &(*at)->chain;
	*at = l->chain;
	l->number = 0;
	l->port->lanes->len--;
	l->port->slots_promised -= l->promised;
	l->promised = 0;
}

static void tell(struct sl_verbs_lane *l, uint32_t news)
{
	struct sl_verbs_context *c = l->conn->context;

	if (l->conn->ended)
		return;
	c->traffic->news += !l->news;
	l->news = news;
	sl_verbs_tell(c);
}

void sl_verbs_lane_lives(struct sl_verbs_lane *l)
{
	if (l->state != SL_VERBS_BEGUN)
		return;
	l->state = SL_VERBS_LIVE;
	if (l->conn->initiator)
		tell(l, SL_VERBS_LANE_LIVE);
	sl_verbs_starve(l->conn);
}

/* Comes back when what the queue pair was doing is over. */
static void mark(struct sl_verbs_lane *l)
{
	struct sl_verbs_record *r = sl_verbs_record(l->conn->context);

	if (!r)
		return;
	r->kind = SL_VERBS_MARK;
	sl_verbs_make_room(l->conn);
	sl_verbs_build(l, r, 0)->opcode = IBV_WR_SEND;
	sl_verbs_ring_bells(l->conn);
}

void sl_verbs_fail_lane(struct sl_verbs_lane *l, int32_t status)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
	int begun = l->state == SL_VERBS_BEGUN || l->state == SL_VERBS_LIVE;

	if (!begun && l->state != SL_VERBS_MADE)
		return;
	(void)sl_verbs.ibv_modify_qp(l->qp, &attr, IBV_QP_STATE); /* or it is in that state already */
	l->state = SL_VERBS_DRAINING;
	l->status = status;
	l->deadline = sl_verbs_now() + (l->posted.first && !l->port->gone ? DRAIN_NS : MARK_NS);
	l->conn->context->traffic->draining++;
	l->port->counters.failures += status != 0;
	if (begun && !l->conn->initiator)
		mark(l);
	if (!l->posted.first)
		sl_verbs_drained(l);
	else
		sl_verbs_rouse(l->conn->context); /* the thread watches the time */
}

void sl_verbs_drained(struct sl_verbs_lane *l)
{
	struct sl_verbs_record *r;

	if (l->state != SL_VERBS_DRAINING)
		return;
	l->state = SL_VERBS_FAILED;
	l->conn->context->traffic->draining--;
	while ((r = sl_verbs_pop(&l->unposted)) != NULL)
		sl_verbs_hold(l, r);
	if (!l->quiet)
		tell(l, SL_VERBS_LANE_FAILED);
	if (!l->conn->ended && l->conn->initiator)
		sl_verbs_starve(l->conn); /* what was to go over it may go over others */
	pthread_cond_broadcast(&l->conn->context->news);
}

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
		forget(l);
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
