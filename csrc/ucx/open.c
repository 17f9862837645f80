/* SPDX-License-Identifier: Apache-2.0 */
/* Opening and closing a context and its workers. */
#define _GNU_SOURCE
#include "worker.h"
#include "../threads.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

static int say(char *why, size_t size, const char *what, ucs_status_t status)
{
	snprintf(why, size, "%s: %s", what, sl_ucx.ucs_status_string(status));
	return status == UCS_ERR_NO_MEMORY ? -ENOMEM : -ENODEV;
}

static int choose(ucp_config_t *config, const char *name, const char *value, char *why, size_t size)
{
	ucs_status_t status = value ? sl_ucx.ucp_config_modify(config, name, value) : UCS_OK;

	return status == UCS_OK ? 0 : say(why, size, name, status);
}

static int open_handle(struct sl_ucx_context *c, char *why, size_t size)
{
	ucp_params_t params = {
		.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED,
		.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
		.mt_workers_shared = 1,
	};
	ucp_config_t *config;
	ucs_status_t status = sl_ucx.ucp_config_read(NULL, NULL, &config);
	const char *const *s = c->config.settings;
	int rc;

	if (status != UCS_OK)
		return say(why, size, "read the configuration", status);
	rc = choose(config, "TLS", c->config.transports, why, size);
	if (rc == 0)
		rc = choose(config, "NET_DEVICES", c->config.devices, why, size);
	for (; s && s[0] && s[1] && rc == 0; s += 2)
		rc = choose(config, s[0], s[1], why, size);
	if (rc == 0) {
		status = sl_ucx.ucp_init_version(SL_UCX_MAJOR, SL_UCX_MINOR, &params, config,
						 &c->handle);
		if (status != UCS_OK)
			rc = say(why, size, "open a context", status);
	}
	sl_ucx.ucp_config_release(config);
	return rc;
}

static int listen_to_messages(struct sl_ucx_worker *w, char *why, size_t size)
{
	ucp_am_handler_param_t handler = {
		.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
			      UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
		.id = SL_UCX_AM,
		.flags = UCP_AM_FLAG_WHOLE_MSG,
		.cb = sl_ucx_arrived,
		.arg = w,
	};
	ucs_status_t status = sl_ucx.ucp_worker_set_am_recv_handler(w->handle, &handler);

	return status == UCS_OK ? 0 : say(why, size, "listen to active messages", status);
}

static int open_worker(struct sl_ucx_worker *w, char *why, size_t size)
{
	ucp_worker_params_t params = {
		.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
		.thread_mode = UCS_THREAD_MODE_SERIALIZED,
	};
	ucs_status_t status = sl_ucx.ucp_worker_create(w->context->handle, &params, &w->handle);

	if (status != UCS_OK)
		return say(why, size, "open a worker", status);
	status = sl_ucx.ucp_worker_get_efd(w->handle, &w->event_fd);
	if (status != UCS_OK)
		return say(why, size, "have the worker wake a sleeper", status);
	status = sl_ucx.ucp_worker_get_address(w->handle, &w->address, &w->address_len);
	if (status != UCS_OK)
		return say(why, size, "ask for the worker's address", status);
	return listen_to_messages(w, why, size);
}

static int prepare_worker(struct sl_ucx_context *c, uint32_t index)
{
	struct sl_ucx_worker *w = &c->workers[index];
	uint32_t batches = c->config.batches;
	size_t bytes = sizeof(*w->ring) + batches * sizeof(w->ring->done[0]);
	pthread_condattr_t clock;

	w->context = c;
	w->controls.end = &w->controls.first;
	w->notifs.end = &w->notifs.first;
	pthread_mutex_init(&w->lock, NULL);
	pthread_condattr_init(&clock);
	pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
	pthread_cond_init(&w->changed, &clock);
	pthread_condattr_destroy(&clock);
	w->ring = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
	w->batches = calloc(batches, sizeof(*w->batches));
	if (!w->ring || !w->batches)
		return -ENOMEM;
	memset(w->ring, 0, bytes);
	w->ring->mask = batches - 1;
	for (uint32_t i = 0; i < batches; i++) {
		w->batches[i].next = w->free;
		w->free = &w->batches[i];
	}
	return 0;
}

static void stop_threads(struct sl_ucx_context *c)
{
	atomic_store(&c->stop, 1);
	for (uint32_t i = 0; c->workers && i < c->config.workers; i++) {
		struct sl_ucx_worker *w = &c->workers[i];

		if (!w->has_thread)
			continue;
		sl_ucx.ucp_worker_signal(w->handle);
		pthread_join(w->thread, NULL);
		w->has_thread = 0;
	}
}

static void release_worker(struct sl_ucx_worker *w)
{
	sl_ucx_free_inboxes(w);
	for (uint32_t i = 0; w->batches && i < w->context->config.batches; i++)
		sl_pieces_free(&w->batches[i].pieces);
	if (w->address)
		sl_ucx.ucp_worker_release_address(w->handle, w->address);
	if (w->handle)
		sl_ucx.ucp_worker_destroy(w->handle);
	free(w->batches);
	free(w->conns);
	w->batches = w->free = NULL;
	w->handle = NULL;
	w->address = NULL;
	w->conns = NULL;
	w->conns_len = 0;
}

/* All keys are free from now on. Threads may look at one still: free gives the table back. */
static void release_memories(struct sl_ucx_context *c)
{
	for (uint32_t i = 0; i < SL_UCX_CHUNKS; i++) {
		struct sl_ucx_memory *chunk = atomic_load(&c->chunks[i]);

		for (uint32_t k = 0; chunk && k < SL_UCX_CHUNK; k++)
			atomic_store(&chunk[k].ticket, 0);
	}
}

/* What open has made so far; threads are at rest. */
static void release(struct sl_ucx_context *c)
{
	pthread_mutex_lock(&c->lock);
	release_memories(c);
	pthread_mutex_unlock(&c->lock);
	for (uint32_t i = 0; c->workers && i < c->config.workers; i++) {
		struct sl_ucx_worker *w = &c->workers[i];

		if (!w->context) /* open has not come so far */
			continue;
		pthread_mutex_lock(&w->lock);
		release_worker(w);
		pthread_mutex_unlock(&w->lock);
	}
	pthread_mutex_lock(&c->lock);
	c->closed = 1;
	if (c->handle)
		sl_ucx.ucp_cleanup(c->handle);
	pthread_mutex_unlock(&c->lock);
}

static int start(struct sl_ucx_context *c, char *why, size_t size)
{
	int rc = open_handle(c, why, size);

	for (uint32_t i = 0; i < c->config.workers && rc == 0; i++)
		rc = open_worker(&c->workers[i], why, size);
	for (uint32_t i = 0; i < c->config.workers && rc == 0; i++) {
		struct sl_ucx_worker *w = &c->workers[i];

		snprintf(why, size, "no thread for the worker");
		w->ticked = sl_ucx_now();
		rc = -pthread_create(&w->thread, NULL, sl_ucx_progress, w);
		w->has_thread = rc == 0;
	}
	return rc;
}

int sl_ucx_open(const struct sl_ucx_config *config, struct sl_ucx_context **out, char *why,
		size_t size)
{
	struct sl_ucx_context *c = calloc(1, sizeof(*c));
	sigset_t all, before;
	int rc = 0;

	snprintf(why, size, "out of memory");
	if (!c)
		return -ENOMEM;
	c->config = *config;
	pthread_mutex_init(&c->lock, NULL);
	c->workers = calloc(config->workers, sizeof(*c->workers));
	if (!c->workers)
		rc = -ENOMEM;
	for (uint32_t i = 0; i < config->workers && rc == 0; i++)
		rc = prepare_worker(c, i);
	/* Threads inherit the mask: signals are the program's, not UCX's nor ours. */
	sl_signals_of_others(&all);
	pthread_sigmask(SIG_BLOCK, &all, &before);
	if (rc == 0)
		rc = start(c, why, size);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	/* Strings are the caller's. */
	c->config.transports = c->config.devices = NULL;
	c->config.settings = NULL;
	if (rc != 0) {
		stop_threads(c);
		release(c);
		sl_ucx_free(c);
		return rc;
	}
	*out = c;
	return 0;
}

/* Calls of progress in a try that does not wait. */
#define LOOKS 64

int sl_ucx_close(struct sl_ucx_context *c, uint64_t grace_ns)
{
	ucp_request_param_t flush = {0};
	uint64_t deadline = sl_ucx_now() + grace_ns; /* of all that peers do not take */
	int rc = 0;

	if (c->closed)
		return 0;
	stop_threads(c);
	for (uint32_t i = 0; i < c->config.workers; i++) {
		struct sl_ucx_worker *w = &c->workers[i];
		int left = 0;

		if (!w->handle) /* it went by the try before */
			continue;
		pthread_mutex_lock(&w->lock);
		for (int k = 0; k < LOOKS && sl_ucx.ucp_worker_progress(w->handle); k++)
			;
		if (w->conns_live)
			left = 1;
		else if (sl_ucx_finish_closing(w, deadline))
			left = sl_ucx_cut(w);
		else
			sl_ucx_finish(w, sl_ucx.ucp_worker_flush_nbx(w->handle, &flush), grace_ns);
		if (left)
			rc = -ETIMEDOUT;
		else
			release_worker(w);
		pthread_mutex_unlock(&w->lock);
	}
	if (rc == 0)
		release(c);
	else /* they are the caller's, and gone by the next try */
		c->config.wake_fd = c->config.control_fd = -1;
	return rc;
}

void sl_ucx_free(struct sl_ucx_context *c)
{
	for (uint32_t i = 0; c->workers && i < c->config.workers; i++) {
		struct sl_ucx_worker *w = &c->workers[i];

		if (!w->context)
			continue;
		pthread_cond_destroy(&w->changed);
		pthread_mutex_destroy(&w->lock);
		free(w->ring);
	}
	for (uint32_t i = 0; i < SL_UCX_CHUNKS; i++)
		free(atomic_load(&c->chunks[i]));
	pthread_mutex_destroy(&c->lock);
	free(c->workers);
	free(c);
}

struct sl_ring *sl_ucx_ring(struct sl_ucx_context *c, uint32_t worker)
{
	return c->workers[worker].ring;
}

const void *sl_ucx_address(struct sl_ucx_context *c, uint32_t worker, size_t *len)
{
	*len = c->workers[worker].address_len;
	return c->workers[worker].address;
}
