/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Messages: numbered, in order, each once. The owner gives back credit as its program takes them,
 * so that each finds a receive that is posted and a place in the inbox.
 */
#define _GNU_SOURCE
#include "pair.h"

#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

int sl_verbs_make_inbox(struct sl_verbs_conn *n)
{
	struct sl_verbs_inbox *head = &n->context->traffic->inboxes, *box = calloc(1, sizeof(*box));
	uint32_t len = n->context->config.notifs;

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

void sl_verbs_free_inbox(struct sl_verbs_inbox *box)
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
		sl_verbs_free_inbox(box);
}

void sl_verbs_empty(struct sl_verbs_context *c)
{
	struct sl_verbs_inbox *head = &c->traffic->inboxes;

	while (head->next != head)
		sl_verbs_free_inbox(head->next);
}

void sl_verbs_free_frame(struct sl_verbs_conn *n, struct sl_verbs_frame *s)
{
	s->next = n->free_frames;
	n->free_frames = s;
	sl_verbs_wake_sender(n);
}

/* A sender that was refused for want of credit learns of it, also if it has not armed yet. */
void sl_verbs_wake_sender(struct sl_verbs_conn *n)
{
	if (!n->was_refused)
		return;
	n->was_refused = 0;
	__atomic_store_n(&n->context->ring->due, 1, __ATOMIC_SEQ_CST);
	sl_verbs_wake_poller(n->context);
}

void sl_verbs_unqueue_notif(struct sl_verbs_batch *b)
{
	struct sl_verbs_conn *n = b->conn;
	struct sl_verbs_batch **at = &n->notif_first, *last = NULL;

	if (!b->notif)
		return;
	while (*at != b) {
		last = *at;
		at = &last->next_notif;
	}
	*at = b->next_notif;
	if (n->notif_last == b)
		n->notif_last = last;
	n->accepted--;
	sl_verbs_free_frame(n, b->notif);
	b->notif = NULL;
}

void sl_verbs_drop_frame(struct sl_verbs_conn *n, struct sl_verbs_record *r)
{
	if (r->frame)
		sl_verbs_free_frame(n, r->frame);
	r->frame = NULL;
}
