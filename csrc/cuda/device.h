/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libcuda, opened at run time, and a device with a stream (struct sl_cuda). Every function makes
 * the device's context current first, since goroutines move between threads, and returns 0 or the
 * driver's error, a positive number. The caller runs one function at a time on a device.
 */
#ifndef SLUICE_CUDA_DEVICE_H
#define SLUICE_CUDA_DEVICE_H

#include <stdbool.h>

#include "calls.h"

/* Written once, by sl_cuda_load: before that all are NULL, afterwards only optional ones. */
struct sl_cuda_api {
#define X(name, args) CUresult(*name) args;
	SL_CUDA_CALLS(X)
	SL_CUDA_OPTIONAL_CALLS(X)
#undef X
};
extern struct sl_cuda_api sl_cu;

/* Returns from the function with the first error. */
#define SL_CUDA_TRY(call) \
	do { \
		int try_rc = (call); \
		if (try_rc) \
			return try_rc; \
	} while (0)

#define SL_CUDA_KERNELS 3

/* A device with its primary context, and a stream of the lowest priority. */
struct sl_cuda {
	CUdevice device;
	/* compute: 10 * major + minor; shared: bytes that a block may opt in to */
	int driver, compute, sms, shared;
	CUcontext context;
	CUstream stream;
	CUmodule module;
	CUfunction kernel[SL_CUDA_KERNELS];
	char name[128], bus[32];
};

/*
 * Opens the library and calls cuInit. The caller runs one call at a time, and none after one that
 * returned 0. After an error nothing has changed, and why is the reason in words. -ENOENT: dlopen
 * failed; -ENOSYS: a function is missing; -ENODEV: cuInit failed.
 */
int sl_cuda_load(const char *path, char *why, size_t size);

/* The driver's name of an error. */
const char *sl_cuda_error(int result);

/* The number of devices; -1 after an error. */
int sl_cuda_count(void);
/* Finds a device by its ordinal. CUDA_ERROR_NO_DEVICE, CUDA_ERROR_INVALID_DEVICE. */
int sl_cuda_find(CUdevice *device, int ordinal);

/* Fills c. After a failure there is nothing to close. */
int sl_cuda_open(struct sl_cuda *c, int ordinal);
/* Waits for the stream first. */
void sl_cuda_close(struct sl_cuda *c);

/* A stream of the lowest priority, in the current context. */
int sl_cuda_make_stream(CUstream *s);

/*
 * Loads PTX that ends with NUL into the current context, and finds the kernels by name; NULL: none
 * at this place. After a failure another may be tried.
 */
int sl_cuda_module(CUmodule *module, CUfunction kernel[SL_CUDA_KERNELS], const char *ptx,
		   const char *const names[SL_CUDA_KERNELS]);
int sl_cuda_load_module(struct sl_cuda *c, const char *ptx, const char *const *names);

int sl_cuda_alloc(struct sl_cuda *c, size_t bytes, CUdeviceptr *at);
int sl_cuda_free(struct sl_cuda *c, CUdeviceptr at);

/* Pins host memory for all devices. CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED: a part of it is. */
int sl_cuda_host_pin(CUcontext context, void *mem, size_t bytes);
int sl_cuda_host_unpin(CUcontext context, void *mem);
/* Where kernels of the device see pinned memory. */
int sl_cuda_host_address(CUcontext context, void *mem, CUdeviceptr *at);
/* Pins host memory; at is where the device sees it. */
int sl_cuda_pin(struct sl_cuda *c, void *mem, size_t bytes, CUdeviceptr *at);

/* Copy to and from device memory, and wait for the end. */
int sl_cuda_write(struct sl_cuda *c, CUdeviceptr to, const void *from, size_t bytes);
int sl_cuda_read(struct sl_cuda *c, void *to, CUdeviceptr from, size_t bytes);

/* Puts a copy on the stream, and does not wait. The device must see both memories. */
int sl_cuda_copy(struct sl_cuda *c, uint64_t dst, uint64_t src, uint64_t bytes);
/*
 * Launches a kernel with args, one struct by value, and waits: n bytes at `tally` come back to
 * `host`, which is pinned. With n of 0 the kernel's args say where it counts, if it does.
 */
int sl_cuda_launch(struct sl_cuda *c, int kernel, unsigned blocks, unsigned threads,
		   unsigned shared, const uint8_t *args, CUdeviceptr tally, uint8_t *host,
		   size_t n);
/* Waits for the stream. It works beside a graph capture of the program, and does not end it. */
int sl_cuda_sync(struct sl_cuda *c);

/* Make and destroy an event. */
int sl_cuda_event_make(struct sl_cuda *c, uint64_t *event);
int sl_cuda_event_drop(struct sl_cuda *c, uint64_t event);
/* Records the event behind what is on the stream; has what follows on the stream wait for it. */
int sl_cuda_record(struct sl_cuda *c, uint64_t event);
int sl_cuda_wait_event(struct sl_cuda *c, uint64_t event);

/*
 * 0 if all work on the stream is done or, where s is NULL, the work that the event has recorded;
 * CUDA_ERROR_NOT_READY if not. It works beside a graph capture of the program, and does not end it.
 */
int sl_cuda_over(CUcontext context, CUstream s, uint64_t event);

/*
 * The outcome of work on a stream, given the result of a wait for it. An error that concerns the
 * wait alone does not end the copies: then sl_cuda_settled waits again until the driver has an
 * outcome.
 */
int sl_cuda_settled(int rc, CUstream s);
void sl_cuda_pause(void); /* a millisecond, between two such waits */

/*
 * Has all later calls of this thread, which is a worker's, work beside a graph capture of the
 * program, and not end it.
 */
void sl_cuda_ignore_captures(void);

/* The device's UUID. -EOPNOTSUPP: the driver is too old. */
int sl_cuda_uuid(int device, uint8_t uuid[16]);

#endif
