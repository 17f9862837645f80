/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A software stand-in of libcuda for tests, never installed: device memory is memory of the
 * host, and kernels are those of this package, compiled for the CPU. Streams work beside the program,
 * each in a thread of its own. It refuses what a driver refuses and tests could get wrong.
 * STANDIN_COMPUTE and STANDIN_DRIVER say what card it is, STANDIN_DEVICES how many there are,
 * STANDIN_REFUSES the module that it does not compile, and STANDIN_PANEL the file of
 * standin_panel.h. Compiled with STANDIN_OLD it is a driver without what is optional.
 */
#define SL_HOST
#include "../gather.cu"


#include "../digest.cu"


#include "../sparse.cu"

#include "block_host.h"
#include "ring_host.h"

#include "../../csrc/cuda/calls.h"
#include "standin_panel.h"

enum {
	INVALID_VALUE = 1,
	OUT_OF_MEMORY = 2,
	INVALID_CONTEXT = 201,
	NO_BINARY_FOR_GPU = 209,
	ALREADY_MAPPED = 208,
	INVALID_PTX = 218,
	UNSUPPORTED_PTX = 222,
	NOT_FOUND = 500,
	NOT_MAPPED = 211,
};

#define DEVICES_MAX 4
struct CUctx_st {
	_Atomic int held;
	int device;
};
static struct CUctx_st contexts[DEVICES_MAX];
static _Thread_local CUcontext current;
static _Atomic int sick[1]; /* what every call answers after a fault */

struct CUfunc_st {
	const char *name;
	void (*run)(const void *args);
	size_t args;
	unsigned threads, shared;
};
static void run_rows(const void *args) { sl_move_rows(*(const struct sl_move *)args); }
static void run_async(const void *args) { sl_move_async(*(const struct sl_move *)args); }
static void run_nest(const void *args) { sl_move_nest(*(const struct sl_nested *)args); }
static void run_digest(const void *args) { sl_digest_cells(*(const struct sl_digest *)args); }
static void run_check(const void *args) { sl_lookup_check(*(const struct sl_lookup *)args); }
static void run_sets(const void *args) { sl_lookup_sets(*(const struct sl_lookup *)args); }
/* Its threads wait for one another: the first runs all. */
static void run_blocks(const void *args)
{
	if (sl_at.tid == 0)
		block_run(run_sets, args);
}
static struct CUfunc_st functions[] = {
	{"sl_move_rows", run_rows, sizeof(struct sl_move), SL_ROWS_THREADS, 48 << 10},
	{"sl_move_nest", run_nest, sizeof(struct sl_nested), SL_ROWS_THREADS, 48 << 10},
	{"sl_move_async", run_async, sizeof(struct sl_move), SL_ASYNC_THREADS, 48 << 10},
	{"sl_digest_cells", run_digest, sizeof(struct sl_digest), SL_DIGEST_THREADS, 48 << 10},
	{"sl_lookup_check", run_check, sizeof(struct sl_lookup), SL_LOOKUP_THREADS, 48 << 10},
	{"sl_lookup_sets", run_blocks, sizeof(struct sl_lookup), SL_LOOKUP_THREADS, 48 << 10},
	{0},
};

struct CUmod_st {
	char *ptx;
};

static int setting(const char *name, int otherwise)
{
	const char *text = getenv(name);

	return text ? atoi(text) : otherwise;
}

#define CONTEXT() \
	do { \
		if (!current || !current->held) \
			return INVALID_CONTEXT; \
		if (sick[0]) \
			return (CUresult)sick[0]; \
	} while (0)

static int standin_devices(void) { return setting("STANDIN_DEVICES", 1); }


CUresult cuInit(unsigned flags) { return flags ? INVALID_VALUE : 0; }
CUresult cuGetErrorName(CUresult r, const char **name)
{
	return *name = r ? "STANDIN_ERROR" : "CUDA_SUCCESS", 0;
}
CUresult cuGetErrorString(CUresult r, const char **text)
{
	return *text = r ? "stand-in" : "no error", 0;
}
CUresult cuDriverGetVersion(int *v) { return *v = setting("STANDIN_DRIVER", 12040), 0; }
CUresult cuDeviceGetCount(int *n) { return *n = standin_devices(), 0; }
CUresult cuDeviceGet(CUdevice *d, int ordinal)
{
	return *d = ordinal, ordinal < DEVICES_MAX ? 0 : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDeviceGetName(char *s, int n, CUdevice d)
{
	return snprintf(s, n, "software stand-in %d", d), 0;
}
CUresult cuDeviceGetPCIBusId(char *s, int n, CUdevice d)
{
	return snprintf(s, n, "0000:0%d:00.0", d), 0;
}

CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute what, CUdevice d)
{
	int compute = setting("STANDIN_COMPUTE", 90);

	*v = what == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR	     ? compute / 10
	     : what == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR	     ? compute % 10
	     : what == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT		     ? 4
	     : what == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 227 << 10
	     : what == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ||
		     what == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED ||
		     what == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED ||
		     what == CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
		 ? 1
		 : -1;
	return d >= DEVICES_MAX || *v < 0 ? INVALID_VALUE : 0;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d)
{
	contexts[d].device = d;
	contexts[d].held++;
	COUNT(contexts, 1);
	*c = &contexts[d];
	return 0;
}

static void forget_all(void);

/* The last one ends the context, and with it what ailed it. */
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice d)
{
	if (contexts[d].held == 0)
		return INVALID_CONTEXT;
	COUNT(contexts, -1);
	if (--contexts[d].held == 0 && sick[0]) {
		forget_all();
		sick[0] = 0;
	}
	return 0;
}

CUresult cuCtxSetCurrent(CUcontext c) { return current = c, c && c->held ? 0 : INVALID_CONTEXT; }

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
	CONTEXT();
	*least = 0;
	*greatest = -5;
	return 0;
}

CUresult cuModuleLoadDataEx(CUmodule *m, const void *image, unsigned n, CUjit_option *o, void **v)
{
	const char *target = strstr(image, ".target sm_");

	CONTEXT();
	if (!strstr(image, ".version ") || !target || n || o || v)
		return INVALID_PTX;
	if (atoi(target + strlen(".target sm_")) > setting("STANDIN_COMPUTE", 90))
		return NO_BINARY_FOR_GPU;
	if (atoi(target + strlen(".target sm_")) == setting("STANDIN_REFUSES", 0))
		return UNSUPPORTED_PTX;
	*m = malloc(sizeof **m);
	(*m)->ptx = strdup(image);
	return 0;
}

CUresult cuModuleUnload(CUmodule m)
{
	CONTEXT();
	free(m->ptx);
	free(m);
	return 0;
}

CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name)
{
	char entry[64];

	CONTEXT();
	snprintf(entry, sizeof entry, ".visible .entry %s(", name);
	for (*f = functions; (*f)->name && strcmp((*f)->name, name); ++*f)
		;
	return (*f)->name && strstr(m->ptx, entry) ? 0 : NOT_FOUND;
}

CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute what, int v)
{
	CONTEXT();
	if (what != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || v > 227 << 10)
		return INVALID_VALUE;
	f->shared = (unsigned)v;
	return 0;
}

static void quiet(void);
#include "standin_memory.h"
#include "standin_streams.h"
