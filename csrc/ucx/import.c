/* SPDX-License-Identifier: Apache-2.0 */
/* The memory of a peer that a connection knows, and how it is mapped. */
#include "worker.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static int take_slot(struct sl_ucx_conn *n, uint32_t *slot)
{
	void *grown;
	uint32_t i = 0;

	while (i < n->imports_len && n->imports[i] && n->imports[i]->used)
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

/*
 * Each unpacked key maps its whole allocation anew, and each page of that is found anew:
 * a lease for every request would cost more than its bytes.
 */
static struct sl_ucx_mapping *mapping_of(struct sl_ucx_conn *n, const struct sl_ucx_export *x)
{
	struct sl_ucx_mapping *m = n->mappings;
	void *at;

	while (m && (m->packed_len != x->rkey_len || memcmp(m->packed, x->rkey, x->rkey_len) != 0))
		m = m->next;
	if (m)
		return m;
	m = calloc(1, sizeof(*m));
	if (!m)
		return NULL;
	if (sl_ucx.ucp_ep_rkey_unpack(n->handle, x->rkey, &m->rkey) != UCS_OK) {
		free(m);
		return NULL;
	}
	if (sl_ucx.ucp_rkey_ptr(m->rkey, x->base, &at) !=
	    UCS_OK) { /* not plain stores: the owner lands them */
		sl_ucx.ucp_rkey_destroy(m->rkey);
		free(m);
		return NULL;
	}
	m->packed_len = x->rkey_len;
	memcpy(m->packed, x->rkey, x->rkey_len);
	m->next = n->mappings;
	n->mappings = m;
	return m;
}

static void map_import(struct sl_ucx_conn *n, struct sl_ucx_import *im,
		       const struct sl_ucx_export *x)
{
	if (!x || !x->rkey_len || !n->words || im->key >= SL_UCX_WORDS)
		return;
	im->mapping = mapping_of(n, x);
	if (!im->mapping)
		return;
	im->mapping->imports++;
	im->rkey = im->mapping->rkey;
	im->word = n->words + im->key;
	im->generation = x->generation;
}

static void unmap_import(struct sl_ucx_conn *n, struct sl_ucx_import *im)
{
	struct sl_ucx_mapping *m = im->mapping, **p = &n->mappings;

	im->mapping = NULL;
	im->rkey = NULL;
	if (!m || --m->imports)
		return;
	while (*p != m)
		p = &(*p)->next;
	*p = m->next;
	sl_ucx.ucp_rkey_destroy(m->rkey);
	free(m);
}

int sl_ucx_import(struct sl_ucx_conn *n, uint32_t key, uint64_t size, uint64_t ticket,
		  uint32_t flags, const struct sl_ucx_export *x, uint32_t *slot)
{
	void *fresh = NULL;
	int rc;

	sl_ucx_lock(n->worker);
	rc = -sl_ucx_over(n);
	if (rc == 0)
		rc = take_slot(n, slot);
	if (rc == 0) {
		struct sl_ucx_import *im = n->imports[*slot];

		*im = (struct sl_ucx_import){.size = size,
					     .ticket = ticket,
					     .key = key,
					     .flags = flags,
					     .used = 1,
					     .base = x ? x->base : 0};
		map_import(n, im, x);
		if (im->mapping && im->mapping->imports == 1 &&
		    sl_ucx.ucp_rkey_ptr(im->rkey, im->base, &fresh) != UCS_OK)
			fresh = NULL;
	}
	sl_ucx_unlock(n->worker);
	if (fresh)
		sl_ucx_populate(fresh, size);
	return rc;
}

static void forget(struct sl_ucx_conn *n, struct sl_ucx_import *im)
{
	unmap_import(n, im);
	n->dropped_imports -= (uint32_t)im->dropped;
	*im = (struct sl_ucx_import){0};
}

void sl_ucx_reap(struct sl_ucx_conn *n)
{
	uint64_t oldest = n->live.next == &n->live ? UINT64_MAX : n->live.next->order;

	for (uint32_t i = 0; i < n->imports_len && n->dropped_imports; i++) {
		struct sl_ucx_import *im = n->imports[i];

		if (im && im->dropped && im->dropped_at <= oldest)
			forget(n, im);
	}
}

void sl_ucx_drop(struct sl_ucx_conn *n, uint32_t slot)
{
	sl_ucx_lock(n->worker);
	if (slot < n->imports_len && n->imports[slot] && n->imports[slot]->used &&
	    !n->imports[slot]->dropped) {
		n->imports[slot]->dropped = 1;
		n->imports[slot]->dropped_at = n->order;
		n->dropped_imports++;
		sl_ucx_reap(n);
	}
	sl_ucx_unlock(n->worker);
}

int sl_ucx_direct(struct sl_ucx_conn *n, uint32_t slot)
{
	int direct;

	sl_ucx_lock(n->worker);
	direct = slot < n->imports_len && n->imports[slot] && n->imports[slot]->rkey != NULL;
	sl_ucx_unlock(n->worker);
	return direct;
}

void sl_ucx_forget_imports(struct sl_ucx_conn *n)
{
	for (uint32_t i = 0; i < n->imports_len; i++) {
		if (n->imports[i])
			unmap_import(n, n->imports[i]);
	}
	if (n->words_key)
		sl_ucx.ucp_rkey_destroy(n->words_key);
	n->words_key = NULL;
	n->words = NULL;
}
