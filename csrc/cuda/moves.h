/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a device does for moves beside launching kernels: copies, marks on its
 * stream, and launches that are captured once and replayed. The rules are those of
 * device.h. A driver may lack some of it: sl_cuda_moves says what there is.
 */
#ifndef SLUICE_CUDA_MOVES_H
#define SLUICE_CUDA_MOVES_H

#include "device.h"

/* The bits of sl_cuda_moves. */
#define SL_CUDA_COPIES 1 /* copies and marks */
#define SL_CUDA_GRAPHS 2

/*
 * Returns the bits, after it looked for the functions in the library that sl_cuda_load opened by
 * that path. The caller sees to it that only one call runs.
 */
int sl_cuda_moves(const char *path);

/*
 * Begins n copies between memories that the device sees, and does not wait. After a failure some
 * may be under way.
 */
int sl_cuda_copy(struct sl_cuda *c, const uint64_t *dst, const uint64_t *src,
		 const uint64_t *len, size_t n);
int sl_cuda_sync(struct sl_cuda *c);

/* A mark: what was begun before it is over when sl_cuda_await returns. */
int sl_cuda_mark_open(struct sl_cuda *c, CUevent *mark);
int sl_cuda_mark(struct sl_cuda *c, CUevent mark);
int sl_cuda_await(struct sl_cuda *c, CUevent mark);
void sl_cuda_mark_close(struct sl_cuda *c, CUevent mark);

/*
 * sl_cuda_run with less to wait for: nothing is written before, and n bytes at `tally` come back to
 * `host`, which is pinned; with n of 0 the kernel's args say where it counts, if it does.
 */
int sl_cuda_launch(struct sl_cuda *c, int kernel, unsigned blocks, unsigned threads,
		   unsigned shared, const uint8_t *args, CUdeviceptr tally, uint8_t *host,
		   size_t n);

/*
 * Captures the launch of a kernel. args are read now, memory that they point to at each replay,
 * which waits. kernel and shared are those of the capture.
 */
int sl_cuda_capture(struct sl_cuda *c, int kernel, unsigned blocks, unsigned threads,
		    unsigned shared, const uint8_t *args, CUgraphExec *graph);
int sl_cuda_replay(struct sl_cuda *c, CUgraphExec graph, int kernel, unsigned shared);
void sl_cuda_graph_close(struct sl_cuda *c, CUgraphExec graph);

#endif
