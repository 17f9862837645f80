/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What peers ask of our memory. Every message shows the ticket of the memory's epoch, and is
 * landed or answered under the lock: a thread that has changed the ticket and taken the lock
 * once knows that nothing of the old epoch lands any more.
 */
#include "worker.h"

#include <errno.h>
#include <string.h>

static int32_t admit(struct sl_ucx_conn *n, const struct sl_ucx_head *h, int write,
		     struct sl_ucx_memory **out)
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

/* 0: there is none, or it leads beyond what may be reached; then count stays above 0. */
static int next(struct rows *r, const struct sl_ucx_memory *m, struct sl_ucx_place *p)
{
	if (r->count == 0)
		return 0;
	memcpy(p, r->table, sizeof(*p)); /* UCX aligns messages to nothing */
	if (!sl_ucx_reaches(m, p->off, p->len) || p->len > r->left)
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

void sl_ucx_acknowledge(struct sl_ucx_conn *n, uint32_t seq, int32_t status)
{
	struct sl_ucx_message *p = sl_ucx_new_notice(n, SL_UCX_MSG_ACK);

	if (!p)
		return;
	p->head.seq = seq;
	p->head.status = status;
	sl_ucx_send(n, p);
}

/* Between the rows of a memory and bytes side by side. */
static __attribute__((noinline)) int32_t move_each(struct rows *rows,
						   const struct sl_ucx_memory *m, uint8_t *bytes,
						   int in)
{
	struct sl_ucx_place p;

	for (; next(rows, m, &p); bytes += p.len) {
		if (in)
			memcpy(m->base + p.off, bytes, p.len);
		else
			memcpy(bytes, m->base + p.off, p.len);
	}
	return rows->count || rows->left ? SL_UCX_RANGE : 0;
}

static int32_t move_rows(const struct sl_ucx_head *h, const struct sl_ucx_memory *m,
			 const uint8_t *table, uint8_t *bytes, int in)
{
	struct rows rows = {.table = table, .count = h->count, .left = h->len};
	struct sl_guard g;
	int32_t status;

	sl_guard_over(&g, m->base, m->len, NULL, 0);
	if (setjmp(g.back))
		return SL_UCX_FAULT;
	sl_guard_arm(&g);
	status = move_each(&rows, m, bytes, in);
	sl_guard_disarm();
	return status;
}

static int32_t scatter(const struct sl_ucx_head *h, struct sl_ucx_memory *m, const uint8_t *data,
		       size_t len)
{
	if (!table_fits(h, len) || !sl_within(h->off, h->len, len))
		return SL_UCX_RANGE;
	return move_rows(h, m, data, (uint8_t *)data + h->off, 1);
}

static int32_t place(const struct sl_ucx_head *h, struct sl_ucx_memory *m, const void *data,
		     size_t len)
{
	if (h->count)
		return scatter(h, m, data, len);
	if (len != h->len || !sl_ucx_reaches(m, h->off, len))
		return SL_UCX_RANGE;
	return sl_guard_copy(m->base + h->off, data, len) ? SL_UCX_FAULT : 0;
}

/* The steps fresh and copy of the model: from the look at the age to the copy nothing waits. */
int sl_ucx_serve_write(struct sl_ucx_conn *n, const struct sl_ucx_head *h, const void *data,
		       size_t len, uint64_t now)
{
	struct sl_ucx_memory *m;
	int32_t status = admit(n, h, 1, &m);

	if (status == 0 && !sl_ucx_enter(m))
		return -EAGAIN;
	if (status == 0 && sl_ucx_age(n, h, now) > n->limit) {
		sl_ucx_leave(m);
		return -ESTALE;
	}
	if (h->flags & SL_UCX_FIRST)
		n->rx_failed = 0;
	if (status == 0) {
		status = place(h, m, data, len);
		sl_ucx_leave(m);
	}
	if (status != 0)
		n->rx_failed = 1;
	if (status != 0 || h->flags & SL_UCX_ASK)
		sl_ucx_acknowledge(n, h->seq, status);
	return 0;
}

/* What is wrong with a request before its table is read. */
static int32_t admit_read(struct sl_ucx_conn *n, const struct sl_ucx_head *h, size_t len,
			  struct sl_ucx_memory **m)
{
	int32_t status = admit(n, h, 0, m);

	if (status != 0)
		return status;
	if (h->len > SL_UCX_BODY_MAX ||
	    (h->count ? !table_fits(h, len) : !sl_ucx_reaches(*m, h->off, h->len)))
		return SL_UCX_RANGE;
	return 0;
}

/* The answer is a copy: a Revoke that follows need not wait until it is sent. */
void sl_ucx_serve_read(struct sl_ucx_conn *n, const struct sl_ucx_head *h, const void *data,
		       size_t len)
{
	struct sl_ucx_memory *m;
	int32_t status = admit_read(n, h, len, &m);
	struct sl_ucx_message *p;

	if (sl_ucx_lose_backlogged(n))
		return;
	p = sl_ucx_new_message(n->worker, status == 0 ? h->len : 0);
	if (!p) {
		sl_ucx_lose(n);
		return;
	}
	if (status == 0 && h->count)
		status = move_rows(h, m, data, p->body, 0);
	else if (status == 0 && sl_guard_copy(p->body, m->base + h->off, h->len) != 0)
		status = SL_UCX_FAULT;
	p->head.type = SL_UCX_MSG_DATA;
	p->head.seq = h->seq;
	p->head.status = status;
	p->len = status == 0 ? (uint32_t)h->len : 0;
	sl_ucx_send(n, p);
}
