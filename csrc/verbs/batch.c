/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The end of a batch: by a completion (complete.c), a cancel or an end of the connection (conn.c),
 * a refused key, or a settle (settle.c). Each of these notes a status, drops the records that are
 * not posted, and calls sl_verbs_end_if_over, which waits for the posted ones. The types are in
 * pair.h.
 */
#define _GNU_SOURCE
#include "pair.h"

void sl_verbs_release_memories(struct sl_verbs_context *c, struct sl_verbs_batch *b)
{
	uint32_t key = 0;

	for (uint32_t i = 0; b->held_runs; i++) {
		uint32_t before = key;

		key = sl_piece(&b->pieces, i).local_key;
		if (i == 0 || key != before) {
			sl_verbs_memory_of(c, key)->users--;
			b->held_runs--;
		}
	}
}

void sl_verbs_drop_record(struct sl_verbs_conn *n, struct sl_verbs_record *r)
{
	struct sl_verbs_batch *b = r->batch;

	if (r->kind == SL_VERBS_NOTIF)
		n->accepted--;
	sl_verbs_free_frame_of(n, r);
	sl_verbs_free_record(n->context, r);
	if (b)
		b->records_open--;
}

/* Drops the records of a batch that are on a list. */
static void drop_from_list(struct sl_verbs_list *l, struct sl_verbs_batch *b)
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

/* Reports the outcome to the program, and frees the batch. */
static void end_batch(struct sl_verbs_batch *b)
{
	struct sl_verbs_conn *n = b->conn;
	struct sl_verbs_context *c = n->context;
	struct sl_verbs_traffic *t = c->traffic;

	sl_verbs_unqueue_notif(b);
	sl_verbs_release_memories(c, b);
	sl_ring_put(c->ring,
		    (struct sl_done){b->tag, b->status, sl_reported_piece(&b->pieces, b->piece)});
	if (n->first_unposted == b)
		n->first_unposted = b->next;
	b->prev->next = b->next;
	b->next->prev = b->prev;
	sl_pieces_trim(&b->pieces);
	b->conn = NULL;
	b->next = t->free_batches;
	t->free_batches = b;
	t->batches_used--;
	if (n->dropped_imports)
		sl_verbs_free_dropped_imports(n);
	if (n->closed)
		pthread_cond_broadcast(&c->changed);
	if (!t->caller_polls)
		sl_verbs_wake_poller(c);
}

void sl_verbs_end_if_over(struct sl_verbs_batch *b)
{
	if (b->records_open == 0 && (b->status != 0 || (sl_verbs_all_posted(b) && !b->notif)))
		end_batch(b);
}

void sl_verbs_give_up_batch(struct sl_verbs_batch *b, int32_t status, int32_t piece)
{
	if (b->status == 0) {
		b->status = status;
		b->piece = piece;
	}
	sl_verbs_unqueue_notif(b);
	drop_from_list(&b->conn->repost, b);
	drop_from_list(&b->conn->resend, b);
	sl_verbs_end_if_over(b);
}

void sl_verbs_key_refused(struct sl_verbs_batch *b, struct sl_verbs_pair *refused_by, int32_t piece)
{
	if (refused_by && b->status == 0) {
		b->refused_by = refused_by;
		b->records_open++;
	}
	sl_verbs_give_up_batch(b, SL_VERBS_REVOKED, piece);
}

void sl_verbs_end_refusals(struct sl_verbs_conn *n, const struct sl_verbs_pair *l)
{
	for (uint32_t i = 0; i < n->imports_len; i++)
		if (n->imports[i] && (!l || n->imports[i]->refused_by == l))
			n->imports[i]->refused_by = NULL;
	for (struct sl_verbs_batch *b = n->batches.next, *next; b != &n->batches; b = next) {
		next = b->next;
		if (!b->refused_by || (l && b->refused_by != l))
			continue;
		b->refused_by = NULL;
		b->records_open--;
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
	if (!sl_verbs_all_posted(b) || b->notif || has_record_of(&n->repost, b) ||
	    has_record_of(&n->resend, b))
		sl_verbs_give_up_batch(b, status, -1);
}
