/* SPDX-License-Identifier: Apache-2.0 */
/* Batches: from submit to their end. */
#define _GNU_SOURCE
#include "pair.h"

void sl_verbs_fail(struct sl_verbs_batch *b, int32_t status, int32_t piece)
{
	if (b->status == 0) {
		b->status = status;
		b->piece = piece;
	}
}

static int lists(const struct sl_verbs_batch *b, const struct sl_verbs_memory *m)
{
	for (uint32_t i = 0; i < b->memories_len; i++)
		if (b->memories[i] == m)
			return 1;
	return 0;
}

void sl_verbs_hold_memory(struct sl_verbs_batch *b, struct sl_verbs_memory *m)
{
	if (lists(b, m))
		return;
	m->users++;
	if (b->memories_len < SL_VERBS_LISTED)
		b->memories[b->memories_len++] = m;
	else
		b->runs_held++;
}

void sl_verbs_release_memories(struct sl_verbs_context *c, struct sl_verbs_batch *b)
{
	uint32_t key = 0;

	for (uint32_t i = 0; b->runs_held; i++) { /* in the order in which submit held them */
		uint32_t before = key;
		struct sl_verbs_memory *m;

		key = sl_piece(&b->pieces, i).local_key;
		m = i == 0 || key != before ? sl_verbs_find(c, key) : NULL;
		if (m && !lists(b, m)) {
			m->users--;
			b->runs_held--;
		}
	}
	while (b->memories_len)
		b->memories[--b->memories_len]->users--;
}

/* It is not to be done any more. r is in no list. */
void sl_verbs_drop_record(struct sl_verbs_conn *n, struct sl_verbs_record *r)
{
	struct sl_verbs_batch *b = r->batch;

	if (r->kind == SL_VERBS_NOTIF)
		n->accepted--;
	sl_verbs_drop_frame(n, r);
	sl_verbs_recycle(n->context, r);
	if (b)
		b->open--;
}

/* Those of a list that are of this batch. */
static void drop_from(struct sl_verbs_list *l, struct sl_verbs_batch *b)
{
	struct sl_verbs_list all = *l;
	struct sl_verbs_record *r;

	*l = (struct sl_verbs_list){0};
	while ((r = sl_verbs_pop(&all)) != NULL) {
		if (r->batch == b)
			sl_verbs_drop_record(b->conn, r);
		else
			sl_verbs_append(l, r);
	}
}

void sl_verbs_drop_records(struct sl_verbs_batch *b)
{
	if (b->conn->again.first)
		drop_from(&b->conn->again, b);
	if (b->conn->resend.first)
		drop_from(&b->conn->resend, b);
}

void sl_verbs_forget_records(struct sl_verbs_conn *n)
{
	struct sl_verbs_record *r;

	for (uint32_t i = 0; i < SL_VERBS_PAIRS; i++)
		while (n->pairs[i] && (r = sl_verbs_pop(&n->pairs[i]->held)) != NULL)
			sl_verbs_drop_record(n, r);
	while ((r = sl_verbs_pop(&n->again)) != NULL)
		sl_verbs_drop_record(n, r);
	while ((r = sl_verbs_pop(&n->resend)) != NULL)
		sl_verbs_drop_record(n, r);
	n->held = 0;
}

static void end(struct sl_verbs_batch *b)
{
	struct sl_verbs_conn *n = b->conn;
	struct sl_verbs_context *c = n->context;
	struct sl_verbs_traffic *t = c->traffic;

	sl_verbs_unqueue_notif(b);
	sl_verbs_release_memories(c, b);
	sl_ring_put(c->ring,
		    (struct sl_done){b->tag, b->status, sl_piece_told(&b->pieces, b->piece)});
	if (n->head == b)
		n->head = b->next;
	b->prev->next = b->next;
	b->next->prev = b->prev;
	sl_pieces_trim(&b->pieces);
	b->conn = NULL;
	b->next = t->free;
	t->free = b;
	t->live--;
	if (n->graves)
		sl_verbs_reap(n);
	if (n->closed)
		pthread_cond_broadcast(&c->news);
	if (!t->polled)
		sl_verbs_wake_poller(c);
}

void sl_verbs_settle_batch(struct sl_verbs_batch *b)
{
	if (b->open == 0 && (b->status != 0 || (sl_verbs_begun(b) && !b->notif)))
		end(b);
}

void sl_verbs_give_up_batch(struct sl_verbs_batch *b, int32_t status, int32_t piece)
{
	sl_verbs_fail(b, status, piece);
	sl_verbs_unqueue_notif(b);
	sl_verbs_drop_records(b);
	sl_verbs_settle_batch(b);
}

/*
 * A key that is over may be the peer's end: a process that is killed loses its memory before its
 * queue pairs. A batch that fails for it ends once the peer has answered for the queue pair that
 * said so, the doubt, or is lost itself.
 */
void sl_verbs_key_over(struct sl_verbs_batch *b, struct sl_verbs_pair *doubt, int32_t piece)
{
	if (doubt && b->status == 0) {
		b->doubt = doubt;
		b->open++;
	}
	sl_verbs_give_up_batch(b, SL_VERBS_REVOKED, piece);
}

void sl_verbs_clear_doubt(struct sl_verbs_conn *n, const struct sl_verbs_pair *l)
{
	for (uint32_t i = 0; i < n->imports_len; i++)
		if (n->imports[i] && (!l || n->imports[i]->doubt == l))
			n->imports[i]->doubt = NULL;
	for (struct sl_verbs_batch *b = n->live.next, *next; b != &n->live; b = next) {
		next = b->next;
		if (!b->doubt || (l && b->doubt != l))
			continue;
		b->doubt = NULL;
		b->open--;
		if (!l && n->outcome == SL_VERBS_LOST && b->status == SL_VERBS_REVOKED) {
			b->status = SL_VERBS_LOST;
			b->piece = -1;
		}
		sl_verbs_settle_batch(b);
	}
}

static int waits_in(const struct sl_verbs_list *l, const struct sl_verbs_batch *b)
{
	for (const struct sl_verbs_record *r = l->first; r; r = r->next)
		if (r->batch == b)
			return 1;
	return 0;
}

void sl_verbs_cancel_batch(struct sl_verbs_batch *b, int32_t status)
{
	struct sl_verbs_conn *n = b->conn;

	b->cancelled = 1;
	if (!sl_verbs_begun(b) || b->notif || waits_in(&n->again, b) || waits_in(&n->resend, b))
		sl_verbs_give_up_batch(b, status, -1);
}
