/* SPDX-License-Identifier: Apache-2.0 */
/* Our end of a connection: its life. */
#define _GNU_SOURCE
#include "ucx_worker.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

/*
 * An id is the place in the table, and above it what nobody guesses: whoever knows the address of
 * a worker can write to it. It is not used again, and no other worker's.
 */
#define PLACE_BITS 20
/* The first sequence number: that it wraps must be nothing rare. */
#define EARLY_WRAP (0u - 3 * SL_UCX_WINDOW)
/* Calls of progress that empty what peers on this host can put into our memory. */
#define LAST_WORDS 4096

struct sl_ucx_conn *sl_ucx_conn_of(struct sl_ucx_worker *w, uint64_t id)
{
	uint64_t place = id & ((1u << PLACE_BITS) - 1);

	return place < w->conns_len && w->conns[place] && w->conns[place]->id == id ? w->conns[place] : NULL;
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
	w->conns_live++;
	return 0;
}

static void leave(struct sl_ucx_conn *n)
{
	n->worker->conns[n->id & ((1u << PLACE_BITS) - 1)] = NULL;
	n->worker->conns_live--;
}

/* Go gives it up when it hears of that, and ends its batches. */
void sl_ucx_lose(struct sl_ucx_conn *n)
{
	n->lost = 1;
	if (!n->ended)
		sl_ucx_put_farewell(n);
	pthread_cond_broadcast(&n->worker->news);
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
	n->farewell = sl_ucx_farewell();
	if (!n->farewell) {
		free(n);
		return NULL;
	}
	n->worker = w;
	n->live.prev = n->live.next = n->head = &n->live;
	n->sending.prev = n->sending.next = &n->sending;
	n->credit = w->context->config.notes;
	n->first_seq = n->next_seq = EARLY_WRAP;
	n->last_in = n->last_out = sl_ucx_about_now();
	n->refused = ENOTSUP;
	if (w->context->config.pull)
		sl_ucx_open_gate(n);
	return n;
}

static void free_conn(struct sl_ucx_conn *n)
{
	for (uint32_t i = 0; i < n->imports_len; i++)
		free(n->imports[i]);
	sl_ucx_shut_gate(n);
	free(n->imports);
	free(n->farewell);
	free(n);
}

/* Makes the endpoint, under the lock. */
static int reach(struct sl_ucx_conn *n, const void *address)
{
	ucp_ep_params_t params = {
		.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
			      UCP_EP_PARAM_FIELD_ERR_HANDLER,
		.address = address,
		/* UCX's lanes of shared memory know no errors: asked for peer mode, it would
		 * move everything on one host over TCP. */
		.err_mode = n->worker->context->config.shared ? UCP_ERR_HANDLING_MODE_NONE : UCP_ERR_HANDLING_MODE_PEER,
		.err_handler = {on_error, n},
	};
	ucs_status_t status = sl_ucx.ucp_ep_create(n->worker->handle, &params, &n->handle);

	if (status == UCS_OK)
		return 0;
	n->handle = NULL;
	return status == UCS_ERR_INVALID_ADDR || status == UCS_ERR_INVALID_PARAM ? -EINVAL : -EHOSTUNREACH;
}

int sl_ucx_connect(struct sl_ucx_context *c, uint32_t worker, const void *address, struct sl_ucx_conn **out)
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
			leave(n);
	}
	sl_ucx_rouse(w);
	sl_ucx_unlock(w);
	if (rc != 0) {
		free_conn(n);
		return rc;
	}
	*out = n;
	return 0;
}

uint64_t sl_ucx_id(struct sl_ucx_conn *n)
{
	return n->id;
}

/* Maps a peer's page of generations, so that its memory can be mapped as well. */
static void map_words(struct sl_ucx_conn *n, const struct sl_ucx_export *words)
{
	void *at;

	if (sl_ucx.ucp_ep_rkey_unpack(n->handle, words->rkey, &n->words_key) != UCS_OK) {
		n->words_key = NULL;
		return;
	}
	if (sl_ucx.ucp_rkey_ptr(n->words_key, words->base, &at) == UCS_OK)
		n->words = at;
}

void sl_ucx_bind(struct sl_ucx_conn *n, const struct sl_ucx_peer *peer)
{
	sl_ucx_lock(n->worker);
	n->peer = peer->conn;
	n->last_in = sl_ucx_about_now();
	if (peer->words.rkey_len && n->worker->context->config.shared && !n->words_key)
		map_words(n, &peer->words);
	sl_ucx_look_at_gate(n, peer);
	n->pulled = peer->pulls && n->gate;
	sl_ucx_unlock(n->worker);
}

int sl_ucx_control(struct sl_ucx_conn *n, const uint8_t *data, size_t len)
{
	struct sl_ucx_worker *w = n->worker;
	struct sl_ucx_parcel *p;
	int rc;

	if (len > SL_UCX_CONTROL_MAX)
		return -EMSGSIZE;
	sl_ucx_lock(w);
	rc = n->ended ? -EBADF : n->lost ? -EPIPE : 0;
	p = rc ? NULL : sl_ucx_parcel(w, len);
	if (p) {
		p->head.type = SL_UCX_MSG_CONTROL;
		p->len = (uint32_t)len;
		memcpy(p->body, data, len);
		sl_ucx_send(n, p, p->body, len, 0);
		sl_ucx_rouse(w);
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
	if (n->handle) /* not where a silent reader was cut off */
		sl_ucx.ucp_ep_print_info(n->handle, f);
	sl_ucx_unlock(n->worker);
	fputc(0, f);
	fclose(f);
	text[size - 1] = 0;
}

/* Both ends ping; who hears nothing for the whole grace gives the other up. */
void sl_ucx_tick(struct sl_ucx_worker *w, uint64_t now, int judge)
{
	uint64_t grace = w->context->config.grace_ns;

	for (uint32_t k = 0; k < w->conns_len; k++) {
		struct sl_ucx_conn *n = w->conns[k];

		if (!n || !n->peer || n->ended || n->lost)
			continue;
		if (judge && now - n->last_in > grace)
			sl_ucx_lose(n);
		else if (now - n->last_out >= grace / 4 && n->pings == 0)
			sl_ucx_signal(n, SL_UCX_MSG_PING, 0);
	}
	sl_ucx_bury(w, 0, 0);
}

int sl_ucx_drain(struct sl_ucx_conn *n, uint64_t grace_ns)
{
	struct sl_ucx_worker *w = n->worker;
	uint64_t deadline = sl_ucx_now() + grace_ns;
	struct sl_ucx_batch *b, *next;
	int rc = 0;

	sl_ucx_lock(w);
	n->closed = 1;
	for (b = n->head; b != &n->live; b = next) {
		next = b->next;
		sl_ucx_give_up(b, SL_UCX_CLOSED);
	}
	sl_ucx_rouse(w);
	while (n->live.next != &n->live && rc == 0)
		rc = sl_ucx_wait(w, deadline);
	if (n->live.next == &n->live)
		rc = 0;
	sl_ucx_unlock(w);
	return rc;
}

/*
 * What UCX 1.13 does not survive: the end by force of an endpoint that still connects ("got REP
 * message"), and of one whose peer is only silent (its socket keeps an event that leads to freed memory
 * when the peer connects again). So those stay, unused, until UCX itself gives them up, or the
 * worker goes. Lanes of shared memory cannot be ended by force.
 */
static int can_force(const struct sl_ucx_conn *n)
{
	return !n->worker->context->config.shared && (n->failed || (n->peer && !n->lost));
}

void sl_ucx_cut(struct sl_ucx_conn *n)
{
	ucp_request_param_t forced = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
		.flags = UCP_EP_CLOSE_FLAG_FORCE,
	};
	ucp_ep_h handle = n->handle;

	if (!handle || !can_force(n))
		return;
	n->handle = NULL; /* what it ends now must not send */
	n->closing = sl_ucx.ucp_ep_close_nbx(handle, &forced);
}

void sl_ucx_cut_readers(struct sl_ucx_context *c, struct sl_ucx_memory *m)
{
	for (uint32_t i = 0; i < c->config.workers; i++) {
		struct sl_ucx_worker *w = &c->workers[i];
		uint64_t deadline = sl_ucx_now() + c->config.grace_ns;

		sl_ucx_lock(w);
		for (uint32_t k = 0; k < w->conns_len; k++) {
			struct sl_ucx_conn *n = w->conns[k];
			struct sl_ucx_parcel *p = n ? n->sending.next : NULL;

			while (p && p != &n->sending && p->memory != m)
				p = p->next;
			if (!p || p == &n->sending)
				continue;
			sl_ucx_lose(n);
			sl_ucx_cut(n);
		}
		/* Also for those whose connections are ended already. */
		while (w->handle && atomic_load(&m->reading) && sl_ucx_now() < deadline) {
			sl_ucx.ucp_worker_progress(w->handle);
			sl_ucx_unlock(w);
			usleep(20);
			sl_ucx_lock(w);
		}
		sl_ucx_unlock(w);
	}
}

static void end(struct sl_ucx_conn *n, int32_t status)
{
	if (n->ended)
		return;
	n->ended = n->closed = 1;
	n->gone = status == SL_UCX_LOST;
	sl_ucx_shut_gate(n);
	if (n->lent) /* UCX must not send from memory whose batch is over */
		sl_ucx_cut(n);
	for (struct sl_ucx_batch *b = n->live.next, *next; b != &n->live; b = next) {
		next = b->next;
		b->cancelled = 1;
		sl_ucx_detach(b);
		sl_ucx_fail(b, status, -1);
		sl_ucx_settle(b);
	}
	pthread_cond_broadcast(&n->worker->news);
}

void sl_ucx_end(struct sl_ucx_conn *n, int32_t status)
{
	struct sl_ucx_worker *w = n->worker;

	sl_ucx_lock(w);
	/* What a process had put into our memory before it died is here, and counts. */
	for (int i = 0; status == SL_UCX_LOST && w->context->config.shared && i < LAST_WORDS; i++) {
		if (!sl_ucx.ucp_worker_progress(w->handle))
			break;
	}
	end(n, status);
	sl_ucx_rouse(w); /* UCX may have something to give up */
	sl_ucx_unlock(w);
}

/* Gives the endpoint back. 0: it is gone. */
static int close_endpoint(struct sl_ucx_conn *n, uint64_t grace_ns)
{
	ucp_request_param_t none = {0};
	struct sl_ucx_worker *w = n->worker;
	int rc = 0;

	if (n->handle && !n->lost && grace_ns)
		rc = sl_ucx_finish(w, sl_ucx.ucp_ep_flush_nbx(n->handle, &none), grace_ns);
	if (n->handle && can_force(n)) {
		sl_ucx_cut(n);
	} else if (n->handle && n->lost && !n->worker->context->config.shared) {
		return -ETIMEDOUT;
	} else if (n->handle && rc == 0) {
		n->closing = sl_ucx.ucp_ep_close_nbx(n->handle, &none);
		n->handle = NULL;
	} else if (n->handle) {
		return rc;
	}
	rc = sl_ucx_await(w, n->closing, grace_ns);
	if (rc == 0)
		n->closing = NULL;
	return rc;
}

/* A message by rendezvous that a dead or frozen peer does not fetch waits nowhere but in our memory. */
static int at_rest(const struct sl_ucx_conn *n)
{
	return !n->handle && !n->closing && n->sends == n->parked && n->live.next == &n->live;
}

void sl_ucx_disconnect(struct sl_ucx_conn *n, uint64_t grace_ns)
{
	struct sl_ucx_worker *w = n->worker;

	sl_ucx_lock(w);
	end(n, SL_UCX_CLOSED);
	sl_ucx_forget_imports(n);
	leave(n);
	sl_ucx_rouse(w);
	close_endpoint(n, grace_ns);
	if (at_rest(n) && n->sends == 0) {
		free_conn(n);
	} else {
		n->next = w->zombies;
		w->zombies = n;
	}
	sl_ucx_unlock(w);
}

static void abandon(struct sl_ucx_conn *n)
{
	while (n->sending.next != &n->sending) {
		struct sl_ucx_parcel *p = n->sending.next;

		n->sending.next = p->next;
		p->next->prev = &n->sending;
		if (p->memory)
			atomic_fetch_sub(&p->memory->reading, 1);
		sl_ucx_parcel_free(n->worker, p);
	}
	free_conn(n);
}

/* The lock was let go of meanwhile: others may have come to stand in front of it. */
static void unlink_zombie(struct sl_ucx_worker *w, const struct sl_ucx_conn *n)
{
	struct sl_ucx_conn **p = &w->zombies;

	while (*p != n)
		p = &(*p)->next;
	*p = n->next;
}

int sl_ucx_bury(struct sl_ucx_worker *w, uint64_t grace_ns, int last)
{
	int left = 0;

	for (struct sl_ucx_conn *n = w->zombies, *next; n; n = next) {
		n->failed |= last; /* the worker goes next, and what its sockets have to say with it */
		if (n->closing || (n->handle && (grace_ns || n->sends == 0) && (n->failed || !n->lost)))
			close_endpoint(n, grace_ns);
		next = n->next;
		if (!at_rest(n) || (n->sends && !last)) {
			left++;
			continue;
		}
		unlink_zombie(w, n);
		abandon(n);
	}
	return left;
}
