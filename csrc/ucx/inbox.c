/* SPDX-License-Identifier: Apache-2.0 */
/* What arrived for Go, until it takes it. */
#include "worker.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Of one connection: a sender may be configured for more than we are, but not for much more. */
#define NOTIFS_MIN 1024
#define NOTIFS_TIMES 4
/*
 * Control messages that wait for Go: of one connection, of all, and of senders that are not known.
 */
#define CONTROLS_MAX 4096
#define WORKER_CONTROLS_MAX 65536
#define HELLOS_MAX 1024

struct sl_ucx_post {
	struct sl_ucx_post *next;
	uint64_t conn;
	size_t len;
	int lost;
	uint8_t body[];
};

static struct sl_ucx_post *make(uint64_t conn, const void *data, size_t len)
{
	struct sl_ucx_post *p = malloc(sizeof(*p) + len);

	if (!p)
		return NULL;
	*p = (struct sl_ucx_post){.conn = conn, .len = len};
	if (len)
		memcpy(p->body, data, len);
	return p;
}

static void push(struct sl_ucx_inbox *box, struct sl_ucx_post *p)
{
	*box->end = p;
	box->end = &p->next;
	box->len++;
}

static void put_control(struct sl_ucx_worker *w, struct sl_ucx_post *p)
{
	uint64_t one = 1;

	push(&w->controls, p);
	(void)!write(w->context->config.control_fd, &one, sizeof(one));
}

int sl_ucx_put_control(struct sl_ucx_conn *n, const void *data, size_t len)
{
	struct sl_ucx_worker *w = n->worker;
	int room = n->controls < CONTROLS_MAX && w->controls.len - w->hellos < WORKER_CONTROLS_MAX;
	struct sl_ucx_post *p = room ? make(n->id, data, len) : NULL;

	if (!p)
		return -ENOMEM;
	n->controls++;
	put_control(w, p);
	return 0;
}

void sl_ucx_put_hello(struct sl_ucx_worker *w, const void *data, size_t len)
{
	struct sl_ucx_post *p = w->hellos < HELLOS_MAX ? make(0, data, len) : NULL;

	if (!p)
		return;
	w->hellos++;
	put_control(w, p);
}

struct sl_ucx_post *sl_ucx_make_loss(void)
{
	struct sl_ucx_post *p = make(0, NULL, 0);

	if (p)
		p->lost = 1;
	return p;
}

void sl_ucx_put_loss(struct sl_ucx_conn *n)
{
	struct sl_ucx_post *p = n->loss;

	n->loss = NULL;
	if (!p)
		return;
	p->conn = n->id;
	p->lost = n->proven ? 2 : 1;
	put_control(n->worker, p);
}

void sl_ucx_put_notification(struct sl_ucx_conn *n, const void *data, size_t len)
{
	struct sl_ucx_worker *w = n->worker;
	uint32_t most = NOTIFS_TIMES * w->context->config.notifs;
	int kept = n->unread < (most > NOTIFS_MIN ? most : NOTIFS_MIN) && len <= SL_UCX_NOTIF_MAX;
	struct sl_ucx_post *p = kept ? make(n->id, data, len) : NULL;

	if (!p) {
		sl_ucx_lose(n);
		return;
	}
	if (!w->notifs.first)
		w->ring->first_len = (uint32_t)len;
	n->unread++;
	push(&w->notifs, p);
	__atomic_fetch_add(&w->ring->notifs, 1, __ATOMIC_SEQ_CST);
	sl_ucx_wake_poller(w);
}

static struct sl_ucx_post *pop(struct sl_ucx_inbox *box)
{
	struct sl_ucx_post *p = box->first;

	if (p) {
		box->first = p->next;
		box->len--;
		if (!box->first)
			box->end = &box->first;
	}
	return p;
}

int sl_ucx_take_control(struct sl_ucx_context *c, struct sl_ucx_arrived_control *out, uint8_t *data)
{
	struct sl_ucx_post *p = NULL;

	for (uint32_t i = 0; i < c->config.workers && !p; i++) {
		struct sl_ucx_worker *w = &c->workers[i];
		struct sl_ucx_conn *n;

		sl_ucx_lock(w);
		p = pop(&w->controls);
		n = p && p->conn ? sl_ucx_conn_of(w, p->conn) : NULL;
		if (p && !p->conn && !p->lost)
			w->hellos--;
		else if (n && !p->lost)
			n->controls--;
		sl_ucx_unlock(w);
		if (p)
			*out = (struct sl_ucx_arrived_control){.conn = p->conn,
							       .worker = i,
							       .len = (uint32_t)p->len,
							       .lost = p->lost};
	}
	if (!p)
		return 0;
	if (p->len)
		memcpy(data, p->body, p->len);
	free(p);
	return 1;
}

void sl_ucx_return_credit(struct sl_ucx_conn *n)
{
	if (!n->credit_owed)
		return;
	sl_ucx_send_value(n, SL_UCX_MSG_CREDIT, n->credit_owed);
	n->credit_owed = 0;
}

/* Not for each message, unless the sender waits. */
void sl_ucx_count_received(struct sl_ucx_conn *n)
{
	n->credit_owed++;
	if (n->credit_urgent)
		n->credit_urgent--;
	if (n->credit_urgent || n->credit_owed > n->worker->context->config.notifs / 4)
		sl_ucx_return_credit(n);
}

uint64_t sl_ucx_take_notification(struct sl_ucx_context *c, uint32_t worker, uint8_t *data)
{
	struct sl_ucx_worker *w = &c->workers[worker];
	struct sl_ucx_post *p;
	struct sl_ucx_conn *n;
	uint64_t conn = 0;

	sl_ucx_lock(w);
	p = pop(&w->notifs);
	if (p) {
		conn = p->conn;
		if (p->len)
			memcpy(data, p->body, p->len);
		if (w->notifs.first)
			w->ring->first_len = (uint32_t)w->notifs.first->len;
		__atomic_fetch_sub(&w->ring->notifs, 1, __ATOMIC_SEQ_CST);
		n = sl_ucx_conn_of(w, p->conn);
		if (n) {
			n->unread--;
			sl_ucx_count_received(n);
		}
	}
	sl_ucx_unlock(w);
	free(p);
	return conn;
}

static void free_messages(struct sl_ucx_message *p)
{
	while (p) {
		struct sl_ucx_message *next = p->next;

		free(p);
		p = next;
	}
}

/* Before the worker goes. */
void sl_ucx_free_inboxes(struct sl_ucx_worker *w)
{
	struct sl_ucx_post *p;

	while ((p = pop(&w->controls)) != NULL)
		free(p);
	while ((p = pop(&w->notifs)) != NULL)
		free(p);
	if (w->ring)
		__atomic_store_n(&w->ring->notifs, 0, __ATOMIC_SEQ_CST);
	free_messages(w->small);
	free_messages(w->large);
	w->small = w->large = NULL;
}
