/* SPDX-License-Identifier: Apache-2.0 */
/* Imports: the memory of its peer that a connection knows, by slot. */
#include "pair.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct sl_verbs_import *sl_verbs_import_of(const struct sl_verbs_conn *n, uint32_t slot)
{
	return slot < n->imports_len ? n->imports[slot] : NULL;
}

/* Finds a free slot of the table, which grows when it has none. */
static int find_slot(struct sl_verbs_conn *n, uint32_t *slot)
{
	struct sl_verbs_import **grown;
	uint32_t i = 0, len;

	while (i < n->imports_len && n->imports[i])
		i++;
	*slot = i;
	if (i < n->imports_len)
		return 0;
	len = n->imports_len ? n->imports_len * 2 : 16;
	grown = realloc(n->imports, len * sizeof(struct sl_verbs_import *));
	if (!grown)
		return -ENOMEM;
	memset(grown + n->imports_len, 0,
	       (len - n->imports_len) * sizeof(struct sl_verbs_import *));
	n->imports = grown;
	n->imports_len = len;
	return 0;
}

int sl_verbs_import(struct sl_verbs_conn *n, uint64_t base, uint64_t size, uint32_t flags,
		    const uint32_t *remote_keys, uint32_t pairs, uint32_t *slot)
{
	struct sl_verbs_import *im;
	uint64_t end;
	int rc;

	if (size == 0 || pairs > SL_VERBS_PAIRS || __builtin_add_overflow(base, size, &end))
		return -ERANGE;
	im = calloc(1, sizeof(*im));
	if (!im)
		return -ENOMEM;
	im->base = base;
	im->size = size;
	im->flags = flags;
	for (uint32_t i = 0; i < pairs; i++) {
		im->keys[i] = remote_keys[i];
		if (remote_keys[i])
			im->reachable_over |= 1u << i;
	}
	sl_verbs_lock(n->context);
	rc = n->outcome == SL_VERBS_LOST ? -EPIPE : n->ended ? -EBADF : find_slot(n, slot);
	if (rc == 0)
		n->imports[*slot] = im;
	sl_verbs_unlock(n->context);
	if (rc != 0)
		free(im);
	return rc;
}

void sl_verbs_free_dropped_imports(struct sl_verbs_conn *n)
{
	uint64_t oldest = n->batches.next == &n->batches ? n->order : n->batches.next->order;

	for (uint32_t i = 0; i < n->imports_len; i++) {
		struct sl_verbs_import *im = n->imports[i];

		if (!im || !im->dropped || im->dropped_at > oldest)
			continue;
		free(im);
		n->imports[i] = NULL;
		n->dropped_imports--;
	}
}

void sl_verbs_drop(struct sl_verbs_conn *n, uint32_t slot)
{
	struct sl_verbs_import *im;

	sl_verbs_lock(n->context);
	im = sl_verbs_import_of(n, slot);
	if (im && !im->dropped) {
		im->dropped = 1;
		im->dropped_at = n->order;
		n->dropped_imports++;
		sl_verbs_free_dropped_imports(n);
	}
	sl_verbs_unlock(n->context);
}
