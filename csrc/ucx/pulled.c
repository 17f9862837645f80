/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes whose bytes the owner copies from our memory: messages say where they are, and the owner
 * takes them after it has compared the ticket. All pages are touched here first: a page that does
 * not come, of a file on a server that is gone or of userfaultfd, must hold up its own process, and
 * not the owner.
 */
#define _GNU_SOURCE
#include "worker.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* since Linux 5.14 */
#endif

/*
 * A remote place costs the kernel half a microsecond. Pieces below this are put together in a block
 * of ours first, so that they are one place.
 */
#define GATHER (8u << 10)
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

/* Memory that is not there the owner's copy tells of. */
static void touch(const uint8_t *at, uint64_t len)
{
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
	uintptr_t from = (uintptr_t)at & ~(page - 1),
		  to = ((uintptr_t)at + len + page - 1) & ~(page - 1);

	if (madvise((void *)from, to - from, MADV_POPULATE_READ) == 0 || errno != EINVAL)
		return;
	/* the kernel is too old */
	for (; from < to; from += page) {
		const void *first = from < (uintptr_t)at ? at : (const void *)from;
		uint8_t byte;

		if (sl_guard_copy(&byte, first, 1) != 0)
			return;
	}
}

static void name(struct sl_ucx_row *row, const struct sl_ucx_run *run, uint64_t len,
		 const uint8_t *at)
{
	*row = (struct sl_ucx_row){run->remote + run->done, len, (uint64_t)(uintptr_t)at};
}

/* Fills a block with what one message can name. */
static void gather(struct sl_ucx_batch *b, struct sl_ucx_message *p, struct sl_ucx_block *k)
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
			sl_ucx_take_local(b, k->bytes + staged, at, len);
			at = k->bytes + staged;
			staged += len;
		} else {
			touch(at, len);
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

static uint64_t offer(struct sl_ucx_batch *b, struct sl_ucx_message *p, struct sl_ucx_block *k)
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
		touch(run->local + run->done, p->head.len);
		run->done += p->head.len;
	}
	len = p->head.len; /* of the message nothing is left when it was sent */
	sl_ucx_send(b->conn, p);
	return len;
}

int sl_ucx_move_offered(struct sl_ucx_batch *b, uint64_t *bytes)
{
	struct sl_ucx_conn *n = b->conn;

	for (;;) {
		struct sl_ucx_block *k = NULL;
		struct sl_ucx_message *p;
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
		p = sl_ucx_new_message(n->worker, 0);
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
