/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whether anything that peers of this host send can still arrive at a worker.
 *
 * All processes put their messages into one queue of the receiver's. UCX 1.13 does so in two steps
 * (uct_mm_ep_am_common_send): the sender moves the head of the queue on by compare-and-swap, and so
 * owns an element; then it fills the element and sets a flag in it. The receiver takes elements in
 * order and waits for the flag of the next one (uct_mm_iface_poll_fifo). A process that is killed
 * between the two steps leaves an element that is never filled, and all that is behind it never
 * arrives. No setting of UCX separates the senders, and nothing repairs the queue from outside. So
 * we send a message to ourselves by the same queue, and see whether it arrives.
 */
#define _GNU_SOURCE
#include "worker.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/random.h>

#define LOOK_NS 2000000u
/* Calls of progress under one hold of the lock: the queue has fewer places. */
#define ROUNDS 512

/* A sender of our own, as a foreign process is one. */
struct probe {
	struct sl_ucx_context context;
	ucp_worker_h worker;
	ucp_ep_h endpoint;
	ucs_status_ptr_t request;
	struct sl_ucx_head head;
};

static int open_probe(struct probe *p, const void *address)
{
	ucp_worker_params_t single = {
		.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
		.thread_mode = UCS_THREAD_MODE_SERIALIZED,
	};
	ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS,
				  .address = address};
	sigset_t all, before;
	char why[256];
	int rc;

	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, &before);
	rc = sl_ucx_open_handle(&p->context, why, sizeof(why));
	if (rc == 0 &&
	    (sl_ucx.ucp_worker_create(p->context.handle, &single, &p->worker) != UCS_OK ||
	     sl_ucx.ucp_ep_create(p->worker, &params, &p->endpoint) != UCS_OK))
		rc = -EHOSTUNREACH;
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return rc;
}

static int sent(struct probe *p)
{
	sl_ucx.ucp_worker_progress(p->worker);
	return !p->request || UCS_PTR_IS_ERR(p->request) ||
	       sl_ucx.ucp_request_check_status(p->request) != UCS_INPROGRESS;
}

static atomic_uint probes_kept;

uint32_t sl_ucx_probes_kept(void)
{
	return atomic_load(&probes_kept);
}

/*
 * UCX ends the process if a worker goes whose message is not sent. Such a probe stays, once a
 * context.
 */
static void close_probe(struct probe *p)
{
	ucp_request_param_t none = {0};
	ucs_status_ptr_t closing;

	if (p->endpoint && !sent(p)) {
		atomic_fetch_add(&probes_kept, 1);
		return;
	}
	if (p->request && !UCS_PTR_IS_ERR(p->request))
		sl_ucx.ucp_request_free(p->request);
	if (p->endpoint) {
		closing = sl_ucx.ucp_ep_close_nbx(p->endpoint, &none);
		while (closing && !UCS_PTR_IS_ERR(closing) &&
		       sl_ucx.ucp_request_check_status(closing) == UCS_INPROGRESS)
			sl_ucx.ucp_worker_progress(p->worker);
		if (closing && !UCS_PTR_IS_ERR(closing))
			sl_ucx.ucp_request_free(closing);
	}
	if (p->worker)
		sl_ucx.ucp_worker_destroy(p->worker);
	if (p->context.handle)
		sl_ucx.ucp_cleanup(p->context.handle);
	free(p);
}

/* Looks for the message until the deadline, and once more: we may have been stopped ourselves. */
static int arrives(struct sl_ucx_worker *w, struct probe *p, uint64_t deadline)
{
	int late = 0, here = 0;

	sl_ucx_lock(w);
	while (!here && !late) {
		unsigned found = 1;

		late = sl_ucx_now() > deadline;
		for (int i = 0; i < (late ? ROUNDS : 1) && found && !here; i++) {
			sent(p);
			found = sl_ucx.ucp_worker_progress(w->handle);
			here = w->probed == p->head.off;
		}
		if (!here && !late)
			sl_ucx_wait(w, sl_ucx_now() + LOOK_NS);
	}
	sl_ucx_rouse(w);
	sl_ucx_unlock(w);
	return here;
}

int sl_ucx_probe(struct sl_ucx_context *c, uint32_t worker, const char *transports,
		 const char *const *settings, uint64_t grace_ns)
{
	struct sl_ucx_worker *w = &c->workers[worker];
	ucp_request_param_t param = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
		.flags = UCP_AM_SEND_FLAG_EAGER,
	};
	struct probe *p = calloc(1, sizeof(*p));
	int rc;

	if (!p)
		return -ENOMEM;
	p->context.config.transports = transports;
	p->context.config.settings = settings;
	rc = open_probe(p, w->address);
	p->head = (struct sl_ucx_head){.version = SL_UCX_VERSION, .type = SL_UCX_MSG_PROBE};
	if (rc == 0 && getrandom(&p->head.off, sizeof(p->head.off), 0) != sizeof(p->head.off))
		rc = -EINTR;
	if (rc == 0) {
		p->request = sl_ucx.ucp_am_send_nbx(p->endpoint, SL_UCX_AM, &p->head,
						    sizeof(p->head), NULL, 0, &param);
		rc = arrives(w, p, sl_ucx_now() + grace_ns) ? 0 : -ETIMEDOUT;
	}
	close_probe(p);
	return rc;
}

void sl_ucx_condemn(struct sl_ucx_context *c)
{
	for (uint32_t i = 0; i < c->config.workers; i++) {
		struct sl_ucx_worker *w = &c->workers[i];

		sl_ucx_lock(w);
		for (uint32_t k = 0; k < w->conns_len; k++) {
			if (w->conns[k] && w->conns[k]->peer)
				sl_ucx_lose(w->conns[k]);
		}
		sl_ucx_rouse(w);
		sl_ucx_unlock(w);
	}
}
