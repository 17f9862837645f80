/* SPDX-License-Identifier: Apache-2.0 */
/* Messages and credit that arrive. Nothing in one is believed. */
#define _GNU_SOURCE
#include "pair.h"

#include <endian.h>
#include <errno.h>
#include <string.h>

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
	__atomic_fetch_add(&ring->notifs, 1, __ATOMIC_SEQ_CST);
}

/* Its turn has come. */
static void admit(struct sl_verbs_conn *n, struct sl_verbs_post *p)
{
	n->seen = p->number;
	deliver(n, p);
	sl_verbs_wake_poller(n->context); /* also a submitter, which looks for completions only */
}

/*
 * The numbers tell what comes twice. One may come before its turn: those of two rails lie in two
 * queues. More than there is room for is not from a peer of ours.
 */
static int put_notif(struct sl_verbs_conn *n, uint64_t number, const uint8_t *body, uint32_t len)
{
	struct sl_verbs_post **at, *p;

	if (n->initiator || number == 0 || number > n->taken + n->context->config.notifs)
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

static int put_credit(struct sl_verbs_conn *n, uint64_t taken)
{
	if (!n->initiator || taken > n->sent)
		return -EPROTO;
	if (taken <= n->credited)
		return 0;
	n->credited = taken;
	sl_verbs_wake_sender(n);
	return 0;
}

static int take_in(struct sl_verbs_conn *n, const uint8_t *at, uint32_t len)
{
	struct sl_verbs_head head;

	if (len < sizeof(head))
		return -EPROTO;
	memcpy(&head, at, sizeof(head));
	at += sizeof(head);
	len -= (uint32_t)sizeof(head);
	if (le32toh(head.magic) != SL_VERBS_MAGIC || len > SL_VERBS_NOTIF_MAX)
		return -EPROTO;
	switch (le32toh(head.kind)) {
	case SL_VERBS_IS_NOTIF:
		return put_notif(n, le64toh(head.value), at, len);
	case SL_VERBS_IS_CREDIT:
		return put_credit(n, le64toh(head.value));
	default:
		return -EPROTO;
	}
}

void sl_verbs_arrived(struct sl_verbs_port *p, const struct ibv_wc *wc)
{
	struct sl_verbs_pair *l = sl_verbs_pair_of(p, wc->qp_num);
	uint32_t slot = (uint32_t)wc->wr_id;

	if (wc->status == IBV_WC_SUCCESS && l && !l->conn->ended &&
	    take_in(l->conn, sl_verbs_slot(p, slot), wc->byte_len) != 0)
		sl_verbs_fail_pair(l, IBV_WC_BAD_RESP_ERR);
	/* Only a device that is going takes none. Its queue pairs fail. */
	(void)sl_verbs_post_slot(p, slot);
}

uint64_t sl_verbs_notif_take(struct sl_verbs_context *c, uint8_t *data)
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
		__atomic_fetch_sub(&c->ring->notifs, 1, __ATOMIC_SEQ_CST);
		if (p->len)
			memcpy(data, p->body, p->len);
		p->next = box->free;
		box->free = p;
		box->unread--;
		if (box->conn) {
			box->conn->taken++;
			if (!box->conn->ended)
				sl_verbs_send_credit(box->conn);
		} else if (box->unread == 0) {
			sl_verbs_free_inbox(box);
		}
	}
	sl_verbs_unlock(c);
	return id;
}
