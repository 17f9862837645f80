/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What puts the work of a batch on the stream of a worker. The caller holds the worker's order,
 * unless it says otherwise.
 */
#ifndef SLUICE_CUDA_FEED_H
#define SLUICE_CUDA_FEED_H

#include "mover.h"

/* The next chunk, with the event of that index behind it, and a note. */
void sl_cuda_feed(struct sl_cuda_worker *l, struct sl_cuda_batch *b, uint32_t batch, int event);

/* Makes a batch ready for its work. No thread works on it yet, so nothing is held. */
int sl_cuda_begin(struct sl_cuda_mover *m, struct sl_cuda_worker *l, uint32_t batch,
		  uint64_t serial);

/* Whether the batch was cancelled: before it was begun, or since. */
bool sl_cuda_cancelled(const struct sl_cuda_batch *b);

/* All entries, to the end. */
void sl_cuda_stage(struct sl_cuda_worker *l, struct sl_cuda_batch *b);

#endif
