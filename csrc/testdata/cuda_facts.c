/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Prints the values of cuda_calls.h, or with -DREAL those of NVIDIA's cuda.h. With -DREAL it
 * does not compile unless every prototype in cuda_calls.h is NVIDIA's.
 */
#ifdef REAL
#include <cuda.h>
#if CUDA_VERSION < 12080
typedef struct {
	int srcAccessOrder;
	struct {
		int type, id;
	} srcLocHint, dstLocHint;
	unsigned flags;
} CUmemcpyAttributes;
enum { CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1 };
#endif
#endif
#include "cuda_calls.h"

#include <stdio.h>

#ifdef REAL
#define SAME(name, args) \
	_Static_assert(__builtin_types_compatible_p(__typeof__(&name), CUresult(CUDAAPI *) args), \
		       #name " has another prototype");
SL_CUDA_CALLS(SAME)
/* Older headers have it not, newer ones under another name; no driver drops the old one. */
#if CUDA_VERSION < 12080 || CUDA_VERSION >= 13000
#define cuMemcpyBatchAsync cuMemcpyBatchAsync_of_12_8
CUresult cuMemcpyBatchAsync(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *, size_t *, size_t, size_t *,
			    CUstream);
#endif
SL_CUDA_MOVE_CALLS(SAME)
#endif

#define VALUE(v) printf("%s = %lld\n", #v, (long long)(v));
#define SIZE(t) printf("sizeof %s = %zu\n", #t, sizeof(t));

int main(void)
{
	VALUE(CUDA_ERROR_NO_DEVICE) VALUE(CUDA_ERROR_INVALID_DEVICE) VALUE(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
	VALUE(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) VALUE(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
	VALUE(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
	VALUE(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) VALUE(CU_STREAM_NON_BLOCKING)
	VALUE(CU_MEMHOSTREGISTER_PORTABLE) VALUE(CU_MEMHOSTREGISTER_DEVICEMAP)
	SIZE(CUresult) SIZE(CUdevice) SIZE(CUdeviceptr) SIZE(CUcontext) SIZE(CUmodule) SIZE(CUfunction) SIZE(CUstream)
	SIZE(CUdevice_attribute) SIZE(CUfunction_attribute) SIZE(CUjit_option)
	VALUE(CU_EVENT_DISABLE_TIMING) VALUE(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) VALUE(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM)
	SIZE(CUevent) SIZE(CUgraph) SIZE(CUgraphExec) SIZE(CUstreamCaptureMode) SIZE(CUmemcpyAttributes)
	VALUE(offsetof(CUmemcpyAttributes, dstLocHint)) VALUE(offsetof(CUmemcpyAttributes, flags))
	return 0;
}
