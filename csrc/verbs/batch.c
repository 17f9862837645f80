/* SPDX-License-Identifier: Apache-2.0 */
/* The ends of batches, and the records and memories that a batch holds until then. */
#define _GNU_SOURCE
#include "pair.h"

void sl_verbs_fail(struct sl_verbs_batch *b, int32_t status, int32_t piece)
{
	if (b->status == 0) {
		b->status = status;
		b->piece = piece;
	}
}

static int is_listed(const struct sl_verbs_batch *b, const struct sl_verbs_memory *m)
{
	for (uint32_t i = 0; i < b->memories_len; i++)
		if (b->memories[i] == m)
			return 1;
	return 0;
}

void sl_verbs_hold_memory(struct sl_verbs_batch *b, struct sl_verbs_memory *m)
{
	if (is_listed(b, m))
		return;
	m->users++;
	if (b->memories_len < SL_VERBS_LISTED)
		b->memories[b->memories_len++] = m;
	else
		b->unlisted_holds++;
}

void sl_verbs_release_memories(struct sl_verbs_context *c, struct sl_verbs_batch *b)
{
	uint32_t key = 0;

	/* The same runs of one key as in submit's check, which held each that is not listed. */
	for (uint32_t i = 0; b->unlisted_holds; i++) {
		uint32_t before = key;
		struct sl_verbs_memory *m;

		key = sl_piece(&b->pieces, i).local_key;
		m = i == 0 || key != before ? sl_verbs_find(c, key) : NULL;
		if (m && !is_listed(b, m)) {
			m->users--;
			b->unlisted_holds--;
		}
	}
	while (b->memories_len)
		b->memories[--b->memories_len]->users--;
}

/* Forgets a record that will not be posted again. It is in no list. */
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

/* Takes the records of a batch out of a list. */
static void drop_records_of(struct sl_verbs_list *l, struct sl_verbs_batch *b)
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

void sl_verbs_drop_waiting_records(struct sl_verbs_batch *b)
{
	if (b->conn->repost.first)
		drop_records_of(&b->conn->repost, b);
	if (b->conn->resend.first)
		drop_records_of(&b->conn->resend, b);
}

void sl_verbs_drop_all_records(struct sl_verbs_conn *n)
{
	struct sl_verbs_record *r;

	for (uint32_t i = 0; i < SL_VERBS_PAIRS; i++)
		while (n->pairs[i] && (r = sl_verbs_pop(&n->pairs[i]->unproved)) != NULL)
			sl_verbs_drop_record(n, r);
	while ((r = sl_verbs_pop(&n->repost)) != NULL)
		sl_verbs_drop_record(n, r);
	while ((r = sl_verbs_pop(&n->resend)) != NULL)
		sl_verbs_drop_record(n, r);
	n->unproved = 0;
}

static void end(struct sl_verbs_batch *b)
{
	struct sl_verbs_conn *n = b->conn;
	struct sl_verbs_context *c = n->context;
	struct sl_verbs_traffic *t = c->traffic;

	sl_verbs_unqueue_notif(b);
	sl_verbs_release_memories(c, b);
	sl_ring_put(c->ring,
		    (struct sl_done){b->tag, b->status, sl_reported_piece(&b->pieces, b->piece)});
	if (n->head == b)
		n->head = b->next;
	b->prev->next = b->next;
	b->next->prev = b->prev;
	sl_pieces_trim(&b->pieces);
	b->conn = NULL;
	b->next = t->free;
	t->free = b;
	t->live--;
	if (n->dropped_imports)
		sl_verbs_free_dropped_imports(n);
	if (n->closed)
		pthread_cond_broadcast(&c->news);
	if (!t->polled)
		sl_verbs_wake_poller(c);
}

void sl_verbs_end_if_over(struct sl_verbs_batch *b)
{
	if (b->open == 0 && (b->status != 0 || (sl_verbs_begun(b) && !b->notif)))
		end(b);
}

void sl_verbs_give_up_batch(struct sl_verbs_batch *b, int32_t status, int32_t piece)
{
	sl_verbs_fail(b, status, piece);
	sl_verbs_unqueue_notif(b);
	sl_verbs_drop_waiting_records(b);
	sl_verbs_end_if_over(b);
}

/*
 * The peer's NIC refused a key. Usually the peer revoked it. But a process that is killed loses its
 * memory before its queue pairs, so the peer may be dying. Until that is known the batch has a
 * doubt: the queue pair that reported the refusal. sl_verbs_resolve_doubt ends it: the peer has
 * answered for that queue pair (the batch ends as revoked), or is lost (it ends as lost).
 */
void sl_verbs_key_refused(struct sl_verbs_batch *b, struct sl_verbs_pair *doubt, int32_t piece)
{
	if (doubt && b->status == 0) {
		b->doubt = doubt;
		b->open++;
	}
	sl_verbs_give_up_batch(b, SL_VERBS_REVOKED, piece);
}

void sl_verbs_resolve_doubt(struct sl_verbs_conn *n, const struct sl_verbs_pair *l)
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
		sl_verbs_end_if_over(b);
	}
}

static int has_record_of(const struct sl_verbs_list *l, const struct sl_verbs_batch *b)
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
	if (!sl_verbs_begun(b) || b->notif || has_record_of(&n->repost, b) ||
	    has_record_of(&n->resend, b))
		sl_verbs_give_up_batch(b, status, -1);
}
