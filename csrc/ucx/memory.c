/* SPDX-License-Identifier: Apache-2.0 */
/* The table of our own memory, and the memory of a peer that a connection knows. */
#define _GNU_SOURCE
#include "worker.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

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

int sl_ucx_reaches(const struct sl_ucx_memory *m, uint64_t off, uint64_t len)
{
	const struct sl_ucx_extent *r = m->only.ranges;
	uint64_t low = 0, high = m->only.n; /* ranges below low begin at off or before */

	if (!sl_within(off, len, m->len))
		return 0;
	if (high == 0)
		return 1;
	while (low < high) {
		uint64_t middle = low + (high - low) / 2;

		if (r[middle].off <= off)
			low = middle + 1;
		else
			high = middle;
	}
	return low > 0 && sl_within(off - r[low - 1].off, len, r[low - 1].len);
}

/* The phase of a provider that moves pages. */
#define MOVES 2

/* As the provider's own Enter, but it does not wait: the caller holds the lock of a worker. */
int sl_ucx_enter(struct sl_ucx_memory *m)
{
	struct sl_ucx_landings *l = &m->landings;

	if (!l->inside)
		return 1;
	__atomic_fetch_add(l->inside, 1, __ATOMIC_SEQ_CST);
	if (__atomic_load_n(l->phase, __ATOMIC_SEQ_CST) != MOVES)
		return 1;
	__atomic_fetch_sub(l->inside, 1, __ATOMIC_SEQ_CST);
	return 0;
}

void sl_ucx_leave(struct sl_ucx_memory *m)
{
	if (m->landings.inside)
		__atomic_fetch_sub(m->landings.inside, 1, __ATOMIC_SEQ_CST);
}

int sl_ucx_map(struct sl_ucx_context *c, uint32_t key, void *base, uint64_t len, uint32_t flags,
	       uint64_t ticket, struct sl_ucx_landings landings, struct sl_ucx_only only)
{
	struct sl_ucx_memory *m;
	int rc;

	if (key / SL_UCX_CHUNK >= SL_UCX_CHUNKS || ticket == 0)
		return -EINVAL;
	pthread_mutex_lock(&c->lock);
	m = make_place(c, key);
	rc = c->closed ? -EBADF : !m ? -ENOMEM : atomic_load(&m->ticket) ? -EEXIST : 0;
	if (rc == 0) {
		m->base = base;
		m->len = len;
		m->flags = flags;
		m->landings = landings;
		m->only = only;
		atomic_store_explicit(&m->ticket, ticket, memory_order_release);
	}
	pthread_mutex_unlock(&c->lock);
	return rc;
}

int sl_ucx_revoke(struct sl_ucx_context *c, uint32_t key, uint64_t ns)
{
	uint64_t deadline = sl_ucx_now() + ns;
	struct sl_ucx_memory *m;
	int closed;

	pthread_mutex_lock(&c->lock);
	closed = c->closed;
	m = closed ? NULL : place(c, key);
	if (m)
		atomic_store(&m->ticket, 0); /* no message is admitted from now on */
	pthread_mutex_unlock(&c->lock);
	/* A thread that admitted one before holds a worker's lock until the bytes have landed. */
	for (uint32_t i = 0; !closed && i < c->config.workers; i++) {
		if (sl_ucx_lock_by(&c->workers[i], deadline) != 0)
			return -ETIMEDOUT;
		sl_ucx_unlock(&c->workers[i]);
	}
	return 0;
}

struct sl_ucx_import *sl_ucx_import_of(const struct sl_ucx_conn *n, uint32_t slot)
{
	struct sl_ucx_import *im = slot < n->imports_len ? n->imports[slot] : NULL;

	return im && im->used ? im : NULL;
}

static int free_slot(struct sl_ucx_conn *n, uint32_t *slot)
{
	void *grown;
	uint32_t i = 0;

	while (sl_ucx_import_of(n, i))
		i++;
	if (i == n->imports_len) {
		grown = sl_ucx_grow(n->imports, &n->imports_len, sizeof(*n->imports));
		if (!grown)
			return -ENOMEM;
		n->imports = grown;
	}
	if (!n->imports[i]) {
		n->imports[i] = calloc(1, sizeof(**n->imports));
		if (!n->imports[i])
			return -ENOMEM;
	}
	*slot = i;
	return 0;
}

int sl_ucx_import(struct sl_ucx_conn *n, uint32_t key, uint64_t size, uint64_t ticket,
		  uint32_t flags, uint32_t *slot)
{
	int rc;

	sl_ucx_lock(n->worker);
	rc = -sl_ucx_refusal(n);
	if (rc == 0)
		rc = free_slot(n, slot);
	if (rc == 0)
		*n->imports[*slot] = (struct sl_ucx_import){
			.size = size, .ticket = ticket, .key = key, .flags = flags, .used = 1};
	sl_ucx_unlock(n->worker);
	return rc;
}

void sl_ucx_free_dropped_imports(struct sl_ucx_conn *n)
{
	uint64_t oldest = n->live.next == &n->live ? UINT64_MAX : n->live.next->order;

	for (uint32_t i = 0; i < n->imports_len && n->dropped_imports; i++) {
		struct sl_ucx_import *im = n->imports[i];

		if (im && im->dropped && im->dropped_at <= oldest) {
			n->dropped_imports--;
			*im = (struct sl_ucx_import){0};
		}
	}
}

void sl_ucx_drop(struct sl_ucx_conn *n, uint32_t slot)
{
	struct sl_ucx_import *im;

	sl_ucx_lock(n->worker);
	im = sl_ucx_import_of(n, slot);
	if (im && !im->dropped) {
		im->dropped = 1;
		im->dropped_at = n->order;
		n->dropped_imports++;
		sl_ucx_free_dropped_imports(n);
	}
	sl_ucx_unlock(n->worker);
}
