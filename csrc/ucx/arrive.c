/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Messages that arrive. A message that cannot be handled now is held: its bytes are too old (see
 * ages.c), or the pages of its memory are being moved. The worker never waits for either, since
 * a Revoke and other peers need its lock. What arrives behind a held message is held, too, so that
 * the order stays.
 */
#include "worker.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static void on_credit(struct sl_ucx_conn *n, uint64_t value)
{
	uint32_t most = n->worker->context->config.notifs;

	/* it may be more by now: what batches held that have ended came back, too */
	if (n->credit < most)
		n->credit = value < most - n->credit ? n->credit + (uint32_t)value : most;
	if (n->starved) {
		n->starved = 0;
		__atomic_store_n(&n->worker->ring->due, 1, __ATOMIC_SEQ_CST);
		sl_ucx_wake_poller(n->worker);
	}
}

/* Handles what changes no memory. */
static void handle(struct sl_ucx_conn *n, const struct sl_ucx_head *h, const void *data, size_t len)
{
	switch (h->type) {
	case SL_UCX_MSG_NOTIFY:
		if (h->flags & SL_UCX_CHECKED && n->rx_failed)
			sl_ucx_count_received(n);
		else
			sl_ucx_put_notification(n, data, len);
		return;
	case SL_UCX_MSG_READ:
		sl_ucx_serve_read(n, h, data, len);
		return;
	case SL_UCX_MSG_ACK:
		sl_ucx_acknowledged(n, h);
		return;
	case SL_UCX_MSG_ASK:
		sl_ucx_acknowledge(n, h->seq, 0);
		return;
	case SL_UCX_MSG_CREDIT:
		on_credit(n, h->off);
		return;
	case SL_UCX_MSG_STARVED:
		n->credit_urgent = n->worker->context->config.notifs;
		sl_ucx_return_credit(n);
		return;
	case SL_UCX_MSG_RESET:
		n->proven = 1;
		sl_ucx_lose(n); /* which answers it */
		return;
	case SL_UCX_MSG_CONFIRM:
		sl_ucx_confirm(n, h);
		return;
	case SL_UCX_MSG_CONTROL:
		if (len <= SL_UCX_CONTROL_MAX && sl_ucx_put_control(n, data, len) != 0)
			sl_ucx_lose(n);
		return;
	}
}

/* 0, or why the message must be held: -ESTALE, -EAGAIN. */
static int dispatch(struct sl_ucx_conn *n, const struct sl_ucx_head *h, const void *data,
		    size_t len, uint64_t now)
{
	switch (h->type) {
	case SL_UCX_MSG_WRITE:
		return sl_ucx_serve_write(n, h, data, len, now);
	case SL_UCX_MSG_DATA:
		return sl_ucx_answered(n, h, data, len);
	default:
		handle(n, h, data, len);
		return 0;
	}
}

/*
 * Whether a message must not overtake those that are held. The others are about our own batches, or
 * the end.
 */
static int keeps_order(uint8_t type)
{
	return type == SL_UCX_MSG_WRITE || type == SL_UCX_MSG_NOTIFY || type == SL_UCX_MSG_READ ||
	       type == SL_UCX_MSG_ASK || type == SL_UCX_MSG_CONTROL;
}

/* Two windows of messages, ours and the peer's, its notifications, and little else. */
static uint64_t held_max(const struct sl_ucx_conn *n)
{
	const struct sl_ucx_config *c = &n->worker->context->config;

	return 4ull * SL_UCX_WINDOW * (SL_UCX_BODY_MAX + sizeof(struct sl_ucx_held)) +
	       c->notifs * (SL_UCX_NOTIF_MAX + sizeof(struct sl_ucx_held));
}

/* Puts a message behind those that are held. 0: the connection is lost. */
static int hold(struct sl_ucx_conn *n, const struct sl_ucx_head *h, const void *data, size_t len)
{
	struct sl_ucx_held *k = n->held_bytes < held_max(n) ? malloc(sizeof(*k) + len) : NULL;

	if (!k) {
		sl_ucx_lose(n);
		return 0;
	}
	*k = (struct sl_ucx_held){.head = *h, .len = len};
	if (len)
		memcpy(k->body, data, len);
	n->held_bytes += sizeof(*k) + len;
	*(n->held ? n->held_end : &n->held) = k;
	n->held_end = &k->next;
	return 1;
}

/* Has the first held message tried again: when the peer has confirmed it, or in a moment. */
static void retry_later(struct sl_ucx_conn *n, int why)
{
	if (why == -EAGAIN)
		n->stalled = n->worker->stalled = 1;
	else
		sl_ucx_ask_confirm(n);
}

static struct sl_ucx_held *pop_held(struct sl_ucx_conn *n)
{
	struct sl_ucx_held *k = n->held;

	if (k) {
		n->held = k->next;
		n->held_bytes -= sizeof(*k) + k->len;
	}
	return k;
}

static void push_front_held(struct sl_ucx_conn *n, struct sl_ucx_held *k)
{
	k->next = n->held;
	if (!n->held)
		n->held_end = &k->next;
	n->held = k;
	n->held_bytes += sizeof(*k) + k->len;
}

void sl_ucx_forget_held(struct sl_ucx_conn *n)
{
	struct sl_ucx_held *k;

	while ((k = pop_held(n)) != NULL)
		free(k);
}

/* Handles what is held, in order, up to the first message that must go on waiting. */
static void resume(struct sl_ucx_conn *n)
{
	struct sl_ucx_held *k;

	n->stalled = 0;
	while (sl_ucx_is_up(n) && (k = pop_held(n)) != NULL) {
		int why = dispatch(n, &k->head, k->body, k->len, sl_ucx_now());

		if (why != 0) {
			push_front_held(n, k);
			retry_later(n, why);
			return;
		}
		free(k);
	}
}

void sl_ucx_resume(struct sl_ucx_worker *w)
{
	w->stalled = 0;
	for (uint32_t k = 0; k < w->conns_len; k++) {
		if (w->conns[k] && w->conns[k]->stalled)
			resume(w->conns[k]);
	}
}

/* An end that is over believes nothing more but that the other end is over, too. */
static void heard(struct sl_ucx_conn *n, const struct sl_ucx_head *h, const void *data, size_t len)
{
	int why;

	if (!sl_ucx_is_up(n)) {
		if (h->type == SL_UCX_MSG_RESET && !n->proven)
			sl_ucx_note_proof(n);
		return;
	}
	n->heard = sl_ucx_now();
	if (h->stamp > n->stamp)
		n->stamp = h->stamp;
	if (h->type == SL_UCX_MSG_CONFIRMED) {
		sl_ucx_confirmed(n, h);
		resume(n);
		return;
	}
	if (n->held && keeps_order(h->type)) {
		hold(n, h, data, len);
		return;
	}
	why = dispatch(n, h, data, len, n->heard);
	if (why != 0 && hold(n, h, data, len))
		retry_later(n, why);
	else if (h->type == SL_UCX_MSG_WRITE && sl_ucx_age(n, h, n->heard) > n->limit / 2)
		sl_ucx_ask_confirm(n); /* early, so that a slow network need not wait */
}

ucs_status_t sl_ucx_arrived(void *worker, const void *head, size_t head_len, void *data, size_t len,
			    const ucp_am_recv_param_t *param)
{
	struct sl_ucx_worker *w = worker;
	struct sl_ucx_head h;
	struct sl_ucx_conn *n;

	if (head_len != sizeof(h) || param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)
		return UCS_OK; /* nothing of ours goes by rendezvous */
	memcpy(&h, head, sizeof(h)); /* UCX aligns it to nothing */
	if (h.version != SL_UCX_VERSION)
		return UCS_OK;
	n = h.conn ? sl_ucx_conn_of(w, h.conn) : NULL;
	if (n)
		heard(n, &h, data, len);
	else if (!h.conn && h.type == SL_UCX_MSG_CONTROL && len <= SL_UCX_CONTROL_MAX)
		sl_ucx_put_hello(w, data, len);
	return UCS_OK;
}
