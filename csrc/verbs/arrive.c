/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Messages and credit that arrive. Each field is checked: the peer may send anything. A message
 * goes from its receive buffer to the inbox, waits there for those with lower numbers, and then
 * goes on the context's list for the program (sl_verbs_notif_take).
 */
#define _GNU_SOURCE
#include "pair.h"

#include <endian.h>
#include <errno.h>
#include <string.h>

/* Appends a message to the list for the program. */
static void deliver(struct sl_verbs_conn *n, struct sl_verbs_message *p)
{
	struct sl_verbs_traffic *t = n->context->traffic;
	struct sl_ring *ring = n->context->ring;

	n->inbox->unread++;
	p->next = NULL;
	if (!t->arrived)
		ring->first_len = p->len;
	*t->arrived_end = p;
	t->arrived_end = &p->next;
	__atomic_fetch_add(&ring->notifs, 1, __ATOMIC_SEQ_CST);
}

/*
 * A message may arrive twice, and before those with lower numbers, since each rail has a queue of
 * its own. One for which there is no room violates the protocol.
 */
static int receive_notif(struct sl_verbs_conn *n, uint64_t number, const uint8_t *body,
			 uint32_t len)
{
	struct sl_verbs_message **at, *p;

	if (n->initiator || number == 0 || number > n->taken + n->context->config.notifs)
		return -EPROTO;
	if (number <= n->seen)
		return 0;
	for (at = &n->inbox->early; *at && (*at)->number < number; at = &(*at)->next)
		;
	if (*at && (*at)->number == number)
		return 0;
	p = n->inbox->free_messages;
	if (!p)
		return -EPROTO;
	n->inbox->free_messages = p->next;
	p->number = number;
	p->len = len;
	memcpy(p->body, body, len);
	p->next = *at;
	*at = p;
	while ((p = n->inbox->early) != NULL && p->number == n->seen + 1) {
		n->inbox->early = p->next;
		n->seen = p->number;
		deliver(n, p);
		sl_verbs_wake_poller(n->context); /* also one that submits: it does not receive */
	}
	return 0;
}

static int receive_credit(struct sl_verbs_conn *n, uint64_t taken)
{
	if (!n->initiator || taken > n->sent)
		return -EPROTO;
	if (taken <= n->taken_by_peer)
		return 0;
	n->taken_by_peer = taken;
	sl_verbs_wake_sender(n);
	return 0;
}

static int decode(struct sl_verbs_conn *n, const uint8_t *at, uint32_t len)
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
		return receive_notif(n, le64toh(head.value), at, len);
	case SL_VERBS_IS_CREDIT:
		return receive_credit(n, le64toh(head.value));
	default:
		return -EPROTO;
	}
}

void sl_verbs_receive(struct sl_verbs_rail *p, const struct ibv_wc *wc)
{
	struct sl_verbs_pair *l = sl_verbs_pair_of(p, wc->qp_num);
	uint32_t number = (uint32_t)wc->wr_id;

	if (wc->status == IBV_WC_SUCCESS && l && !l->conn->ended &&
	    decode(l->conn, sl_verbs_buffer(p, number), wc->byte_len) != 0)
		sl_verbs_fail_pair(l, IBV_WC_BAD_RESP_ERR);
	/* Fails only if the device is being removed; then its queue pairs fail, too. */
	(void)sl_verbs_post_receive(p, number);
}

uint64_t sl_verbs_notif_take(struct sl_verbs_context *c, uint8_t *data)
{
	struct sl_verbs_traffic *t = c->traffic;
	struct sl_verbs_inbox *box;
	struct sl_verbs_message *p;
	uint64_t id = 0;

	sl_verbs_lock(c);
	p = t->arrived;
	if (p) {
		box = p->box;
		id = box->id;
		t->arrived = p->next;
		if (!t->arrived)
			t->arrived_end = &t->arrived;
		else
			c->ring->first_len = t->arrived->len;
		__atomic_fetch_sub(&c->ring->notifs, 1, __ATOMIC_SEQ_CST);
		if (p->len)
			memcpy(data, p->body, p->len);
		p->next = box->free_messages;
		box->free_messages = p;
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
