/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Batches that the owner of the memory serves, by messages that carry the bytes: writes go to it,
 * and it lands and acknowledges them, reads are asked for and landed here.
 */
#include "worker.h"

#include <errno.h>
#include <string.h>

/* Rows of one message's table. */
#define ROWS 512

/* memcpy from memory of ours; where it is gone the batch fails, and zeros go in its place. */
static void take_local(struct sl_ucx_batch *b, uint8_t *to, const uint8_t *local, uint64_t len)
{
	if (sl_guard_copy(to, local, len) == 0)
		return;
	memset(to, 0, len);
	sl_ucx_fail(b, SL_UCX_FAULT, (int32_t)b->run.first);
}

/*
 * One message of as many pieces as fit: a table, and for a write their bytes behind it. The table
 * is made at the front of the body, and the bytes are moved up to it, so each is copied once.
 */
static void pack(struct sl_ucx_batch *b, struct sl_ucx_message *p, struct sl_ucx_record *r,
		 uint64_t room)
{
	struct sl_ucx_place *table = (struct sl_ucx_place *)p->body;
	struct sl_ucx_run *run = &b->run;
	const struct sl_ucx_import *im = run->import;
	uint32_t rows = 0;
	/* if the others are alike */
	uint64_t bytes = 0, most = room / (sizeof(*table) + run->len - run->done) + 1;
	uint8_t *data;

	if (most > ROWS)
		most = ROWS;
	data = p->body + most * sizeof(*table);
	room -= most * sizeof(*table);
	while (rows < most && bytes < room) {
		uint64_t len = sl_ucx_bite(run, room - bytes);

		table[rows++] = (struct sl_ucx_place){run->remote + run->done, len};
		if (b->write)
			take_local(b, data + bytes, run->local + run->done, len);
		bytes += len;
		run->done += len;
		if (run->done < run->len)
			break;
		if (!sl_ucx_next_run(b))
			break;
		if (run->import != im)
			break;
	}
	r->len = bytes;
	p->head.count = rows;
	p->head.len = bytes;
	p->head.off = most * sizeof(*table); /* where the bytes begin */
	p->len = (uint32_t)(b->write ? p->head.off + bytes : rows * sizeof(*table));
}

static void send_packed(struct sl_ucx_batch *b, struct sl_ucx_message *p, uint64_t room)
{
	struct sl_ucx_conn *n = b->conn;
	const struct sl_ucx_import *im = b->run.import;
	int first = b->run.first == 0 && b->run.done == 0;
	struct sl_ucx_record *r = sl_ucx_new_record(b, b->write ? SL_UCX_WRITING : SL_UCX_READING);

	sl_ucx_address_to(p, b->write ? SL_UCX_MSG_WRITE : SL_UCX_MSG_READ, r, im);
	pack(b, p, r, room);
	p->head.flags = (uint16_t)(first ? SL_UCX_FIRST : 0);
	if (sl_ucx_all_taken(b) || r->seq % 8 == 7 || sl_ucx_window_full(n) || b->run.import != im)
		p->head.flags |= SL_UCX_ASK;
	sl_ucx_send(n, p);
}

/* One message of one place, without a table. */
static void send_plain(struct sl_ucx_batch *b, struct sl_ucx_message *p, uint64_t room)
{
	struct sl_ucx_conn *n = b->conn;
	struct sl_ucx_run *run = &b->run;
	int first = run->first == 0 && run->done == 0;
	struct sl_ucx_record *r = sl_ucx_new_record(b, b->write ? SL_UCX_WRITING : SL_UCX_READING);
	uint8_t *local = run->local + run->done;
	uint64_t len = sl_ucx_bite(run, room);

	r->len = len;
	r->local = local;
	r->memory = run->memory;
	sl_ucx_address_to(p, b->write ? SL_UCX_MSG_WRITE : SL_UCX_MSG_READ, r, run->import);
	p->head.off = run->remote + run->done;
	p->head.len = len;
	run->done += len;
	p->head.flags = (uint16_t)(first ? SL_UCX_FIRST : 0);
	if (sl_ucx_all_taken(b) || r->seq % 8 == 7 || sl_ucx_window_full(n))
		p->head.flags |= SL_UCX_ASK;
	if (b->write) {
		take_local(b, p->body, local, len);
		p->len = (uint32_t)len;
	}
	sl_ucx_send(n, p);
}

/* A whole message of one run needs no table. */
static int is_plain(const struct sl_ucx_batch *b, uint64_t room)
{
	const struct sl_ucx_run *run = &b->run;

	return run->len - run->done >= (b->write ? room / 2 : room) ||
	       b->next_piece == b->pieces.count;
}

int sl_ucx_move_served(struct sl_ucx_batch *b, uint64_t *bytes)
{
	struct sl_ucx_conn *n = b->conn;
	uint64_t segment = n->worker->context->config.segment;

	for (;;) {
		struct sl_ucx_message *p;
		uint32_t before;
		int plain;

		if (b->run.done == b->run.len && !sl_ucx_next_run(b))
			return 0;
		if (*bytes == 0)
			return 1;
		if (sl_ucx_window_full(n))
			return -EAGAIN;
		plain = is_plain(b, segment);
		p = sl_ucx_new_message(n->worker, !plain     ? segment
						  : b->write ? sl_ucx_bite(&b->run, segment)
							     : 0);
		if (!p)
			return -EAGAIN;
		before = n->next_seq;
		if (plain)
			send_plain(b, p, segment);
		else
			send_packed(b, p, segment);
		{
			uint64_t sent = n->records[before % SL_UCX_WINDOW].len;

			*bytes -= sent < *bytes ? sent : *bytes;
		}
		if (b->status != 0)
			return 0;
	}
}

static int copy_in(struct sl_ucx_batch *b, uint32_t piece, struct sl_ucx_memory *m, uint8_t *to,
		   const uint8_t *data, uint64_t len)
{
	if (!sl_ucx_enter(m))
		return -EAGAIN;
	if (sl_guard_copy(to, data, len) != 0)
		sl_ucx_fail(b, SL_UCX_FAULT, (int32_t)piece);
	sl_ucx_leave(m);
	return 0;
}

/*
 * Lands bytes in the pieces of a read, from where its request began. Repeated whole after -EAGAIN.
 */
static int land(struct sl_ucx_batch *b, const struct sl_ucx_record *r, const uint8_t *data)
{
	struct sl_ucx_run run;
	uint64_t left = r->len, off = r->off;

	if (r->local) /* found once: a long run is not put together again for each of its answers */
		return copy_in(b, r->piece, r->memory, r->local, data, left);
	for (uint32_t piece = r->piece; left && sl_ucx_run_at(b, piece, &run);
	     piece += run.count, off = 0) {
		uint64_t len = run.len - off < left ? run.len - off : left;

		if (copy_in(b, piece, run.memory, run.local + off, data, len) != 0)
			return -EAGAIN;
		data += len;
		left -= len;
	}
	if (left)
		sl_ucx_fail(b, SL_UCX_RANGE, (int32_t)r->piece);
	return 0;
}

int sl_ucx_answered(struct sl_ucx_conn *n, const struct sl_ucx_head *h, const void *data,
		    size_t len)
{
	struct sl_ucx_record *r = sl_ucx_record_of(n, h->seq);

	if (!r || r->kind != SL_UCX_READING)
		return 0;
	if (r->batch && h->status != 0)
		sl_ucx_fail(r->batch, h->status, (int32_t)r->piece);
	else if (r->batch && len != r->len)
		sl_ucx_fail(r->batch, UCS_ERR_IO_ERROR, (int32_t)r->piece);
	else if (r->batch && land(r->batch, r, data) != 0)
		return -EAGAIN;
	sl_ucx_record_over(n, r);
	return 0;
}
