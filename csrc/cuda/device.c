/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "device.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

struct sl_cuda_api sl_cu;

int sl_cuda_load(const char *path, char *why, size_t size)
{
	struct sl_cuda_api api;
	const char *name = "", *text = "";
	void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
	int rc;

	if (!lib) {
		snprintf(why, size, "%s", dlerror());
		return -ENOENT;
	}
	/* By memory, since ISO C has no cast from void * to a function. */
#define OPTIONAL(call, args) *(void **)&api.call = dlsym(lib, #call);
#define REQUIRED(call, args) \
	OPTIONAL(call, args) \
	if (!api.call) { \
		snprintf(why, size, "%s has no function %s", path, #call); \
		return -ENOSYS; \
	}
	SL_CUDA_CALLS(REQUIRED)
	SL_CUDA_OPTIONAL_CALLS(OPTIONAL)
	rc = api.cuInit(0);
	if (rc) {
		if (api.cuGetErrorName(rc, &name) || api.cuGetErrorString(rc, &text))
			name = "unknown error";
		snprintf(why, size, "%s: cuInit answers %d, %s: %s", path, rc, name, text);
		return -ENODEV;
	}
	sl_cu = api;
	return 0;
}

const char *sl_cuda_error(int result)
{
	const char *name;

	return sl_cu.cuGetErrorName(result, &name) ? "unknown error" : name;
}

int sl_cuda_count(void)
{
	int n;

	return sl_cu.cuDeviceGetCount(&n) ? -1 : n;
}

int sl_cuda_find(CUdevice *device, int ordinal)
{
	int count;

	SL_CUDA_TRY(sl_cu.cuDeviceGetCount(&count));
	if (count == 0)
		return CUDA_ERROR_NO_DEVICE;
	if (ordinal < 0 || ordinal >= count)
		return CUDA_ERROR_INVALID_DEVICE;
	return sl_cu.cuDeviceGet(device, ordinal);
}

static int describe(struct sl_cuda *c)
{
	const CUdevice d = c->device;
	int major, minor;

	SL_CUDA_TRY(sl_cu.cuDriverGetVersion(&c->driver));
	SL_CUDA_TRY(sl_cu.cuDeviceGetName(c->name, sizeof c->name, d));
	SL_CUDA_TRY(sl_cu.cuDeviceGetPCIBusId(c->bus, sizeof c->bus, d));
	SL_CUDA_TRY(sl_cu.cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
					       d));
	SL_CUDA_TRY(sl_cu.cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
					       d));
	SL_CUDA_TRY(
	    sl_cu.cuDeviceGetAttribute(&c->sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, d));
	SL_CUDA_TRY(sl_cu.cuDeviceGetAttribute(
	    &c->shared, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, d));
	c->compute = 10 * major + minor;
	return 0;
}

int sl_cuda_make_stream(CUstream *s)
{
	int lowest, highest;

	SL_CUDA_TRY(sl_cu.cuCtxGetStreamPriorityRange(&lowest, &highest));
	return sl_cu.cuStreamCreateWithPriority(s, CU_STREAM_NON_BLOCKING, lowest);
}

int sl_cuda_open(struct sl_cuda *c, int ordinal)
{
	int rc;

	memset(c, 0, sizeof *c);
	SL_CUDA_TRY(sl_cuda_find(&c->device, ordinal));
	SL_CUDA_TRY(describe(c));
	SL_CUDA_TRY(sl_cu.cuDevicePrimaryCtxRetain(&c->context, c->device));
	rc = sl_cu.cuCtxSetCurrent(c->context);
	if (!rc)
		rc = sl_cuda_make_stream(&c->stream);
	if (rc)
		sl_cu.cuDevicePrimaryCtxRelease_v2(c->device);
	return rc;
}

void sl_cuda_close(struct sl_cuda *c)
{
	if (sl_cu.cuCtxSetCurrent(c->context) == 0) {
		sl_cu.cuStreamSynchronize(c->stream);
		sl_cu.cuStreamDestroy_v2(c->stream);
		if (c->module)
			sl_cu.cuModuleUnload(c->module);
	}
	sl_cu.cuDevicePrimaryCtxRelease_v2(c->device);
}

int sl_cuda_module(CUmodule *module, CUfunction kernel[SL_CUDA_KERNELS], const char *ptx,
		   const char *const names[SL_CUDA_KERNELS])
{
	int rc = 0;

	SL_CUDA_TRY(sl_cu.cuModuleLoadDataEx(module, ptx, 0, NULL, NULL));
	for (int i = 0; i < SL_CUDA_KERNELS && !rc; i++)
		if (names[i])
			rc = sl_cu.cuModuleGetFunction(&kernel[i], *module, names[i]);
	if (rc) {
		sl_cu.cuModuleUnload(*module);
		*module = NULL;
	}
	return rc;
}

int sl_cuda_load_module(struct sl_cuda *c, const char *ptx, const char *const *names)
{
	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(c->context));
	return sl_cuda_module(&c->module, c->kernel, ptx, names);
}

int sl_cuda_alloc(struct sl_cuda *c, size_t bytes, CUdeviceptr *at)
{
	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(c->context));
	return sl_cu.cuMemAlloc_v2(at, bytes);
}

int sl_cuda_free(struct sl_cuda *c, CUdeviceptr at)
{
	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(c->context));
	return sl_cu.cuMemFree_v2(at);
}

int sl_cuda_host_pin(CUcontext context, void *mem, size_t bytes)
{
	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(context));
	return sl_cu.cuMemHostRegister_v2(mem, bytes, CU_MEMHOSTREGISTER_PORTABLE |
							  CU_MEMHOSTREGISTER_DEVICEMAP);
}

int sl_cuda_host_unpin(CUcontext context, void *mem)
{
	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(context));
	return sl_cu.cuMemHostUnregister(mem);
}

int sl_cuda_host_address(CUcontext context, void *mem, CUdeviceptr *at)
{
	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(context));
	return sl_cu.cuMemHostGetDevicePointer_v2(at, mem, 0);
}

int sl_cuda_pin(struct sl_cuda *c, void *mem, size_t bytes, CUdeviceptr *at)
{
	int rc;

	SL_CUDA_TRY(sl_cuda_host_pin(c->context, mem, bytes));
	rc = sl_cuda_host_address(c->context, mem, at);
	if (rc)
		sl_cu.cuMemHostUnregister(mem);
	return rc;
}

/* Nothing is under way when a function returns, whatever failed. */
static int wait(struct sl_cuda *c, int rc)
{
	int waited = sl_cu.cuStreamSynchronize(c->stream);

	return rc ? rc : waited;
}

int sl_cuda_write(struct sl_cuda *c, CUdeviceptr to, const void *from, size_t bytes)
{
	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(c->context));
	return wait(c, sl_cu.cuMemcpyHtoDAsync_v2(to, from, bytes, c->stream));
}

int sl_cuda_read(struct sl_cuda *c, void *to, CUdeviceptr from, size_t bytes)
{
	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(c->context));
	return wait(c, sl_cu.cuMemcpyDtoHAsync_v2(to, from, bytes, c->stream));
}

int sl_cuda_copy(struct sl_cuda *c, uint64_t dst, uint64_t src, uint64_t bytes)
{
	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(c->context));
	return sl_cu.cuMemcpyAsync(dst, src, bytes, c->stream);
}

/* Has the next calls of this thread go on beside a capture; `again` undoes it. */
static bool relax(CUstreamCaptureMode *mode)
{
	*mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	return sl_cu.cuThreadExchangeStreamCaptureMode &&
	       sl_cu.cuThreadExchangeStreamCaptureMode(mode) == 0;
}

static void again(bool relaxed, CUstreamCaptureMode *mode)
{
	if (relaxed)
		(void)sl_cu.cuThreadExchangeStreamCaptureMode(mode);
}

int sl_cuda_sync(struct sl_cuda *c)
{
	CUstreamCaptureMode mode;
	bool relaxed;
	int rc;

	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(c->context));
	relaxed = relax(&mode);
	rc = sl_cu.cuStreamSynchronize(c->stream);
	again(relaxed, &mode);
	return rc;
}

int sl_cuda_launch(struct sl_cuda *c, int kernel, unsigned blocks, unsigned threads,
		   unsigned shared, const uint8_t *args, CUdeviceptr tally, uint8_t *host, size_t n)
{
	void *params[] = {(void *)args};
	int rc, waited;

	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(c->context));
	if (shared) /* a launch in between may have allowed the kernel less */
		SL_CUDA_TRY(sl_cu.cuFuncSetAttribute(
		    c->kernel[kernel], CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
		    (int)shared));
	rc = sl_cu.cuLaunchKernel(c->kernel[kernel], blocks, 1, 1, threads, 1, 1, shared, c->stream,
				  params, NULL);
	if (!rc && n)
		rc = sl_cu.cuMemcpyDtoHAsync_v2(host, tally, n, c->stream);
	waited = sl_cuda_sync(c);
	return rc ? rc : waited;
}

int sl_cuda_event_make(struct sl_cuda *c, uint64_t *event)
{
	CUevent made;

	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(c->context));
	SL_CUDA_TRY(sl_cu.cuEventCreate(&made, CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING));
	*event = (uintptr_t)made;
	return 0;
}

int sl_cuda_event_drop(struct sl_cuda *c, uint64_t event)
{
	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(c->context));
	return sl_cu.cuEventDestroy_v2((CUevent)(uintptr_t)event);
}

int sl_cuda_record(struct sl_cuda *c, uint64_t event)
{
	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(c->context));
	return sl_cu.cuEventRecord((CUevent)(uintptr_t)event, c->stream);
}

int sl_cuda_wait_event(struct sl_cuda *c, uint64_t event)
{
	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(c->context));
	return sl_cu.cuStreamWaitEvent(c->stream, (CUevent)(uintptr_t)event, 0);
}

int sl_cuda_over(CUcontext context, CUstream s, uint64_t event)
{
	CUstreamCaptureMode mode;
	bool relaxed;
	int rc;

	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(context));
	relaxed = relax(&mode);
	rc = s ? sl_cu.cuStreamQuery(s) : sl_cu.cuEventQuery((CUevent)(uintptr_t)event);
	again(relaxed, &mode);
	return rc;
}

void sl_cuda_ignore_captures(void)
{
	CUstreamCaptureMode mode;

	(void)relax(&mode);
}

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

int sl_cuda_uuid(int device, uint8_t uuid[16])
{
	CUdevice d;
	CUuuid u;

	if (!sl_cu.cuDeviceGetUuid_v2)
		return -EOPNOTSUPP;
	SL_CUDA_TRY(sl_cu.cuDeviceGet(&d, device));
	SL_CUDA_TRY(sl_cu.cuDeviceGetUuid_v2(&u, d));
	memcpy(uuid, u.bytes, sizeof u.bytes);
	return 0;
}
