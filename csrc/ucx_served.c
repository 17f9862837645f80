/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Batches that the owner of the memory serves, by messages that carry the bytes: writes go to it, and
 * it lands and acknowledges them, reads are asked for and landed here.
 */
#include "ucx_worker.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/*
 * Contiguous bytes of one message by rendezvous: what cancel and fence wait for, and what a frozen
 * peer may still have in hand.
 */
#define LARGE (256u << 10)
/* Rows of one message's table. */
#define ROWS 512

/* Whether the rest of the run is one message that the receiver takes by rendezvous. */
static int is_large(const struct sl_ucx_batch *b)
{
	uint64_t min = b->conn->worker->context->config.rendezvous;

	return min && b->run.len - b->run.done >= min;
}

static void send_large(struct sl_ucx_batch *b, struct sl_ucx_parcel *p)
{
	struct sl_ucx_run *run = &b->run;
	struct sl_ucx_record *r = sl_ucx_new_record(b, b->write ? SL_UCX_WRITING : SL_UCX_READING);
	uint64_t len = run->len - run->done;
	uint8_t *local = run->local + run->done;

	if (len > LARGE)
		len = LARGE;
	r->exact = (uint8_t)(b->write != 0);
	r->len = len;
	r->local = local;
	b->exact += r->exact;
	sl_ucx_address_to(p, b->write ? SL_UCX_MSG_WRITE : SL_UCX_MSG_READ, r, run->import);
	p->head.flags = b->write ? SL_UCX_EXACT : SL_UCX_LARGE;
	p->head.off = run->remote + run->done;
	p->head.len = len;
	if (run->first == 0 && run->done == 0)
		p->head.flags |= SL_UCX_FIRST;
	run->done += len;
	if (b->write)
		sl_ucx_send(b->conn, p, local, len, UCP_AM_SEND_FLAG_RNDV);
	else
		sl_ucx_send(b->conn, p, NULL, 0, 0);
}

/*
 * One message of as many pieces as fit: a table, and for a write their bytes behind it. The table is
 * made at the front of the body, and the bytes are moved up to it, so each is copied once.
 */
static void pack(struct sl_ucx_batch *b, struct sl_ucx_parcel *p, struct sl_ucx_record *r, uint64_t room)
{
	struct sl_ucx_place *table = (struct sl_ucx_place *)p->body;
	struct sl_ucx_run *run = &b->run;
	const struct sl_ucx_import *im = run->import;
	uint32_t rows = 0;
	uint64_t bytes = 0, most = room / (sizeof(*table) + run->len - run->done) + 1; /* if the others are alike */
	uint8_t *data;

	if (most > ROWS)
		most = ROWS;
	data = p->body + most * sizeof(*table);
	room -= most * sizeof(*table);
	while (rows < most && bytes < room) {
		uint64_t len = sl_ucx_bite(run, room - bytes);

		table[rows++] = (struct sl_ucx_place){run->remote + run->done, len};
		if (b->write)
			memcpy(data + bytes, run->local + run->done, len);
		bytes += len;
		run->done += len;
		if (run->done < run->len)
			break;
		if (!sl_ucx_next_run(b))
			break;
		if (run->import != im || (is_large(b) && b->write))
			break;
	}
	r->len = bytes;
	p->head.count = rows;
	p->head.len = bytes;
	p->head.off = most * sizeof(*table); /* where the bytes begin */
	p->len = (uint32_t)(b->write ? p->head.off + bytes : rows * sizeof(*table));
}

static void send_packed(struct sl_ucx_batch *b, struct sl_ucx_parcel *p, uint64_t room)
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
	sl_ucx_send(n, p, p->body, p->len, 0);
}

/* One message of one place, whose bytes are sent from where they are. */
static void send_plain(struct sl_ucx_batch *b, struct sl_ucx_parcel *p, uint64_t room)
{
	struct sl_ucx_conn *n = b->conn;
	struct sl_ucx_run *run = &b->run;
	int first = run->first == 0 && run->done == 0;
	struct sl_ucx_record *r = sl_ucx_new_record(b, b->write ? SL_UCX_WRITING : SL_UCX_READING);
	uint8_t *local = run->local + run->done;
	uint64_t len = sl_ucx_bite(run, room);

	r->len = len;
	r->local = local;
	sl_ucx_address_to(p, b->write ? SL_UCX_MSG_WRITE : SL_UCX_MSG_READ, r, run->import);
	p->head.off = run->remote + run->done;
	p->head.len = len;
	run->done += len;
	p->head.flags = (uint16_t)(first ? SL_UCX_FIRST : 0);
	if (sl_ucx_all_taken(b) || r->seq % 8 == 7 || sl_ucx_window_full(n))
		p->head.flags |= SL_UCX_ASK;
	sl_ucx_send(n, p, b->write ? local : NULL, b->write ? len : 0, 0);
}

/* A whole message of one run needs no table, and no copy where UCX can send from the memory itself. */
static int is_plain(const struct sl_ucx_batch *b, uint64_t room)
{
	const struct sl_ucx_run *run = &b->run;

	if (!b->write)
		return run->len - run->done >= room || b->next_piece == b->pieces.count;
	/* Where memory is shared UCX might copy it later, after the batch was ended by force. */
	if (b->conn->worker->context->config.shared)
		return 0;
	return run->len - run->done >= room / 2 || b->next_piece == b->pieces.count;
}

int sl_ucx_move_served(struct sl_ucx_batch *b, uint64_t *bytes)
{
	struct sl_ucx_conn *n = b->conn;
	uint64_t segment = n->worker->context->config.segment;

	for (;;) {
		struct sl_ucx_parcel *p;
		uint64_t before;

		if (b->run.done == b->run.len && !sl_ucx_next_run(b))
			return 0;
		if (*bytes == 0)
			return 1;
		if (sl_ucx_window_full(n))
			return -EAGAIN;
		p = sl_ucx_parcel(n->worker, is_large(b) || is_plain(b, segment) ? 0 : segment);
		if (!p)
			return -EAGAIN;
		before = n->next_seq;
		if (is_large(b))
			send_large(b, p);
		else if (is_plain(b, segment))
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

/* Lands bytes in the pieces of a read, from where its request began. */
static void land(struct sl_ucx_batch *b, const struct sl_ucx_record *r, const uint8_t *data)
{
	struct sl_ucx_run run;
	uint64_t left = r->len, off = r->off;

	if (r->local) { /* found once: a long run is not put together again for each of its answers */
		memcpy(r->local, data, left);
		return;
	}
	for (uint32_t piece = r->piece; left && sl_ucx_run_at(b, piece, &run); piece += run.count, off = 0) {
		uint64_t len = run.len - off < left ? run.len - off : left;

		memcpy(run.local + off, data, len);
		data += len;
		left -= len;
	}
	if (left)
		sl_ucx_fail(b, SL_UCX_RANGE, (int32_t)r->piece);
}

/* Bytes of an answer that UCX lands by itself. */
struct arrival {
	struct sl_ucx_conn *conn; /* which stays as long as its batch */
	uint32_t seq;
};

static void landed(struct sl_ucx_conn *n, struct sl_ucx_record *r, ucs_status_t status)
{
	if (status != UCS_OK) { /* mostly because its process has died, which others hear of later */
		if (r->batch)
			sl_ucx_fail(r->batch, SL_UCX_LOST, (int32_t)r->piece);
		sl_ucx_lose(n);
	}
	sl_ucx_record_over(n, r, SL_UCX_BY_ANSWER);
}

static void on_landed(void *request, ucs_status_t status, size_t length, void *user)
{
	struct arrival a = *(struct arrival *)user;
	struct sl_ucx_record *r = sl_ucx_record_of(a.conn, a.seq);

	(void)length;
	free(user);
	sl_ucx.ucp_request_free(request);
	if (r)
		landed(a.conn, r, status);
}

static ucs_status_t fetch(struct sl_ucx_conn *n, struct sl_ucx_record *r, void *data)
{
	struct arrival *a = r->local ? malloc(sizeof(*a)) : NULL;
	ucp_request_param_t param = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE,
		.cb.recv_am = on_landed,
		.user_data = a,
		.memory_type = UCS_MEMORY_TYPE_HOST,
	};
	ucs_status_ptr_t request;

	if (!a) {
		sl_ucx_fail(r->batch, r->local ? UCS_ERR_NO_MEMORY : UCS_ERR_IO_ERROR, (int32_t)r->piece); /* none was asked for */
		sl_ucx_record_over(n, r, SL_UCX_BY_ANSWER);
		return UCS_OK;
	}
	*a = (struct arrival){n, r->seq};
	r->kind = SL_UCX_LANDING;
	request = sl_ucx.ucp_am_recv_data_nbx(n->worker->handle, data, r->local, r->len, &param);
	if (!request || UCS_PTR_IS_ERR(request)) {
		free(a);
		landed(n, r, UCS_PTR_RAW_STATUS(request));
	}
	return UCS_OK;
}

ucs_status_t sl_ucx_answered(struct sl_ucx_conn *n, const struct sl_ucx_head *h, void *data, size_t len, int rendezvous)
{
	struct sl_ucx_record *r = sl_ucx_record_of(n, h->seq);

	if (!r || r->kind != SL_UCX_READING || !(r->waits & SL_UCX_BY_ANSWER))
		return UCS_OK;
	if (r->batch && h->status != 0)
		sl_ucx_fail(r->batch, h->status, (int32_t)r->piece);
	else if (r->batch && r->faulty)
		sl_ucx_fail(r->batch, SL_UCX_FAULT, (int32_t)r->piece);
	else if (r->batch && len != r->len)
		sl_ucx_fail(r->batch, UCS_ERR_IO_ERROR, (int32_t)r->piece);
	else if (r->batch && rendezvous)
		return fetch(n, r, data);
	else if (r->batch)
		land(r->batch, r, data);
	sl_ucx_record_over(n, r, SL_UCX_BY_ANSWER);
	return UCS_OK;
}
