/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libcuda, opened at run time, and a device. Every function makes the device's context
 * current first, since goroutines move between threads, and returns 0 or what the driver
 * said, a positive number. None may run beside another on the same device.
 */
#ifndef SLUICE_CUDA_DEVICE_H
#define SLUICE_CUDA_DEVICE_H

#include <stdbool.h>

#include "calls.h"

/* What the driver can do; all set once, by sl_cuda_load, but for what is optional. */
struct sl_cuda_api {
#define X(name, args) CUresult(*name) args;
	SL_CUDA_CALLS(X)
	SL_CUDA_OPTIONAL_CALLS(X)
#undef X
};
extern struct sl_cuda_api sl_cu;

/* The first failure ends a function. */
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
 * Opens the library and initialises it: all of it or nothing. The caller sees to it that only
 * one call runs, and none after one that returned 0. -ENOENT: dlopen failed; -ENOSYS: a
 * function is missing; -ENODEV: cuInit failed. why is then the reason in words.
 */
int sl_cuda_load(const char *path, char *why, size_t size);

/* What the driver calls a result. */
const char *sl_cuda_error(int result);

/* How many devices there are; -1 if the driver does not say. */
int sl_cuda_count(void);
/* Looks a device up by its number: CUDA_ERROR_NO_DEVICE, CUDA_ERROR_INVALID_DEVICE. */
int sl_cuda_find(CUdevice *device, int ordinal);

/* Fills c. After a failure there is nothing to close. */
int sl_cuda_open(struct sl_cuda *c, int ordinal);
/* After all that was begun. */
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

/* These wait. */
int sl_cuda_write(struct sl_cuda *c, CUdeviceptr to, const void *from, size_t bytes);
int sl_cuda_read(struct sl_cuda *c, void *to, CUdeviceptr from, size_t bytes);

/* Puts a copy between memories that the device sees on the stream. */
int sl_cuda_copy(struct sl_cuda *c, uint64_t dst, uint64_t src, uint64_t bytes);
/*
 * Launches a kernel with args, one struct by value, and waits: n bytes at `tally` come back to
 * `host`, which is pinned. With n of 0 the kernel's args say where it counts, if it does.
 */
int sl_cuda_launch(struct sl_cuda *c, int kernel, unsigned blocks, unsigned threads,
		   unsigned shared, const uint8_t *args, CUdeviceptr tally, uint8_t *host,
		   size_t n);
/* Waits for the stream, also while a thread of the program captures a graph, and does not end the
 * capture. */
int sl_cuda_sync(struct sl_cuda *c);

/* Events of the program. */
int sl_cuda_event_make(struct sl_cuda *c, uint64_t *event);
int sl_cuda_event_drop(struct sl_cuda *c, uint64_t event);
/* The event happens when the stream has come so far; what follows on the stream waits for it. */
int sl_cuda_record(struct sl_cuda *c, uint64_t event);
int sl_cuda_wait_event(struct sl_cuda *c, uint64_t event);

/*
 * Whether what is on a stream is over or, where s is NULL, what an event had recorded:
 * CUDA_ERROR_NOT_READY if it is not. Asked beside a capture of the program, it does not end it.
 */
int sl_cuda_over(CUcontext context, CUstream s, uint64_t event);

/*
 * What a wait for work on a stream has answered, once the work is over: an answer that is about the
 * call alone is no end of copies that go on, so the driver is asked again.
 */
int sl_cuda_settled(int rc, CUstream s);
void sl_cuda_pause(void); /* a millisecond, before the driver is asked again */

/*
 * For a thread of ours: its calls go on while a thread of the program captures a graph, and do not
 * end the capture.
 */
void sl_cuda_ignore_captures(void);

/* What names a device on the host. -EOPNOTSUPP: the driver is too old. */
int sl_cuda_uuid(int device, uint8_t uuid[16]);

#endif
