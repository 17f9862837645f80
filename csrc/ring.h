/* SPDX-License-Identifier: Apache-2.0 */
/* Where C says which batches have ended: memory that Go reads without a crossing. */
#ifndef SLUICE_RING_H
#define SLUICE_RING_H

#include <stdint.h>

/* The end of a batch. */
struct sl_done {
	uint64_t tag;
	int32_t status;
	int32_t piece; /* that failed, -1 if that is not known */
};

/* Read by Go with atomics. There are as many places as batches, so it never fills. */
struct sl_ring {
	_Alignas(64) uint64_t head; /* written here */
	_Alignas(64) uint64_t tail; /* written by the poller */
	_Alignas(64) uint32_t armed; /* the poller wants wake_fd written to, once */
	uint32_t notifs;		     /* messages that wait to be received */
	uint32_t first_len;	     /* bytes of the first of them */
	uint32_t mask;
	/* there is room again, since the poller last armed */
	uint32_t due;
	_Alignas(64) struct sl_done done[];
};

/* Shows the end of a batch to the poller. All callers hold one lock. */
static inline void sl_ring_put(struct sl_ring *r, struct sl_done d)
{
	r->done[r->head & r->mask] = d;
	__atomic_store_n(&r->head, r->head + 1, __ATOMIC_SEQ_CST);
}

#endif
