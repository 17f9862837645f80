/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What peers ask of our memory. Every message shows the ticket of the memory's epoch, and is
 * landed, taken or answered under the lock: whoever has changed the ticket and taken the lock once
 * knows that nothing of the old epoch lands any more.
 */
#include "ucx_worker.h"

#include <stdlib.h>
#include <string.h>

static int32_t admit(struct sl_ucx_conn *n, const struct sl_ucx_head *h, int write, struct sl_ucx_memory **out)
{
	struct sl_ucx_memory *m = sl_ucx_find(n->worker->context, h->key);

	*out = m;
	if (!m || h->ticket == 0 || atomic_load(&m->ticket) != h->ticket)
		return SL_UCX_REVOKED;
	return write && m->flags & SL_UCX_READ_ONLY ? SL_UCX_DENIED : 0;
}

/*
 * The rows of a table. Each is read once, and judged as it was read: a message may lie in
 * memory that its sender can still write.
 */
struct rows {
	const uint8_t *table;
	uint32_t count; /* that are left */
	uint64_t left;	/* bytes that they name */
};

/* 0: there is none, or it leads beyond the memory; then count stays above 0. */
static int next(struct rows *r, uint64_t size, struct sl_ucx_place *p)
{
	if (r->count == 0)
		return 0;
	memcpy(p, r->table, sizeof(*p)); /* UCX aligns messages to nothing */
	if (!sl_within(p->off, p->len, size) || p->len > r->left)
		return 0;
	r->table += sizeof(*p);
	r->count--;
	r->left -= p->len;
	return 1;
}

static int table_fits(const struct sl_ucx_head *h, size_t len)
{
	return h->count <= len / sizeof(struct sl_ucx_place);
}

void sl_ucx_acknowledge(struct sl_ucx_conn *n, uint32_t seq, uint16_t flags, int32_t status)
{
	struct sl_ucx_parcel *p = sl_ucx_notice(n, SL_UCX_MSG_ACK);

	if (!p)
		return;
	p->head.flags = flags;
	p->head.seq = seq;
	p->head.status = status;
	sl_ucx_send(n, p, NULL, 0, 0);
}

/* A message of a write that UCX lands by itself. */
struct arrival {
	struct sl_ucx_worker *worker;
	struct sl_ucx_memory *memory;
	uint64_t conn;
	uint32_t seq;
};

static void landed(const struct arrival *a, ucs_status_t status)
{
	struct sl_ucx_conn *n = sl_ucx_conn_of(a->worker, a->conn);

	atomic_fetch_sub(&a->memory->landing, 1);
	/* The sender keeps its message back until then, so a failure concerns no other. */
	if (n)
		sl_ucx_acknowledge(n, a->seq, SL_UCX_EXACT, status);
}

static void on_landed(void *request, ucs_status_t status, size_t length, void *user)
{
	struct arrival a = *(struct arrival *)user;

	(void)length;
	free(user);
	sl_ucx.ucp_request_free(request);
	landed(&a, status);
}

static void fetch(struct sl_ucx_conn *n, const struct sl_ucx_head *h, struct sl_ucx_memory *m, void *data)
{
	struct arrival *a = malloc(sizeof(*a)), now = {n->worker, m, n->id, h->seq};
	ucp_request_param_t param = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE |
				(m->handle ? UCP_OP_ATTR_FIELD_MEMH : 0),
		.cb.recv_am = on_landed,
		.user_data = a,
		.memory_type = UCS_MEMORY_TYPE_HOST,
		.memh = m->handle,
	};
	ucs_status_ptr_t request;

	if (!a) {
		sl_ucx_acknowledge(n, h->seq, SL_UCX_EXACT, UCS_ERR_NO_MEMORY);
		return;
	}
	*a = now;
	atomic_fetch_add(&m->landing, 1);
	request = sl_ucx.ucp_am_recv_data_nbx(n->worker->handle, data, m->base + h->off, h->len, &param);
	if (!request || UCS_PTR_IS_ERR(request)) {
		free(a);
		landed(&now, UCS_PTR_RAW_STATUS(request));
	}
}

static int32_t scatter(const struct sl_ucx_head *h, struct sl_ucx_memory *m, const uint8_t *data, size_t len)
{
	struct rows rows = {.table = data, .count = h->count, .left = h->len};
	struct sl_ucx_place p;

	if (!table_fits(h, len) || !sl_within(h->off, h->len, len))
		return SL_UCX_RANGE;
	data += h->off;
	while (next(&rows, m->len, &p)) {
		memcpy(m->base + p.off, data, p.len);
		data += p.len;
	}
	return rows.count || rows.left ? SL_UCX_RANGE : 0;
}

ucs_status_t sl_ucx_serve_write(struct sl_ucx_conn *n, const struct sl_ucx_head *h, void *data, size_t len, int rendezvous)
{
	struct sl_ucx_memory *m;
	int32_t status = admit(n, h, 1, &m);

	if (h->flags & SL_UCX_FIRST)
		n->rx_failed = 0;
	if (status == 0 && h->flags & SL_UCX_PULL) {
		status = rendezvous ? SL_UCX_RANGE : sl_ucx_take(n, h, m);
	} else if (status == 0 && h->count) {
		status = rendezvous ? SL_UCX_RANGE : scatter(h, m, data, len);
	} else if (status == 0) {
		if (len != h->len || !sl_within(h->off, len, m->len)) {
			status = SL_UCX_RANGE;
		} else if (rendezvous) {
			fetch(n, h, m, data);
			return UCS_OK;
		} else {
			memcpy(m->base + h->off, data, len);
		}
	}
	if (status != 0)
		n->rx_failed = 1;
	if (status != 0 || h->flags & (SL_UCX_ASK | SL_UCX_EXACT))
		sl_ucx_acknowledge(n, h->seq, h->flags & SL_UCX_EXACT, status);
	return UCS_OK;
}

static int32_t gather(const struct sl_ucx_head *h, const struct sl_ucx_memory *m, const uint8_t *table, uint8_t *to)
{
	struct rows rows = {.table = table, .count = h->count, .left = h->len};
	struct sl_ucx_place p;

	while (next(&rows, m->len, &p)) {
		memcpy(to, m->base + p.off, p.len);
		to += p.len;
	}
	return rows.count || rows.left ? SL_UCX_RANGE : 0;
}

/* The bytes of one place are sent from where they are; sl_ucx_unmap ends that. */
static void answer_plain(struct sl_ucx_conn *n, const struct sl_ucx_head *h, struct sl_ucx_memory *m, struct sl_ucx_parcel *p)
{
	unsigned flags = h->flags & SL_UCX_LARGE ? UCP_AM_SEND_FLAG_RNDV : 0;

	if (!n->worker->context->config.shared) { /* there the peer reads, and an error is its own */
		atomic_fetch_add(&m->reading, 1);
		p->memory = m;
	}
	sl_ucx_send(n, p, m->base + h->off, h->len, flags);
}

/* What is wrong with a request before its table is read. */
static int32_t admit_read(struct sl_ucx_conn *n, const struct sl_ucx_head *h, size_t len, struct sl_ucx_memory **m)
{
	int32_t status = admit(n, h, 0, m);

	if (status != 0)
		return status;
	if (h->len > SL_UCX_ANSWER_MAX || (h->count ? !table_fits(h, len) : !sl_within(h->off, h->len, (*m)->len)))
		return SL_UCX_RANGE;
	return 0;
}

void sl_ucx_serve_read(struct sl_ucx_conn *n, const struct sl_ucx_head *h, const void *data, size_t len)
{
	struct sl_ucx_memory *m;
	int32_t status = admit_read(n, h, len, &m);
	/* Where memory is shared UCX may copy late, also from what is not mapped any more. */
	int copy = h->count || (n->worker->context->config.shared && !(h->flags & SL_UCX_LARGE));
	struct sl_ucx_parcel *p;

	if (sl_ucx_flooded(n))
		return;
	p = sl_ucx_parcel(n->worker, status == 0 && copy ? h->len : 0);
	if (!p) {
		sl_ucx_lose(n);
		return;
	}
	if (status == 0 && h->count)
		status = gather(h, m, data, p->body);
	else if (status == 0 && copy)
		memcpy(p->body, m->base + h->off, h->len);
	p->head.type = SL_UCX_MSG_DATA;
	p->head.seq = h->seq;
	p->head.status = status;
	if (status == 0 && !copy)
		answer_plain(n, h, m, p);
	else
		sl_ucx_send(n, p, p->body, status == 0 ? h->len : 0, 0);
}
