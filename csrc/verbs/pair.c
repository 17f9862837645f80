/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A queue pair from the time when it is connected, in the order of its life. Completions find it by
 * its number (enlist). Its probe makes it live (set_live). Requests are built and posted on it
 * (next_entries, build, post_built), and leave it (pop_posted). It fails (fail_pair), and is
 * drained when the NIC has given back all its requests (pair_drained). The requests that may have
 * been executed are then on its unproved list, for settle.c. make.c makes queue pairs, end.c
 * destroys them; the types are in pair.h.
 */
#define _GNU_SOURCE
#include "pair.h"

#include <errno.h>

/* One request in so many asks for a completion, and so does the last of those posted together. */
#define SIGNAL_EVERY 16
/* How long a NIC may take to give back the requests of a queue pair in the error state. */
#define DRAIN_NS 1000000000u
/* The same where only a mark is posted, or where the device is gone and reports nothing. */
#define MARK_NS 100000000u

static struct sl_verbs_pair **bucket(struct sl_verbs_rail *p, uint32_t number)
{
	return &p->traffic->buckets[number % SL_VERBS_BUCKETS];
}

struct sl_verbs_pair *sl_verbs_pair_of(struct sl_verbs_rail *p, uint32_t number)
{
	struct sl_verbs_pair *l = *bucket(p, number);

	while (l && l->number != number)
		l = l->next_in_bucket;
	return l;
}

void sl_verbs_enlist(struct sl_verbs_pair *l)
{
	struct sl_verbs_pair **at = bucket(l->rail, l->number);

	l->next_in_bucket = *at;
	*at = l;
	l->rail->traffic->len++;
}

void sl_verbs_delist(struct sl_verbs_pair *l)
{
	struct sl_verbs_pair **at;

	if (!l->number)
		return;
	at = bucket(l->rail, l->number);
	while (*at != l)
		at = &(*at)->next_in_bucket;
	*at = l->next_in_bucket;
	l->number = 0;
	l->rail->traffic->len--;
	l->rail->receives_reserved -= l->receives_reserved;
	l->receives_reserved = 0;
}

static void report_news(struct sl_verbs_pair *l, uint32_t news)
{
	struct sl_verbs_context *c = l->conn->context;

	if (l->conn->ended)
		return;
	c->traffic->news_waiting += !l->unreported;
	l->unreported = news;
	sl_verbs_signal_news(c);
}

void sl_verbs_set_live(struct sl_verbs_pair *l)
{
	if (l->state != SL_VERBS_BEGUN)
		return;
	l->state = SL_VERBS_LIVE;
	if (l->conn->initiator)
		report_news(l, SL_VERBS_PAIR_LIVE);
	sl_verbs_queue_conn(l->conn);
}

struct sl_verbs_record *sl_verbs_pop_posted(struct sl_verbs_pair *l)
{
	struct sl_verbs_record *r = sl_verbs_pop(&l->posted);

	l->returned++;
	l->bytes_posted -= r->len;
	l->reposted -= r->reposted;
	l->rail->counters.in_flight -= r->len;
	l->rail->sends_reserved--;
	r->pair = NULL;
	return r;
}

void sl_verbs_keep_unproved(struct sl_verbs_pair *l, struct sl_verbs_record *r)
{
	struct sl_verbs_conn *n = l->conn;

	r->pair = NULL;
	if (r->batch) {
		sl_verbs_append(&l->unproved, r);
		n->unproved++;
		return;
	}
	if (r->kind == SL_VERBS_CREDIT) { /* sl_verbs_send_credit sends it again */
		n->credit_posted = 0;
		n->credit_sent = 0;
	}
	sl_verbs_free_frame_of(n, r);
	sl_verbs_free_record(n->context, r);
}

void sl_verbs_keep_all_unproved(struct sl_verbs_pair *l)
{
	while (l->posted.first)
		sl_verbs_keep_unproved(l, sl_verbs_pop_posted(l));
}

int sl_verbs_has_room(const struct sl_verbs_pair *l)
{
	return l->posted.n < l->depth && l->bytes_posted < l->conn->context->config.flight &&
	       l->rail->sends_reserved + l->rail->traffic->len < (uint32_t)l->rail->send_cq->cqe;
}

struct ibv_sge *sl_verbs_next_entries(struct sl_verbs_conn *n)
{
	struct sl_verbs_traffic *t = n->context->traffic;

	if (t->wrs_used == SL_VERBS_CHAIN ||
	    t->sges_used + SL_VERBS_ENTRIES > SL_VERBS_CHAIN * SL_VERBS_ENTRIES)
		sl_verbs_post_built(n);
	return &t->sges[t->sges_used];
}

struct ibv_send_wr *sl_verbs_build(struct sl_verbs_pair *l, struct sl_verbs_record *r,
				   struct ibv_sge *entries, uint32_t len)
{
	struct sl_verbs_traffic *t = l->conn->context->traffic;
	struct ibv_send_wr *wr = &t->wrs[t->wrs_used++];

	wr->wr_id = (uintptr_t)r;
	wr->next = NULL;
	wr->sg_list = entries;
	wr->num_sge = (int)len;
	wr->send_flags = 0;
	if (++l->unsignalled == SIGNAL_EVERY) {
		l->unsignalled = 0;
		wr->send_flags = IBV_SEND_SIGNALED;
	}
	t->sges_used += len;
	if (l->wr_last)
		l->wr_last->next = wr;
	else
		l->wr_first = wr;
	l->wr_last = wr;
	r->pair = l;
	l->reposted += r->reposted;
	l->bytes_posted += r->len;
	l->rail->counters.in_flight += r->len;
	l->rail->counters.requests++;
	l->rail->sends_reserved++;
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
		l->bytes_posted -= r->len;
		l->reposted -= r->reposted;
		l->rail->counters.in_flight -= r->len;
		l->rail->sends_reserved--;
	}
}

/* Gives the built requests of a queue pair to the NIC. */
static void post_list(struct sl_verbs_pair *l)
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

	for (uint32_t i = 0; t->wrs_used && i < SL_VERBS_PAIRS; i++)
		if (n->pairs[i] && n->pairs[i]->wr_first)
			post_list(n->pairs[i]);
	t->wrs_used = t->sges_used = 0;
}

/*
 * Posts a request to an owner's queue pair in the error state. The NIC completes it with an error,
 * after all requests of the peer that the queue pair was executing.
 */
static void post_mark(struct sl_verbs_pair *l)
{
	struct sl_verbs_record *r = sl_verbs_new_record(l->conn->context);

	if (!r)
		return;
	r->kind = SL_VERBS_MARK;
	sl_verbs_build(l, r, sl_verbs_next_entries(l->conn), 0)->opcode = IBV_WR_SEND;
	sl_verbs_post_built(l->conn);
}

void sl_verbs_fail_pair(struct sl_verbs_pair *l, int32_t status)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
	int connected = l->state == SL_VERBS_BEGUN || l->state == SL_VERBS_LIVE, stopped;

	if (!connected && l->state != SL_VERBS_MADE)
		return;
	/* If this fails, posted requests may still go out, and the peer's writes still land. */
	stopped = sl_verbs.ibv_modify_qp(l->qp, &attr, IBV_QP_STATE) == 0;
	l->state = SL_VERBS_DRAINING;
	l->status = status;
	l->deadline = sl_verbs_now() + (l->posted.first && !l->rail->gone ? DRAIN_NS : MARK_NS);
	l->conn->context->traffic->draining++;
	l->rail->counters.failures += status != 0;
	if (connected && stopped && !l->conn->initiator)
		post_mark(l);
	if (!l->posted.first)
		sl_verbs_pair_drained(l);
	else
		sl_verbs_wake_thread(l->conn->context); /* it watches the deadline */
}

void sl_verbs_pair_drained(struct sl_verbs_pair *l)
{
	struct sl_verbs_record *r;

	if (l->state != SL_VERBS_DRAINING)
		return;
	l->state = SL_VERBS_FAILED;
	l->conn->context->traffic->draining--;
	while ((r = sl_verbs_pop(&l->unposted)) != NULL)
		sl_verbs_keep_unproved(l, r);
	if (!l->end_awaited)
		report_news(l, SL_VERBS_PAIR_FAILED);
	if (!l->conn->ended && l->conn->initiator)
		sl_verbs_queue_conn(l->conn); /* other queue pairs may take its requests */
	pthread_cond_broadcast(&l->conn->context->changed);
}
