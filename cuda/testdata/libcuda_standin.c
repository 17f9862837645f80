/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A software stand-in of libcuda for tests, never installed: device memory is memory of the
 * host, and kernels are those of gather.cu, compiled for the CPU. It refuses what a driver
 * refuses and tests could get wrong. STANDIN_COMPUTE and STANDIN_DRIVER say what card it is,
 * STANDIN_DEVICES (at most 4) how many there are, STANDIN_REFUSES the module that it does not compile.
 */
#define SL_HOST
#include "../gather.cu"

#include "../decode.cu"

#include "ring_host.h"

#include "../../csrc/cuda_calls.h"

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

struct CUctx_st {
	int held;
};
static struct CUctx_st contexts[4];
static _Thread_local CUcontext current;

struct CUfunc_st {
	const char *name;
	void (*run)(const void *args);
	size_t args;
	unsigned threads, shared;
};
static void run_rows(const void *args) { sl_move_rows(*(const struct sl_move *)args); }
static void run_bulk(const void *args) { sl_move_bulk(*(const struct sl_move *)args); }
static void run_step(const void *args) { sl_decode_step(*(const struct sl_step *)args); }
static struct CUfunc_st functions[] = {
	{"sl_move_rows", run_rows, sizeof(struct sl_move), SL_ROWS_THREADS, 48 << 10},
	{"sl_move_bulk", run_bulk, sizeof(struct sl_move), SL_BULK_THREADS, 48 << 10},
	{"sl_decode_step", run_step, sizeof(struct sl_step), SL_STEP_THREADS, 48 << 10},
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
	if (!current || !current->held) \
	return INVALID_CONTEXT

#include "standin_streams.h"

CUresult cuInit(unsigned flags) { return flags ? INVALID_VALUE : 0; }
CUresult cuGetErrorName(CUresult r, const char **name) { return *name = r ? "STANDIN_ERROR" : "CUDA_SUCCESS", 0; }
CUresult cuGetErrorString(CUresult r, const char **text) { return *text = r ? "stand-in" : "no error", 0; }
CUresult cuDriverGetVersion(int *v) { return *v = setting("STANDIN_DRIVER", 12040), 0; }
CUresult cuDeviceGetCount(int *n) { return *n = setting("STANDIN_DEVICES", 1), 0; }
CUresult cuDeviceGet(CUdevice *d, int ordinal) { return *d = ordinal, ordinal >= 4; }
CUresult cuDeviceGetName(char *s, int n, CUdevice d) { return snprintf(s, n, "software stand-in %d", d), 0; }
CUresult cuDeviceGetPCIBusId(char *s, int n, CUdevice d) { return snprintf(s, n, "0000:0%d:00.0", d), 0; }

CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute what, CUdevice d)
{
	int compute = setting("STANDIN_COMPUTE", 90);

	*v = what == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR	     ? compute / 10
	     : what == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR	     ? compute % 10
	     : what == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT		     ? 4
	     : what == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 227 << 10
									     : -1;
	return d >= 4 || *v < 0 ? INVALID_VALUE : 0;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d)
{
	contexts[d].held++;
	*c = &contexts[d];
	return 0;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice d) { return contexts[d].held-- ? 0 : INVALID_CONTEXT; }
CUresult cuCtxSetCurrent(CUcontext c) { return current = c, c && c->held ? 0 : INVALID_CONTEXT; }

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
	CONTEXT();
	*least = 0;
	*greatest = -5;
	return 0;
}

CUresult cuStreamCreateWithPriority(CUstream *s, unsigned flags, int priority)
{
	CONTEXT();
	*s = stream_open();
	return flags == CU_STREAM_NON_BLOCKING && priority <= 0 && priority >= -5 ? 0 : INVALID_VALUE;
}

CUresult cuStreamDestroy_v2(CUstream s)
{
	CONTEXT();
	stream_close(s);
	return 0;
}

CUresult cuStreamSynchronize(CUstream s)
{
	CONTEXT();
	if (!s || s->capture)
		return s ? CAPTURE_UNSUPPORTED : INVALID_VALUE;
	flush(s);
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

CUresult cuMemAlloc_v2(CUdeviceptr *at, size_t n)
{
	CONTEXT();
	*at = n && n < 1ul << 40 ? (CUdeviceptr)aligned_alloc(256, (n + 255) / 256 * 256) : 0;
	return *at ? 0 : n ? OUT_OF_MEMORY : INVALID_VALUE;
}

CUresult cuMemFree_v2(CUdeviceptr at)
{
	CONTEXT();
	flush_all();
	free((void *)at);
	return 0;
}

/* Pinned memory, by where it begins. */
#define PINS 4096
static void *pinned[PINS];

static void **slot(const void *mem)
{
	for (int i = 0; i < PINS; i++)
		if (pinned[i] == mem)
			return &pinned[i];
	return NULL;
}

CUresult cuMemHostRegister_v2(void *mem, size_t n, unsigned flags)
{
	CONTEXT();
	if (!mem || !n || flags != (CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP))
		return INVALID_VALUE;
	if (slot(mem))
		return ALREADY_MAPPED;
	if (!slot(NULL))
		return OUT_OF_MEMORY;
	*slot(NULL) = mem;
	return 0;
}

CUresult cuMemHostUnregister(void *mem)
{
	CONTEXT();
	flush_all();
	if (!slot(mem))
		return NOT_MAPPED;
	*slot(mem) = NULL;
	return 0;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *at, void *mem, unsigned flags)
{
	CONTEXT();
	*at = (CUdeviceptr)mem;
	return slot(mem) && !flags ? 0 : INVALID_VALUE;
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t n, CUstream s)
{
	struct op o = {.to = to, .from = (CUdeviceptr)from, .n = n};

	CONTEXT();
	return s ? begin(s, &o, 0) : INVALID_VALUE;
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t n, CUstream s)
{
	struct op o = {.to = (CUdeviceptr)to, .from = from, .n = n};

	CONTEXT();
	return s ? begin(s, &o, 0) : INVALID_VALUE;
}

static void perform_launch(const struct op *o)
{
	ring.late_loads = ring.late_stores = 1;
	ring.size = o->shared;
	ring.memory = aligned_alloc(16, o->shared + 16);
	sl_at = (struct sl_at){0, 0, o->threads, o->blocks};
	for (sl_at.bid = 0; sl_at.bid < o->blocks; sl_at.bid++)
		for (sl_at.tid = 0; sl_at.tid < o->threads; sl_at.tid++)
			o->f->run(o->args);
	free(ring.memory);
}

CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
			unsigned shared, CUstream s, void **params, void **extra)
{
	struct op o = {.f = f, .blocks = gx, .threads = bx, .shared = shared};

	CONTEXT();
	if (!f || !gx || gy != 1 || gz != 1 || !bx || bx > f->threads || by != 1 || bz != 1 || shared > f->shared || !s || extra)
		return INVALID_VALUE;
	memcpy(o.args, params[0], f->args);
	return begin(s, &o, 0);
}
