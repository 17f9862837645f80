/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of ours, and what is known of a peer's. */
#ifndef SLUICE_UCX_MEMORY_H
#define SLUICE_UCX_MEMORY_H

#include "../guard.h"
#include "ucx.h"
#include "load.h"

#include <stdatomic.h>

/*
 * A key. Read under the lock of any worker; changed by a thread that then takes each of
 * them once, so that no thread still works with what was before.
 */
struct sl_ucx_memory {
	_Atomic uint64_t ticket; /* 0: the key is free */
	uint8_t *base;
	uint64_t len;
	uint32_t flags;
	struct sl_ucx_only only;
	struct sl_ucx_allocation *in;
	struct sl_ucx_landings landings;
	/* Under the lock of the context: */
	int exported;	/* in this epoch */
	int owed;	/* peers may still store what they began in earlier ones */
	uint64_t nonce; /* of the pings that were sent for that, or 0 */
};

/* Whether a message may write or read there. */
int sl_ucx_reaches(const struct sl_ucx_memory *m, uint64_t off, uint64_t len);

struct sl_ucx_allocation {
	struct sl_ucx_allocation *next;
	struct sl_ucx_context *context;
	ucp_mem_h handle;
	uint8_t *base;
	uint64_t len, mapped; /* asked for; UCX's own */
	uint32_t rkey_len;
	uint8_t rkey[SL_UCX_RKEY_MAX];
	struct sl_ucx_range {
		uint64_t from, to;
	} *fresh; /* ranges that peers cannot map */
	uint32_t fresh_len;
};

/* An allocation of a peer that we have mapped, for all imports that lie in it. */
struct sl_ucx_mapping {
	struct sl_ucx_mapping *next;
	uint32_t imports, packed_len;
	ucp_rkey_h rkey;
	uint8_t packed[SL_UCX_RKEY_MAX];
};

/* A peer's memory. */
struct sl_ucx_import {
	uint64_t size, ticket;
	uint32_t key, flags;
	int used, dropped;
	uint64_t dropped_at; /* order of the first batch that cannot use it */
	/* Direct: */
	struct sl_ucx_mapping *mapping; /* NULL: served */
	ucp_rkey_h rkey;
	uint64_t base;
	const _Atomic uint32_t *word;
	uint32_t generation;
};

struct sl_ucx_batch;

/* memcpy from memory of ours; where it is gone the batch fails, and zeros go in its place. */
void sl_ucx_take_local(struct sl_ucx_batch *b, uint8_t *to, const uint8_t *local, uint64_t len);

#endif
