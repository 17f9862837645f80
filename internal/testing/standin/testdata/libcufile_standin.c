/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A software stand-in of libcufile for tests: it reads and writes files by system calls, into the
 * memory of the stand-in of libcuda, whose addresses are the host's. It is not cuFile, and no
 * measure of its speed. As cuFile does in its compat mode it reads, changes and writes whole blocks
 * where a write is not aligned, so that neighbours under way at once lose bytes; it does the
 * entries of a batch in no order; and it wants a CUDA context to be current, and memory to be
 * inside what was allocated.
 *
 * -DSTANDIN_OLD: version 1.4, with no function that is optional. STANDIN_LIBCUDA names the driver's
 * stand-in.
 */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "../../../../csrc/cufile/calls.h"
#include "standin_panel.h"

enum {
	OK = 0,
	INVALID_POINTER = 5012,
	POINTER_RANGE = 5014,
	CONTEXT_MISMATCH = 5015,
	INVALID_VALUE = 5022,
	ALREADY_REGISTERED = 5023,
	NOT_REGISTERED = 5024,
	BATCH_FULL = 5037,
	BLOCK = 4096,
};

static CUfileError_t says(int err)
{
	return (CUfileError_t){err, err == CU_FILE_CUDA_DRIVER_ERROR ? 100 : 0};
}

/* A file, opened once more so that no alignment is asked for. */
struct file {
	int fd;
};

static CUresult (*get_attribute)(void *, CUpointer_attribute, CUdeviceptr);

__attribute__((constructor)) static void find_driver(void)
{
	const char *path = getenv("STANDIN_LIBCUDA");
	void *lib = dlopen(path ? path : "libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);

	if (lib)
		*(void **)&get_attribute = dlsym(lib, "cuPointerGetAttribute");
}

/* Minus what is wrong with a range of memory. */
static ssize_t wrong(const char *base, off_t offset, size_t size)
{
	CUdeviceptr at = (CUdeviceptr)(uintptr_t)(base + offset), begin;
	size_t range;
	int type, rc;

	if (!base || offset < 0)
		return -INVALID_POINTER;
	if (!get_attribute)
		return 0;
	rc = get_attribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at);
	if (rc == CUDA_ERROR_INVALID_VALUE)
		return -INVALID_POINTER;
	if (rc || get_attribute(&begin, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, at) ||
	    get_attribute(&range, CU_POINTER_ATTRIBUTE_RANGE_SIZE, at))
		return -CONTEXT_MISMATCH;
	return at + size > begin + range ? -POINTER_RANGE : 0;
}

static void wait_for_test(void)
{
	unsigned us = WORD(delay_us);

	if (us)
		usleep(us);
	while (WORD(hold))
		usleep(100);
}

/* Blocks that a write covers in part are read, changed and written as a whole. */
static ssize_t write_blocks(int fd, const char *from, size_t size, off_t at)
{
	off_t begin = at / BLOCK * BLOCK, end = (at + (off_t)size + BLOCK - 1) / BLOCK * BLOCK;
	struct stat st;
	ssize_t n;
	char *mem;

	if (fstat(fd, &st))
		return -errno;
	if (end > st.st_size) /* as far as the file goes, and no further */
		end = st.st_size > at + (off_t)size ? st.st_size : at + (off_t)size;
	if (begin == at && end == at + (off_t)size) {
		n = pwrite(fd, from, size, at);
		return n < 0 ? -errno : n;
	}
	mem = calloc(1, (size_t)(end - begin));
	if (!mem)
		return -ENOMEM;
	n = pread(fd, mem, (size_t)(end - begin), begin);
	if (n >= 0) {
		wait_for_test();
		memcpy(mem + (at - begin), from, size);
		n = pwrite(fd, mem, (size_t)(end - begin), begin);
	}
	n = n < 0			       ? -errno
	    : n < (at - begin)		       ? 0
	    : n - (at - begin) < (ssize_t)size ? n - (at - begin)
					       : (ssize_t)size;
	free(mem);
	return n;
}

/* Whether this request is the one that is to fail. */
static int fails(void)
{
	unsigned left = WORD(fail_after);

	while (left && !__atomic_compare_exchange_n((unsigned *)&panel->fail_after, &left, left - 1,
						    0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
		;
	return left == 1;
}

/* The memory was looked at when the batch came, in a thread that had a context. */
static __thread int looked;

/* Bytes, or minus an error: an errno below 5000. */
static ssize_t move(const struct file *f, char *base, size_t size, off_t at, off_t offset,
		    int write, int *failed)
{
	ssize_t n = looked ? 0 : wrong(base, offset, size);
	unsigned most = WORD(short_max), end = WORD(end_at);

	COUNT(under_way, 1);
	wait_for_test();
	*failed = 0;
	if (write && (at % BLOCK || size % BLOCK))
		COUNT(changed_blocks, 1);
	if (end && at + (off_t)size > (off_t)end)
		size = at < (off_t)end ? (size_t)(end - at) : 0;
	if (most && size > most)
		size = most;
	if (!n && fails()) {
		*failed = 1;
		n = -(ssize_t)WORD(fail_code);
	} else if (!n && write) {
		n = size ? write_blocks(f->fd, base + offset, size, at) : 0;
	} else if (!n) {
		n = pread(f->fd, base + offset, size, at);
		n = n < 0 ? -errno : n;
	}
	COUNT(under_way, -1);
	return n;
}

static ssize_t moved(ssize_t n)
{
	if (n >= 0 || n <= -CUFILEOP_BASE_ERR)
		return n;
	errno = (int)-n;
	return -1;
}

ssize_t cuFileRead(CUfileHandle_t h, void *base, size_t size, off_t at, off_t offset)
{
	int failed;

	COUNT(reads, 1);
	return moved(move(h, base, size, at, offset, 0, &failed));
}

ssize_t cuFileWrite(CUfileHandle_t h, const void *base, size_t size, off_t at, off_t offset)
{
	int failed;

	COUNT(writes, 1);
	return moved(move(h, (char *)(uintptr_t)base, size, at, offset, 1, &failed));
}

CUfileError_t cuFileDriverOpen(void)
{
	if (WORD(open_result))
		return says((int)WORD(open_result));
	return says(COUNT(opens, 1) ? CU_FILE_DRIVER_ALREADY_OPEN : OK);
}

CUfileError_t cuFileDriverGetProperties(CUfileDrvProps_t *p)
{
	memset(p, 0, sizeof *p);
	if (WORD(direct)) {
		p->nvfs.major_version = 2;
		p->nvfs.minor_version = 24;
		p->nvfs.dstatusflags = 1u << CU_FILE_NVME_SUPPORTED;
	}
	p->nvfs.dcontrolflags = 1u << CU_FILE_ALLOW_COMPAT_MODE;
	p->nvfs.max_direct_io_size = 16384;
	p->max_device_cache_size = 131072;
	p->per_buffer_cache_size = 1024;
	p->max_device_pinned_mem_size = 1u << 20;
	p->max_batch_io_size = 128;
	return says(OK);
}

CUfileError_t cuFileHandleRegister(CUfileHandle_t *h, CUfileDescr_t *d)
{
	struct file *f;
	char name[64];
	int flags;

	if (WORD(handle_result))
		return says((int)WORD(handle_result));
	if (d->type != CU_FILE_HANDLE_TYPE_OPAQUE_FD || d->fs_ops)
		return says(INVALID_VALUE);
	flags = fcntl(d->handle.fd, F_GETFL);
	if (flags < 0)
		return says(INVALID_VALUE);
	f = malloc(sizeof *f);
	snprintf(name, sizeof name, "/proc/self/fd/%d", d->handle.fd);
	f->fd = f ? open(name, (flags & O_ACCMODE) | O_CLOEXEC) : -1;
	if (!f || f->fd < 0) {
		free(f);
		return says(INVALID_VALUE);
	}
	COUNT(handles, 1);
	*h = f;
	return says(OK);
}

void cuFileHandleDeregister(CUfileHandle_t h)
{
	struct file *f = h;

	close(f->fd);
	free(f);
	COUNT(handles, -1);
}

#define BUFFERS 1024
static const void *buffers[BUFFERS];
static pthread_mutex_t buffers_lock = PTHREAD_MUTEX_INITIALIZER;

static int buffer_at(const void *base)
{
	for (int i = 0; i < BUFFERS; i++)
		if (buffers[i] == base)
			return i;
	return -1;
}

CUfileError_t cuFileBufRegister(const void *base, size_t size, int flags)
{
	int i, rc = OK;

	if (WORD(register_result))
		return says((int)WORD(register_result));
	if (!base || flags || wrong(base, 0, size))
		return says(INVALID_VALUE);
	pthread_mutex_lock(&buffers_lock);
	if (buffer_at(base) >= 0)
		rc = ALREADY_REGISTERED;
	else if ((i = buffer_at(NULL)) < 0)
		rc = INVALID_VALUE;
	else
		buffers[i] = base;
	pthread_mutex_unlock(&buffers_lock);
	if (!rc)
		COUNT(buffers, 1);
	return says(rc);
}

CUfileError_t cuFileBufDeregister(const void *base)
{
	int i;

	if (WORD(deregister_result))
		return says((int)WORD(deregister_result));
	pthread_mutex_lock(&buffers_lock);
	i = base ? buffer_at(base) : -1;
	if (i >= 0)
		buffers[i] = NULL;
	pthread_mutex_unlock(&buffers_lock);
	if (i < 0)
		return says(NOT_REGISTERED);
	COUNT(buffers, -1);
	return says(OK);
}

#ifndef STANDIN_OLD
CUfileError_t cuFileGetVersion(int *v)
{
	*v = 1140;
	return says(OK);
}

CUfileError_t cuFileGetParameterBool(CUFileBoolConfigParameter_t which, bool *v)
{
	*v = which == CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE;
	return says(OK);
}

#include "standin_batch.h"
#endif
