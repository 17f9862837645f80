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
	struct sl_ucx_landings landings;
};

/* Whether a message may write or read there. */
int sl_ucx_reaches(const struct sl_ucx_memory *m, uint64_t off, uint64_t len);

/* A peer's memory. */
struct sl_ucx_import {
	uint64_t size, ticket;
	uint32_t key, flags;
	int used, dropped;
	uint64_t dropped_at; /* order of the first batch that cannot use it */
};

#endif
