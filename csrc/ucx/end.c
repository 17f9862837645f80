/* SPDX-License-Identifier: Apache-2.0 */
/* Our end of a connection: how it is lost, closed and given back. */
#include "worker.h"

#include <errno.h>
#include <stdlib.h>

/* Goes to a later state, never back. Whether that changed anything. */
static int advance(struct sl_ucx_conn *n, enum sl_ucx_state to)
{
	if (n->state >= to)
		return 0;
	n->state = to;
	return 1;
}

int sl_ucx_is_up(const struct sl_ucx_conn *n)
{
	return n->state == SL_UCX_OPEN || n->state == SL_UCX_DRAINING;
}

/*
 * Tells the peer that we send nothing more, and land nothing that it sends: it must neither wait
 * for us nor complete a batch as if it had arrived.
 */
static void reset(struct sl_ucx_conn *n)
{
	struct sl_ucx_message *p = n->failed ? NULL : sl_ucx_new_message(n->worker, 0);

	if (!p)
		return;
	p->head.type = SL_UCX_MSG_RESET;
	sl_ucx_send(n, p);
}

/* Go gives it up when it hears of that, and ends its batches. */
void sl_ucx_lose(struct sl_ucx_conn *n)
{
	if (advance(n, SL_UCX_BROKEN)) {
		reset(n);
		sl_ucx_put_loss(n);
	}
	pthread_cond_broadcast(&n->worker->changed);
}

void sl_ucx_note_proof(struct sl_ucx_conn *n)
{
	n->proven = 1;
	if (n->state == SL_UCX_BROKEN && !n->loss) {
		n->loss = sl_ucx_make_loss(); /* the second: now a proof is known */
		sl_ucx_put_loss(n);
	}
	pthread_cond_broadcast(&n->worker->changed);
}

/* From then on the peer asks before it lands what we sent, and an ended end does not answer. */
static uint64_t proof_at(const struct sl_ucx_conn *n)
{
	/*
	 * The eighth is for clocks that do not run alike: those of two hosts drift apart by at most
	 * 1,000 ppm, as NTP corrects each by at most 500 ppm. No time of the owner's is worked out
	 * by our clock: an echo is what came.
	 */
	return n->heard + n->lease + n->lease / 8;
}

int sl_ucx_drain(struct sl_ucx_conn *n, uint64_t grace_ns)
{
	struct sl_ucx_worker *w = n->worker;
	uint64_t deadline = sl_ucx_now() + grace_ns;
	struct sl_ucx_batch *b, *next;
	int rc = 0;

	sl_ucx_lock(w);
	advance(n, SL_UCX_DRAINING);
	for (b = n->head; b != &n->live; b = next) {
		next = b->next;
		sl_ucx_cancel_batch(b, SL_UCX_CLOSED);
	}
	sl_ucx_wake_thread(w);
	while (n->live.next != &n->live && sl_ucx_is_up(n) && rc == 0) {
		uint64_t silent_at = proof_at(n); /* later, if anything comes until then */

		rc = sl_ucx_wait(w, silent_at < deadline ? silent_at : deadline);
		if (rc != 0 && sl_ucx_now() >= proof_at(n))
			rc = -EPIPE;
		else if (rc != 0 && sl_ucx_now() < deadline)
			rc = 0;
	}
	if (n->live.next == &n->live)
		rc = 0;
	sl_ucx_unlock(w);
	return rc;
}

/* Ends the batches that may end by now: all, or all but writes with unanswered messages. */
static void end_batches(struct sl_ucx_conn *n)
{
	if (n->proven || sl_ucx_now() >= proof_at(n)) {
		sl_ucx_end_batches(n);
		return;
	}
	for (struct sl_ucx_batch *b = n->live.next, *next; b != &n->live; b = next) {
		next = b->next;
		if (!b->write)
			sl_ucx_detach(b);
		sl_ucx_end_if_over(b);
	}
}

static void end(struct sl_ucx_conn *n, int32_t status, int proven)
{
	n->proven |= proven;
	if (!n->proven && sl_ucx_is_up(n))
		reset(n);
	if (advance(n, SL_UCX_ENDED)) {
		n->outcome = status;
		for (struct sl_ucx_batch *b = n->live.next; b != &n->live; b = b->next) {
			b->cancelled = 1;
			sl_ucx_fail(b, status, -1);
		}
	}
	sl_ucx_forget_held(n);
	end_batches(n);
	pthread_cond_broadcast(&n->worker->changed);
}

void sl_ucx_end(struct sl_ucx_conn *n, int32_t status, int proven)
{
	struct sl_ucx_worker *w = n->worker;

	sl_ucx_lock(w);
	end(n, status, proven);
	sl_ucx_wake_thread(w); /* UCX may have something to give up */
	sl_ucx_unlock(w);
}

/* Whether a batch, a submission or a held message waits for the peer. */
static int has_waiters(const struct sl_ucx_conn *n)
{
	return n->live.next != &n->live || n->starved || n->held;
}

void sl_ucx_silence(struct sl_ucx_conn *n, uint64_t *heard_ns, uint64_t *waited_ns)
{
	uint64_t now;

	*heard_ns = *waited_ns = 0;
	sl_ucx_lock(n->worker);
	now = sl_ucx_now();
	if (n->peer && sl_ucx_is_up(n)) {
		*heard_ns = now - n->heard;
		*waited_ns = now - n->idle_at;
	}
	/* Both ends ping, three eighths of the larger Grace apart at most. */
	if (!has_waiters(n) && *heard_ns < n->lease / 2)
		*heard_ns = 0;
	sl_ucx_unlock(n->worker);
}

void sl_ucx_give_up(struct sl_ucx_conn *n)
{
	sl_ucx_lock(n->worker);
	if (sl_ucx_is_up(n))
		sl_ucx_lose(n);
	sl_ucx_unlock(n->worker);
}

/*
 * Both ends ping, so that each has a fresh stamp of the other. Silence alone is no reason to give a
 * peer up: Go looks whether its host is there.
 */
void sl_ucx_tick(struct sl_ucx_worker *w, uint64_t now, int judge)
{
	const struct sl_ucx_config *config = &w->context->config;

	for (uint32_t k = 0; k < w->conns_len; k++) {
		struct sl_ucx_conn *n = w->conns[k];

		if (!n || !n->peer)
			continue;
		if (n->state == SL_UCX_ENDED)
			end_batches(n);
		if (!sl_ucx_is_up(n))
			continue;
		if (!judge || !has_waiters(n))
			n->idle_at = now;
		if (now - n->last_out >= config->grace_ns / 4)
			sl_ucx_ping(n);
	}
	sl_ucx_finish_closing(w, 0);
}

/*
 * Gives the endpoint back. 0: it is gone. -ETIMEDOUT: it stays, unused, until the peer's UCX has
 * taken all that we have said, UCX itself gives the peer up, or the worker goes.
 *
 * The end by force comes behind a flush, since UCX 1.13 over TCP does not survive it while bytes
 * wait for room in the socket. UCX then keeps the socket for what the peer still says, and has its
 * own goodbye wait for that room. A stopped peer that goes on says goodbye and makes room at once:
 * uct_tcp_iface_handle_events frees the endpoint for the one, and uses it for the other. Nor does
 * UCX survive the end by force of an endpoint that still connects ("got REP message").
 */
static int close_endpoint(struct sl_ucx_conn *n, uint64_t grace_ns)
{
	ucp_request_param_t none = {0}, forced = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
		.flags = UCP_EP_CLOSE_FLAG_FORCE,
	};
	struct sl_ucx_worker *w = n->worker;
	uint64_t now = sl_ucx_now(), silent_at = n->heard + w->context->config.grace_ns;
	ucp_ep_h handle = n->handle;
	int rc;

	if (now + grace_ns > silent_at) /* a peer that was silent for Grace is not waited for */
		grace_ns = silent_at > now ? silent_at - now : 0;
	if (handle && !n->failed && !n->flushed) {
		if (!n->flush)
			n->flush = sl_ucx.ucp_ep_flush_nbx(handle, &none);
		rc = sl_ucx_await(w, n->flush, grace_ns);
		if (rc != 0 && !n->failed)
			return rc;
		n->flushed = rc == 0;
		if (rc == 0)
			n->flush = NULL;
	}
	if (handle) {
		n->handle = NULL; /* what its end calls must not send */
		n->closing = sl_ucx.ucp_ep_close_nbx(handle,
						     n->failed || n->peer ? &forced : &none);
	}
	if (n->flush) /* of an endpoint that failed: UCX ends it, too */
		sl_ucx.ucp_request_free(n->flush);
	n->flush = NULL;
	rc = sl_ucx_await(w, n->closing, grace_ns);
	if (rc == 0)
		n->closing = NULL;
	return rc;
}

static int at_rest(const struct sl_ucx_conn *n)
{
	return !n->handle && !n->closing && n->sends == 0 && n->live.next == &n->live;
}

static void release_conn(struct sl_ucx_conn *n)
{
	sl_ucx_leave_table(n);
	sl_ucx_free_conn(n);
}

void sl_ucx_disconnect(struct sl_ucx_conn *n, uint64_t grace_ns)
{
	struct sl_ucx_worker *w = n->worker;

	sl_ucx_lock(w);
	end(n, SL_UCX_CLOSED, 0);
	while (n->live.next != &n->live) {
		sl_ucx_wait(w, proof_at(n));
		end_batches(n);
	}
	w->conns_live--;
	sl_ucx_wake_thread(w);
	close_endpoint(n, grace_ns);
	if (at_rest(n)) {
		release_conn(n);
	} else {
		n->next = w->closing_conns;
		w->closing_conns = n;
	}
	sl_ucx_unlock(w);
}

/* The lock was let go of meanwhile: others may have come to stand in front of it. */
static void unlink_closing(struct sl_ucx_worker *w, const struct sl_ucx_conn *n)
{
	struct sl_ucx_conn **p = &w->closing_conns;

	while (*p != n)
		p = &(*p)->next;
	*p = n->next;
}

int sl_ucx_finish_closing(struct sl_ucx_worker *w, uint64_t deadline)
{
	int left = 0;

	for (struct sl_ucx_conn *n = w->closing_conns, *next; n; n = next) {
		uint64_t now = sl_ucx_now();

		if (n->handle || n->closing)
			close_endpoint(n, now < deadline ? deadline - now : 0);
		next = n->next;
		if (!at_rest(n)) {
			left++;
			continue;
		}
		unlink_closing(w, n);
		release_conn(n);
	}
	return left;
}

int sl_ucx_cut(struct sl_ucx_worker *w)
{
	for (struct sl_ucx_conn *n = w->closing_conns; n; n = n->next)
		n->failed = 1;
	return sl_ucx_finish_closing(w, 0);
}
