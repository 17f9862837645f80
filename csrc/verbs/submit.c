/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the program asks of a batch: submit and cancel; and the end of an import's epoch. submit
 * checks the state of the connection, copies the pieces, checks them, and posts what has room.
 * Later completions post the rest (post.c).
 */
#define _GNU_SOURCE
#include "pair.h"

#include <errno.h>
#include <string.h>

/* Whether any queue pair, live or not, reaches both memories. */
static int reachable(const struct sl_verbs_conn *n, const struct sl_verbs_memory *m,
		     const struct sl_verbs_import *im)
{
	uint32_t pairs = im->reachable_over & n->pairs_made;

	for (uint32_t i = 0; pairs >> i; i++)
		if (pairs >> i & 1 && m->pinned_rails >> n->pairs[i]->rail->index & 1)
			return 1;
	return 0;
}

/* 0, or the errno for a piece between these memories. */
static int check_memories(const struct sl_verbs_conn *n, int write, const struct sl_verbs_memory *m,
			  const struct sl_verbs_import *im)
{
	if (!m || !im || im->dropped)
		return ERANGE;
	if (im->expired)
		return ESTALE;
	if (write && im->flags & SL_VERBS_READ_ONLY)
		return EROFS;
	return reachable(n, m, im) ? 0 : EHOSTUNREACH;
}

/*
 * Checks the pieces, and counts each run of them as a user of its local memory. Returns 0, or what
 * sl_verbs_submit returns for the first piece that is wrong.
 */
static int64_t check_pieces(const struct sl_verbs_conn *n, struct sl_verbs_batch *b)
{
	struct sl_verbs_memory *m = NULL;
	const struct sl_verbs_import *im = NULL;
	uint32_t local = 0, slot = 0;

	for (uint32_t i = 0; i < b->pieces.count; i++) {
		struct sl_desc d = sl_piece(&b->pieces, i);
		int wrong = 0, run = i == 0 || d.local_key != local;

		if (run || d.remote_key != slot) {
			m = sl_verbs_memory_of(n->context, local = d.local_key);
			im = sl_verbs_import_of(n, slot = d.remote_key);
			wrong = check_memories(n, b->write, m, im);
			if (run && !wrong) {
				m->users++;
				b->held_runs++;
			}
		}
		if (!wrong && (d.len == 0 || !sl_within(d.local, d.len, m->len) ||
			       !sl_within(d.remote, d.len, im->size)))
			wrong = ERANGE;
		if (!wrong && !b->write && m->flags & SL_VERBS_READ_ONLY)
			wrong = EROFS;
		if (wrong)
			return wrong | (int64_t)sl_reported_piece(&b->pieces, (int32_t)i) << 16;
		b->bytes += d.len;
	}
	return 0;
}

/* 0, or the errno why the connection takes no batch now. */
static int64_t check_conn(struct sl_verbs_conn *n, int notif)
{
	struct sl_verbs_traffic *t = n->context->traffic;
	const struct sl_ring *r = n->context->ring;

	if (n->outcome == SL_VERBS_LOST)
		return EPIPE;
	if (n->closed || !n->initiator)
		return EBADF;
	/* A batch occupies a place in the ring until its completion was polled. */
	if (t->batches_used + (r->head - __atomic_load_n(&r->tail, __ATOMIC_ACQUIRE)) > r->mask)
		return EAGAIN;
	if (notif && (n->accepted - n->taken_by_peer >= n->window || !n->free_frames)) {
		n->was_refused = 1;
		return EAGAIN;
	}
	return 0;
}

static void enqueue(struct sl_verbs_conn *n, struct sl_verbs_batch *b)
{
	b->order = n->order++;
	b->prev = n->batches.prev;
	b->next = &n->batches;
	b->prev->next = b->next->prev = b;
	if (n->first_unposted == &n->batches)
		n->first_unposted = b;
	n->context->traffic->batches_used++;
}

/* The message that follows the data of a batch. */
struct notif {
	const uint8_t *data; /* NULL: none */
	size_t len;
};

static int notif_allowed(const struct notif *t, int write)
{
	return t->len <= SL_VERBS_NOTIF_MAX && (write || !t->data);
}

/* Copies the message into a frame, and queues the batch for sl_verbs_post_notifs. */
static void queue_notif(struct sl_verbs_batch *b, const struct notif *t)
{
	struct sl_verbs_conn *n = b->conn;
	struct sl_verbs_frame *s = n->free_frames;

	n->free_frames = s->next;
	s->len = (uint32_t)(sizeof(struct sl_verbs_head) + t->len);
	if (t->len)
		memcpy(s->at + sizeof(struct sl_verbs_head), t->data, t->len);
	b->notif = s;
	n->accepted++;
	b->next_notif = NULL;
	if (n->notif_last)
		n->notif_last->next_notif = b;
	else
		n->notif_first = b;
	n->notif_last = b;
}

/* Makes b the batch that spec describes. b keeps its memory for a copy of the pieces. */
static void init_batch(struct sl_verbs_batch *b, const struct sl_verbs_batch *spec,
		       struct sl_verbs_conn *n)
{
	struct sl_pieces pieces = b->pieces;

	*b = *spec;
	b->conn = n;
	b->pieces = pieces;
	sl_pieces_take(&b->pieces, &spec->pieces);
	/* before they are checked: the program may change its arrays at any time */
	sl_pieces_keep(&b->pieces);
	b->piece = b->pair = -1;
}

/* Under the lock. spec has what the caller asks for: tag, direction and pieces. */
static int64_t submit(struct sl_verbs_conn *n, struct sl_verbs_batch *spec,
		      const struct notif *notif)
{
	struct sl_verbs_traffic *t = n->context->traffic;
	struct sl_verbs_batch *b = t->free_batches, *next;
	int64_t rc = check_conn(n, notif->data != NULL);

	if (rc == 0 && sl_pieces_reserve(&b->pieces, &spec->pieces) != 0)
		rc = ENOMEM;
	if (rc != 0)
		return rc;
	next = b->next;
	init_batch(b, spec, n);
	rc = check_pieces(n, b);
	if (rc != 0) {
		sl_verbs_release_memories(n->context, b);
		b->conn = NULL;
		b->next = next;
		return rc;
	}
	b->one_pair = b->bytes <= n->context->config.slice;
	t->free_batches = next;
	if (notif->data)
		queue_notif(b, notif);
	enqueue(n, b);
	t->caller_polls = 1; /* it finds what ends now without being woken */
	sl_verbs_post_waiting(n);
	t->caller_polls = 0;
	if (!t->queued_conns) /* nothing waits for completions but callers, which poll */
		atomic_fetch_add_explicit(&t->drives, 1, memory_order_relaxed);
	return 0;
}

int64_t sl_verbs_submit(struct sl_verbs_conn *n, int write, uint64_t tag, const struct sl_desc *d,
			size_t count, const struct sl_pages *p, const struct sl_nest *nest,
			const uint32_t *local, const uint32_t *remote, const uint8_t *notif,
			size_t notif_len)
{
	struct sl_verbs_batch spec = {.tag = tag, .write = write};
	struct notif t = {notif, notif_len};
	int64_t rc;

	if (!sl_pieces_init(&spec.pieces, d, count, p, nest, local, remote) ||
	    !notif_allowed(&t, write))
		return ERANGE;
	sl_verbs_lock(n->context);
	rc = submit(n, &spec, &t);
	sl_verbs_unlock(n->context);
	return rc;
}

void sl_verbs_cancel(struct sl_verbs_conn *n, uint64_t tag)
{
	struct sl_verbs_batch *b;

	sl_verbs_lock(n->context);
	for (b = n->batches.prev; b != &n->batches && b->tag != tag; b = b->prev)
		;
	if (b != &n->batches && !b->cancelled) {
		sl_verbs_cancel_batch(b, SL_VERBS_ABORTED);
		if (!n->ended)
			sl_verbs_post_waiting(n);
	}
	sl_verbs_unlock(n->context);
}

void sl_verbs_expire(struct sl_verbs_conn *n, uint32_t slot)
{
	struct sl_verbs_import *im;

	sl_verbs_lock(n->context);
	im = sl_verbs_import_of(n, slot);
	if (im) {
		im->expired = 1;
		im->refused_by = NULL; /* the peer itself has said that it revoked the memory */
	}
	if (!n->ended)
		sl_verbs_post_waiting(n); /* records that wait are refused when they are built */
	sl_verbs_unlock(n->context);
}
