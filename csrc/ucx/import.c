/* SPDX-License-Identifier: Apache-2.0 */
/* The memory of a peer that a connection knows. */
#include "worker.h"

#include <errno.h>
#include <stdlib.h>

struct sl_ucx_import *sl_ucx_import_of(const struct sl_ucx_conn *n, uint32_t slot)
{
	struct sl_ucx_import *im = slot < n->imports_len ? n->imports[slot] : NULL;

	return im && im->used ? im : NULL;
}

static int take_slot(struct sl_ucx_conn *n, uint32_t *slot)
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
	rc = -sl_ucx_over(n);
	if (rc == 0)
		rc = take_slot(n, slot);
	if (rc == 0)
		*n->imports[*slot] = (struct sl_ucx_import){
			.size = size, .ticket = ticket, .key = key, .flags = flags, .used = 1};
	sl_ucx_unlock(n->worker);
	return rc;
}

void sl_ucx_reap(struct sl_ucx_conn *n)
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
		sl_ucx_reap(n);
	}
	sl_ucx_unlock(n->worker);
}
