/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a batch is moved, by messages that carry the bytes: writes go to the owner of the memory,
 * which lands and acknowledges them; reads are asked for and landed here. The pieces of a batch are
 * taken as runs, and each message with data has a record in the window of the connection.
 */
#include "worker.h"

#include <errno.h>
#include <string.h>

static int run_at(struct sl_ucx_batch *b, uint32_t piece, struct sl_ucx_run *run)
{
	struct sl_ucx_conn *n = b->conn;
	struct sl_ucx_import *im;
	struct sl_ucx_memory *m;
	struct sl_desc d, e;
	uint32_t count = 1;

	if (piece >= b->pieces.count)
		return 0;
	d = sl_piece(&b->pieces, piece);
	for (; piece + count < b->pieces.count; count++) {
		e = sl_piece(&b->pieces, piece + count);
		if (e.local != d.local + d.len || e.remote != d.remote + d.len ||
		    e.local_key != d.local_key || e.remote_key != d.remote_key)
			break;
		d.len += e.len;
	}
	/* there until the batch ends: the engine's promise */
	m = sl_ucx_find(n->worker->context, d.local_key);
	im = sl_ucx_import_of(n, d.remote_key);
	/* A list may have changed since it was checked. */
	if (!m || !im || !sl_within(d.local, d.len, m->len) ||
	    !sl_within(d.remote, d.len, im->size))
		return 0;
	*run = (struct sl_ucx_run){
		.local = m->base + d.local,
		.remote = d.remote,
		.len = d.len,
		.import = im,
		.memory = m,
		.first = piece,
		.count = count,
	};
	return 1;
}

static int next_run(struct sl_ucx_batch *b)
{
	if (b->next_piece >= b->pieces.count)
		return 0;
	if (!run_at(b, b->next_piece, &b->run)) {
		sl_ucx_fail(b, SL_UCX_RANGE, (int32_t)b->next_piece);
		return 0;
	}
	b->next_piece += b->run.count;
	return 1;
}

static struct sl_ucx_record *record_of(struct sl_ucx_conn *n, uint32_t seq)
{
	struct sl_ucx_record *r = &n->records[seq % SL_UCX_WINDOW];

	return r->kind != SL_UCX_FREE && r->seq == seq ? r : NULL;
}

static void record_over(struct sl_ucx_conn *n, struct sl_ucx_record *r)
{
	struct sl_ucx_batch *b = r->batch;

	r->batch = NULL;
	if (b)
		b->outstanding--;
	r->kind = SL_UCX_FREE;
	while (n->first_seq != n->next_seq &&
	       n->records[n->first_seq % SL_UCX_WINDOW].kind == SL_UCX_FREE)
		n->first_seq++;
	if (b)
		sl_ucx_end_if_over(b);
}

/* The batch ends without what is under way: answers to it are dropped. */
void sl_ucx_detach(struct sl_ucx_batch *b)
{
	struct sl_ucx_conn *n = b->conn;

	for (uint32_t seq = n->first_seq; seq != n->next_seq; seq++) {
		struct sl_ucx_record *r = &n->records[seq % SL_UCX_WINDOW];

		if (r->kind == SL_UCX_FREE || r->batch != b)
			continue;
		r->batch = NULL;
		b->outstanding--;
	}
}

void sl_ucx_acknowledged(struct sl_ucx_conn *n, const struct sl_ucx_head *h)
{
	for (uint32_t seq = n->first_seq; (int32_t)(h->seq - seq) >= 0 && seq != n->next_seq;
	     seq++) {
		struct sl_ucx_record *r = record_of(n, seq);

		if (!r || r->kind != SL_UCX_WRITING)
			continue;
		if (seq == h->seq && h->status != 0 && r->batch)
			sl_ucx_fail(r->batch, h->status, (int32_t)r->piece);
		record_over(n, r);
	}
}

static struct sl_ucx_record *new_record(struct sl_ucx_batch *b, uint8_t kind)
{
	struct sl_ucx_conn *n = b->conn;
	struct sl_ucx_record *r = &n->records[n->next_seq % SL_UCX_WINDOW];

	*r = (struct sl_ucx_record){.batch = b,
				    .seq = n->next_seq++,
				    .kind = kind,
				    .piece = b->run.first,
				    .off = b->run.done};
	b->outstanding++;
	return r;
}

/* Also where a peer acknowledges what UCX has not sent: messages must not pile up here. */
static int window_full(const struct sl_ucx_conn *n)
{
	return n->next_seq - n->first_seq >= SL_UCX_WINDOW || n->data_sends >= 2 * SL_UCX_WINDOW;
}

static void address_to(struct sl_ucx_message *p, uint8_t type, const struct sl_ucx_record *r,
		       const struct sl_ucx_import *im)
{
	p->head.type = type;
	p->head.seq = r->seq;
	p->head.key = im->key;
	p->head.ticket = im->ticket;
	p->counted = 1;
}

/* Takes as much of the run as a message has room for. */
static uint64_t fitting(const struct sl_ucx_run *run, uint64_t room)
{
	uint64_t left = run->len - run->done;

	return left < room ? left : room;
}

static int all_taken(const struct sl_ucx_batch *b)
{
	return b->run.done == b->run.len && b->next_piece == b->pieces.count;
}

/* Acknowledgements of what was sent without asking for any. */
void sl_ucx_request_ack(struct sl_ucx_conn *n)
{
	struct sl_ucx_message *p;

	if (n->first_seq == n->next_seq)
		return;
	p = sl_ucx_new_notice(n, SL_UCX_MSG_ASK);
	if (!p)
		return;
	p->head.seq = n->next_seq - 1;
	sl_ucx_send(n, p);
}

/* Rows of one message's table. */
#define ROWS 512

/* memcpy from memory of ours; where it is gone the batch fails, and zeros go in its place. */
static void copy_out(struct sl_ucx_batch *b, uint8_t *to, const uint8_t *local, uint64_t len)
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
		uint64_t len = fitting(run, room - bytes);

		table[rows++] = (struct sl_ucx_place){run->remote + run->done, len};
		if (b->write)
			copy_out(b, data + bytes, run->local + run->done, len);
		bytes += len;
		run->done += len;
		if (run->done < run->len)
			break;
		if (!next_run(b))
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
	struct sl_ucx_record *r = new_record(b, b->write ? SL_UCX_WRITING : SL_UCX_READING);

	address_to(p, b->write ? SL_UCX_MSG_WRITE : SL_UCX_MSG_READ, r, im);
	pack(b, p, r, room);
	p->head.flags = (uint16_t)(first ? SL_UCX_FIRST : 0);
	if (all_taken(b) || r->seq % 8 == 7 || window_full(n) || b->run.import != im)
		p->head.flags |= SL_UCX_ASK;
	sl_ucx_send(n, p);
}

/* One message of one place, without a table. */
static void send_plain(struct sl_ucx_batch *b, struct sl_ucx_message *p, uint64_t room)
{
	struct sl_ucx_conn *n = b->conn;
	struct sl_ucx_run *run = &b->run;
	int first = run->first == 0 && run->done == 0;
	struct sl_ucx_record *r = new_record(b, b->write ? SL_UCX_WRITING : SL_UCX_READING);
	uint8_t *local = run->local + run->done;
	uint64_t len = fitting(run, room);

	r->len = len;
	r->local = local;
	r->memory = run->memory;
	address_to(p, b->write ? SL_UCX_MSG_WRITE : SL_UCX_MSG_READ, r, run->import);
	p->head.off = run->remote + run->done;
	p->head.len = len;
	run->done += len;
	p->head.flags = (uint16_t)(first ? SL_UCX_FIRST : 0);
	if (all_taken(b) || r->seq % 8 == 7 || window_full(n))
		p->head.flags |= SL_UCX_ASK;
	if (b->write) {
		copy_out(b, p->body, local, len);
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

int sl_ucx_send_batch(struct sl_ucx_batch *b, uint64_t *bytes)
{
	struct sl_ucx_conn *n = b->conn;

	for (;;) {
		struct sl_ucx_message *p;
		uint32_t before;
		int plain;

		if (b->run.done == b->run.len && !next_run(b))
			return 0;
		if (*bytes == 0)
			return 1;
		if (window_full(n))
			return -EAGAIN;
		plain = is_plain(b, SL_UCX_BODY_MAX);
		p = sl_ucx_new_message(n->worker, !plain     ? SL_UCX_BODY_MAX
						  : b->write ? fitting(&b->run, SL_UCX_BODY_MAX)
							     : 0);
		if (!p)
			return -EAGAIN;
		before = n->next_seq;
		if (plain)
			send_plain(b, p, SL_UCX_BODY_MAX);
		else
			send_packed(b, p, SL_UCX_BODY_MAX);
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
	for (uint32_t piece = r->piece; left && run_at(b, piece, &run);
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
	struct sl_ucx_record *r = record_of(n, h->seq);

	if (!r || r->kind != SL_UCX_READING)
		return 0;
	if (r->batch && h->status != 0)
		sl_ucx_fail(r->batch, h->status, (int32_t)r->piece);
	else if (r->batch && len != r->len)
		sl_ucx_fail(r->batch, UCS_ERR_IO_ERROR, (int32_t)r->piece);
	else if (r->batch && land(r->batch, r, data) != 0)
		return -EAGAIN;
	record_over(n, r);
	return 0;
}
