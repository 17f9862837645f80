/* SPDX-License-Identifier: Apache-2.0 */
/* What the caller asks for: submit, cancel, and the end of an import. */
#define _GNU_SOURCE
#include "pair.h"

#include <errno.h>
#include <string.h>

/* Whether a queue pair reaches both, be it live or not. */
static int joined(const struct sl_verbs_conn *n, const struct sl_verbs_memory *m,
		  const struct sl_verbs_import *im)
{
	uint32_t pairs = im->pairs & n->reaches;

	for (uint32_t i = 0; pairs >> i; i++)
		if (pairs >> i & 1 && m->rails >> n->pairs[i]->port->index & 1)
			return 1;
	return 0;
}

static int wrong_with(const struct sl_verbs_conn *n, int write, const struct sl_verbs_memory *m,
		      const struct sl_verbs_import *im)
{
	if (!m || !im || im->dropped)
		return ERANGE;
	if (im->expired)
		return ESTALE;
	if (write && im->flags & SL_VERBS_READ_ONLY)
		return EROFS;
	return joined(n, m, im) ? 0 : EHOSTUNREACH;
}

/* What is wrong with the pieces, as submit returns it. It holds the local memories. */
static int64_t check(const struct sl_verbs_conn *n, struct sl_verbs_batch *b)
{
	struct sl_verbs_memory *m = NULL;
	const struct sl_verbs_import *im = NULL;
	uint32_t local = 0, slot = 0;

	for (uint32_t i = 0; i < b->pieces.count; i++) {
		struct sl_desc d = sl_piece(&b->pieces, i);
		int wrong = 0, run = i == 0 || d.local_key != local;

		if (run || d.remote_key != slot) {
			m = sl_verbs_find(n->context, local = d.local_key);
			im = sl_verbs_import_of(n, slot = d.remote_key);
			wrong = wrong_with(n, b->write, m, im);
			if (run && !wrong)
				sl_verbs_hold_memory(b, m);
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

static int64_t refuse(struct sl_verbs_conn *n, int notif)
{
	struct sl_verbs_traffic *t = n->context->traffic;
	const struct sl_ring *r = n->context->ring;

	if (n->outcome == SL_VERBS_LOST)
		return EPIPE;
	if (n->closed || !n->initiator)
		return EBADF;
	/* A place in the ring is taken until the completion was polled. */
	if (t->live + (r->head - __atomic_load_n(&r->tail, __ATOMIC_ACQUIRE)) > r->mask)
		return EAGAIN;
	if (notif && (n->accepted - n->credited >= n->window || !n->free_frames)) {
		n->was_refused = 1;
		return EAGAIN;
	}
	return 0;
}

static void enqueue(struct sl_verbs_conn *n, struct sl_verbs_batch *b)
{
	b->order = n->order++;
	b->prev = n->live.prev;
	b->next = &n->live;
	b->prev->next = b->next->prev = b;
	if (n->head == &n->live)
		n->head = b;
	n->context->traffic->live++;
}

/* The message that follows the data. */
struct trailer {
	const uint8_t *data; /* NULL: none */
	size_t len;
};

static int sound(const struct trailer *t, int write)
{
	return t->len <= SL_VERBS_NOTIF_MAX && (write || !t->data);
}

static void take_notif(struct sl_verbs_batch *b, const struct trailer *t)
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
	/* before they are looked at: the caller's may change at any time */
	sl_pieces_keep(&b->pieces);
	b->piece = b->pair = -1;
}

/* Under the lock. spec has what the caller asks for: tag, direction and pieces. */
static int64_t submit(struct sl_verbs_conn *n, struct sl_verbs_batch *spec,
		      const struct trailer *notif)
{
	struct sl_verbs_traffic *t = n->context->traffic;
	struct sl_verbs_batch *b = t->free, *next;
	int64_t rc = refuse(n, notif->data != NULL);

	if (rc == 0 && sl_pieces_reserve(&b->pieces, &spec->pieces) != 0)
		rc = ENOMEM;
	if (rc != 0)
		return rc;
	next = b->next;
	init_batch(b, spec, n);
	rc = check(n, b);
	if (rc != 0) {
		sl_verbs_release_memories(n->context, b);
		b->conn = NULL;
		b->next = next;
		return rc;
	}
	b->whole = b->bytes <= n->context->config.slice;
	t->free = next;
	if (notif->data)
		take_notif(b, notif);
	enqueue(n, b);
	t->polled = 1; /* what ends now, the caller finds without being woken */
	sl_verbs_pump(n);
	t->polled = 0;
	if (!t->pump_queue) /* its completion can wait until a caller looks for it */
		atomic_fetch_add_explicit(&t->drives, 1, memory_order_relaxed);
	return 0;
}

int64_t sl_verbs_submit(struct sl_verbs_conn *n, int write, uint64_t tag, const struct sl_desc *d,
			size_t count, const uint8_t *notif, size_t notif_len)
{
	struct sl_verbs_batch spec = {.tag = tag,
				      .write = write,
				      .pieces = {.descs = d, .count = (uint32_t)count}};
	struct trailer t = {notif, notif_len};
	int64_t rc;

	if (count > SL_PIECES_MAX || !sound(&t, write))
		return ERANGE;
	sl_verbs_enter(n->context);
	rc = submit(n, &spec, &t);
	sl_verbs_unlock(n->context);
	return rc;
}

int64_t sl_verbs_submit_pages(struct sl_verbs_conn *n, int write, uint64_t tag,
			      const struct sl_pages *p, const struct sl_nest *nest,
			      const uint32_t *local, const uint32_t *remote, const uint8_t *notif,
			      size_t notif_len)
{
	struct sl_verbs_batch spec = {.tag = tag,
				      .write = write,
				      .pieces = {.pages = *p,
						 .local_index = local,
						 .remote_index = remote,
						 .nest = nest,
						 .runs = nest ? nest->runs : 1,
						 .count = (uint32_t)(p->count *
								     (nest ? nest->runs : 1))}};
	struct trailer t = {notif, notif_len};
	int64_t rc;

	if (!(nest ? sl_nest_sound(p, nest, local, remote) : sl_pages_sound(p, local, remote)) ||
	    !sound(&t, write))
		return ERANGE;
	sl_verbs_enter(n->context);
	rc = submit(n, &spec, &t);
	sl_verbs_unlock(n->context);
	return rc;
}

static struct sl_verbs_batch *find(struct sl_verbs_conn *n, uint64_t tag)
{
	for (struct sl_verbs_batch *b = n->live.prev; b != &n->live; b = b->prev)
		if (b->tag == tag)
			return b;
	return NULL;
}

void sl_verbs_cancel(struct sl_verbs_conn *n, uint64_t tag)
{
	struct sl_verbs_batch *b;

	sl_verbs_enter(n->context);
	b = find(n, tag);
	if (b && !b->cancelled) {
		sl_verbs_cancel_batch(b, SL_VERBS_ABORTED);
		if (!n->ended)
			sl_verbs_pump(n);
	}
	sl_verbs_unlock(n->context);
}

void sl_verbs_expire(struct sl_verbs_conn *n, uint32_t slot)
{
	struct sl_verbs_import *im;

	sl_verbs_enter(n->context);
	im = sl_verbs_import_of(n, slot);
	if (im) {
		im->expired = 1;
		im->doubt = NULL; /* the peer has said so itself */
	}
	if (!n->ended)
		sl_verbs_pump(n); /* what waits for a queue pair finds out when it is built */
	sl_verbs_unlock(n->context);
}
