/* SPDX-License-Identifier: Apache-2.0 */
/* The table of our own memory. */
#define _GNU_SOURCE
#include "ucx_worker.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int sl_ucx_errno(ucs_status_t status)
{
	switch (status) {
	case UCS_OK:
		return 0;
	case UCS_ERR_NO_MEMORY:
		return -ENOMEM;
	case UCS_ERR_UNREACHABLE:
	case UCS_ERR_NO_DEVICE:
		return -EHOSTUNREACH;
	case UCS_ERR_UNSUPPORTED:
	case UCS_ERR_NOT_IMPLEMENTED:
		return -ENOTSUP;
	default:
		return -EINVAL;
	}
}

/* Doubles a table whose free entries are zero. NULL: no memory, and nothing changed. */
void *sl_ucx_grow(void *table, uint32_t *len, size_t entry)
{
	uint32_t wider = *len ? *len * 2 : 16;
	uint8_t *grown = realloc(table, wider * entry);

	if (!grown)
		return NULL;
	memset(grown + *len * entry, 0, (wider - *len) * entry);
	*len = wider;
	return grown;
}

static struct sl_ucx_memory *place(struct sl_ucx_context *c, uint32_t key)
{
	struct sl_ucx_memory *chunk;

	if (key / SL_UCX_CHUNK >= SL_UCX_CHUNKS)
		return NULL;
	chunk = atomic_load_explicit(&c->chunks[key / SL_UCX_CHUNK], memory_order_acquire);
	return chunk ? &chunk[key % SL_UCX_CHUNK] : NULL;
}

/* Under the lock of the context. NULL: no memory. */
static struct sl_ucx_memory *make_place(struct sl_ucx_context *c, uint32_t key)
{
	struct sl_ucx_memory *m = place(c, key), *chunk;

	if (m)
		return m;
	chunk = calloc(SL_UCX_CHUNK, sizeof(*chunk));
	if (!chunk)
		return NULL;
	atomic_store_explicit(&c->chunks[key / SL_UCX_CHUNK], chunk, memory_order_release);
	return &chunk[key % SL_UCX_CHUNK];
}

struct sl_ucx_memory *sl_ucx_find(struct sl_ucx_context *c, uint32_t key)
{
	struct sl_ucx_memory *m = place(c, key);

	return m && atomic_load_explicit(&m->ticket, memory_order_acquire) ? m : NULL;
}

/* When it returns, whoever held a lock when it was called has let go of it. */
void sl_ucx_quiesce(struct sl_ucx_context *c)
{
	for (uint32_t i = 0; i < c->config.workers; i++) {
		sl_ucx_lock(&c->workers[i]);
		sl_ucx_unlock(&c->workers[i]);
	}
}

/*
 * Memory of peers is reached by UCX's own means only where the context shares none: there
 * a registration tells devices about ours.
 */
static int register_own(struct sl_ucx_context *c, void *base, uint64_t len, ucp_mem_h *handle)
{
	ucp_mem_map_params_t params = {
		.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
			      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
		.address = base,
		.length = len,
		.memory_type = UCS_MEMORY_TYPE_HOST,
	};

	*handle = NULL;
	if (c->config.shared)
		return 0;
	return sl_ucx_errno(sl_ucx.ucp_mem_map(c->handle, &params, handle));
}

int sl_ucx_map(struct sl_ucx_context *c, uint32_t key, void *base, uint64_t len, uint32_t flags, uint64_t ticket,
	       struct sl_ucx_allocation *in)
{
	struct sl_ucx_memory *m;
	ucp_mem_h handle;
	int rc;

	if (key / SL_UCX_CHUNK >= SL_UCX_CHUNKS || ticket == 0)
		return -EINVAL;
	pthread_mutex_lock(&c->lock); /* all the time: the context stays as long */
	m = make_place(c, key);
	rc = c->closed ? -EBADF : !m ? -ENOMEM : atomic_load(&m->ticket) ? -EEXIST : register_own(c, base, len, &handle);
	if (rc == 0) {
		m->base = base;
		m->len = len;
		m->flags = flags;
		m->handle = handle;
		m->in = in;
		m->nonce = 0;
		m->exported = m->owed = 0;
		atomic_store_explicit(&m->ticket, ticket, memory_order_release);
	}
	pthread_mutex_unlock(&c->lock);
	return rc;
}

/* A message by rendezvous that is in hand ends within moments, or its peer is lost. */
static void await_landing(struct sl_ucx_context *c, const struct sl_ucx_memory *m)
{
	uint64_t deadline = sl_ucx_now() + c->config.grace_ns;

	while (atomic_load(&m->landing) && sl_ucx_now() < deadline)
		usleep(20);
}

void sl_ucx_unmap(struct sl_ucx_context *c, uint32_t key)
{
	_Atomic uint32_t *word;
	struct sl_ucx_memory *m;

	pthread_mutex_lock(&c->lock);
	word = sl_ucx_word(c, key);
	m = sl_ucx_find(c, key);
	if (m) {
		atomic_store(&m->ticket, 0);
		if (word)
			atomic_fetch_add(word, 1);
		sl_ucx_quiesce(c);
		if (atomic_load(&m->reading)) /* a peer that does not take its answer must not hold us up */
			sl_ucx_cut_readers(c, m);
		await_landing(c, m);
		if (m->handle)
			sl_ucx.ucp_mem_unmap(c->handle, m->handle);
		m->handle = NULL;
	}
	pthread_mutex_unlock(&c->lock);
}

/*
 * Devices have the pages that were there when the memory was registered: after those were
 * replaced, all memory in the range is registered anew.
 */
int sl_ucx_register_again(struct sl_ucx_context *c, uint8_t *from, uint64_t len)
{
	int rc = 0;

	pthread_mutex_lock(&c->lock);
	for (uint32_t key = 0; key / SL_UCX_CHUNK < SL_UCX_CHUNKS && rc == 0; key++) {
		struct sl_ucx_memory *m = sl_ucx_find(c, key);
		ucp_mem_h before, now;

		if (!m && !place(c, key))
			key |= SL_UCX_CHUNK - 1; /* nothing in the whole chunk */
		if (!m || !m->handle || m->base >= from + len || from >= m->base + m->len)
			continue;
		rc = register_own(c, m->base, m->len, &now);
		if (rc != 0)
			break;
		before = m->handle;
		m->handle = now;
		sl_ucx_quiesce(c);
		sl_ucx.ucp_mem_unmap(c->handle, before);
	}
	pthread_mutex_unlock(&c->lock);
	return rc;
}
