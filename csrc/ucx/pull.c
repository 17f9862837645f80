/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies from the memory of another process by the kernel (process_vm_readv), and the owner's part
 * in
 * them: a write names where its bytes are, and the owner of their target takes them from there.
 *
 * So messages are short, whatever they move. A process that is killed while it puts one into our
 * queue leaves a hole there that blocks the queue for good, so it must not take long; and the bytes
 * are not in any hand that can be stopped: the call that copies them ends before a signal takes
 * effect.
 */
#define _GNU_SOURCE
#include "worker.h"

#include <errno.h>
#include <string.h>

void sl_ucx_begin_pull(struct sl_ucx_vectors *v)
{
	v->locals = v->remotes = 1; /* the gate's */
	v->len = 0;
}

void sl_ucx_add_pull(struct sl_ucx_vectors *v, void *local, uint64_t at, uint64_t len)
{
	struct iovec *last = &v->remote[v->remotes - 1];

	v->local[v->locals++] = (struct iovec){local, len};
	v->len += len;
	/* The kernel looks for the pages of each anew. */
	if (v->remotes > 1 && (uint64_t)(uintptr_t)last->iov_base + last->iov_len == at)
		last->iov_len += len;
	else
		v->remote[v->remotes++] = (struct iovec){(void *)(uintptr_t)at, len};
}

int sl_ucx_pull(struct sl_ucx_conn *n, struct sl_ucx_vectors *v, uint64_t *got)
{
	uint8_t mark[SL_UCX_MARK];
	ssize_t copied;

	v->local[0] = (struct iovec){mark, sizeof(mark)};
	v->remote[0] = (struct iovec){(void *)(uintptr_t)n->their.at, sizeof(mark)};
	copied = process_vm_readv((pid_t)n->pid, v->local, v->locals, v->remote, v->remotes, 0);
	if (copied < (ssize_t)sizeof(mark) || memcmp(mark, n->their.mark, sizeof(mark)) != 0)
		return -EPIPE;
	*got = (uint64_t)copied - sizeof(mark);
	return *got == v->len ? 0 : -EFAULT;
}

/* How a pull for a message ended. */
static int32_t taken(struct sl_ucx_conn *n, int rc)
{
	if (rc == -EPIPE)
		sl_ucx_lose(n);
	return rc == 0 ? 0 : rc == -EPIPE ? SL_UCX_LOST : SL_UCX_FAULT;
}

/* Reads a table out of the sender's memory, once: it is judged and obeyed as it is here. */
static int32_t take_table(struct sl_ucx_conn *n, const struct sl_ucx_head *h)
{
	struct sl_ucx_vectors *v = n->worker->vectors;
	uint64_t got;

	sl_ucx_begin_pull(v);
	sl_ucx_add_pull(v, v->rows, h->at, h->count * sizeof(v->rows[0]));
	return taken(n, sl_ucx_pull(n, v, &got));
}

static int32_t spread(struct sl_ucx_vectors *v, const struct sl_ucx_head *h,
		      const struct sl_ucx_memory *m)
{
	uint64_t left = h->len;

	sl_ucx_begin_pull(v);
	for (uint32_t i = 0; i < h->count; i++) {
		const struct sl_ucx_row *r = &v->rows[i];

		if (!sl_ucx_reaches(m, r->off, r->len) || r->len > left)
			return SL_UCX_RANGE;
		left -= r->len;
		sl_ucx_add_pull(v, m->base + r->off, r->at, r->len);
	}
	return left ? SL_UCX_RANGE : 0;
}

/*
 * Takes the bytes of a write that was admitted into the memory. Addresses are the sender's
 * word, and lead nowhere but into the sender's own process.
 */
int32_t sl_ucx_take(struct sl_ucx_conn *n, const struct sl_ucx_head *h, struct sl_ucx_memory *m)
{
	struct sl_ucx_vectors *v = n->worker->vectors;
	int32_t status = 0;
	uint64_t got;

	if (!n->pid || h->len > SL_UCX_PULL_MAX || h->count > SL_UCX_ROWS)
		return SL_UCX_RANGE;
	if (h->count) {
		status = take_table(n, h);
		if (status == 0)
			status = spread(v, h, m);
	} else if (sl_ucx_reaches(m, h->off, h->len)) {
		sl_ucx_begin_pull(v);
		sl_ucx_add_pull(v, m->base + h->off, h->at, h->len);
	} else {
		status = SL_UCX_RANGE;
	}
	return status ? status : taken(n, sl_ucx_pull(n, v, &got));
}
