/* SPDX-License-Identifier: Apache-2.0 */
/* When work on a stream is over though the driver did not say so. */
#include <stdbool.h>
#include <time.h>

#include "mover.h"

/*
 * Answers that say nothing of the work: a call that another thread's capture of a graph forbids, a
 * want of memory or of the system. Any other one of a wait comes from the work itself, and the
 * driver documents of those that nothing of the process runs on the device any more.
 */
static bool of_the_call(int rc)
{
	return rc == CUDA_ERROR_OUT_OF_MEMORY || rc == CUDA_ERROR_OPERATING_SYSTEM ||
	       rc == CUDA_ERROR_NOT_READY || rc == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

void sl_cuda_pause(void)
{
	nanosleep(&(struct timespec){0, 1000000}, NULL);
}

int sl_cuda_settled(int rc, CUstream s)
{
	int said;

	if (!rc)
		return 0;
	while ((said = sl_cu.cuStreamSynchronize(s)) && of_the_call(said))
		sl_cuda_pause();
	return said || of_the_call(rc) ? said : rc;
}

int sl_cuda_over(CUcontext context, CUstream s, uint64_t event)
{
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	bool exchanged;
	int rc;

	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(context));
	exchanged = sl_cu.cuThreadExchangeStreamCaptureMode &&
		    sl_cu.cuThreadExchangeStreamCaptureMode(&mode) == 0;
	rc = s ? sl_cu.cuStreamQuery(s) : sl_cu.cuEventQuery((CUevent)(uintptr_t)event);
	if (exchanged)
		(void)sl_cu.cuThreadExchangeStreamCaptureMode(&mode);
	return rc;
}

void sl_cuda_ignore_captures(void)
{
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;

	if (sl_cu.cuThreadExchangeStreamCaptureMode)
		(void)sl_cu.cuThreadExchangeStreamCaptureMode(&mode);
}
