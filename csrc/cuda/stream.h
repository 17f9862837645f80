/* SPDX-License-Identifier: Apache-2.0 */
/* A stream and events of a program's own, beside those of movers. Results are as there. */
#ifndef SLUICE_CUDA_STREAM_H
#define SLUICE_CUDA_STREAM_H

#include "mover.h"

struct sl_cuda_stream {
	CUdevice device;
	CUcontext context;
	CUstream stream;
};

int sl_cuda_stream_open(int device, struct sl_cuda_stream *s);
int sl_cuda_stream_close(struct sl_cuda_stream *s);
int sl_cuda_stream_copy(struct sl_cuda_stream *s, uint64_t dst, uint64_t src, uint64_t bytes);
int sl_cuda_stream_wait(struct sl_cuda_stream *s, uint64_t event);
int sl_cuda_stream_record(struct sl_cuda_stream *s, uint64_t event);
int sl_cuda_stream_sync(struct sl_cuda_stream *s);
int sl_cuda_event_make(struct sl_cuda_stream *s, uint64_t *event);
int sl_cuda_event_drop(struct sl_cuda_stream *s, uint64_t event);

#endif
