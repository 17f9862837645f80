/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The functions of libcuda that sluice calls, declared here: no header of NVIDIA's is
 * needed. The names are those that the library exports, with the versions that cuda.h hides
 * behind macros. testdata/facts.c, which includes cuda.h before, holds all against it.
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

typedef struct CUevent_st *CUevent;
typedef int CUpointer_attribute, CUstreamCaptureMode, CUstreamCaptureStatus;
typedef int CUmemAllocationType, CUmemAllocationHandleType, CUmemLocationType, CUmemAccess_flags;
typedef int CUmemAllocationGranularity_flags, CUmemRangeHandleType;
typedef unsigned long long CUmemGenericAllocationHandle;

typedef struct CUuuid_st {
	char bytes[16];
} CUuuid;

typedef struct CUmemLocation_st {
	CUmemLocationType type;
	int id;
} CUmemLocation;

typedef struct CUmemAllocationProp_st {
	CUmemAllocationType type;
	CUmemAllocationHandleType requestedHandleTypes;
	CUmemLocation location;
	void *win32HandleMetaData;
	struct {
		unsigned char compressionType, gpuDirectRDMACapable;
		unsigned short usage;
		unsigned char reserved[4];
	} allocFlags;
} CUmemAllocationProp;

typedef struct CUmemAccessDesc_st {
	CUmemLocation location;
	CUmemAccess_flags flags;
} CUmemAccessDesc;

enum {
	CUDA_ERROR_INVALID_VALUE = 1,
	CUDA_ERROR_OUT_OF_MEMORY = 2,
	CUDA_ERROR_OPERATING_SYSTEM = 304,
	CUDA_ERROR_NOT_READY = 600,
	CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
	CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
	CUDA_ERROR_CAPTURED_EVENT = 907,
	CU_STREAM_CAPTURE_MODE_RELAXED = 2,
	CU_STREAM_CAPTURE_STATUS_NONE = 0,
	CU_EVENT_BLOCKING_SYNC = 1,
	CU_EVENT_DISABLE_TIMING = 2,
	CU_MEMORYTYPE_DEVICE = 2,
	CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
	CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
	CU_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11,
	CU_POINTER_ATTRIBUTE_RANGE_SIZE = 12,
	CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
	CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
	CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110,
	CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED = 124,
	CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
	CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1,
	CU_MEM_ALLOCATION_TYPE_PINNED = 1,
	CU_MEM_LOCATION_TYPE_DEVICE = 1,
	CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
	CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
};
#endif

/* All in CUDA 11: a driver without one of them is not used. */
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
	X(cuLaunchKernel, (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
			   unsigned, CUstream, void **, void **)) \
	X(cuEventCreate, (CUevent *, unsigned)) \
	X(cuEventDestroy_v2, (CUevent)) \
	X(cuEventRecord, (CUevent, CUstream)) \
	X(cuEventSynchronize, (CUevent)) \
	X(cuEventQuery, (CUevent)) \
	X(cuStreamQuery, (CUstream)) \
	X(cuStreamWaitEvent, (CUstream, CUevent, unsigned)) \
	X(cuMemcpyDtoDAsync_v2, (CUdeviceptr, CUdeviceptr, size_t, CUstream)) \
	X(cuMemcpyAsync, (CUdeviceptr, CUdeviceptr, size_t, CUstream)) \
	X(cuMemHostAlloc, (void **, size_t, unsigned)) \
	X(cuMemFreeHost, (void *)) \
	X(cuPointerGetAttribute, (void *, CUpointer_attribute, CUdeviceptr))

/* NULL where the driver is too old for them. */
#define SL_CUDA_OPTIONAL_CALLS(X) \
	X(cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long)) \
	X(cuMemAddressFree, (CUdeviceptr, size_t)) \
	X(cuMemCreate, (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, \
			unsigned long long)) \
	X(cuMemRelease, (CUmemGenericAllocationHandle)) \
	X(cuMemMap, \
	  (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long)) \
	X(cuMemUnmap, (CUdeviceptr, size_t)) \
	X(cuMemSetAccess, (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t)) \
	X(cuMemGetAllocationGranularity, \
	  (size_t *, const CUmemAllocationProp *, CUmemAllocationGranularity_flags)) \
	X(cuMemGetHandleForAddressRange, \
	  (void *, CUdeviceptr, size_t, CUmemRangeHandleType, unsigned long long)) \
	X(cuMemExportToShareableHandle, \
	  (void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long)) \
	X(cuMemImportFromShareableHandle, \
	  (CUmemGenericAllocationHandle *, void *, CUmemAllocationHandleType)) \
	X(cuDeviceGetUuid_v2, (CUuuid *, CUdevice)) \
	X(cuCtxSynchronize, (void)) \
	X(cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode *)) \
	X(cuStreamIsCapturing, (CUstream, CUstreamCaptureStatus *))

#endif
