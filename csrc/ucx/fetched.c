/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads of another process's memory by the kernel, by the reader's own hand and without asking
 * first. Then the owner is asked whether the ticket still holds. If it does, no other epoch began
 * meanwhile, and the bytes are the right ones; if not, the read has failed.
 *
 * An owner that is killed meanwhile has nothing of it in its hand. Messages with the bytes would be
 * different: a process that is killed while it puts one into our queue blocks the queue for good.
 */
#include "worker.h"

#include <errno.h>

/* Names pieces of one import and one local memory, as many as one call of the kernel takes. */
static void choose(struct sl_ucx_batch *b, struct sl_ucx_vectors *v, uint64_t most)
{
	struct sl_ucx_run *run = &b->run;
	const struct sl_ucx_import *im = run->import;

	sl_ucx_begin_pull(v);
	v->memory = run->memory;
	while (v->locals <= SL_UCX_ROWS && v->len < most) {
		uint64_t len = sl_ucx_bite(run, most - v->len);

		v->piece[v->locals] = run->first;
		sl_ucx_add_pull(v, run->local + run->done, im->base + run->remote + run->done, len);
		run->done += len;
		if (run->done < run->len || !sl_ucx_next_run(b) || run->import != im ||
		    run->memory != v->memory)
			break;
	}
}

/* The piece that the first byte not copied is of. */
static uint32_t broken(const struct sl_ucx_vectors *v, uint64_t got)
{
	uint32_t i = 1;

	while (i + 1 < v->locals && got >= v->local[i].iov_len)
		got -= v->local[i++].iov_len;
	return v->piece[i];
}

/* -EAGAIN: later, the pages of our memory are being moved. */
static int fetch(struct sl_ucx_batch *b, uint64_t *bytes)
{
	struct sl_ucx_conn *n = b->conn;
	struct sl_ucx_vectors *v = n->worker->vectors;
	uint64_t got;
	int rc;

	if (!sl_ucx_enter(b->run.memory)) {
		n->worker->stalled = 1;
		return -EAGAIN;
	}
	if (!b->unproved)
		b->unproved_piece = b->run.first;
	b->unproved = b->run.import;
	choose(b, v, *bytes < SL_UCX_PULL_MAX ? *bytes : SL_UCX_PULL_MAX);
	*bytes -= v->len;
	rc = sl_ucx_pull(n, v, &got);
	sl_ucx_leave(v->memory);
	if (rc == -EPIPE) {
		sl_ucx_fail(b, SL_UCX_LOST, (int32_t)v->piece[1]);
		sl_ucx_lose(n);
	} else if (
	    rc != 0) { /* the memory may be gone with its epoch: then that is what its owner says */
		b->faulty = 1;
		b->unproved_piece = broken(v, got);
	}
	return 0;
}

/* Asks whether what was fetched is of the ticket's epoch, by a read of nothing. 0: not now. */
static int prove(struct sl_ucx_batch *b)
{
	struct sl_ucx_conn *n = b->conn;
	struct sl_ucx_message *p = sl_ucx_window_full(n) ? NULL : sl_ucx_new_message(n->worker, 0);
	struct sl_ucx_record *r;

	if (!p)
		return 0;
	r = sl_ucx_new_record(b, SL_UCX_READING);
	r->piece = b->unproved_piece;
	r->faulty = (uint8_t)b->faulty;
	sl_ucx_address_to(p, SL_UCX_MSG_READ, r, b->unproved);
	b->unproved = NULL;
	sl_ucx_send(n, p);
	return 1;
}

int sl_ucx_move_fetched(struct sl_ucx_batch *b, uint64_t *bytes)
{
	for (;;) {
		int more = !b->faulty && (b->run.done < b->run.len || sl_ucx_next_run(b));

		if (b->unproved && (!more || b->run.import != b->unproved)) {
			if (!prove(b))
				return -EAGAIN;
		}
		if (!more || b->status != 0)
			return 0;
		if (*bytes == 0)
			return 1;
		if (fetch(b, bytes) != 0)
			return -EAGAIN;
		if (b->status != 0)
			return 0;
	}
}
