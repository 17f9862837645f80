/* SPDX-License-Identifier: Apache-2.0 */
/* Sending messages, and what becomes of those that arrive. */
#include "ucx_worker.h"

#include <stdlib.h>
#include <string.h>

#define SMALL 256
/* Messages of ours that UCX keeps, more than a peer that takes them ever leaves there. */
#define REPLIES_MAX 4096

static size_t large(const struct sl_ucx_worker *w)
{
	size_t most = w->context->config.segment;

	return most > SL_UCX_CONTROL_MAX ? most : SL_UCX_CONTROL_MAX;
}

struct sl_ucx_parcel *sl_ucx_parcel(struct sl_ucx_worker *w, size_t body)
{
	int big = body > SMALL;
	int odd = body > large(w); /* for a peer whose segments are larger than ours */
	struct sl_ucx_parcel **pool = big ? &w->large : &w->small, *p = odd ? NULL : *pool;

	if (p)
		*pool = p->next;
	else
		p = malloc(sizeof(*p) + (odd ? body : big ? large(w) : SMALL));
	if (p) {
		p->memory = NULL;
		p->len = 0;
		p->large = (uint8_t)big;
		p->odd = (uint8_t)odd;
		p->counted = p->parked = p->lent = 0;
		p->head = (struct sl_ucx_head){.version = SL_UCX_VERSION};
	}
	return p;
}

void sl_ucx_parcel_free(struct sl_ucx_worker *w, struct sl_ucx_parcel *p)
{
	struct sl_ucx_parcel **pool = p->large ? &w->large : &w->small;

	if (p->odd) {
		free(p);
		return;
	}
	p->next = *pool;
	*pool = p;
}

/* UCX has let go of it. */
static void over(struct sl_ucx_parcel *p, ucs_status_t status)
{
	struct sl_ucx_conn *n = p->conn;

	p->prev->next = p->next;
	p->next->prev = p->prev;
	n->sends--;
	n->parked -= p->parked;
	n->lent -= p->lent;
	if (p->head.type == SL_UCX_MSG_PING)
		n->pings--;
	if (p->memory)
		atomic_fetch_sub(&p->memory->reading, 1);
	if (p->counted)
		sl_ucx_sent(n, p->head.seq, status);
	if (n->ended)
		pthread_cond_broadcast(&n->worker->news);
	sl_ucx_parcel_free(n->worker, p);
}

static void on_sent(void *request, ucs_status_t status, void *user)
{
	sl_ucx.ucp_request_free(request);
	over(user, status);
}

void sl_ucx_send(struct sl_ucx_conn *n, struct sl_ucx_parcel *p, const void *data, size_t len, unsigned flags)
{
	ucp_request_param_t param = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS |
				UCP_OP_ATTR_FIELD_MEMORY_TYPE,
		.flags = flags ? flags : UCP_AM_SEND_FLAG_EAGER,
		.cb.send = on_sent,
		.user_data = p,
		.memory_type = UCS_MEMORY_TYPE_HOST,
	};
	ucs_status_ptr_t request;

	p->conn = n;
	p->head.conn = n->peer;
	p->prev = n->sending.prev;
	p->next = &n->sending;
	p->prev->next = p->next->prev = p;
	p->parked = flags == UCP_AM_SEND_FLAG_RNDV;
	p->lent = p->counted && data && data != p->body;
	n->sends++;
	n->parked += p->parked;
	n->lent += p->lent;
	n->pings += p->head.type == SL_UCX_MSG_PING;
	n->last_out = sl_ucx_about_now();
	if (!n->handle) {
		over(p, UCS_ERR_CANCELED);
		return;
	}
	request = sl_ucx.ucp_am_send_nbx(n->handle, SL_UCX_AM, &p->head, sizeof(p->head), data, len, &param);
	if (!request || UCS_PTR_IS_ERR(request))
		over(p, UCS_PTR_RAW_STATUS(request));
}

int sl_ucx_flooded(struct sl_ucx_conn *n)
{
	if (n->sends - n->pings <= REPLIES_MAX + 2 * n->worker->context->config.notes)
		return 0;
	sl_ucx_lose(n);
	return 1;
}

struct sl_ucx_parcel *sl_ucx_notice(struct sl_ucx_conn *n, uint8_t type)
{
	struct sl_ucx_parcel *p;

	if (n->ended || n->lost || sl_ucx_flooded(n))
		return NULL;
	p = sl_ucx_parcel(n->worker, 0);
	if (p)
		p->head.type = type;
	else
		sl_ucx_lose(n);
	return p;
}

void sl_ucx_signal(struct sl_ucx_conn *n, uint8_t type, uint64_t value)
{
	struct sl_ucx_parcel *p = sl_ucx_notice(n, type);

	if (!p)
		return;
	p->head.off = value;
	sl_ucx_send(n, p, NULL, 0, 0);
}

static void on_ping(struct sl_ucx_conn *n, uint64_t nonce)
{
	sl_ucx_signal(n, SL_UCX_MSG_PONG, nonce);
}

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

/*
 * A peer may have died, or stood still and gone on, since it sent what arrives now, and its engine
 * may have been told that nothing lands any more. It pings far more often than this, so
 * after such a silence nothing that it sent before counts.
 */
static int stale(struct sl_ucx_conn *n)
{
	uint64_t now = sl_ucx_about_now(), silence = now > n->last_in ? now - n->last_in : 0;

	if (n->peer && silence > n->worker->context->config.grace_ns / 4 * 3) {
		sl_ucx_signal(n, SL_UCX_MSG_RESET, 0);
		sl_ucx_lose(n);
	}
	n->last_in = now;
	return n->lost;
}

static ucs_status_t dispatch(struct sl_ucx_conn *n, const struct sl_ucx_head *h, void *data, size_t len, int keep,
			     int rendezvous)
{
	switch (h->type) {
	case SL_UCX_MSG_WRITE:
		return sl_ucx_serve_write(n, h, data, len, rendezvous);
	case SL_UCX_MSG_DATA:
		return sl_ucx_answered(n, h, data, len, rendezvous);
	case SL_UCX_MSG_NOTE:
		if (h->flags & SL_UCX_CHECKED && n->rx_failed)
			sl_ucx_owe(n);
		else if (!rendezvous)
			return sl_ucx_put_note(n, data, len, keep);
		return UCS_OK;
	case SL_UCX_MSG_COUNT:
		on_count(n, h);
		return UCS_OK;
	case SL_UCX_MSG_READ:
		if (!rendezvous)
			sl_ucx_serve_read(n, h, data, len);
		return UCS_OK;
	case SL_UCX_MSG_ACK:
		sl_ucx_acknowledged(n, h);
		return UCS_OK;
	case SL_UCX_MSG_ASK:
		sl_ucx_acknowledge(n, h->seq, 0, 0);
		return UCS_OK;
	case SL_UCX_MSG_CREDIT:
		on_credit(n, h->off);
		return UCS_OK;
	case SL_UCX_MSG_STARVED:
		n->impatient = n->worker->context->config.notes;
		sl_ucx_repay(n);
		return UCS_OK;
	case SL_UCX_MSG_PING:
		on_ping(n, h->off);
		return UCS_OK;
	case SL_UCX_MSG_PONG:
		on_pong(n, h->off);
		return UCS_OK;
	case SL_UCX_MSG_RESET:
		sl_ucx_lose(n);
		return UCS_OK;
	case SL_UCX_MSG_CONTROL:
		if (!rendezvous && len <= SL_UCX_CONTROL_MAX && sl_ucx_put_control(n->worker, n->id, data, len) != 0)
			sl_ucx_lose(n);
		return UCS_OK;
	}
	return UCS_OK;
}

ucs_status_t sl_ucx_arrived(void *worker, const void *head, size_t head_len, void *data, size_t len,
			    const ucp_am_recv_param_t *param)
{
	struct sl_ucx_worker *w = worker;
	struct sl_ucx_head h;
	struct sl_ucx_conn *n;
	int rendezvous = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
	int keep = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_DATA) != 0;

	if (head_len != sizeof(h))
		return UCS_OK;
	memcpy(&h, head, sizeof(h)); /* UCX aligns it to nothing */
	if (h.version != SL_UCX_VERSION)
		return UCS_OK;
	if (h.conn == 0) {
		if (h.type == SL_UCX_MSG_CONTROL && !rendezvous && len <= SL_UCX_CONTROL_MAX)
			(void)sl_ucx_put_control(w, 0, data, len);
		return UCS_OK;
	}
	n = sl_ucx_conn_of(w, h.conn);
	if (!n || n->ended || stale(n))
		return UCS_OK;
	return dispatch(n, &h, data, len, keep, rendezvous);
}
