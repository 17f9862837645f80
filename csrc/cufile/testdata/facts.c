/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Prints the values of calls.h, or with -DREAL those of NVIDIA's cufile.h. With -DREAL it
 * does not compile unless every prototype in calls.h is NVIDIA's.
 */
#ifdef REAL
#include <cufile.h>
#undef cuFileDriverClose
#endif
#include "calls.h"

#include <stdio.h>

#ifdef REAL
#define SAME(ret, name, args)                                                                      \
	_Static_assert(__builtin_types_compatible_p(__typeof__(&name), ret(*) args),               \
		       #name " has another prototype");
SL_CUFILE_CALLS(SAME)
SL_CUFILE_OPTIONAL_CALLS(SAME)
#endif

#define VALUE(v) printf("%s = %lld\n", #v, (long long)(v));
#define OFFSET(t, f) printf("offset of %s.%s = %zu\n", #t, #f, offsetof(t, f));
#define SIZE(t) printf("sizeof %s = %zu\n", #t, sizeof(t));

int main(void)
{
	VALUE(CU_FILE_SUCCESS) VALUE(CU_FILE_CUDA_DRIVER_ERROR)
	VALUE(CU_FILE_MEMORY_ALREADY_REGISTERED)
	VALUE(CU_FILE_DRIVER_ALREADY_OPEN) VALUE(CUFILEOP_BASE_ERR)
	SIZE(CUfileError_t) OFFSET(CUfileError_t, err) OFFSET(CUfileError_t, cu_err)
	SIZE(CUfileDrvProps_t) OFFSET(CUfileDrvProps_t, nvfs.major_version)
	OFFSET(CUfileDrvProps_t, nvfs.minor_version)
	OFFSET(CUfileDrvProps_t, nvfs.poll_thresh_size)
	OFFSET(CUfileDrvProps_t, nvfs.max_direct_io_size)
	OFFSET(CUfileDrvProps_t, nvfs.dstatusflags) OFFSET(CUfileDrvProps_t, nvfs.dcontrolflags)
	OFFSET(CUfileDrvProps_t, fflags) OFFSET(CUfileDrvProps_t, max_device_cache_size)
	OFFSET(CUfileDrvProps_t, per_buffer_cache_size)
	OFFSET(CUfileDrvProps_t, max_device_pinned_mem_size)
	OFFSET(CUfileDrvProps_t, max_batch_io_size)
	OFFSET(CUfileDrvProps_t, max_batch_io_timeout_msecs)
	VALUE(CU_FILE_ALLOW_COMPAT_MODE) VALUE(CU_FILE_NVME_SUPPORTED)
	VALUE(CU_FILE_HANDLE_TYPE_OPAQUE_FD)
	VALUE(CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE) VALUE(CUFILE_PARAM_FORCE_COMPAT_MODE)
	VALUE(CUFILE_PARAM_USE_PCIP2PDMA)
	SIZE(CUfileDescr_t) OFFSET(CUfileDescr_t, type) OFFSET(CUfileDescr_t, handle.fd)
	OFFSET(CUfileDescr_t, fs_ops)
	SIZE(CUfileHandle_t) SIZE(CUfileBatchHandle_t)
	VALUE(CUFILE_READ) VALUE(CUFILE_WRITE) VALUE(CUFILE_BATCH) VALUE(CUFILE_WAITING)
	VALUE(CUFILE_PENDING)
	VALUE(CUFILE_INVALID) VALUE(CUFILE_CANCELED) VALUE(CUFILE_COMPLETE)
	VALUE(CUFILE_TIMEOUT) VALUE(CUFILE_FAILED)
	SIZE(CUfileIOParams_t) OFFSET(CUfileIOParams_t, mode)
	OFFSET(CUfileIOParams_t, u.batch.devPtr_base)
	OFFSET(CUfileIOParams_t, u.batch.file_offset)
	OFFSET(CUfileIOParams_t, u.batch.devPtr_offset)
	OFFSET(CUfileIOParams_t, u.batch.size) OFFSET(CUfileIOParams_t, fh)
	OFFSET(CUfileIOParams_t, opcode)
	OFFSET(CUfileIOParams_t, cookie)
	SIZE(CUfileIOEvents_t) OFFSET(CUfileIOEvents_t, cookie)
	OFFSET(CUfileIOEvents_t, status) OFFSET(CUfileIOEvents_t, ret)
	SIZE(CUFileBoolConfigParameter_t)
	return 0;
}
