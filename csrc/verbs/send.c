/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sends messages, and credit for them. A message follows the data of all batches up to its own. So
 * it is posted once each of them is done, or is posted on the same queue pair: NICs deliver the
 * requests of one queue pair in order.
 */
#define _GNU_SOURCE
#include "pair.h"

#include <endian.h>
#include <errno.h>
#include <string.h>

/* Builds the send request for the frame of a record: a message or credit, as kind says. */
static void build_frame(struct sl_verbs_pair *l, struct sl_verbs_record *r, uint32_t kind,
			uint64_t value)
{
	struct sl_verbs_conn *n = l->conn;
	struct sl_verbs_head head = {htole32(SL_VERBS_MAGIC), htole32(kind), htole64(value)};
	struct ibv_sge *entry = sl_verbs_next_entries(n);
	struct ibv_send_wr *wr;

	memcpy(r->frame->at, &head, sizeof(head));
	*entry = (struct ibv_sge){.addr = (uintptr_t)r->frame->at,
				  .length = r->frame->len,
				  .lkey = n->frame_mrs[l->rail->index]->lkey};
	wr = sl_verbs_build(l, r, entry, 1);
	wr->opcode = IBV_WR_SEND;
	if (r->frame->len <= l->rail->info.inline_max)
		wr->send_flags |= IBV_SEND_INLINE;
}

/*
 * All messages go over one queue pair, so that they arrive in order. It may change only when none
 * is in flight.
 */
struct sl_verbs_pair *sl_verbs_notif_pair(struct sl_verbs_conn *n)
{
	if (n->notifs_in_flight)
		return sl_verbs_usable(n->notif_pair) ? n->notif_pair : NULL;
	for (uint32_t i = 0; i < SL_VERBS_PAIRS; i++)
		if (sl_verbs_usable(n->pairs[i]))
			return n->pairs[i];
	return NULL;
}

/*
 * Whether the message of a batch, if it is posted now on l, arrives after the data of that batch
 * and of all batches before it. Batches are numbered by order as they are submitted.
 */
static int in_order(const struct sl_verbs_conn *n, const struct sl_verbs_pair *l, uint64_t order)
{
	if (n->repost.first || n->unproved)
		return 0;
	for (uint32_t i = 0; i < SL_VERBS_PAIRS; i++) {
		const struct sl_verbs_pair *other = n->pairs[i];

		if (!other || other == l || !other->posted.first)
			continue;
		if (other->reposted || !other->posted.first->batch ||
		    other->posted.first->batch->order <= order)
			return 0;
	}
	return n->first_unposted == &n->batches || n->first_unposted->order > order;
}

/* Posts the message of record r again or, where r is NULL, that of batch b for the first time. */
static int post_notif(struct sl_verbs_conn *n, struct sl_verbs_pair *l, struct sl_verbs_batch *b,
		      struct sl_verbs_record *r)
{
	if (r) {
		sl_verbs_pop(&n->resend);
	} else {
		r = sl_verbs_new_record(n->context);
		if (!r)
			return -ENOMEM;
		r->kind = SL_VERBS_NOTIF;
		r->batch = b;
		r->frame = b->notif;
		b->records_open++;
		b->notif = NULL;
		n->notif_first = b->next_notif;
		if (!n->notif_first)
			n->notif_last = NULL;
	}
	r->number = ++n->sent;
	n->notif_pair = l;
	n->notifs_in_flight++;
	build_frame(l, r, SL_VERBS_IS_NOTIF, r->number);
	return 0;
}

void sl_verbs_post_notifs(struct sl_verbs_conn *n)
{
	while (n->resend.first || n->notif_first) {
		struct sl_verbs_record *r = n->resend.first;
		struct sl_verbs_batch *b = r ? r->batch : n->notif_first;
		struct sl_verbs_pair *l;

		(void)sl_verbs_next_entries(n); /* may post what was built: before the choice */
		l = sl_verbs_notif_pair(n);
		if (!l || !sl_verbs_has_room(l) || !in_order(n, l, b->order) ||
		    post_notif(n, l, b, r) != 0)
			return;
	}
}

/*
 * Credit is sent before the peer has to wait for it, and not for each message. The peer may have
 * used up its credit when as many messages as its window have arrived since the last credit.
 */
void sl_verbs_send_credit(struct sl_verbs_conn *n)
{
	uint32_t notifs = n->context->config.notifs;
	struct sl_verbs_record *r;
	struct sl_verbs_pair *l = NULL;

	if (n->initiator || n->credit_posted || n->taken == n->credit_sent || !n->free_frames)
		return;
	if (n->credit_sent && n->taken - n->credit_sent < (notifs + 3) / 4 &&
	    n->seen - n->credit_sent < notifs)
		return;
	for (uint32_t i = 0; i < SL_VERBS_PAIRS && !l; i++)
		if (n->pairs[i] && n->pairs[i]->state == SL_VERBS_LIVE &&
		    sl_verbs_has_room(n->pairs[i]))
			l = n->pairs[i];
	r = l ? sl_verbs_new_record(n->context) : NULL;
	if (!r)
		return;
	r->kind = SL_VERBS_CREDIT;
	r->frame = n->free_frames;
	n->free_frames = r->frame->next;
	r->frame->len = sizeof(struct sl_verbs_head);
	n->credit_posted = 1;
	n->credit_sent = n->taken;
	build_frame(l, r, SL_VERBS_IS_CREDIT, n->taken);
	sl_verbs_post_built(n);
}
