/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The functions of libcuda that sluice calls, in our own words: no header of NVIDIA's is
 * needed. The names are those that the library exports, with the versions that cuda.h hides
 * behind macros. testdata/cuda_facts.c, which includes cuda.h before, holds all against it.
 */
#ifndef SLUICE_CUDA_CALLS_H
#define SLUICE_CUDA_CALLS_H

#include <stddef.h>
#include <stdint.h>

#ifndef CUDA_VERSION
typedef int CUresult; /* 0: success */
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef int CUdevice_attribute, CUfunction_attribute, CUjit_option;

enum {
	CUDA_ERROR_NO_DEVICE = 100,
	CUDA_ERROR_INVALID_DEVICE = 101,
	CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
	CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
	CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
	CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
	CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
	CU_STREAM_NON_BLOCKING = 1,
	CU_MEMHOSTREGISTER_PORTABLE = 1,
	CU_MEMHOSTREGISTER_DEVICEMAP = 2,
};
#endif

#define SL_CUDA_CALLS(X) \
	X(cuInit, (unsigned)) \
	X(cuDriverGetVersion, (int *)) \
	X(cuGetErrorName, (CUresult, const char **)) \
	X(cuGetErrorString, (CUresult, const char **)) \
	X(cuDeviceGetCount, (int *)) \
	X(cuDeviceGet, (CUdevice *, int)) \
	X(cuDeviceGetName, (char *, int, CUdevice)) \
	X(cuDeviceGetAttribute, (int *, CUdevice_attribute, CUdevice)) \
	X(cuDeviceGetPCIBusId, (char *, int, CUdevice)) \
	X(cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice)) \
	X(cuDevicePrimaryCtxRelease_v2, (CUdevice)) \
	X(cuCtxSetCurrent, (CUcontext)) \
	X(cuCtxGetStreamPriorityRange, (int *, int *)) \
	X(cuStreamCreateWithPriority, (CUstream *, unsigned, int)) \
	X(cuStreamDestroy_v2, (CUstream)) \
	X(cuStreamSynchronize, (CUstream)) \
	X(cuModuleLoadDataEx, (CUmodule *, const void *, unsigned, CUjit_option *, void **)) \
	X(cuModuleUnload, (CUmodule)) \
	X(cuModuleGetFunction, (CUfunction *, CUmodule, const char *)) \
	X(cuFuncSetAttribute, (CUfunction, CUfunction_attribute, int)) \
	X(cuMemAlloc_v2, (CUdeviceptr *, size_t)) \
	X(cuMemFree_v2, (CUdeviceptr)) \
	X(cuMemHostRegister_v2, (void *, size_t, unsigned)) \
	X(cuMemHostUnregister, (void *)) \
	X(cuMemHostGetDevicePointer_v2, (CUdeviceptr *, void *, unsigned)) \
	X(cuMemcpyHtoDAsync_v2, (CUdeviceptr, const void *, size_t, CUstream)) \
	X(cuMemcpyDtoHAsync_v2, (void *, CUdeviceptr, size_t, CUstream)) \
	X(cuLaunchKernel, (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, \
			   void **, void **))

/* For graphs and copies in batches (cuda_moves.h). A driver may lack any of them: then it is NULL. */
#ifndef CUDA_VERSION
typedef struct CUevent_st *CUevent;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphExec_st *CUgraphExec;
typedef int CUstreamCaptureMode;
typedef struct {
	int srcAccessOrder;
	struct {
		int type, id;
	} srcLocHint, dstLocHint; /* heeded for managed memory alone */
	unsigned flags;
} CUmemcpyAttributes;

enum {
	CU_EVENT_DISABLE_TIMING = 2,
	CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
	CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1,
};
#endif

#define SL_CUDA_MOVE_CALLS(X) \
	X(cuEventCreate, (CUevent *, unsigned)) \
	X(cuEventRecord, (CUevent, CUstream)) \
	X(cuEventSynchronize, (CUevent)) \
	X(cuEventDestroy_v2, (CUevent)) \
	X(cuMemcpyAsync, (CUdeviceptr, CUdeviceptr, size_t, CUstream)) \
	X(cuMemcpyBatchAsync, (CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *, size_t *, size_t, \
			       size_t *, CUstream)) \
	X(cuStreamBeginCapture_v2, (CUstream, CUstreamCaptureMode)) \
	X(cuStreamEndCapture, (CUstream, CUgraph *)) \
	X(cuGraphInstantiateWithFlags, (CUgraphExec *, CUgraph, unsigned long long)) \
	X(cuGraphLaunch, (CUgraphExec, CUstream)) \
	X(cuGraphExecDestroy, (CUgraphExec)) \
	X(cuGraphDestroy, (CUgraph))

#endif
