/* SPDX-License-Identifier: Apache-2.0 */
/* The window of messages with data that are under way on a connection, each with a record. */
#include "worker.h"

struct sl_ucx_record *sl_ucx_record_of(struct sl_ucx_conn *n, uint32_t seq)
{
	struct sl_ucx_record *r = &n->records[seq % SL_UCX_WINDOW];

	return r->kind != SL_UCX_FREE && r->seq == seq ? r : NULL;
}

void sl_ucx_record_over(struct sl_ucx_conn *n, struct sl_ucx_record *r)
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
		sl_ucx_settle(b);
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
		struct sl_ucx_record *r = sl_ucx_record_of(n, seq);

		if (!r || r->kind != SL_UCX_WRITING)
			continue;
		if (seq == h->seq && h->status != 0 && r->batch)
			sl_ucx_fail(r->batch, h->status, (int32_t)r->piece);
		sl_ucx_record_over(n, r);
	}
}

struct sl_ucx_record *sl_ucx_new_record(struct sl_ucx_batch *b, uint8_t kind)
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
int sl_ucx_window_full(const struct sl_ucx_conn *n)
{
	return n->next_seq - n->first_seq >= SL_UCX_WINDOW || n->carried >= 2 * SL_UCX_WINDOW;
}

void sl_ucx_address_to(struct sl_ucx_message *p, uint8_t type, const struct sl_ucx_record *r,
		       const struct sl_ucx_import *im)
{
	p->head.type = type;
	p->head.seq = r->seq;
	p->head.key = im->key;
	p->head.ticket = im->ticket;
	p->counted = 1;
}

/* Takes as much of the run as a message has room for. */
uint64_t sl_ucx_bite(const struct sl_ucx_run *run, uint64_t room)
{
	uint64_t left = run->len - run->done;

	return left < room ? left : room;
}

int sl_ucx_all_taken(const struct sl_ucx_batch *b)
{
	return b->run.done == b->run.len && b->next_piece == b->pieces.count;
}

/* Acknowledgements of what was sent without asking for any. */
void sl_ucx_ask(struct sl_ucx_conn *n)
{
	struct sl_ucx_message *p;

	if (n->first_seq == n->next_seq)
		return;
	p = sl_ucx_notice(n, SL_UCX_MSG_ASK);
	if (!p)
		return;
	p->head.seq = n->next_seq - 1;
	sl_ucx_send(n, p);
}
