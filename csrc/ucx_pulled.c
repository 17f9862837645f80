/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Batches between processes that copy from each other's memory. A write is offered: messages say where
 * its bytes are, and the owner takes them, after it compared the ticket. A read is fetched by
 * our own hand, without asking first; then the owner is asked whether the ticket still holds. If it
 * does no other epoch began meanwhile, and the bytes are the right ones; if not, what was
 * read is nobody's business but ours, and the read has failed.
 */
#include "ucx_worker.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/*
 * A remote place costs the kernel half a microsecond. Pieces below this are put together in a block of
 * ours first, so that they are one place.
 */
#define GATHER 2048
/* From this on a contiguous piece has a message of its own, without a table. */
#define PLAIN (64u << 10)
/* Blocks of one connection under way. */
#define BLOCKS 12

static struct sl_ucx_block *take_block(struct sl_ucx_conn *n)
{
	struct sl_ucx_worker *w = n->worker;
	struct sl_ucx_block *k = w->blocks;

	if (n->blocks >= BLOCKS)
		return NULL;
	if (k)
		w->blocks = k->next;
	else
		k = malloc(sizeof(*k));
	n->blocks += k != NULL;
	return k;
}

static void give_block(struct sl_ucx_conn *n, struct sl_ucx_block *k)
{
	k->next = n->worker->blocks;
	n->worker->blocks = k;
	n->blocks--;
}

void sl_ucx_free_block(struct sl_ucx_conn *n, struct sl_ucx_record *r)
{
	if (r->block)
		give_block(n, r->block);
	r->block = NULL;
}

static void name(struct sl_ucx_row *row, const struct sl_ucx_run *run, uint64_t len, const uint8_t *at)
{
	*row = (struct sl_ucx_row){run->remote + run->done, len, (uint64_t)(uintptr_t)at};
}

/* Fills a block with what one message can name. */
static void gather(struct sl_ucx_batch *b, struct sl_ucx_parcel *p, struct sl_ucx_block *k)
{
	struct sl_ucx_run *run = &b->run;
	const struct sl_ucx_import *im = run->import;
	uint32_t rows = 0;
	uint64_t bytes = 0, staged = 0;

	while (rows < SL_UCX_ROWS && bytes < SL_UCX_PULL_MAX) {
		uint64_t len = sl_ucx_bite(run, SL_UCX_PULL_MAX - bytes);
		const uint8_t *at = run->local + run->done;

		if (len < GATHER) {
			if (len > SL_UCX_STAGE - staged)
				break;
			at = memcpy(k->bytes + staged, at, len);
			staged += len;
		}
		name(&k->rows[rows++], run, len, at);
		bytes += len;
		run->done += len;
		if (run->done < run->len || !sl_ucx_next_run(b))
			break;
		if (run->import != im || run->len >= PLAIN)
			break;
	}
	p->head.count = rows;
	p->head.len = bytes;
	p->head.at = (uint64_t)(uintptr_t)k->rows;
}

static uint64_t offer(struct sl_ucx_batch *b, struct sl_ucx_parcel *p, struct sl_ucx_block *k)
{
	struct sl_ucx_run *run = &b->run;
	struct sl_ucx_record *r = sl_ucx_new_record(b, SL_UCX_WRITING);
	uint64_t len;

	r->block = k;
	sl_ucx_address_to(p, SL_UCX_MSG_WRITE, r, run->import);
	p->head.flags = SL_UCX_PULL | SL_UCX_ASK;
	if (run->first == 0 && run->done == 0)
		p->head.flags |= SL_UCX_FIRST;
	if (k) {
		gather(b, p, k);
	} else {
		p->head.off = run->remote + run->done;
		p->head.len = sl_ucx_bite(run, SL_UCX_PULL_MAX);
		p->head.at = (uint64_t)(uintptr_t)(run->local + run->done);
		run->done += p->head.len;
	}
	len = p->head.len; /* of the parcel nothing is left when it was sent */
	sl_ucx_send(b->conn, p, NULL, 0, 0);
	return len;
}

int sl_ucx_move_offered(struct sl_ucx_batch *b, uint64_t *bytes)
{
	struct sl_ucx_conn *n = b->conn;

	for (;;) {
		struct sl_ucx_block *k = NULL;
		struct sl_ucx_parcel *p;
		uint64_t len;
		int plain;

		if (b->run.done == b->run.len && !sl_ucx_next_run(b))
			return 0;
		if (*bytes == 0)
			return 1;
		if (sl_ucx_window_full(n))
			return -EAGAIN;
		plain = b->run.len - b->run.done >= PLAIN || b->next_piece == b->pieces.count;
		if (!plain && (k = take_block(n)) == NULL)
			return -EAGAIN;
		p = sl_ucx_parcel(n->worker, 0);
		if (!p) {
			if (k)
				give_block(n, k);
			return -EAGAIN;
		}
		len = offer(b, p, k);
		*bytes -= len < *bytes ? len : *bytes;
		if (b->status != 0)
			return 0;
	}
}

/* Names pieces of one import, as many as one call of the kernel takes. */
static void choose(struct sl_ucx_batch *b, struct sl_ucx_vectors *v, uint64_t most)
{
	struct sl_ucx_run *run = &b->run;
	const struct sl_ucx_import *im = run->import;

	sl_ucx_begin_pull(v);
	while (v->locals <= SL_UCX_ROWS && v->len < most) {
		uint64_t len = sl_ucx_bite(run, most - v->len);

		v->piece[v->locals] = run->first;
		sl_ucx_add_pull(v, run->local + run->done, im->base + run->remote + run->done, len);
		run->done += len;
		if (run->done < run->len || !sl_ucx_next_run(b) || run->import != im)
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

static void fetch(struct sl_ucx_batch *b, uint64_t *bytes)
{
	struct sl_ucx_conn *n = b->conn;
	struct sl_ucx_vectors *v = n->worker->vectors;
	uint64_t got;
	int rc;

	if (!b->unproved)
		b->unproved_piece = b->run.first;
	b->unproved = b->run.import;
	choose(b, v, *bytes < SL_UCX_PULL_MAX ? *bytes : SL_UCX_PULL_MAX);
	*bytes -= v->len;
	rc = sl_ucx_pull(n, v, &got);
	if (rc == -EPIPE) {
		sl_ucx_fail(b, SL_UCX_LOST, (int32_t)v->piece[1]);
		sl_ucx_lose(n);
	} else if (rc != 0) { /* the memory may be gone with its epoch: then that is what its owner says */
		b->faulty = 1;
		b->unproved_piece = broken(v, got);
	}
}

/* Asks whether what was fetched is of the ticket's epoch, by a read of nothing. 0: not now. */
static int prove(struct sl_ucx_batch *b)
{
	struct sl_ucx_conn *n = b->conn;
	struct sl_ucx_parcel *p = sl_ucx_window_full(n) ? NULL : sl_ucx_parcel(n->worker, 0);
	struct sl_ucx_record *r;

	if (!p)
		return 0;
	r = sl_ucx_new_record(b, SL_UCX_READING);
	r->piece = b->unproved_piece;
	r->faulty = (uint8_t)b->faulty;
	sl_ucx_address_to(p, SL_UCX_MSG_READ, r, b->unproved);
	b->unproved = NULL;
	sl_ucx_send(n, p, NULL, 0, 0);
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
		fetch(b, bytes);
		if (b->status != 0)
			return 0;
	}
}
