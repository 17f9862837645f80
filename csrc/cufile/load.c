/* SPDX-License-Identifier: Apache-2.0 */
/* libcufile, what it says of itself, and what it is told of files and memory. */
#define _GNU_SOURCE
#include "mover.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct sl_cufile_api sl_cufile;

/* By memory, since ISO C has no cast from void * to a function. */
static bool find(void *lib, const char *name, void *slot)
{
	return (*(void **)slot = dlsym(lib, name)) != NULL;
}

int sl_cufile_load(const char *path, char *why, size_t size)
{
	struct sl_cufile_api api;
	CUfileError_t rc;
	void *lib;

	lib = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
	if (!lib) {
		snprintf(why, size, "%s", dlerror());
		return -ENOENT;
	}
#define X(ret, name, args) \
	if (!find(lib, #name, &api.name)) { \
		snprintf(why, size, "%s has no function %s", path, #name); \
		return -ENOSYS; \
	}
	SL_CUFILE_CALLS(X)
#undef X
#define X(ret, name, args) (void)find(lib, #name, &api.name);
	SL_CUFILE_OPTIONAL_CALLS(X)
#undef X
	/* By ourselves: what opens it by the way may crash in old versions. */
	rc = api.cuFileDriverOpen();
	if (rc.err && rc.err != CU_FILE_DRIVER_ALREADY_OPEN) {
		snprintf(why, size, "%s: cuFileDriverOpen answers %d (CUDA %d)", path, rc.err,
			 (int)rc.cu_err);
		return -ENODEV;
	}
	sl_cufile = api;
	return 0;
}

static int32_t parameter(CUFileBoolConfigParameter_t which)
{
	bool v = false;

	if (!sl_cufile.cuFileGetParameterBool || sl_cufile.cuFileGetParameterBool(which, &v).err)
		return -1;
	return v;
}

CUfileError_t sl_cufile_facts(struct sl_cufile_facts *f)
{
	CUfileDrvProps_t p;
	CUfileError_t rc;
	int version = 0;

	memset(&p, 0, sizeof p);
	memset(f, 0, sizeof *f);
	rc = sl_cufile.cuFileDriverGetProperties(&p);
	if (rc.err)
		return rc;
	if (sl_cufile.cuFileGetVersion && !sl_cufile.cuFileGetVersion(&version).err)
		f->version = version;
	/*
	 * Old libraries export batches that do not work yet: a program that does not name a version
	 * has those.
	 */
	f->batches = f->version && sl_cufile.cuFileBatchIOSetUp && sl_cufile.cuFileBatchIOSubmit &&
		     sl_cufile.cuFileBatchIOGetStatus && sl_cufile.cuFileBatchIOCancel &&
		     sl_cufile.cuFileBatchIODestroy;
	f->force_compat = parameter(CUFILE_PARAM_FORCE_COMPAT_MODE);
	f->p2pdma = parameter(CUFILE_PARAM_USE_PCIP2PDMA);
	f->nvfs_major = p.nvfs.major_version;
	f->nvfs_minor = p.nvfs.minor_version;
	f->batch_max = p.max_batch_io_size;
	f->direct_max = (uint64_t)p.nvfs.max_direct_io_size << 10;
	f->pinned_max = (uint64_t)p.max_device_pinned_mem_size << 10;
	f->cache_max = (uint64_t)p.max_device_cache_size << 10;
	return rc;
}

CUfileError_t sl_cufile_open(int fd, uint64_t *handle)
{
	CUfileDescr_t d;
	CUfileHandle_t h = NULL;
	CUfileError_t rc;

	memset(&d, 0, sizeof d);
	d.type = CU_FILE_HANDLE_TYPE_OPAQUE_FD;
	d.handle.fd = fd;
	rc = sl_cufile.cuFileHandleRegister(&h, &d);
	*handle = (uint64_t)(uintptr_t)h;
	return rc;
}

void sl_cufile_close(uint64_t handle)
{
	sl_cufile.cuFileHandleDeregister((CUfileHandle_t)(uintptr_t)handle);
}

/* A context that cannot be made current. */
static CUfileError_t no_context(int rc) { return (CUfileError_t){CU_FILE_CUDA_DRIVER_ERROR, rc}; }

CUfileError_t sl_cufile_register(struct sl_cufile_mover *m, int device, uint64_t base,
				 uint64_t bytes)
{
	int rc = sl_cu.cuCtxSetCurrent(m->context[device]);

	return rc ? no_context(rc) : sl_cufile.cuFileBufRegister((void *)(uintptr_t)base, bytes, 0);
}

CUfileError_t sl_cufile_deregister(struct sl_cufile_mover *m, int device, uint64_t base)
{
	int rc = sl_cu.cuCtxSetCurrent(m->context[device]);

	return rc ? no_context(rc) : sl_cufile.cuFileBufDeregister((void *)(uintptr_t)base);
}

int sl_cufile_device(struct sl_cufile_mover *m, int device)
{
	CUdevice d;
	int rc = 0;

	pthread_mutex_lock(&m->lock);
	if (!m->context[device]) {
		rc = sl_cu.cuDeviceGet(&d, device);
		if (!rc)
			rc = sl_cu.cuDevicePrimaryCtxRetain(&m->context[device], d);
		if (rc)
			m->context[device] = NULL;
	}
	pthread_mutex_unlock(&m->lock);
	return rc;
}

int sl_cufile_whose(struct sl_cufile_mover *m, int device, uint64_t at, uint64_t bytes, int *whose,
		    uint64_t *until)
{
	/* all that the question needs */
	struct sl_cuda_mover here = {.context = m->context[device]};

	return sl_cuda_whose(&here, at, bytes, whose, until);
}
