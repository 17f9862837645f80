/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libcuda, opened at run time, and a device. Every function makes the device's context
 * current first, since goroutines move between threads, and returns 0 or what the driver
 * said, a positive number. None may run beside another on the same device.
 */
#ifndef SLUICE_CUDA_DEVICE_H
#define SLUICE_CUDA_DEVICE_H

#include "calls.h"

#define SL_CUDA_KERNELS 2

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

/* Fills c; the stream has the lowest priority. After a failure there is nothing to close. */
int sl_cuda_open(struct sl_cuda *c, int ordinal);
void sl_cuda_close(struct sl_cuda *c);

/*
 * Loads PTX that ends with NUL, and finds the kernels by name; NULL: none at this place. After a
 * failure another may be tried.
 */
int sl_cuda_module(struct sl_cuda *c, const char *ptx, const char *kernel0, const char *kernel1);

int sl_cuda_alloc(struct sl_cuda *c, size_t bytes, CUdeviceptr *at);
int sl_cuda_free(struct sl_cuda *c, CUdeviceptr at);

/* Pins host memory, portable and mapped; at is where the device sees it. */
int sl_cuda_pin(struct sl_cuda *c, void *mem, size_t bytes, CUdeviceptr *at);
int sl_cuda_unpin(struct sl_cuda *c, void *mem);

/* These wait. */
int sl_cuda_write(struct sl_cuda *c, CUdeviceptr to, const void *from, size_t bytes);
int sl_cuda_read(struct sl_cuda *c, void *to, CUdeviceptr from, size_t bytes);

#endif
