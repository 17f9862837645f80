/* SPDX-License-Identifier: Apache-2.0 */
/*
 * This process's end of a connection, an initiator's or an owner's: made (connect), drained of what
 * is under way (drain), ended with an outcome for all batches (end), and freed (disconnect). Its
 * queue pairs are in make.c, pair.c and end.c.
 */
#define _GNU_SOURCE
#include "pair.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

/* Bytes of the largest frame. */
#define FRAME_MAX (sizeof(struct sl_verbs_head) + SL_VERBS_NOTIF_MAX)

/*
 * Allocates the frames of outgoing messages: for an initiator as many as may be unacknowledged,
 * for an owner the one in which it sends credit. The caller frees n after an error.
 */
static int make_frames(struct sl_verbs_conn *n)
{
	uint32_t len = n->initiator ? n->window : 1;
	size_t each = n->initiator ? FRAME_MAX : sizeof(struct sl_verbs_head);
	void *memory;

	n->frame_memory_size = (len * each + 4095) & ~(size_t)4095;
	memory = mmap(NULL, n->frame_memory_size, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		return -ENOMEM;
	n->frame_memory = memory;
	n->frames = calloc(len, sizeof(n->frames[0]));
	if (!n->frames)
		return -ENOMEM;
	for (uint32_t i = len; i > 0; i--) {
		n->frames[i - 1] = (struct sl_verbs_frame){.next = n->free_frames,
							   .at = n->frame_memory + (i - 1) * each};
		n->free_frames = &n->frames[i - 1];
	}
	return 0;
}

static void free_conn(struct sl_verbs_conn *n)
{
	for (uint32_t i = 0; i < n->imports_len; i++)
		free(n->imports[i]);
	for (uint32_t i = 0; i < SL_VERBS_PAIRS; i++)
		free(n->pairs[i]);
	if (n->frame_memory)
		munmap(n->frame_memory, n->frame_memory_size);
	free(n->imports);
	free(n->frames);
	pthread_mutex_destroy(&n->setup_lock);
	free(n);
}

void sl_verbs_free_conns(struct sl_verbs_context *c)
{
	struct sl_verbs_conn *head = &c->traffic->conns;

	while (head->next != head) {
		struct sl_verbs_conn *n = head->next;

		head->next = n->next;
		n->next->prev = head;
		free_conn(n);
	}
}

static struct sl_verbs_conn *new_conn(struct sl_verbs_context *c, int initiator, uint32_t credit)
{
	struct sl_verbs_conn *n = calloc(1, sizeof(*n));
	uint32_t notifs = c->config.notifs;

	if (!n)
		return NULL;
	n->context = c;
	n->initiator = initiator;
	n->window = credit && credit < notifs ? credit : notifs;
	n->batches.prev = n->batches.next = n->first_unposted = &n->batches;
	pthread_mutex_init(&n->setup_lock, NULL);
	if (make_frames(n) == 0)
		return n;
	free_conn(n);
	return NULL;
}

int sl_verbs_connect(struct sl_verbs_context *c, int initiator, uint32_t credit,
		     struct sl_verbs_conn **out)
{
	struct sl_verbs_conn *n = new_conn(c, initiator, credit), *head = &c->traffic->conns;
	int rc;

	if (!n)
		return -ENOMEM;
	sl_verbs_lock(c);
	rc = c->closed ? -EBADF : 0;
	n->id = ++c->traffic->last_id;
	if (rc == 0 && !initiator)
		rc = sl_verbs_make_inbox(n);
	if (rc == 0) {
		n->next = head;
		n->prev = head->prev;
		n->prev->next = n->next->prev = n;
	}
	sl_verbs_unlock(c);
	if (rc != 0) {
		free_conn(n);
		return rc;
	}
	*out = n;
	return 0;
}

uint64_t sl_verbs_id(struct sl_verbs_conn *n)
{
	return n->id;
}

uint64_t sl_verbs_seen(struct sl_verbs_conn *n)
{
	struct sl_verbs_context *c = n->context;
	uint64_t seen;

	sl_verbs_lock(c);
	/* Take all completions first: messages that arrived over any rail count. */
	for (uint32_t i = 0; i < c->rails_len; i++)
		if (c->rails[i]->traffic)
			sl_verbs_take_receives(c->rails[i]);
	seen = n->seen;
	sl_verbs_unlock(c);
	return seen;
}

int sl_verbs_busy(struct sl_verbs_conn *n)
{
	int busy;

	sl_verbs_lock(n->context);
	busy = n->batches.next != &n->batches;
	sl_verbs_unlock(n->context);
	return busy;
}

int sl_verbs_drain(struct sl_verbs_conn *n, uint64_t grace_ns)
{
	struct sl_verbs_context *c = n->context;
	uint64_t deadline = sl_verbs_now() + grace_ns;
	int rc = 0;

	sl_verbs_lock(c);
	n->closed = 1;
	for (struct sl_verbs_batch *b = n->batches.next, *next; b != &n->batches; b = next) {
		next = b->next;
		sl_verbs_cancel_batch(b, SL_VERBS_CLOSED);
	}
	/*
	 * sl_verbs_step runs once more after the deadline: this process may have been stopped until
	 * then, with completions waiting.
	 */
	for (sl_verbs_step(c); n->batches.next != &n->batches && rc == 0; sl_verbs_step(c))
		rc = sl_verbs_wait(c, deadline);
	if (n->batches.next == &n->batches)
		rc = 0;
	sl_verbs_unlock(c);
	return rc;
}

/*
 * The batch of a write or a message that did not complete ends as unproven, whatever status it had:
 * the request may still land at the peer.
 */
static void end_unproven(struct sl_verbs_record *r, int32_t status)
{
	struct sl_verbs_batch *b = r->batch;

	if (!b || (r->kind == SL_VERBS_DATA && !b->write))
		return;
	b->status = status;
	b->piece = -1;
}

/* Ends all batches. Under the lock; no queue pair is left. */
static void end_batches(struct sl_verbs_conn *n, int32_t status)
{
	int32_t unproven =
	    status == SL_VERBS_LOST ? SL_VERBS_LOST_UNPROVEN : SL_VERBS_CLOSED_UNPROVEN;

	for (uint32_t i = 0; i < SL_VERBS_PAIRS && !n->proved; i++)
		for (struct sl_verbs_record *r = n->pairs[i] ? n->pairs[i]->unproved.first : NULL;
		     r; r = r->next)
			end_unproven(r, unproven);
	sl_verbs_drop_all_records(n);
	sl_verbs_end_refusals(n, NULL);
	for (struct sl_verbs_batch *b = n->batches.next, *next; b != &n->batches; b = next) {
		next = b->next;
		sl_verbs_give_up_batch(b, status, -1);
	}
	sl_verbs_unqueue_conn(n);
	pthread_cond_broadcast(&n->context->changed);
}

static void deregister_frames(struct sl_verbs_conn *n)
{
	for (uint32_t i = 0; i < SL_VERBS_RAILS; i++) {
		if (n->frame_mrs[i])
			(void)sl_verbs.ibv_dereg_mr(n->frame_mrs[i]);
		n->frame_mrs[i] = NULL;
	}
}

int sl_verbs_end(struct sl_verbs_conn *n, int32_t status, int proved)
{
	struct sl_verbs_context *c = n->context;
	int first, one, rc = 0;

	pthread_mutex_lock(&n->setup_lock);
	sl_verbs_lock(c);
	first = !n->ended;
	n->closed = 1;
	if (!n->ending) {
		n->outcome = status;
		n->proved = proved;
	}
	n->ending = 1;
	sl_verbs_unlock(c);
	for (uint32_t i = 0; first && i < SL_VERBS_PAIRS; i++) {
		one = n->pairs[i] ? sl_verbs_destroy_pair(n->pairs[i]) : 0;
		rc = rc != 0 ? rc : one;
	}
	if (first && rc == 0) { /* no queue pair is left, so no read can land here */
		sl_verbs_lock(c);
		n->ended = 1;
		end_batches(n, n->outcome);
		sl_verbs_unlock(c);
		deregister_frames(n);
	}
	pthread_mutex_unlock(&n->setup_lock);
	return rc;
}

int sl_verbs_disconnect(struct sl_verbs_conn *n)
{
	struct sl_verbs_context *c = n->context;
	int rc = sl_verbs_end(n, SL_VERBS_CLOSED, 0);

	if (rc != 0)
		return rc;
	sl_verbs_lock(c);
	n->prev->next = n->next;
	n->next->prev = n->prev;
	sl_verbs_detach_inbox(n);
	sl_verbs_unlock(c);
	free_conn(n);
	return 0;
}
