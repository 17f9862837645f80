/* SPDX-License-Identifier: Apache-2.0 */
/* Streams and events of the program. */
#include "stream.h"

static int make(struct sl_cuda_stream *s)
{
	int lowest, highest;

	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(s->context));
	SL_CUDA_TRY(sl_cu.cuCtxGetStreamPriorityRange(&lowest, &highest));
	return sl_cu.cuStreamCreateWithPriority(&s->stream, CU_STREAM_NON_BLOCKING, lowest);
}

int sl_cuda_stream_open(int ordinal, struct sl_cuda_stream *s)
{
	int rc;

	SL_CUDA_TRY(sl_cu.cuDeviceGet(&s->device, ordinal));
	SL_CUDA_TRY(sl_cu.cuDevicePrimaryCtxRetain(&s->context, s->device));
	rc = make(s);
	if (rc)
		sl_cu.cuDevicePrimaryCtxRelease_v2(s->device);
	return rc;
}

int sl_cuda_stream_close(struct sl_cuda_stream *s)
{
	int rc = sl_cuda_stream_sync(s);

	sl_cu.cuStreamDestroy_v2(s->stream);
	sl_cu.cuDevicePrimaryCtxRelease_v2(s->device);
	return rc;
}

int sl_cuda_stream_copy(struct sl_cuda_stream *s, uint64_t dst, uint64_t src, uint64_t bytes)
{
	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(s->context));
	return sl_cu.cuMemcpyAsync(dst, src, bytes, s->stream);
}

int sl_cuda_stream_wait(struct sl_cuda_stream *s, uint64_t event)
{
	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(s->context));
	return sl_cu.cuStreamWaitEvent(s->stream, (CUevent)(uintptr_t)event, 0);
}

int sl_cuda_stream_record(struct sl_cuda_stream *s, uint64_t event)
{
	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(s->context));
	return sl_cu.cuEventRecord((CUevent)(uintptr_t)event, s->stream);
}

int sl_cuda_stream_sync(struct sl_cuda_stream *s)
{
	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(s->context));
	return sl_cu.cuStreamSynchronize(s->stream);
}

int sl_cuda_event_make(struct sl_cuda_stream *s, uint64_t *event)
{
	CUevent made;

	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(s->context));
	SL_CUDA_TRY(sl_cu.cuEventCreate(&made, CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING));
	*event = (uintptr_t)made;
	return 0;
}

int sl_cuda_event_drop(struct sl_cuda_stream *s, uint64_t event)
{
	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(s->context));
	return sl_cu.cuEventDestroy_v2((CUevent)(uintptr_t)event);
}
