/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The functions of libcufile that sluice calls, declared here after NVIDIA's "GPUDirect
 * Storage cuFile API Reference Guide": no header of NVIDIA's is needed. The layouts are those of
 * cuFile 1.4 to 1.20; testdata/facts.c, which includes cufile.h before, holds all against it.
 */
#ifndef SLUICE_CUFILE_CALLS_H
#define SLUICE_CUFILE_CALLS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#include "../cuda/calls.h"

#ifndef CUFILEOP_BASE_ERR
#define CUFILEOP_BASE_ERR 5000

enum {
	CU_FILE_SUCCESS = 0,
	CU_FILE_CUDA_DRIVER_ERROR = 5011,
	CU_FILE_MEMORY_ALREADY_REGISTERED = 5023,
	CU_FILE_DRIVER_ALREADY_OPEN = 5026,
};

typedef struct CUfileError {
	int err; /* a CUfileOpError: 0, or from 5000 on */
	CUresult cu_err;
} CUfileError_t;

/* Sizes are in KiB, but for poll_thresh_size and max_direct_io_size of nvfs, which are so, too. */
typedef struct CUfileDrvProps {
	struct {
		unsigned int major_version; /* of nvidia-fs; 0.0: it is not there */
		unsigned int minor_version;
		size_t poll_thresh_size;
		size_t max_direct_io_size;
		unsigned int dstatusflags;
		unsigned int dcontrolflags;
	} nvfs;
	unsigned int fflags;
	unsigned int max_device_cache_size;
	unsigned int per_buffer_cache_size;
	unsigned int max_device_pinned_mem_size;
	unsigned int max_batch_io_size; /* entries */
	unsigned int max_batch_io_timeout_msecs;
} CUfileDrvProps_t;

/* Bits of dcontrolflags and dstatusflags, and parameters that may be asked for. */
enum {
	CU_FILE_ALLOW_COMPAT_MODE = 1,
	CU_FILE_NVME_SUPPORTED = 4,
	CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE = 1,
	CUFILE_PARAM_FORCE_COMPAT_MODE = 2,
	CUFILE_PARAM_USE_PCIP2PDMA = 7,
};

enum { CU_FILE_HANDLE_TYPE_OPAQUE_FD = 1 };

typedef struct CUfileDescr_t {
	int type;
	union {
		int fd;
		void *handle;
	} handle;
	const void *fs_ops;
} CUfileDescr_t;

typedef void *CUfileHandle_t;
typedef void *CUfileBatchHandle_t;

enum { CUFILE_READ = 0, CUFILE_WRITE = 1 };
enum { CUFILE_BATCH = 1 };
enum {
	CUFILE_WAITING = 0x01,
	CUFILE_PENDING = 0x02,
	CUFILE_INVALID = 0x04,
	CUFILE_CANCELED = 0x08,
	CUFILE_COMPLETE = 0x10,
	CUFILE_TIMEOUT = 0x20,
	CUFILE_FAILED = 0x40,
};

typedef struct CUfileIOParams {
	int mode;
	union {
		struct {
			void *devPtr_base;
			off_t file_offset;
			off_t devPtr_offset;
			size_t size;
		} batch;
	} u;
	CUfileHandle_t fh;
	int opcode;
	void *cookie;
} CUfileIOParams_t;

typedef struct CUfileIOEvents {
	void *cookie;
	int status;
	size_t ret; /* bytes, or a negative error */
} CUfileIOEvents_t;

typedef int CUFileBoolConfigParameter_t;
#endif

#define SL_CUFILE_CALLS(X) \
	X(CUfileError_t, cuFileDriverOpen, (void)) \
	X(CUfileError_t, cuFileDriverGetProperties, (CUfileDrvProps_t *)) \
	X(CUfileError_t, cuFileHandleRegister, (CUfileHandle_t *, CUfileDescr_t *)) \
	X(void, cuFileHandleDeregister, (CUfileHandle_t)) \
	X(CUfileError_t, cuFileBufRegister, (const void *, size_t, int)) \
	X(CUfileError_t, cuFileBufDeregister, (const void *)) \
	X(ssize_t, cuFileRead, (CUfileHandle_t, void *, size_t, off_t, off_t)) \
	X(ssize_t, cuFileWrite, (CUfileHandle_t, const void *, size_t, off_t, off_t))

/*
 * NULL where the library is older: versions from 1.8, batches from 1.6, parameters
 * from 1.14 on.
 */
#define SL_CUFILE_OPTIONAL_CALLS(X)                                                                \
	X(CUfileError_t, cuFileGetVersion, (int *))                                                \
	X(CUfileError_t, cuFileBatchIOSetUp, (CUfileBatchHandle_t *, unsigned))                    \
	X(CUfileError_t, cuFileBatchIOSubmit,                                                      \
	  (CUfileBatchHandle_t, unsigned, CUfileIOParams_t *, unsigned))                           \
	X(CUfileError_t, cuFileBatchIOGetStatus,                                                   \
	  (CUfileBatchHandle_t, unsigned, unsigned *, CUfileIOEvents_t *, struct timespec *))      \
	X(CUfileError_t, cuFileBatchIOCancel, (CUfileBatchHandle_t))                               \
	X(void, cuFileBatchIODestroy, (CUfileBatchHandle_t))                                       \
	X(CUfileError_t, cuFileGetParameterBool, (CUFileBoolConfigParameter_t, bool *))

#endif
