/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Completions that the queues of a rail report. A request without an error is done, and so are
 * those before it. An error fails the queue pair; it also fails the batch, if the request itself
 * was at fault (a refused key).
 */
#include "pair.h"

#include <errno.h>

/* Completions taken by one call, and from one queue before the lock is released. */
#define POLL_MAX 32
#define TAKE_MAX 256

void sl_verbs_complete(struct sl_verbs_pair *l, struct sl_verbs_record *r)
{
	struct sl_verbs_conn *n = l->conn;
	struct sl_verbs_batch *b = r->batch;

	switch ((enum sl_verbs_kind)r->kind) {
	case SL_VERBS_DATA:
		if (b->write)
			l->rail->counters.bytes_out += r->len;
		else
			l->rail->counters.bytes_in += r->len;
		break;
	case SL_VERBS_NOTIF:
		n->notifs_in_flight--;
		n->acknowledged = r->number;
		sl_verbs_free_frame_of(n, r);
		break;
	case SL_VERBS_CREDIT:
		n->credit_posted = 0;
		sl_verbs_free_frame_of(n, r);
		if (!n->ended)
			sl_verbs_send_credit(n);
		break;
	case SL_VERBS_PROBE:
		sl_verbs_set_live(l);
		break;
	case SL_VERBS_MARK:
		break;
	}
	sl_verbs_free_record(n->context, r);
	if (b) {
		b->records_open--;
		sl_verbs_end_if_over(b);
	}
}

/* The status of the batch where the request is at fault and not the queue pair; else 0. */
static int32_t fault_of(enum ibv_wc_status status)
{
	switch (status) {
	case IBV_WC_REM_ACCESS_ERR: /* submit has checked the bounds: the key was refused */
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

/* Fails the batch of the request that failed a queue pair, if that request was at fault. */
static void fail_batch_of(struct sl_verbs_pair *l, struct sl_verbs_record *r,
			  enum ibv_wc_status status)
{
	struct sl_verbs_batch *b = r->batch;
	int32_t fault = fault_of(status);

	if (!b || r->kind != SL_VERBS_DATA || !fault)
		return;
	if (fault == SL_VERBS_REVOKED) {
		struct sl_verbs_import *im =
		    l->conn->imports[sl_piece(&b->pieces, r->piece).remote_key];

		if (!im->expired)
			im->refused_by = l;
		im->expired = 1; /* more requests would fail more queue pairs */
		sl_verbs_key_refused(b, im->refused_by, (int32_t)r->piece);
		return;
	}
	/* The batch ends later: r is to be settled first. */
	sl_verbs_give_up_batch(b, fault, (int32_t)r->piece);
}

static void take_send(const struct ibv_wc *wc)
{
	struct sl_verbs_record *r = (struct sl_verbs_record *)(uintptr_t)wc->wr_id;
	struct sl_verbs_pair *l = r->pair;

	if (!l || l->number != wc->qp_num) /* its queue pair was given up meanwhile */
		return;
	while (l->posted.first != r) /* the unsignalled ones before it are done */
		sl_verbs_complete(l, sl_verbs_pop_posted(l));
	sl_verbs_pop_posted(l);
	if (wc->status == IBV_WC_SUCCESS) {
		sl_verbs_complete(l, r);
	} else {
		if (l->state != SL_VERBS_DRAINING)
			fail_batch_of(l, r, wc->status);
		sl_verbs_keep_unproved(l, r); /* before the unposted ones, which are later */
		sl_verbs_fail_pair(l, (int32_t)wc->status);
	}
	if (l->state == SL_VERBS_DRAINING && !l->posted.first)
		sl_verbs_pair_drained(l);
}

/*
 * Takes at most max completions of a queue, and some more. ibv_poll_cq returns fewer if it is
 * empty.
 */
static unsigned take_from(struct sl_verbs_rail *p, struct ibv_cq *cq, unsigned max)
{
	struct ibv_wc wc[POLL_MAX];
	unsigned all = 0;
	int n;

	do {
		n = sl_verbs_poll_cq(cq, POLL_MAX, wc);
		for (int i = 0; i < n; i++) {
			if (cq == p->send_cq)
				take_send(&wc[i]);
			else
				sl_verbs_receive(p, &wc[i]);
		}
		all += n > 0 ? (unsigned)n : 0;
	} while (n == POLL_MAX && all < max);
	return all;
}

unsigned sl_verbs_take_completions(struct sl_verbs_rail *p)
{
	unsigned sends = take_from(p, p->send_cq, TAKE_MAX);

	return sends + take_from(p, p->receive_cq, TAKE_MAX);
}

void sl_verbs_take_receives(struct sl_verbs_rail *p)
{
	struct ibv_wc wc[POLL_MAX];
	int n;

	/* At most what the queue holds: messages for other queue pairs may arrive without end. */
	for (int left = p->receive_cq->cqe; left > 0; left -= n) {
		n = sl_verbs_poll_cq(p->receive_cq, POLL_MAX, wc);
		if (n <= 0)
			return;
		for (int i = 0; i < n; i++)
			sl_verbs_receive(p, &wc[i]);
	}
}
