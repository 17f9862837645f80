/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Messages and counts: numbered, in order, each once. The owner gives back credit as its program
 * takes messages, and as counts arrive, so that each finds a receive that is posted and a place
 * in the inbox.
 */
#define _GNU_SOURCE
#include "lane.h"

#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* A message that arrived. */
struct sl_verbs_post {
	struct sl_verbs_post *next;
	struct sl_verbs_inbox *box;
	uint64_t number;
	uint32_t kind, len;
	uint8_t body[SL_VERBS_NOTE_MAX];
};

int sl_verbs_make_inbox(struct sl_verbs_conn *n)
{
	struct sl_verbs_inbox *head = &n->context->traffic->inboxes, *box = calloc(1, sizeof(*box));
	uint32_t len = n->context->config.notes;

	if (box)
		box->posts = calloc(len, sizeof(box->posts[0]));
	if (!box || !box->posts) {
		free(box);
		return -ENOMEM;
	}
	for (uint32_t i = 0; i < len; i++) {
		box->posts[i].box = box;
		box->posts[i].next = box->free;
		box->free = &box->posts[i];
	}
	box->conn = n;
	box->id = n->id;
	box->next = head;
	box->prev = head->prev;
	box->prev->next = box->next->prev = box;
	n->inbox = box;
	return 0;
}

static void free_inbox(struct sl_verbs_inbox *box)
{
	box->prev->next = box->next;
	box->next->prev = box->prev;
	free(box->posts);
	free(box);
}

void sl_verbs_leave_inbox(struct sl_verbs_conn *n)
{
	struct sl_verbs_inbox *box = n->inbox;

	n->inbox = NULL;
	if (!box)
		return;
	box->conn = NULL;
	if (box->unread == 0)
		free_inbox(box);
}

void sl_verbs_empty(struct sl_verbs_context *c)
{
	struct sl_verbs_inbox *head = &c->traffic->inboxes;

	while (head->next != head)
		free_inbox(head->next);
}

void sl_verbs_free_slip(struct sl_verbs_conn *n, struct sl_verbs_slip *s)
{
	s->next = n->free_slips;
	n->free_slips = s;
	sl_verbs_relieve(n);
}

/* Whoever was refused for want of credit learns of it, also if it has not armed yet. */
void sl_verbs_relieve(struct sl_verbs_conn *n)
{
	if (!n->starved)
		return;
	n->starved = 0;
	__atomic_store_n(&n->context->ring->due, 1, __ATOMIC_SEQ_CST);
	sl_verbs_wake(n->context);
}

void sl_verbs_unqueue_note(struct sl_verbs_batch *b)
{
	struct sl_verbs_conn *n = b->conn;
	struct sl_verbs_batch **at = &n->note_first, *last = NULL;

	if (!b->note)
		return;
	while (*at != b) {
		last = *at;
		at = &last->next_note;
	}
	*at = b->next_note;
	if (n->note_last == b)
		n->note_last = last;
	n->accepted--;
	sl_verbs_free_slip(n, b->note);
	b->note = NULL;
}

/* Builds a message of a slip. r is made by the caller. */
static void build(struct sl_verbs_lane *l, struct sl_verbs_record *r, uint32_t kind, uint64_t value)
{
	struct sl_verbs_conn *n = l->conn;
	struct sl_verbs_head head = {htole32(SL_VERBS_MAGIC), htole32(kind), htole64(value)};
	struct ibv_send_wr *wr;

	memcpy(r->slip->at, &head, sizeof(head));
	*sl_verbs_entries(n->context) = (struct ibv_sge){
		.addr = (uintptr_t)r->slip->at, .length = r->slip->len, .lkey = n->slab_mr[l->port->index]->lkey};
	wr = sl_verbs_build(l, r, 1);
	wr->opcode = IBV_WR_SEND;
	if (r->slip->len <= l->port->info.inline_max)
		wr->send_flags |= IBV_SEND_INLINE;
}

/* All go over one lane, so that they arrive in order; over another only when none is under way. */
struct sl_verbs_lane *sl_verbs_note_lane(struct sl_verbs_conn *n)
{
	if (n->notes_out)
		return sl_verbs_usable(n->note_lane) ? n->note_lane : NULL;
	for (uint32_t i = 0; i < SL_VERBS_LANES; i++)
		if (sl_verbs_usable(n->lanes[i]))
			return n->lanes[i];
	return NULL;
}

/*
 * Whether all that was submitted before a message, or with it, is in place when it arrives over
 * this lane: done, or before it on the same lane.
 */
static int clear(const struct sl_verbs_conn *n, const struct sl_verbs_lane *l, uint64_t order)
{
	if (n->again.first || n->held)
		return 0;
	for (uint32_t i = 0; i < SL_VERBS_LANES; i++) {
		const struct sl_verbs_lane *other = n->lanes[i];

		if (!other || other == l || !other->posted.first)
			continue;
		if (other->again || !other->posted.first->batch || other->posted.first->batch->order <= order)
			return 0;
	}
	return n->head == &n->live || n->head->order > order;
}

static int post_note(struct sl_verbs_conn *n, struct sl_verbs_lane *l, struct sl_verbs_batch *b, struct sl_verbs_record *r)
{
	if (r) {
		sl_verbs_pop(&n->resend);
	} else {
		r = sl_verbs_record(n->context);
		if (!r)
			return -ENOMEM;
		r->kind = SL_VERBS_NOTE;
		r->batch = b;
		r->slip = b->note;
		b->open++;
		b->note = NULL;
		n->note_first = b->next_note;
		if (!n->note_first)
			n->note_last = NULL;
	}
	r->number = ++n->sent;
	n->note_lane = l;
	n->notes_out++;
	build(l, r, r->slip->kind, r->number);
	return 0;
}

void sl_verbs_post_notes(struct sl_verbs_conn *n)
{
	while (n->resend.first || n->note_first) {
		struct sl_verbs_record *r = n->resend.first;
		struct sl_verbs_batch *b = r ? r->batch : n->note_first;
		struct sl_verbs_lane *l;

		sl_verbs_make_room(n);
		l = sl_verbs_note_lane(n);
		if (!l || !sl_verbs_has_room(l) || !clear(n, l, b->order) || post_note(n, l, b, r) != 0)
			return;
	}
}

/* To the program. */
static void deliver(struct sl_verbs_conn *n, struct sl_verbs_post *p)
{
	struct sl_verbs_traffic *t = n->context->traffic;
	struct sl_ring *ring = n->context->ring;

	n->inbox->unread++;
	p->next = NULL;
	if (!t->first)
		ring->first_len = p->len;
	*t->end = p;
	t->end = &p->next;
	__atomic_fetch_add(&ring->notes, 1, __ATOMIC_SEQ_CST);
}

/* The value goes up before the look at who waits for it; those do it the other way round. */
static void count(struct sl_verbs_conn *n, struct sl_verbs_post *p)
{
	struct sl_verbs_context *c = n->context;
	struct sl_verbs_counter *at;
	uint64_t value, awaited;
	uint32_t counter;

	memcpy(&counter, p->body, sizeof(counter));
	at = &c->tally[le32toh(counter)];
	value = __atomic_add_fetch(&at->value, 1, __ATOMIC_SEQ_CST);
	awaited = __atomic_load_n(&at->awaited, __ATOMIC_SEQ_CST);
	if (awaited != 0 && value >= awaited) {
		__atomic_store_n(&c->ring->due, 1, __ATOMIC_SEQ_CST);
		sl_verbs_wake(c);
	}
	p->next = n->inbox->free;
	n->inbox->free = p;
	n->taken++;
	sl_verbs_repay(n);
}

/* Its turn has come. */
static void admit(struct sl_verbs_conn *n, struct sl_verbs_post *p)
{
	n->seen = p->number;
	if (p->kind == SL_VERBS_IS_COUNT) {
		count(n, p);
		return;
	}
	deliver(n, p);
	sl_verbs_wake(n->context); /* also whoever submits: it looks for completions only */
}

/*
 * The numbers tell what comes twice. One may come before its turn: those of two rails lie in two queues.
 * More than there is room for is not from a peer of ours.
 */
static int put_note(struct sl_verbs_conn *n, uint32_t kind, uint64_t number, const uint8_t *body, uint32_t len)
{
	struct sl_verbs_post **at, *p;

	if (n->initiator || number == 0 || number > n->taken + n->context->config.notes)
		return -EPROTO;
	if (number <= n->seen)
		return 0;
	for (at = &n->inbox->ahead; *at && (*at)->number < number; at = &(*at)->next)
		;
	if (*at && (*at)->number == number)
		return 0;
	p = n->inbox->free;
	if (!p)
		return -EPROTO;
	n->inbox->free = p->next;
	p->number = number;
	p->kind = kind;
	p->len = len;
	memcpy(p->body, body, len);
	p->next = *at;
	*at = p;
	while ((p = n->inbox->ahead) != NULL && p->number == n->seen + 1) {
		n->inbox->ahead = p->next;
		admit(n, p);
	}
	return 0;
}

/* Whether the bytes of a count name a counter. */
static int names_counter(const uint8_t *body, uint32_t len)
{
	uint32_t counter;

	if (len != sizeof(counter))
		return 0;
	memcpy(&counter, body, sizeof(counter));
	return le32toh(counter) < SL_VERBS_COUNTERS;
}

static int put_credit(struct sl_verbs_conn *n, uint64_t taken)
{
	if (!n->initiator || taken > n->sent)
		return -EPROTO;
	if (taken <= n->credited)
		return 0;
	n->credited = taken;
	sl_verbs_relieve(n);
	return 0;
}

static int take_in(struct sl_verbs_conn *n, const uint8_t *at, uint32_t len)
{
	struct sl_verbs_head head;
	uint32_t kind;

	if (len < sizeof(head))
		return -EPROTO;
	memcpy(&head, at, sizeof(head));
	at += sizeof(head);
	len -= (uint32_t)sizeof(head);
	if (le32toh(head.magic) != SL_VERBS_MAGIC || len > SL_VERBS_NOTE_MAX)
		return -EPROTO;
	kind = le32toh(head.kind);
	switch (kind) {
	case SL_VERBS_IS_COUNT:
		if (!names_counter(at, len))
			return -EPROTO;
		/* fall through */
	case SL_VERBS_IS_NOTE:
		return put_note(n, kind, le64toh(head.value), at, len);
	case SL_VERBS_IS_CREDIT:
		return put_credit(n, le64toh(head.value));
	default:
		return -EPROTO;
	}
}

void sl_verbs_arrived(struct sl_verbs_port *p, const struct ibv_wc *wc)
{
	struct sl_verbs_lane *l = sl_verbs_lane_of(p, wc->qp_num);
	uint32_t slot = (uint32_t)wc->wr_id;

	if (wc->status == IBV_WC_SUCCESS && l && !l->conn->ended &&
	    take_in(l->conn, sl_verbs_slot(p, slot), wc->byte_len) != 0)
		sl_verbs_fail_lane(l, IBV_WC_BAD_RESP_ERR);
	(void)sl_verbs_post_slot(p, slot); /* a device that does not take it is gone */
}

/*
 * Not for each message, but before the peer has to wait: it may have used up its credit when
 * so many have arrived since it was told.
 */
void sl_verbs_repay(struct sl_verbs_conn *n)
{
	uint32_t notes = n->context->config.notes;
	struct sl_verbs_record *r;
	struct sl_verbs_lane *l = NULL;

	if (n->initiator || n->telling || n->taken == n->told || !n->free_slips)
		return;
	if (n->told && n->taken - n->told < (notes + 3) / 4 && n->seen - n->told < notes)
		return;
	for (uint32_t i = 0; i < SL_VERBS_LANES && !l; i++)
		if (n->lanes[i] && n->lanes[i]->state == SL_VERBS_LIVE && sl_verbs_has_room(n->lanes[i]))
			l = n->lanes[i];
	r = l ? sl_verbs_record(n->context) : NULL;
	if (!r)
		return;
	r->kind = SL_VERBS_CREDIT;
	r->slip = n->free_slips;
	n->free_slips = r->slip->next;
	r->slip->len = sizeof(struct sl_verbs_head);
	n->telling = 1;
	n->told = n->taken;
	build(l, r, SL_VERBS_IS_CREDIT, n->taken);
	sl_verbs_ring_bells(n);
}

uint64_t sl_verbs_note_take(struct sl_verbs_context *c, uint8_t *data)
{
	struct sl_verbs_traffic *t = c->traffic;
	struct sl_verbs_inbox *box;
	struct sl_verbs_post *p;
	uint64_t id = 0;

	sl_verbs_enter(c);
	p = t->first;
	if (p) {
		box = p->box;
		id = box->id;
		t->first = p->next;
		if (!t->first)
			t->end = &t->first;
		else
			c->ring->first_len = t->first->len;
		__atomic_fetch_sub(&c->ring->notes, 1, __ATOMIC_SEQ_CST);
		if (p->len)
			memcpy(data, p->body, p->len);
		p->next = box->free;
		box->free = p;
		box->unread--;
		if (box->conn) {
			box->conn->taken++;
			if (!box->conn->ended)
				sl_verbs_repay(box->conn);
		} else if (box->unread == 0) {
			free_inbox(box);
		}
	}
	sl_verbs_unlock(c);
	return id;
}
