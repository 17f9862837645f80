/* SPDX-License-Identifier: Apache-2.0 */
/* Batches, from Submit to their end. move.c cuts them into messages. */
#define _GNU_SOURCE
#include "worker.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* So many bytes Submit sends in the caller's thread. */
#define INLINE (64u << 10)

void sl_ucx_fail(struct sl_ucx_batch *b, int32_t status, int32_t piece)
{
	if (b->status == 0) {
		b->status = status;
		b->piece = piece;
	}
}

static void free_tail(struct sl_ucx_batch *b)
{
	if (!b->tail)
		return;
	sl_ucx_free_message(b->conn->worker, b->tail);
	b->tail = NULL;
	b->conn->credit++;
}

static void end(struct sl_ucx_batch *b)
{
	struct sl_ucx_conn *n = b->conn;
	struct sl_ucx_worker *w = n->worker;

	free_tail(b);
	sl_ring_put(w->ring,
		    (struct sl_done){b->tag, b->status, sl_reported_piece(&b->pieces, b->piece)});
	if (n->head == b)
		n->head = b->next;
	b->prev->next = b->next;
	b->next->prev = b->prev;
	sl_pieces_trim(&b->pieces);
	b->conn = NULL;
	b->next = w->free;
	w->free = b;
	w->batches_live--;
	if (n->dropped_imports)
		sl_ucx_free_dropped_imports(n);
	if (n->state != SL_UCX_OPEN)
		pthread_cond_broadcast(&w->changed);
	if (!w->caller_polls)
		sl_ucx_wake_poller(w);
}

void sl_ucx_end_if_over(struct sl_ucx_batch *b)
{
	if (b->outstanding == 0 && (b->issued || b->status != 0))
		end(b);
}

void sl_ucx_cancel_batch(struct sl_ucx_batch *b, int32_t status)
{
	b->cancelled = 1;
	if (!b->write)
		sl_ucx_detach(b);
	sl_ucx_fail(b, status, -1);
	if (b->outstanding)
		sl_ucx_request_ack(b->conn); /* its last message would, but is not sent */
	sl_ucx_end_if_over(b);
}

/* All bytes of a batch were sent: sends its notification, too. */
static void mark_issued(struct sl_ucx_batch *b)
{
	struct sl_ucx_conn *n = b->conn;

	b->issued = 1;
	n->head = b->next;
	if (b->status != 0 && b->outstanding && b->write)
		sl_ucx_request_ack(n);
	if (b->tail && b->status == 0 && !sl_ucx_is_up(n))
		sl_ucx_fail(b, SL_UCX_LOST, -1);
	if (b->tail && b->status == 0) {
		struct sl_ucx_message *p = b->tail;

		b->tail = NULL;
		p->head.flags = b->write && b->pieces.count ? SL_UCX_CHECKED : 0;
		sl_ucx_send(n, p);
		if (!sl_ucx_is_up(n)) /* the notification may not have been sent */
			sl_ucx_fail(b, SL_UCX_LOST, -1);
	}
	sl_ucx_end_if_over(b);
}

void sl_ucx_end_batches(struct sl_ucx_conn *n)
{
	for (struct sl_ucx_batch *b = n->live.next, *next; b != &n->live; b = next) {
		next = b->next;
		sl_ucx_detach(b);
		sl_ucx_end_if_over(b);
	}
}

/* An end that is not up sends nothing: it may have told the peer that nothing more comes. */
int sl_ucx_send_batches(struct sl_ucx_conn *n, uint64_t bytes)
{
	int moved = 0;

	while (sl_ucx_is_up(n) && n->head != &n->live && bytes > 0) {
		struct sl_ucx_batch *b = n->head;
		uint64_t before = bytes;
		int rc = 0;

		if (b->status == 0)
			rc = sl_ucx_send_batch(b, &bytes);
		moved |= bytes != before;
		if (rc != 0)
			break;
		mark_issued(b);
		moved = 1;
	}
	return moved;
}

/* What is wrong with the pieces, as submit returns it. */
static int64_t check(const struct sl_ucx_conn *n, const struct sl_ucx_batch *b)
{
	const struct sl_ucx_memory *m = NULL;
	const struct sl_ucx_import *im = NULL;
	uint32_t local = 0, slot = 0;

	for (uint32_t i = 0; i < b->pieces.count; i++) {
		struct sl_desc d = sl_piece(&b->pieces, i);
		int wrong = 0;

		if (!m || d.local_key != local)
			m = sl_ucx_find(n->worker->context, local = d.local_key);
		if (!im || d.remote_key != slot)
			im = sl_ucx_import_of(n, slot = d.remote_key);
		if (!m || !im || im->dropped || d.len == 0 || !sl_within(d.local, d.len, m->len) ||
		    !sl_within(d.remote, d.len, im->size))
			wrong = ERANGE;
		else if (b->write && im->flags & SL_UCX_READ_ONLY)
			wrong = EROFS;
		if (wrong)
			return wrong | (int64_t)sl_reported_piece(&b->pieces, (int32_t)i) << 16;
	}
	return 0;
}

/* The notification that follows the bytes of a batch. */
struct tail {
	const uint8_t *notif; /* or NULL */
	size_t len;
};

/* Makes the notification of a batch, and uses one credit. NULL: no memory. */
static struct sl_ucx_message *make_tail(struct sl_ucx_conn *n, const struct tail *t)
{
	struct sl_ucx_message *p = sl_ucx_new_message(n->worker, t->len);

	if (!p)
		return NULL;
	p->head.type = SL_UCX_MSG_NOTIFY;
	p->len = (uint32_t)t->len;
	if (t->len)
		memcpy(p->body, t->notif, t->len);
	n->credit--;
	return p;
}

int sl_ucx_refusal(const struct sl_ucx_conn *n)
{
	switch (n->state) {
	case SL_UCX_OPEN:
		return 0;
	case SL_UCX_DRAINING:
		return EBADF;
	case SL_UCX_BROKEN:
		return EPIPE;
	default:
		return n->outcome == SL_UCX_LOST ? EPIPE : EBADF;
	}
}

static int check_credit(struct sl_ucx_conn *n)
{
	if (n->credit)
		return 0;
	if (!n->starved)
		sl_ucx_send_value(n, SL_UCX_MSG_STARVED, 0);
	n->starved = 1;
	return EAGAIN;
}

static int64_t refuse(struct sl_ucx_conn *n, const struct tail *t)
{
	struct sl_ucx_worker *w = n->worker;
	int rc = sl_ucx_refusal(n);

	if (rc != 0)
		return rc;
	/* A place in the ring is taken until the completion was polled. */
	if (w->batches_live + (w->ring->head - __atomic_load_n(&w->ring->tail, __ATOMIC_ACQUIRE)) >
	    w->ring->mask)
		return EAGAIN;
	return t->notif ? check_credit(n) : 0;
}

int sl_ucx_notify(struct sl_ucx_conn *n, const uint8_t *data, size_t len)
{
	const struct tail t = {.notif = data, .len = len};
	struct sl_ucx_message *p;
	int rc;

	if (len > SL_UCX_NOTIF_MAX)
		return -ERANGE;
	sl_ucx_lock(n->worker);
	rc = sl_ucx_refusal(n);
	if (rc == 0)
		rc = check_credit(n);
	p = rc == 0 ? make_tail(n, &t) : NULL;
	if (rc == 0 && !p)
		rc = ENOMEM;
	if (p)
		sl_ucx_send(n, p);
	sl_ucx_wake_thread(n->worker);
	sl_ucx_unlock(n->worker);
	return -rc;
}

static void enqueue(struct sl_ucx_conn *n, struct sl_ucx_batch *b)
{
	b->order = n->order++;
	b->prev = n->live.prev;
	b->next = &n->live;
	b->prev->next = b->next->prev = b;
	if (n->head == &n->live)
		n->head = b;
	n->worker->batches_live++;
}

/* Makes b the batch that spec describes. b keeps its memory for a copy of the pieces. */
static void init_batch(struct sl_ucx_batch *b, const struct sl_ucx_batch *spec,
		       struct sl_ucx_conn *n)
{
	struct sl_pieces pieces = b->pieces;

	*b = *spec;
	b->conn = n;
	b->pieces = pieces;
	sl_pieces_take(&b->pieces, &spec->pieces);
	b->piece = -1;
}

/* Under the lock. spec has what the caller asks for: tag, direction and pieces. */
static int64_t submit(struct sl_ucx_conn *n, const struct sl_ucx_batch *spec,
		      const struct tail *tail)
{
	struct sl_ucx_worker *w = n->worker;
	struct sl_ucx_batch *b = w->free;
	int64_t rc = refuse(n, tail);

	if (rc == 0)
		rc = check(n, spec);
	if (rc != 0)
		return rc;
	if (sl_pieces_reserve(&b->pieces, &spec->pieces) != 0)
		return ENOMEM;
	w->free = b->next;
	init_batch(b, spec, n);
	b->tail = tail->notif ? make_tail(n, tail) : NULL;
	if (tail->notif && !b->tail) {
		b->next = w->free;
		w->free = b;
		return ENOMEM;
	}
	enqueue(n, b);
	if (n->head == b) {
		w->caller_polls = 1;
		sl_ucx_send_batches(n, INLINE);
		w->caller_polls = 0;
	}
	/*
	 * A batch that has not ended needs a copy of its pieces: they are to be sent, or answers to
	 * a read look them up. b->conn is NULL if it has ended; we hold the lock, so b cannot be
	 * another batch by now.
	 */
	if (b->conn && !(b->issued && b->write))
		sl_pieces_keep(&b->pieces);
	if (w->batches_live)
		sl_ucx_wake_thread(w);
	return 0;
}

int64_t sl_ucx_submit(struct sl_ucx_conn *n, int write, uint64_t tag, const struct sl_desc *d,
		      size_t count, const struct sl_pages *p, const struct sl_nest *nest,
		      const uint32_t *local, const uint32_t *remote, const uint8_t *notif,
		      size_t notif_len)
{
	struct sl_ucx_batch spec = {.tag = tag, .write = write};
	const struct tail tail = {notif, notif_len};
	int64_t rc;

	if (!sl_pieces_init(&spec.pieces, d, count, p, nest, local, remote) ||
	    notif_len > SL_UCX_NOTIF_MAX)
		return ERANGE;
	sl_ucx_lock(n->worker);
	rc = submit(n, &spec, &tail);
	sl_ucx_unlock(n->worker);
	return rc;
}

/* How long sl_ucx_help waits for the owner of memory. */
#define PATIENCE_NS 50000u

static struct sl_ucx_batch *find(struct sl_ucx_conn *n, uint64_t tag)
{
	for (struct sl_ucx_batch *b = n->live.prev; b != &n->live; b = b->prev) {
		if (b->tag == tag)
			return b;
	}
	return NULL;
}

void sl_ucx_cancel(struct sl_ucx_conn *n, uint64_t tag)
{
	struct sl_ucx_batch *b;

	sl_ucx_lock(n->worker);
	b = find(n, tag);
	if (b && !b->cancelled && !(b->issued && b->write)) {
		sl_ucx_cancel_batch(b, SL_UCX_ABORTED);
		sl_ucx_wake_thread(n->worker);
	}
	sl_ucx_unlock(n->worker);
}

/* Steps the worker while the owner answers, which takes microseconds or long; once: one step. */
static int wait_for_owner(struct sl_ucx_conn *n, uint64_t tag, int once)
{
	struct sl_ucx_worker *w = n->worker;
	uint64_t until = once ? 1 : sl_ucx_now() + PATIENCE_NS, now = 0;
	struct sl_ucx_batch *b;
	int moved = 0;

	/* Looked up each time: the batch may end while the lock is free. */
	while ((b = find(n, tag)) != NULL && b->status == 0 && now < until) {
		atomic_fetch_add_explicit(&w->drives, 1, memory_order_relaxed);
		w->caller_polls = 1;
		moved |= sl_ucx_step(w) != 0;
		w->caller_polls = 0;
		now = sl_ucx_now();
		if (atomic_load(&w->waiting)) {
			sl_ucx_unlock(w);
			sl_ucx_yield_lock(w);
			sl_ucx_lock(w);
		}
	}
	return moved ? SL_UCX_HELPED | (find(n, tag) ? SL_UCX_AGAIN : 0) : 0;
}

int sl_ucx_help(struct sl_ucx_conn *n, uint64_t tag, int once)
{
	struct sl_ucx_worker *w = n->worker;
	uint64_t ended;
	int done = 0;

	sl_ucx_lock(w);
	ended = w->ring->head;
	if (n->state != SL_UCX_ENDED)
		done = wait_for_owner(n, tag, once);
	if (w->ring->head != ended) /* some batch ended, whichever it was */
		done |= SL_UCX_HELPED;
	sl_ucx_unlock(w);
	if (done)
		sl_ucx_yield_lock(w);
	return done;
}
