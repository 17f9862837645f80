/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory for messages: frames of outgoing ones, and inboxes of received ones. An initiator numbers
 * its messages. The owner delivers each once, in order, and sends credit as its program takes them:
 * so each message finds a posted receive and room in the inbox. send.c and arrive.c use this.
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
		box->messages = calloc(len, sizeof(box->messages[0]));
	if (!box || !box->messages) {
		free(box);
		return -ENOMEM;
	}
	for (uint32_t i = 0; i < len; i++) {
		box->messages[i].box = box;
		box->messages[i].next = box->free_messages;
		box->free_messages = &box->messages[i];
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
	free(box->messages);
	free(box);
}

void sl_verbs_detach_inbox(struct sl_verbs_conn *n)
{
	struct sl_verbs_inbox *box = n->inbox;

	n->inbox = NULL;
	if (!box)
		return;
	box->conn = NULL;
	if (box->unread == 0)
		sl_verbs_free_inbox(box);
}

void sl_verbs_free_inboxes(struct sl_verbs_context *c)
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

void sl_verbs_wake_sender(struct sl_verbs_conn *n)
{
	if (!n->was_refused)
		return;
	n->was_refused = 0;
	/* It finds due when it arms, if it has not armed yet. */
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

void sl_verbs_free_frame_of(struct sl_verbs_conn *n, struct sl_verbs_record *r)
{
	if (r->frame)
		sl_verbs_free_frame(n, r->frame);
	r->frame = NULL;
}
