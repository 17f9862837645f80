/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Messages that arrive, and how old they may be.
 *
 * A peer that is given up, or closed by force, ends its batches although bytes of them may be on their way
 * still: in a slow link, or in a queue of ours while we are stopped. So no bytes land here that are older than
 * Grace: each message carries the last stamp of our own clock that its sender had from us, and was sent after
 * that. The sender waits for as long, from when that stamp came, before it ends such a batch. What is older is
 * held, and we ask the sender whether it is still wanted: an end that is over does not answer. All that arrives
 * behind it is held as well, so that its order stays.
 */
#include "ucx_worker.h"

#include <stdlib.h>
#include <string.h>

static void on_pong(struct sl_ucx_conn *n, uint64_t nonce)
{
	if (nonce > n->answered && nonce <= n->asked) {
		n->answered = nonce;
		pthread_cond_broadcast(&n->worker->news);
	}
}

static void on_credit(struct sl_ucx_conn *n, uint64_t value)
{
	uint32_t most = n->worker->context->config.notes;

	n->credit = value < most - n->credit ? n->credit + (uint32_t)value : most;
	if (n->starved) {
		n->starved = 0;
		__atomic_store_n(&n->worker->ring->due, 1, __ATOMIC_SEQ_CST);
		sl_ucx_wake(n->worker);
	}
}

/* The value goes up before the look, and AwaitCount does it the other way round. */
static void on_count(struct sl_ucx_conn *n, const struct sl_ucx_head *h)
{
	struct sl_ucx_counter *c = n->worker->context->config.counters;
	uint64_t value, awaited;

	sl_ucx_owe(n); /* it takes no room here */
	if (!c || h->off >= SL_UCX_COUNTERS || (h->flags & SL_UCX_CHECKED && n->rx_failed))
		return;
	value = __atomic_add_fetch(&c[h->off].value, 1, __ATOMIC_SEQ_CST);
	awaited = __atomic_load_n(&c[h->off].awaited, __ATOMIC_SEQ_CST);
	if (awaited && value >= awaited) {
		__atomic_store_n(&n->worker->ring->due, 1, __ATOMIC_SEQ_CST);
		sl_ucx_wake(n->worker);
	}
}

static int is_stale(const struct sl_ucx_conn *n, const struct sl_ucx_head *h)
{
	return n->heard - h->echo > n->worker->context->config.grace_ns; /* also of an echo that is none of ours */
}

static void dispatch(struct sl_ucx_conn *n, const struct sl_ucx_head *h, const void *data, size_t len)
{
	switch (h->type) {
	case SL_UCX_MSG_WRITE:
		sl_ucx_serve_write(n, h, data, len);
		return;
	case SL_UCX_MSG_DATA:
		sl_ucx_answered(n, h, data, len);
		return;
	case SL_UCX_MSG_NOTE:
		if (h->flags & SL_UCX_CHECKED && n->rx_failed)
			sl_ucx_owe(n);
		else
			sl_ucx_put_note(n, data, len);
		return;
	case SL_UCX_MSG_COUNT:
		on_count(n, h);
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
		n->impatient = n->worker->context->config.notes;
		sl_ucx_repay(n);
		return;
	case SL_UCX_MSG_PING:
		sl_ucx_signal(n, SL_UCX_MSG_PONG, h->off);
		return;
	case SL_UCX_MSG_PONG:
		on_pong(n, h->off);
		return;
	case SL_UCX_MSG_RESET:
		n->proven = 1;
		sl_ucx_lose(n);
		return;
	case SL_UCX_MSG_CONFIRM:
		sl_ucx_signal(n, SL_UCX_MSG_CONFIRMED, 0);
		return;
	case SL_UCX_MSG_CONTROL:
		if (len <= SL_UCX_CONTROL_MAX && sl_ucx_put_control(n->worker, n->id, data, len) != 0)
			sl_ucx_lose(n);
		return;
	}
}

/* Whether a message must not overtake those that are held. The others are about our own batches, or the end. */
static int keeps_order(uint8_t type)
{
	return type == SL_UCX_MSG_WRITE || type == SL_UCX_MSG_NOTE || type == SL_UCX_MSG_COUNT || type == SL_UCX_MSG_READ ||
	       type == SL_UCX_MSG_ASK || type == SL_UCX_MSG_CONTROL;
}

/* A peer has a window of messages under way, and little else. */
static void hold(struct sl_ucx_conn *n, const struct sl_ucx_head *h, const void *data, size_t len)
{
	uint64_t most = 2ull * SL_UCX_WINDOW * (n->worker->context->config.segment + sizeof(struct sl_ucx_held));
	struct sl_ucx_held *k = n->held_bytes < most ? malloc(sizeof(*k) + len) : NULL;

	if (!k) {
		sl_ucx_lose(n);
		return;
	}
	*k = (struct sl_ucx_held){.head = *h, .len = len};
	if (len)
		memcpy(k->body, data, len);
	n->held_bytes += sizeof(*k) + len;
	if (n->held) {
		*n->held_end = k;
		n->held_end = &k->next;
		return;
	}
	n->held = k;
	n->held_end = &k->next;
	sl_ucx_signal(n, SL_UCX_MSG_CONFIRM, 0); /* last: a peer that is ourselves answers at once */
}

static struct sl_ucx_held *take_held(struct sl_ucx_conn *n)
{
	struct sl_ucx_held *k = n->held;

	if (k) {
		n->held = k->next;
		n->held_bytes -= sizeof(*k) + k->len;
	}
	return k;
}

void sl_ucx_forget_held(struct sl_ucx_conn *n)
{
	struct sl_ucx_held *k;

	while ((k = take_held(n)) != NULL)
		free(k);
}

/* What is held was sent before this. If it was on its way for too long itself, the next one need not be. */
static void on_confirmed(struct sl_ucx_conn *n, const struct sl_ucx_head *h)
{
	struct sl_ucx_held *k;

	if (n->held && is_stale(n, h)) {
		sl_ucx_signal(n, SL_UCX_MSG_CONFIRM, 0);
		return;
	}
	while (sl_ucx_speaks(n) && (k = take_held(n)) != NULL) {
		dispatch(n, &k->head, k->body, k->len);
		free(k);
	}
}

/* An end that is over believes nothing more, but UCX can be told to let go of one whose peer lives. */
static void heard(struct sl_ucx_conn *n, const struct sl_ucx_head *h, const void *data, size_t len)
{
	if (!sl_ucx_speaks(n)) {
		n->silent = 0;
		return;
	}
	n->heard = sl_ucx_now();
	if (h->stamp > n->stamp)
		n->stamp = h->stamp;
	if (h->type == SL_UCX_MSG_CONFIRMED)
		on_confirmed(n, h);
	else if (n->held ? keeps_order(h->type) : h->type == SL_UCX_MSG_WRITE && is_stale(n, h))
		hold(n, h, data, len);
	else
		dispatch(n, h, data, len);
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
		(void)sl_ucx_put_control(w, 0, data, len);
	return UCS_OK;
}
