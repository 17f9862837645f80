/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The life of a queue pair: it is found by its number (enlist), goes live with its probe
 * (pair_lives), has requests built and posted (build, post_built), fails (fail_pair), and is
 * drained when nothing is posted any more (pair_drained).
 */
#define _GNU_SOURCE
#include "pair.h"

#include <errno.h>

/* One request in so many asks for a completion, and so does the last of each list. */
#define SIGNAL_EVERY 16
/* How long a queue pair in the error state may take to give back its requests. */
#define DRAIN_NS 1000000000u
/*
 * How long where only the mark is posted (an owner's queue pair), or where the driver refused even
 * that, or the device is gone and reports nothing.
 */
#define MARK_NS 100000000u

static struct sl_verbs_pair **bucket(struct sl_verbs_port *p, uint32_t number)
{
	return &p->pairs->buckets[number % SL_VERBS_BUCKETS];
}

struct sl_verbs_pair *sl_verbs_pair_of(struct sl_verbs_port *p, uint32_t number)
{
	struct sl_verbs_pair *l = *bucket(p, number);

	while (l && l->number != number)
		l = l->chain;
	return l;
}

void sl_verbs_enlist(struct sl_verbs_pair *l)
{
	struct sl_verbs_pair **at = bucket(l->port, l->number);

	l->chain = *at;
	*at = l;
	l->port->pairs->len++;
}

void sl_verbs_delist(struct sl_verbs_pair *l)
{
	struct sl_verbs_pair **at;

	if (!l->number)
		return;
	at = bucket(l->port, l->number);
	while (*at != l)
		at = &(*at)->chain;
	*at = l->chain;
	l->number = 0;
	l->port->pairs->len--;
	l->port->slots_promised -= l->receives_promised;
	l->receives_promised = 0;
}

static void report(struct sl_verbs_pair *l, uint32_t news)
{
	struct sl_verbs_context *c = l->conn->context;

	if (l->conn->ended)
		return;
	c->traffic->news += !l->news;
	l->news = news;
	sl_verbs_signal_news(c);
}

void sl_verbs_pair_lives(struct sl_verbs_pair *l)
{
	if (l->state != SL_VERBS_BEGUN)
		return;
	l->state = SL_VERBS_LIVE;
	if (l->conn->initiator)
		report(l, SL_VERBS_PAIR_LIVE);
	sl_verbs_queue_pump(l->conn);
}

struct sl_verbs_record *sl_verbs_pop_posted(struct sl_verbs_pair *l)
{
	struct sl_verbs_record *r = sl_verbs_pop(&l->posted);

	l->returned++;
	l->flight -= r->len;
	l->reposted -= r->reposted;
	l->port->counters.in_flight -= r->len;
	l->port->sends_promised--;
	r->pair = NULL;
	return r;
}

void sl_verbs_record_unproved(struct sl_verbs_pair *l, struct sl_verbs_record *r)
{
	struct sl_verbs_conn *n = l->conn;

	r->pair = NULL;
	if (r->batch) {
		sl_verbs_append(&l->unproved, r);
		n->unproved++;
		return;
	}
	if (r->kind == SL_VERBS_CREDIT) { /* sent anew when a queue pair is live */
		n->credit_posted = 0;
		n->credit_sent = 0;
	}
	sl_verbs_drop_frame(n, r);
	sl_verbs_recycle(n->context, r);
}

void sl_verbs_posted_unproved(struct sl_verbs_pair *l)
{
	while (l->posted.first)
		sl_verbs_record_unproved(l, sl_verbs_pop_posted(l));
}

int sl_verbs_has_room(const struct sl_verbs_pair *l)
{
	return l->posted.n < l->depth && l->flight < l->conn->context->config.flight &&
	       l->port->sends_promised + l->port->pairs->len < (uint32_t)l->port->sends->cqe;
}

struct ibv_sge *sl_verbs_entries(struct sl_verbs_conn *n)
{
	struct sl_verbs_traffic *t = n->context->traffic;

	if (t->built == SL_VERBS_CHAIN ||
	    t->entries + SL_VERBS_ENTRIES > SL_VERBS_CHAIN * SL_VERBS_ENTRIES)
		sl_verbs_post_built(n);
	return &t->sges[t->entries];
}

struct ibv_send_wr *sl_verbs_build(struct sl_verbs_pair *l, struct sl_verbs_record *r,
				   struct ibv_sge *entries, uint32_t len)
{
	struct sl_verbs_traffic *t = l->conn->context->traffic;
	struct ibv_send_wr *wr = &t->wrs[t->built++];

	wr->wr_id = (uintptr_t)r;
	wr->next = NULL;
	wr->sg_list = entries;
	wr->num_sge = (int)len;
	wr->send_flags = 0;
	if (++l->unsignalled == SIGNAL_EVERY) {
		l->unsignalled = 0;
		wr->send_flags = IBV_SEND_SIGNALED;
	}
	t->entries += len;
	if (l->wr_last)
		l->wr_last->next = wr;
	else
		l->wr_first = wr;
	l->wr_last = wr;
	r->pair = l;
	l->reposted += r->reposted;
	l->flight += r->len;
	l->port->counters.in_flight += r->len;
	l->port->counters.requests++;
	l->port->sends_promised++;
	sl_verbs_append(&l->posted, r);
	return wr;
}

/* Moves the requests that the device refused, from bad on, from posted to unposted. */
static void unpost_from(struct sl_verbs_pair *l, const struct ibv_send_wr *bad)
{
	struct sl_verbs_list all = l->posted;
	struct sl_verbs_record *r;
	int refused = 0;

	l->posted = (struct sl_verbs_list){0};
	while ((r = sl_verbs_pop(&all)) != NULL) {
		refused |= (uintptr_t)r == bad->wr_id;
		sl_verbs_append(refused ? &l->unposted : &l->posted, r);
		if (!refused)
			continue;
		l->flight -= r->len;
		l->reposted -= r->reposted;
		l->port->counters.in_flight -= r->len;
		l->port->sends_promised--;
	}
}

static void ring_bell(struct sl_verbs_pair *l)
{
	struct ibv_send_wr *first = l->wr_first, *bad = first;
	int rc;

	l->wr_last->send_flags |= IBV_SEND_SIGNALED;
	l->unsignalled = 0;
	l->wr_first = l->wr_last = NULL;
	rc = sl_verbs_post_send(l->qp, first, &bad);
	if (rc == 0)
		return;
	unpost_from(l, bad);
	sl_verbs_fail_pair(l, IBV_WC_GENERAL_ERR);
}

void sl_verbs_post_built(struct sl_verbs_conn *n)
{
	struct sl_verbs_traffic *t = n->context->traffic;

	for (uint32_t i = 0; t->built && i < SL_VERBS_PAIRS; i++)
		if (n->pairs[i] && n->pairs[i]->wr_first)
			ring_bell(n->pairs[i]);
	t->built = t->entries = 0;
}

/*
 * Posts a request to a queue pair in the error state. The NIC completes it, as flushed, behind all
 * that the queue pair was doing for the peer.
 */
static void post_mark(struct sl_verbs_pair *l)
{
	struct sl_verbs_record *r = sl_verbs_record(l->conn->context);

	if (!r)
		return;
	r->kind = SL_VERBS_MARK;
	sl_verbs_build(l, r, sl_verbs_entries(l->conn), 0)->opcode = IBV_WR_SEND;
	sl_verbs_post_built(l->conn);
}

void sl_verbs_fail_pair(struct sl_verbs_pair *l, int32_t status)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
	int begun = l->state == SL_VERBS_BEGUN || l->state == SL_VERBS_LIVE, stopped;

	if (!begun && l->state != SL_VERBS_MADE)
		return;
	/* If this fails, posted requests may still go out, and the peer's writes still land. */
	stopped = sl_verbs.ibv_modify_qp(l->qp, &attr, IBV_QP_STATE) == 0;
	l->state = SL_VERBS_DRAINING;
	l->status = status;
	l->deadline = sl_verbs_now() + (l->posted.first && !l->port->gone ? DRAIN_NS : MARK_NS);
	l->conn->context->traffic->draining++;
	l->port->counters.failures += status != 0;
	if (begun && stopped && !l->conn->initiator)
		post_mark(l);
	if (!l->posted.first)
		sl_verbs_pair_drained(l);
	else
		sl_verbs_wake_thread(l->conn->context); /* the thread watches the time */
}

void sl_verbs_pair_drained(struct sl_verbs_pair *l)
{
	struct sl_verbs_record *r;

	if (l->state != SL_VERBS_DRAINING)
		return;
	l->state = SL_VERBS_FAILED;
	l->conn->context->traffic->draining--;
	while ((r = sl_verbs_pop(&l->unposted)) != NULL)
		sl_verbs_record_unproved(l, r);
	if (!l->awaited)
		report(l, SL_VERBS_PAIR_FAILED);
	if (!l->conn->ended && l->conn->initiator)
		sl_verbs_queue_pump(l->conn); /* others may take its requests */
	pthread_cond_broadcast(&l->conn->context->news);
}
