/* SPDX-License-Identifier: Apache-2.0 */
/* What comes back: requests that are done, and those that are not. */
#include "lane.h"

#include <errno.h>

/* Completions taken from a queue at a time, and under one hold of the lock. */
#define HANDFUL 32
#define ENOUGH 256
/* The rate is measured over so many bytes and ns at least. */
#define MEASURE_BYTES (256u << 10)
#define MEASURE_NS 100000u

static void drop_slip(struct sl_verbs_conn *n, struct sl_verbs_record *r)
{
	if (r->slip)
		sl_verbs_free_slip(n, r->slip);
	r->slip = NULL;
}

/* It was done. r is in no list. */
static void finish(struct sl_verbs_lane *l, struct sl_verbs_record *r)
{
	struct sl_verbs_conn *n = l->conn;
	struct sl_verbs_batch *b = r->batch;

	switch ((enum sl_verbs_kind)r->kind) {
	case SL_VERBS_DATA:
		if (b->write)
			l->port->counters.bytes_out += r->len;
		else
			l->port->counters.bytes_in += r->len;
		l->port->lanes->window_bytes += r->len;
		break;
	case SL_VERBS_NOTE:
		n->notes_out--;
		n->arrived = r->number;
		drop_slip(n, r);
		break;
	case SL_VERBS_CREDIT:
		n->telling = 0;
		drop_slip(n, r);
		if (!n->ended)
			sl_verbs_repay(n);
		break;
	case SL_VERBS_PROBE:
		sl_verbs_lane_lives(l);
		break;
	case SL_VERBS_MARK:
		break;
	}
	sl_verbs_recycle(n->context, r);
	if (b) {
		b->open--;
		sl_verbs_settle_batch(b);
	}
}

/* It is not to be done any more. r is in no list. */
static void drop(struct sl_verbs_conn *n, struct sl_verbs_record *r)
{
	struct sl_verbs_batch *b = r->batch;

	if (r->kind == SL_VERBS_NOTE)
		n->accepted--;
	drop_slip(n, r);
	sl_verbs_recycle(n->context, r);
	if (b)
		b->open--;
}

/* The next that was posted leaves the queue pair. */
static struct sl_verbs_record *leave(struct sl_verbs_lane *l)
{
	struct sl_verbs_record *r = sl_verbs_pop(&l->posted);

	l->returned++;
	l->flight -= r->len;
	l->again -= r->again;
	l->port->counters.in_flight -= r->len;
	l->port->sends_promised--;
	r->lane = NULL;
	return r;
}

void sl_verbs_hold(struct sl_verbs_lane *l, struct sl_verbs_record *r)
{
	struct sl_verbs_conn *n = l->conn;

	r->lane = NULL;
	if (r->batch) {
		sl_verbs_append(&l->held, r);
		n->held++;
		return;
	}
	if (r->kind == SL_VERBS_CREDIT) { /* told anew when a lane is live */
		n->telling = 0;
		n->told = 0;
	}
	drop_slip(n, r);
	sl_verbs_recycle(n->context, r);
}

void sl_verbs_abandon(struct sl_verbs_lane *l)
{
	while (l->posted.first)
		sl_verbs_hold(l, leave(l));
}

/* The fault is the request's, and not the lane's: what its batch ends with, or 0. */
static int32_t own_fault(enum ibv_wc_status status)
{
	switch (status) {
	case IBV_WC_REM_ACCESS_ERR: /* within its bounds: so the key is over */
		return SL_VERBS_REVOKED;
	case IBV_WC_LOC_LEN_ERR:
	case IBV_WC_LOC_PROT_ERR:
	case IBV_WC_REM_INV_REQ_ERR:
	case IBV_WC_REM_OP_ERR:
		return (int32_t)status;
	default:
		return 0;
	}
}

/* The first request of a lane that failed. */
static void blame(struct sl_verbs_lane *l, struct sl_verbs_record *r, enum ibv_wc_status status)
{
	struct sl_verbs_batch *b = r->batch;
	int32_t fault = own_fault(status);

	if (!b || r->kind != SL_VERBS_DATA || !fault)
		return;
	if (fault == SL_VERBS_REVOKED) /* it would break one lane after the other */
		l->conn->imports[sl_piece(&b->pieces, r->piece).remote_key]->expired = 1;
	sl_verbs_give_up(b, fault, (int32_t)r->piece); /* it ends later: r is still to be settled */
}

static void take_send(const struct ibv_wc *wc)
{
	struct sl_verbs_record *r = (struct sl_verbs_record *)(uintptr_t)wc->wr_id;
	struct sl_verbs_lane *l = r->lane;

	if (!l || l->number != wc->qp_num) /* of a queue pair that was given up */
		return;
	l->port->counters.completions++;
	while (l->posted.first != r) /* those before it are done, be they signalled or not */
		finish(l, leave(l));
	leave(l);
	if (wc->status == IBV_WC_SUCCESS) {
		finish(l, r);
	} else {
		if (l->state != SL_VERBS_DRAINING)
			blame(l, r, wc->status);
		sl_verbs_hold(l, r); /* before those that were not even posted */
		sl_verbs_fail_lane(l, (int32_t)wc->status);
	}
	if (l->state == SL_VERBS_DRAINING && !l->posted.first)
		sl_verbs_drained(l);
}

/* Bytes a second while there were any under way. */
static void measure(struct sl_verbs_port *p)
{
	struct sl_verbs_lanes *w = p->lanes;
	uint64_t now, rate;

	if (w->window_bytes < MEASURE_BYTES)
		return; /* the clock costs something */
	now = sl_verbs_now();
	if (w->window_at == 0) {
		w->window_at = now;
		w->window_bytes = 0;
		return;
	}
	if (now - w->window_at < MEASURE_NS)
		return;
	rate = (uint64_t)((double)w->window_bytes * 1e9 / (double)(now - w->window_at));
	p->counters.rate = p->counters.rate ? (3 * p->counters.rate + rate) / 4 : rate;
	w->window_at = now;
	w->window_bytes = 0;
}

unsigned sl_verbs_take_completions(struct sl_verbs_port *p)
{
	struct ibv_wc wc[HANDFUL];
	unsigned all = 0, sends;
	int n;

	do {
		n = sl_verbs_poll_cq(p->sends, HANDFUL, wc);
		for (int i = 0; i < n; i++)
			take_send(&wc[i]);
		all += n > 0 ? (unsigned)n : 0;
	} while (n == HANDFUL && all < ENOUGH);
	sends = all;
	do {
		n = sl_verbs_poll_cq(p->receives, HANDFUL, wc);
		for (int i = 0; i < n; i++)
			sl_verbs_arrived(p, &wc[i]);
		all += n > 0 ? (unsigned)n : 0;
	} while (n == HANDFUL && all < 2 * ENOUGH);
	if (sends)
		measure(p);
	return all;
}

void sl_verbs_take_receives(struct sl_verbs_port *p)
{
	struct ibv_wc wc[HANDFUL];
	int n;

	/* The queue holds no more: what comes meanwhile for others is theirs. */
	for (int left = p->receives->cqe; left > 0; left -= n) {
		n = sl_verbs_poll_cq(p->receives, HANDFUL, wc);
		if (n <= 0)
			return;
		for (int i = 0; i < n; i++)
			sl_verbs_arrived(p, &wc[i]);
	}
}

/* Those of a list that are of this batch. */
static void drop_from(struct sl_verbs_list *l, struct sl_verbs_batch *b)
{
	struct sl_verbs_list all = *l;
	struct sl_verbs_record *r;

	*l = (struct sl_verbs_list){0};
	while ((r = sl_verbs_pop(&all)) != NULL) {
		if (r->batch == b)
			drop(b->conn, r);
		else
			sl_verbs_append(l, r);
	}
}

void sl_verbs_drop_records(struct sl_verbs_batch *b)
{
	if (b->conn->again.first)
		drop_from(&b->conn->again, b);
	if (b->conn->resend.first)
		drop_from(&b->conn->resend, b);
}

/* The last message of those held that the peer has seen, or NULL; *notes: whether there are any. */
static const struct sl_verbs_record *last_seen(const struct sl_verbs_lane *l, uint64_t seen, int *notes)
{
	const struct sl_verbs_record *last = NULL;

	*notes = 0;
	for (const struct sl_verbs_record *r = l->held.first; r; r = r->next) {
		if (r->kind != SL_VERBS_NOTE)
			continue;
		*notes = 1;
		if (r->number <= seen)
			last = r;
	}
	return last;
}

/* What was not proved done is done once more, unless its batch has failed meanwhile. */
static void do_again(struct sl_verbs_lane *l, struct sl_verbs_record *r)
{
	struct sl_verbs_conn *n = l->conn;
	struct sl_verbs_batch *b = r->batch;

	if (b->cancelled || b->status != 0) {
		drop(n, r);
		sl_verbs_give_up(b, n->closed ? SL_VERBS_CLOSED : SL_VERBS_ABORTED, -1);
		return;
	}
	l->port->counters.again++;
	if (r->kind == SL_VERBS_NOTE) {
		n->notes_out--;
		sl_verbs_append(&n->resend, r);
	} else {
		sl_verbs_append(&n->again, r);
	}
}

/*
 * The peer takes what comes over a queue pair in order: a message that it has seen proves the
 * writes before it, but not that the answer of a read came back.
 */
static void settle(struct sl_verbs_lane *l, uint64_t seen)
{
	struct sl_verbs_conn *n = l->conn;
	int notes;
	const struct sl_verbs_record *last = last_seen(l, seen, &notes);
	struct sl_verbs_list held = l->held;
	struct sl_verbs_record *r;

	if (notes)
		n->sent = seen;
	l->held = (struct sl_verbs_list){0};
	n->held -= held.n;
	while ((r = sl_verbs_pop(&held)) != NULL) {
		int proved = last != NULL, note = r->kind == SL_VERBS_NOTE;

		if (r == last)
			last = NULL;
		if (proved && (note || r->batch->write)) {
			finish(l, r);
		} else {
			if (note && (r->batch->cancelled || r->batch->status != 0))
				n->notes_out--;
			do_again(l, r);
		}
	}
}

int sl_verbs_lane_settle(struct sl_verbs_conn *n, uint32_t lane, uint64_t seen)
{
	struct sl_verbs_lane *l;
	int rc = 0;

	sl_verbs_enter(n->context);
	l = lane < SL_VERBS_LANES ? n->lanes[lane] : NULL;
	if (!l || n->ended)
		rc = -EBADF;
	else if (l->state != SL_VERBS_FAILED && l->state != SL_VERBS_MADE)
		rc = -EBUSY;
	if (rc == 0) {
		seen = seen > n->arrived ? seen : n->arrived;
		settle(l, seen < n->sent ? seen : n->sent);
		sl_verbs_pump(n);
	}
	sl_verbs_unlock(n->context);
	return rc;
}

void sl_verbs_forget_records(struct sl_verbs_conn *n)
{
	struct sl_verbs_record *r;

	for (uint32_t i = 0; i < SL_VERBS_LANES; i++)
		while (n->lanes[i] && (r = sl_verbs_pop(&n->lanes[i]->held)) != NULL)
			drop(n, r);
	while ((r = sl_verbs_pop(&n->again)) != NULL)
		drop(n, r);
	while ((r = sl_verbs_pop(&n->resend)) != NULL)
		drop(n, r);
	n->held = 0;
}
