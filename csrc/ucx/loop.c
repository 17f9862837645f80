/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "loop.h"
#include "load.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Calls of progress between two looks at the clock, which cost as much. */
#define LOOKS 64

struct sl_ucx_loop {
	ucp_context_h context;
	ucp_worker_h worker;
	ucp_address_t *address;
	size_t address_len;
	ucp_mem_h memory;
	uint8_t *base;
	uint64_t len;
	ucp_ep_h endpoint;
	ucp_rkey_h rkey;
	uint64_t remote_base, remote_len;
	uint32_t pending; /* operations under way */
	int lost;	  /* one of them has not ended in time */
	ucs_status_t status; /* of the first one that failed */
};

static uint64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int say(char *why, size_t size, const char *what, ucs_status_t status)
{
	if (status == UCS_OK)
		return 0;
	snprintf(why, size, "%s: %s", what, sl_ucx.ucs_status_string(status));
	return -ENODEV;
}

static int choose(ucp_config_t *config, const char *name, const char *value, char *why, size_t size)
{
	return value ? say(why, size, name, sl_ucx.ucp_config_modify(config, name, value)) : 0;
}

static int open_context(struct sl_ucx_loop *l, const char *transports, const char *devices,
			char *why, size_t size)
{
	ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_RMA};
	ucp_config_t *config;
	int rc =
	    say(why, size, "read the configuration", sl_ucx.ucp_config_read(NULL, NULL, &config));

	if (rc != 0)
		return rc;
	rc = choose(config, "TLS", transports, why, size);
	if (rc == 0)
		rc = choose(config, "NET_DEVICES", devices, why, size);
	if (rc == 0)
		rc = say(why, size, "open a context",
			 sl_ucx.ucp_init_version(SL_UCX_MAJOR, SL_UCX_MINOR, &params, config,
						 &l->context));
	sl_ucx.ucp_config_release(config);
	return rc;
}

int sl_ucx_loop_open(const char *transports, const char *devices, struct sl_ucx_loop **out,
		     char *why, size_t size)
{
	/* Not "single": the thread may change between calls. It costs nothing here. */
	ucp_worker_params_t params = {
		.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
		.thread_mode = UCS_THREAD_MODE_SERIALIZED,
	};
	struct sl_ucx_loop *l = calloc(1, sizeof(*l));
	int rc;

	if (!l)
		return -ENOMEM;
	rc = open_context(l, transports, devices, why, size);
	if (rc == 0)
		rc = say(why, size, "open a worker",
			 sl_ucx.ucp_worker_create(l->context, &params, &l->worker));
	if (rc == 0)
		rc = say(why, size, "ask for the worker's address",
			 sl_ucx.ucp_worker_get_address(l->worker, &l->address, &l->address_len));
	if (rc != 0) {
		sl_ucx_loop_close(l, 0);
		return rc;
	}
	*out = l;
	return 0;
}

/* Whether a request without a callback has ended by the deadline. */
static int await(struct sl_ucx_loop *l, ucs_status_ptr_t request, uint64_t deadline)
{
	int ended = 0;

	if (!request || UCS_PTR_IS_ERR(request))
		return 1;
	for (int i = 1; !ended; i++) {
		sl_ucx.ucp_worker_progress(l->worker);
		ended = sl_ucx.ucp_request_check_status(request) != UCS_INPROGRESS;
		if (i % LOOKS == 0 && now() > deadline)
			break;
	}
	if (ended && sl_ucx.ucp_request_check_status(request) != UCS_OK && l->status == UCS_OK)
		l->status = sl_ucx.ucp_request_check_status(request);
	sl_ucx.ucp_request_free(request);
	return ended;
}

/* An endpoint that does not end keeps its worker: UCX would end the process. */
static int disconnect(struct sl_ucx_loop *l, uint64_t limit_ns)
{
	ucp_request_param_t plain = {0};

	if (l->rkey)
		sl_ucx.ucp_rkey_destroy(l->rkey);
	return !l->endpoint ||
	       await(l, sl_ucx.ucp_ep_close_nbx(l->endpoint, &plain), now() + limit_ns);
}

void sl_ucx_loop_close(struct sl_ucx_loop *l, uint64_t limit_ns)
{
	int ended = !l->lost && disconnect(l, limit_ns);

	if (ended && l->memory)
		sl_ucx.ucp_mem_unmap(l->context, l->memory);
	if (ended && l->address)
		sl_ucx.ucp_worker_release_address(l->worker, l->address);
	if (ended && l->worker)
		sl_ucx.ucp_worker_destroy(l->worker);
	if (ended && l->context)
		sl_ucx.ucp_cleanup(l->context);
	free(l);
}

int sl_ucx_loop_allocate(struct sl_ucx_loop *l, uint64_t len, void **base)
{
	ucp_mem_map_params_t params = {
		.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
			      UCP_MEM_MAP_PARAM_FIELD_FLAGS | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
		.length = len,
		.flags = UCP_MEM_MAP_ALLOCATE,
		.memory_type = UCS_MEMORY_TYPE_HOST,
	};
	ucp_mem_attr_t attr = {.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS};

	if (l->memory)
		return -EBUSY;
	if (sl_ucx.ucp_mem_map(l->context, &params, &l->memory) != UCS_OK) {
		l->memory = NULL;
		return -ENOMEM;
	}
	if (sl_ucx.ucp_mem_query(l->memory, &attr) != UCS_OK)
		return -EINVAL;
	l->base = attr.address;
	l->len = len;
	memset(l->base, 0, len); /* the pages are there when it is measured */
	*base = l->base;
	return 0;
}

const void *sl_ucx_loop_address(struct sl_ucx_loop *l, size_t *len)
{
	*len = l->address_len;
	return l->address;
}

int sl_ucx_loop_rkey(struct sl_ucx_loop *l, void *rkey, size_t *len)
{
	void *packed;
	int rc = 0;

	if (!l->memory || sl_ucx.ucp_rkey_pack(l->context, l->memory, &packed, len) != UCS_OK)
		return -EINVAL;
	if (*len <= SL_UCX_LOOP_RKEY_MAX)
		memcpy(rkey, packed, *len);
	else
		rc = -ENOTSUP;
	sl_ucx.ucp_rkey_buffer_release(packed);
	return rc;
}

int sl_ucx_loop_connect(struct sl_ucx_loop *l, const void *address, const void *rkey, uint64_t base,
			uint64_t len)
{
	ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS,
				  .address = address};

	if (l->endpoint)
		return -EISCONN;
	if (sl_ucx.ucp_ep_create(l->worker, &params, &l->endpoint) != UCS_OK) {
		l->endpoint = NULL;
		return -EHOSTUNREACH;
	}
	if (sl_ucx.ucp_ep_rkey_unpack(l->endpoint, rkey, &l->rkey) != UCS_OK) {
		l->rkey = NULL;
		return -EHOSTUNREACH;
	}
	l->remote_base = base;
	l->remote_len = len;
	return 0;
}

static void on_done(void *request, ucs_status_t status, void *user)
{
	struct sl_ucx_loop *l = user;

	sl_ucx.ucp_request_free(request);
	if (status != UCS_OK && l->status == UCS_OK)
		l->status = status;
	l->pending--;
}

/* Moves the worker until fewer than n operations are under way. */
static int make_room(struct sl_ucx_loop *l, uint32_t n, uint64_t deadline)
{
	for (int i = 1; l->pending >= n; i++) {
		sl_ucx.ucp_worker_progress(l->worker);
		if (i % LOOKS == 0 && now() > deadline) {
			l->lost = 1;
			return -ETIMEDOUT;
		}
	}
	return 0;
}

static int post(struct sl_ucx_loop *l, int write, const struct sl_desc *d, size_t n,
		uint32_t window, uint64_t deadline)
{
	ucp_request_param_t param = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
				(n > 1 ? UCP_OP_ATTR_FLAG_MULTI_SEND : 0),
		.cb.send = on_done,
		.user_data = l,
	};

	for (size_t i = 0; i < n; i++) {
		uint8_t *local = l->base + d[i].local;
		uint64_t remote = l->remote_base + d[i].remote;
		ucs_status_ptr_t p =
		    write
			? sl_ucx.ucp_put_nbx(l->endpoint, local, d[i].len, remote, l->rkey, &param)
			: sl_ucx.ucp_get_nbx(l->endpoint, local, d[i].len, remote, l->rkey, &param);

		if (UCS_PTR_IS_ERR(p))
			return -EIO;
		if (!p)
			continue;
		l->pending++;
		if (l->pending >= window && make_room(l, window, deadline) != 0)
			return -ETIMEDOUT;
	}
	return 0;
}

/* Waits for what is under way, and for writes to be there. */
static int finish(struct sl_ucx_loop *l, int write, uint64_t deadline)
{
	ucp_request_param_t plain = {0};
	int rc = make_room(l, 1, deadline);

	if (rc == 0 && write && !await(l, sl_ucx.ucp_ep_flush_nbx(l->endpoint, &plain), deadline)) {
		l->lost = 1;
		rc = -ETIMEDOUT;
	}
	return rc == 0 && l->status != UCS_OK ? -EIO : rc;
}

int sl_ucx_loop_move(struct sl_ucx_loop *l, int write, const struct sl_desc *d, size_t n,
		     uint32_t window, uint64_t limit_ns, uint64_t *posted_ns)
{
	uint64_t begin = now();
	int rc = !l->rkey || !l->memory || l->lost ? -ENOTCONN : 0, ended;

	if (rc != 0)
		return rc;
	rc = post(l, write, d, n, window, begin + limit_ns);
	if (posted_ns)
		*posted_ns = now() - begin;
	ended = l->lost ? rc : finish(l, write, begin + limit_ns);
	return rc != 0 ? rc : ended;
}

void sl_ucx_loop_progress(struct sl_ucx_loop *l, uint64_t ns)
{
	uint64_t deadline = now() + ns;

	do {
		for (int i = 0; i < LOOKS; i++)
			sl_ucx.ucp_worker_progress(l->worker);
	} while (now() < deadline);
}
