/* SPDX-License-Identifier: Apache-2.0 */
#include "device.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

/* All set or all NULL. Written once, by sl_cuda_load. */
static struct {
#define X(name, args) CUresult(*name) args;
	SL_CUDA_CALLS(X)
#undef X
} cu;

int sl_cuda_load(const char *path, char *why, size_t size)
{
	__typeof__(cu) api;
	const char *name = "", *text = "";
	void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
	int rc;

	if (!lib) {
		snprintf(why, size, "%s", dlerror());
		return -ENOENT;
	}
	/* By memory, since ISO C has no cast from void * to a function. */
#define X(call, args) \
	if (!(*(void **)&api.call = dlsym(lib, #call))) { \
		snprintf(why, size, "%s has no function %s", path, #call); \
		return -ENOSYS; \
	}
	SL_CUDA_CALLS(X)
#undef X
	rc = api.cuInit(0);
	if (rc) {
		if (api.cuGetErrorName(rc, &name) || api.cuGetErrorString(rc, &text))
			name = "unknown error";
		snprintf(why, size, "%s: cuInit answers %d, %s: %s", path, rc, name, text);
		return -ENODEV;
	}
	cu = api;
	return 0;
}

const char *sl_cuda_error(int result)
{
	const char *name;

	return cu.cuGetErrorName(result, &name) ? "unknown error" : name;
}

/* The first failure ends a function. */
#define TRY(call) \
	do { \
		int try_rc = (call); \
		if (try_rc) \
			return try_rc; \
	} while (0)

static int describe(struct sl_cuda *c)
{
	int major, minor;

	TRY(cu.cuDriverGetVersion(&c->driver));
	TRY(cu.cuDeviceGetName(c->name, sizeof c->name, c->device));
	TRY(cu.cuDeviceGetPCIBusId(c->bus, sizeof c->bus, c->device));
	TRY(cu.cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
				    c->device));
	TRY(cu.cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
				    c->device));
	TRY(cu.cuDeviceGetAttribute(&c->sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, c->device));
	TRY(cu.cuDeviceGetAttribute(&c->shared,
				    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
				    c->device));
	c->compute = 10 * major + minor;
	return 0;
}

static int stream(struct sl_cuda *c)
{
	int lowest, highest;

	TRY(cu.cuCtxSetCurrent(c->context));
	TRY(cu.cuCtxGetStreamPriorityRange(&lowest, &highest));
	return cu.cuStreamCreateWithPriority(&c->stream, CU_STREAM_NON_BLOCKING, lowest);
}

int sl_cuda_open(struct sl_cuda *c, int ordinal)
{
	int count, rc;

	memset(c, 0, sizeof *c);
	TRY(cu.cuDeviceGetCount(&count));
	if (count == 0)
		return CUDA_ERROR_NO_DEVICE;
	if (ordinal < 0 || ordinal >= count)
		return CUDA_ERROR_INVALID_DEVICE;
	TRY(cu.cuDeviceGet(&c->device, ordinal));
	TRY(describe(c));
	TRY(cu.cuDevicePrimaryCtxRetain(&c->context, c->device));
	rc = stream(c);
	if (rc)
		cu.cuDevicePrimaryCtxRelease_v2(c->device);
	return rc;
}

void sl_cuda_close(struct sl_cuda *c)
{
	if (cu.cuCtxSetCurrent(c->context) == 0) {
		cu.cuStreamSynchronize(c->stream);
		cu.cuStreamDestroy_v2(c->stream);
		if (c->module)
			cu.cuModuleUnload(c->module);
	}
	cu.cuDevicePrimaryCtxRelease_v2(c->device);
}

int sl_cuda_module(struct sl_cuda *c, const char *ptx, const char *kernel0, const char *kernel1)
{
	const char *names[SL_CUDA_KERNELS] = {kernel0, kernel1};
	int rc = 0;

	TRY(cu.cuCtxSetCurrent(c->context));
	TRY(cu.cuModuleLoadDataEx(&c->module, ptx, 0, NULL, NULL));
	for (int i = 0; i < SL_CUDA_KERNELS && !rc; i++)
		if (names[i])
			rc = cu.cuModuleGetFunction(&c->kernel[i], c->module, names[i]);
	if (rc) {
		cu.cuModuleUnload(c->module);
		c->module = NULL;
	}
	return rc;
}

int sl_cuda_alloc(struct sl_cuda *c, size_t bytes, CUdeviceptr *at)
{
	TRY(cu.cuCtxSetCurrent(c->context));
	return cu.cuMemAlloc_v2(at, bytes);
}

int sl_cuda_free(struct sl_cuda *c, CUdeviceptr at)
{
	TRY(cu.cuCtxSetCurrent(c->context));
	return cu.cuMemFree_v2(at);
}

int sl_cuda_pin(struct sl_cuda *c, void *mem, size_t bytes, CUdeviceptr *at)
{
	int rc;

	TRY(cu.cuCtxSetCurrent(c->context));
	TRY(cu.cuMemHostRegister_v2(mem, bytes,
				    CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP));
	rc = cu.cuMemHostGetDevicePointer_v2(at, mem, 0);
	if (rc)
		cu.cuMemHostUnregister(mem);
	return rc;
}

int sl_cuda_unpin(struct sl_cuda *c, void *mem)
{
	TRY(cu.cuCtxSetCurrent(c->context));
	return cu.cuMemHostUnregister(mem);
}

/* Nothing is under way when a function returns, whatever failed. */
static int wait(struct sl_cuda *c, int rc)
{
	int waited = cu.cuStreamSynchronize(c->stream);

	return rc ? rc : waited;
}

int sl_cuda_write(struct sl_cuda *c, CUdeviceptr to, const void *from, size_t bytes)
{
	TRY(cu.cuCtxSetCurrent(c->context));
	return wait(c, cu.cuMemcpyHtoDAsync_v2(to, from, bytes, c->stream));
}

int sl_cuda_read(struct sl_cuda *c, void *to, CUdeviceptr from, size_t bytes)
{
	TRY(cu.cuCtxSetCurrent(c->context));
	return wait(c, cu.cuMemcpyDtoHAsync_v2(to, from, bytes, c->stream));
}
