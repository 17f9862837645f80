/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The least that moves pieces over UCX: one context, one worker, no thread, no lock, no
 * table of keys. Benchmarks stand it beside the data plane, to see what that adds. Needs
 * sl_ucx_load first. Functions return 0 or -errno; a loop is for one thread at a time.
 */
#ifndef SLUICE_UCX_LOOP_H
#define SLUICE_UCX_LOOP_H

#include "../sluice.h"

#define SL_UCX_LOOP_RKEY_MAX 360

struct sl_ucx_loop;

/* transports, devices: as UCX_TLS and UCX_NET_DEVICES; NULL: UCX's own choice. */
int sl_ucx_loop_open(const char *transports, const char *devices, struct sl_ucx_loop **out,
		     char *why, size_t size);

/* Ends everything, within limit_ns; the peer's side must still be moved for that. */
void sl_ucx_loop_close(struct sl_ucx_loop *l, uint64_t limit_ns);

/* Memory that UCX allocates and its peers can map, zeroed; one a loop. */
int sl_ucx_loop_allocate(struct sl_ucx_loop *l, uint64_t len, void **base);

/* What the peer needs; rkey has room for SL_UCX_LOOP_RKEY_MAX bytes. */
const void *sl_ucx_loop_address(struct sl_ucx_loop *l, size_t *len);
int sl_ucx_loop_rkey(struct sl_ucx_loop *l, void *rkey, size_t *len);

/* The way to the peer's memory of that length. Does not wait for the peer. */
int sl_ucx_loop_connect(struct sl_ucx_loop *l, const void *address, const void *rkey, uint64_t base,
			uint64_t len);

/*
 * Moves descriptors, whose offsets the caller knows to be within the two memories and whose
 * keys are not looked at, one ucp_put_nbx or ucp_get_nbx each, with at most window of them under
 * way, and waits until they have ended: a write until it is there. posted_ns, unless NULL, is the
 * time until the last one was posted. -ETIMEDOUT: not within limit_ns; the loop is of no further
 * use.
 */
int sl_ucx_loop_move(struct sl_ucx_loop *l, int write, const struct sl_desc *d, size_t n,
		     uint32_t window, uint64_t limit_ns, uint64_t *posted_ns);

/* Moves the worker for that long: what the passive side does. */
void sl_ucx_loop_progress(struct sl_ucx_loop *l, uint64_t ns);

#endif
