/* SPDX-License-Identifier: Apache-2.0 */
/* Completions: of requests that are done, and of those that failed. */
#include "pair.h"

#include <errno.h>

/* Completions taken from a queue at a time, and under one hold of the lock. */
#define HANDFUL 32
#define ENOUGH 256

/* Counts a request as done and forgets it. It is in no list. */
void sl_verbs_done(struct sl_verbs_pair *l, struct sl_verbs_record *r)
{
	struct sl_verbs_conn *n = l->conn;
	struct sl_verbs_batch *b = r->batch;

	switch ((enum sl_verbs_kind)r->kind) {
	case SL_VERBS_DATA:
		if (b->write)
			l->port->counters.bytes_out += r->len;
		else
			l->port->counters.bytes_in += r->len;
		break;
	case SL_VERBS_NOTIF:
		n->notifs_out--;
		n->arrived = r->number;
		sl_verbs_drop_frame(n, r);
		break;
	case SL_VERBS_CREDIT:
		n->credit_posted = 0;
		sl_verbs_drop_frame(n, r);
		if (!n->ended)
			sl_verbs_send_credit(n);
		break;
	case SL_VERBS_PROBE:
		sl_verbs_pair_lives(l);
		break;
	case SL_VERBS_MARK:
		break;
	}
	sl_verbs_recycle(n->context, r);
	if (b) {
		b->open--;
		sl_verbs_end_if_over(b);
	}
}

/* The status of the batch where the request is at fault and not the queue pair; else 0. */
static int32_t own_fault(enum ibv_wc_status status)
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

/* Fails the batch of the first request of a queue pair that failed, if that is at fault. */
static void blame(struct sl_verbs_pair *l, struct sl_verbs_record *r, enum ibv_wc_status status)
{
	struct sl_verbs_batch *b = r->batch;
	int32_t fault = own_fault(status);

	if (!b || r->kind != SL_VERBS_DATA || !fault)
		return;
	if (fault == SL_VERBS_REVOKED) {
		struct sl_verbs_import *im =
		    l->conn->imports[sl_piece(&b->pieces, r->piece).remote_key];

		if (!im->expired)
			im->doubt = l;
		im->expired = 1; /* else its requests would break one queue pair after the other */
		sl_verbs_key_refused(b, im->doubt, (int32_t)r->piece);
		return;
	}
	/* It ends later: r is still to be settled. */
	sl_verbs_give_up_batch(b, fault, (int32_t)r->piece);
}

static void take_send(const struct ibv_wc *wc)
{
	struct sl_verbs_record *r = (struct sl_verbs_record *)(uintptr_t)wc->wr_id;
	struct sl_verbs_pair *l = r->pair;

	if (!l || l->number != wc->qp_num) /* of a queue pair that was given up */
		return;
	while (l->posted.first != r) /* those before it are done, be they signalled or not */
		sl_verbs_done(l, sl_verbs_pop_posted(l));
	sl_verbs_pop_posted(l);
	if (wc->status == IBV_WC_SUCCESS) {
		sl_verbs_done(l, r);
	} else {
		if (l->state != SL_VERBS_DRAINING)
			blame(l, r, wc->status);
		sl_verbs_record_unproved(l, r); /* before the unposted ones, as in their order */
		sl_verbs_fail_pair(l, (int32_t)wc->status);
	}
	if (l->state == SL_VERBS_DRAINING && !l->posted.first)
		sl_verbs_pair_drained(l);
}

unsigned sl_verbs_take_completions(struct sl_verbs_port *p)
{
	struct ibv_wc wc[HANDFUL];
	unsigned all = 0;
	int n;

	do {
		n = sl_verbs_poll_cq(p->sends, HANDFUL, wc);
		for (int i = 0; i < n; i++)
			take_send(&wc[i]);
		all += n > 0 ? (unsigned)n : 0;
	} while (n == HANDFUL && all < ENOUGH);
	do {
		n = sl_verbs_poll_cq(p->receives, HANDFUL, wc);
		for (int i = 0; i < n; i++)
			sl_verbs_arrived(p, &wc[i]);
		all += n > 0 ? (unsigned)n : 0;
	} while (n == HANDFUL && all < 2 * ENOUGH);
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
