/* SPDX-License-Identifier: Apache-2.0 */
/* Our end of a connection: how it begins, and what it is asked. end.c has its end. */
#define _GNU_SOURCE
#include "worker.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

/*
 * An id is the place in the table, and above it what cannot be guessed: a process that knows the
 * address of a worker can write to it. It is not used again, and no other worker's.
 */
#define PLACE_BITS 20
/* The first sequence number: that it wraps must be nothing rare. */
#define EARLY_WRAP (0u - 3 * SL_UCX_WINDOW)

struct sl_ucx_conn *sl_ucx_conn_of(struct sl_ucx_worker *w, uint64_t id)
{
	uint64_t place = id & ((1u << PLACE_BITS) - 1);

	return place < w->conns_len && w->conns[place] && w->conns[place]->id == id
		   ? w->conns[place]
		   : NULL;
}

static uint64_t draw(void)
{
	uint64_t n = 0;

	while (n >> PLACE_BITS == 0) {
		if (getrandom(&n, sizeof(n), 0) != sizeof(n))
			n = 0; /* interrupted */
	}
	return n;
}

static int enter(struct sl_ucx_worker *w, struct sl_ucx_conn *n)
{
	uint32_t place = 0;
	void *grown;

	while (place < w->conns_len && w->conns[place])
		place++;
	if (place >> PLACE_BITS)
		return -EMFILE;
	if (place == w->conns_len) {
		grown = sl_ucx_grow(w->conns, &w->conns_len, sizeof(*w->conns));
		if (!grown)
			return -ENOMEM;
		w->conns = grown;
	}
	n->id = draw() >> PLACE_BITS << PLACE_BITS | place;
	w->conns[place] = n;
	return 0;
}

static void on_error(void *arg, ucp_ep_h ep, ucs_status_t status)
{
	struct sl_ucx_conn *n = arg;

	(void)ep;
	(void)status;
	n->failed = 1;
	sl_ucx_lose(n); /* from progress, under the lock */
}

static struct sl_ucx_conn *make(struct sl_ucx_worker *w)
{
	struct sl_ucx_conn *n = calloc(1, sizeof(*n));

	if (!n)
		return NULL;
	n->loss = sl_ucx_make_loss();
	if (!n->loss) {
		free(n);
		return NULL;
	}
	n->worker = w;
	n->live.prev = n->live.next = n->head = &n->live;
	n->credit = w->context->config.notifs;
	n->first_seq = n->next_seq = EARLY_WRAP;
	n->heard = n->last_out = n->idle_at = sl_ucx_now();
	sl_ucx_begin_ages(n, 0);
	return n;
}

void sl_ucx_free_conn(struct sl_ucx_conn *n)
{
	for (uint32_t i = 0; i < n->imports_len; i++)
		free(n->imports[i]);
	sl_ucx_forget_held(n);
	free(n->imports);
	free(n->loss);
	free(n);
}

void sl_ucx_leave_table(struct sl_ucx_conn *n)
{
	n->worker->conns[n->id & ((1u << PLACE_BITS) - 1)] = NULL;
}

/* Makes the endpoint, under the lock. */
static int reach(struct sl_ucx_conn *n, const void *address)
{
	ucp_ep_params_t params = {
	    .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
			  UCP_EP_PARAM_FIELD_ERR_HANDLER,
	    .address = address,
	    .err_mode = UCP_ERR_HANDLING_MODE_PEER,
	    .err_handler = {on_error, n},
	};
	ucs_status_t status = sl_ucx.ucp_ep_create(n->worker->handle, &params, &n->handle);

	if (status == UCS_OK)
		return 0;
	n->handle = NULL;
	return status == UCS_ERR_INVALID_ADDR || status == UCS_ERR_INVALID_PARAM ? -EINVAL
										 : -EHOSTUNREACH;
}

int sl_ucx_connect(struct sl_ucx_context *c, uint32_t worker, const void *address,
		   struct sl_ucx_conn **out)
{
	struct sl_ucx_worker *w = &c->workers[worker];
	struct sl_ucx_conn *n = make(w);
	int rc;

	if (!n)
		return -ENOMEM;
	sl_ucx_lock(w);
	rc = w->handle ? enter(w, n) : -EBADF;
	if (rc == 0) {
		rc = reach(n, address);
		if (rc != 0)
			sl_ucx_leave_table(n);
		w->conns_live += rc == 0;
	}
	sl_ucx_wake_thread(w);
	sl_ucx_unlock(w);
	if (rc != 0) {
		sl_ucx_free_conn(n);
		return rc;
	}
	*out = n;
	return 0;
}

uint64_t sl_ucx_id(struct sl_ucx_conn *n)
{
	return n->id;
}

void sl_ucx_bind(struct sl_ucx_conn *n, uint64_t peer, uint64_t grace_ns)
{
	sl_ucx_lock(n->worker);
	n->peer = peer;
	n->heard = sl_ucx_now();
	sl_ucx_begin_ages(n, grace_ns);
	sl_ucx_unlock(n->worker);
}

int sl_ucx_control(struct sl_ucx_conn *n, const uint8_t *data, size_t len)
{
	struct sl_ucx_worker *w = n->worker;
	struct sl_ucx_message *p;
	int rc;

	if (len > SL_UCX_CONTROL_MAX)
		return -EMSGSIZE;
	sl_ucx_lock(w);
	rc = n->state == SL_UCX_DRAINING ? 0 : -sl_ucx_refusal(n);
	if (rc == 0 && sl_ucx_has_backlog(n))
		rc = -EAGAIN;
	p = rc ? NULL : sl_ucx_new_message(w, len);
	if (p) {
		p->head.type = SL_UCX_MSG_CONTROL;
		p->len = (uint32_t)len;
		memcpy(p->body, data, len);
		sl_ucx_send(n, p);
		sl_ucx_wake_thread(w);
	} else if (rc == 0) {
		rc = -ENOMEM;
	}
	sl_ucx_unlock(w);
	return rc;
}

void sl_ucx_lanes(struct sl_ucx_conn *n, char *text, size_t size)
{
	FILE *f = fmemopen(text, size, "w");

	if (!f) {
		text[0] = 0;
		return;
	}
	sl_ucx_lock(n->worker);
	if (n->handle)
		sl_ucx.ucp_ep_print_info(n->handle, f);
	sl_ucx_unlock(n->worker);
	fputc(0, f);
	fclose(f);
	text[size - 1] = 0;
}
