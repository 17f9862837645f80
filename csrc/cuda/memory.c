/* SPDX-License-Identifier: Apache-2.0 */
/* What the driver knows of memory, memory of devices, and how other processes map it. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "mover.h"

/* The allocation, registration or mapping that an address lies in. */
static int range(CUdeviceptr at, CUdeviceptr *begin, size_t *size)
{
	SL_CUDA_TRY(sl_cu.cuPointerGetAttribute(begin, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, at));
	SL_CUDA_TRY(sl_cu.cuPointerGetAttribute(size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, at));
	return *begin > at || at - *begin >= *size ? CUDA_ERROR_INVALID_VALUE : 0;
}

bool sl_cuda_host_pinned(struct sl_cuda_mover *m, uint64_t at, uint64_t bytes)
{
	CUdeviceptr begin;
	size_t size;

	return sl_cu.cuCtxSetCurrent(m->context) == 0 && range(at, &begin, &size) == 0 &&
	       begin + size - at >= bytes;
}

/* Mappings of one reservation may be ranges of their own. */
int sl_cuda_whose(struct sl_cuda_mover *m, uint64_t at, uint64_t bytes, int *device,
		  uint64_t *until)
{
	int type = 0, now = -1;
	CUdeviceptr begin;
	size_t size;

	*device = -1;
	*until = at;
	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(m->context));
	for (CUdeviceptr next = at; next - at < bytes; next = begin + size, *until = next) {
		SL_CUDA_TRY(
		    sl_cu.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, next));
		SL_CUDA_TRY(
		    sl_cu.cuPointerGetAttribute(&now, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, next));
		SL_CUDA_TRY(range(next, &begin, &size));
		if (type != CU_MEMORYTYPE_DEVICE || (*device >= 0 && *device != now))
			return CUDA_ERROR_INVALID_VALUE;
		*device = now;
	}
	return 0;
}

int sl_cuda_place_open(struct sl_cuda_mover *m, size_t bytes, void **host, CUdeviceptr *at)
{
	int rc;

	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(m->context));
	SL_CUDA_TRY(sl_cu.cuMemHostAlloc(host, bytes, CU_MEMHOSTREGISTER_PORTABLE));
	rc = sl_cu.cuMemAlloc_v2(at, bytes);
	if (rc)
		sl_cu.cuMemFreeHost(*host);
	return rc;
}

void sl_cuda_place_close(struct sl_cuda_mover *m, void *host, CUdeviceptr at)
{
	if (sl_cu.cuCtxSetCurrent(m->context))
		return;
	sl_cu.cuMemFreeHost(host);
	sl_cu.cuMemFree_v2(at);
}

static int can(int device, CUdevice_attribute what)
{
	int v = 0;

	return sl_cu.cuDeviceGetAttribute(&v, what, device) == 0 && v;
}

static bool maps(int device)
{
	return sl_cu.cuMemAddressReserve && sl_cu.cuMemAddressFree && sl_cu.cuMemCreate &&
	       sl_cu.cuMemRelease && sl_cu.cuMemMap && sl_cu.cuMemUnmap && sl_cu.cuMemSetAccess &&
	       sl_cu.cuMemGetAllocationGranularity &&
	       can(device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
}

static void property(int device, CUmemAllocationProp *p)
{
	memset(p, 0, sizeof *p);
	p->type = CU_MEM_ALLOCATION_TYPE_PINNED;
	p->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	p->location.id = device;
	if (can(device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED))
		p->requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
	p->allocFlags.gpuDirectRDMACapable =
	    (unsigned char)can(device, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
}

static int map(CUdeviceptr at, const struct sl_cuda_block *b, CUmemGenericAllocationHandle handle)
{
	CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, b->device},
				  CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
	int rc;

	SL_CUDA_TRY(sl_cu.cuMemMap(at, b->mapped, 0, handle, 0));
	rc = sl_cu.cuMemSetAccess(at, b->mapped, &access, 1);
	if (rc)
		sl_cu.cuMemUnmap(at, b->mapped);
	return rc;
}

static int map_anywhere(CUdeviceptr *at, const struct sl_cuda_block *b,
			 CUmemGenericAllocationHandle handle)
{
	int rc;

	SL_CUDA_TRY(sl_cu.cuMemAddressReserve(at, b->mapped, 0, 0, 0));
	rc = map(*at, b, handle);
	if (rc)
		sl_cu.cuMemAddressFree(*at, b->mapped);
	return rc;
}

static int open_mapped(int device, size_t bytes, struct sl_cuda_block *b)
{
	CUmemAllocationProp prop;
	size_t unit = 0;
	int rc;

	property(device, &prop);
	SL_CUDA_TRY(
	    sl_cu.cuMemGetAllocationGranularity(&unit, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
	if (unit == 0 || bytes > SIZE_MAX - unit)
		return CUDA_ERROR_INVALID_VALUE;
	b->mapped = (bytes + unit - 1) / unit * unit;
	SL_CUDA_TRY(sl_cu.cuMemCreate(&b->handle, b->mapped, &prop, 0));
	rc = map_anywhere(&b->at, b, b->handle);
	if (rc)
		sl_cu.cuMemRelease(b->handle);
	b->owns = !rc;
	return rc;
}

static int open_block(int device, size_t bytes, struct sl_cuda_block *b)
{
	int rc;

	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(b->context));
	rc = maps(device) ? open_mapped(device, bytes, b) : -1;
	if (rc == 0 || rc == CUDA_ERROR_OUT_OF_MEMORY)
		return rc;
	b->mapped = 0; /* a device, or a container, that has no such memory */
	return sl_cu.cuMemAlloc_v2(&b->at, bytes);
}

int sl_cuda_block_open(int device, size_t bytes, struct sl_cuda_block *b)
{
	int rc;

	memset(b, 0, sizeof *b);
	b->bytes = bytes;
	SL_CUDA_TRY(sl_cu.cuDeviceGet(&b->device, device));
	SL_CUDA_TRY(sl_cu.cuDevicePrimaryCtxRetain(&b->context, b->device));
	rc = open_block(device, bytes, b);
	if (rc)
		sl_cu.cuDevicePrimaryCtxRelease_v2(b->device);
	return rc;
}

int sl_cuda_block_close(struct sl_cuda_block *b)
{
	int rc = sl_cu.cuCtxSetCurrent(b->context), freed;

	if (!rc && b->mapped) {
		rc = sl_cu.cuMemUnmap(b->at, b->mapped);
		freed = sl_cu.cuMemAddressFree(b->at, b->mapped);
		rc = rc ? rc : freed;
		if (b->owns)
			sl_cu.cuMemRelease(b->handle);
	} else if (!rc) {
		rc = sl_cu.cuMemFree_v2(b->at);
	}
	sl_cu.cuDevicePrimaryCtxRelease_v2(b->device);
	return rc;
}

int sl_cuda_block_export(const struct sl_cuda_block *b, size_t page, int *fd, uint64_t *off)
{
	CUdeviceptr begin = b->at / page * page;
	size_t size = b->mapped ? b->mapped : (b->at + b->bytes - begin + page - 1) / page * page;

	*fd = -1;
	*off = b->at - begin;
	if (!sl_cu.cuMemGetHandleForAddressRange ||
	    !can(b->device, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED))
		return 0;
	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(b->context));
	return sl_cu.cuMemGetHandleForAddressRange(fd, begin, size,
						   CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
}

int sl_cuda_block_share(const struct sl_cuda_block *b, int *fd)
{
	*fd = -1;
	if (!b->owns || !sl_cu.cuMemExportToShareableHandle || !sl_cu.cuCtxSynchronize ||
	    !can(b->device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED))
		return -EOPNOTSUPP;
	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(b->context));
	return sl_cu.cuMemExportToShareableHandle(fd, b->handle,
						  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
}

/* The handle may go at once: the mapping keeps the memory. */
static int import(struct sl_cuda_block *b, int fd)
{
	CUmemGenericAllocationHandle handle;
	int rc;

	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(b->context));
	SL_CUDA_TRY(sl_cu.cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd,
							 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
	rc = map_anywhere(&b->at, b, handle);
	sl_cu.cuMemRelease(handle);
	return rc;
}

int sl_cuda_block_import(int device, int fd, size_t mapped, struct sl_cuda_block *b)
{
	int rc;

	memset(b, 0, sizeof *b);
	b->bytes = b->mapped = mapped;
	if (!sl_cu.cuMemImportFromShareableHandle || !sl_cu.cuMemAddressReserve ||
	    !sl_cu.cuMemMap || !sl_cu.cuMemUnmap || !sl_cu.cuMemSetAccess ||
	    !sl_cu.cuMemAddressFree || !sl_cu.cuMemRelease)
		return -EOPNOTSUPP;
	SL_CUDA_TRY(sl_cu.cuDeviceGet(&b->device, device));
	SL_CUDA_TRY(sl_cu.cuDevicePrimaryCtxRetain(&b->context, b->device));
	rc = import(b, fd);
	if (rc)
		sl_cu.cuDevicePrimaryCtxRelease_v2(b->device);
	return rc;
}

static int copy_all(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
	CUstream stream;
	int rc, waited;

	SL_CUDA_TRY(sl_cu.cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0));
	rc = sl_cu.cuMemcpyDtoDAsync_v2(to, from, bytes, stream);
	waited = sl_cuda_settled(sl_cu.cuStreamSynchronize(stream), stream);
	sl_cu.cuStreamDestroy_v2(stream);
	return rc ? rc : waited;
}

/* The old memory comes back where the new one cannot be mapped. */
static int swap(struct sl_cuda_block *b, CUmemGenericAllocationHandle fresh)
{
	int rc;

	SL_CUDA_TRY(sl_cu.cuMemUnmap(b->at, b->mapped));
	rc = map(b->at, b, fresh);
	if (rc)
		map(b->at, b, b->handle);
	return rc;
}

static int renew(struct sl_cuda_block *b, CUmemGenericAllocationHandle fresh)
{
	CUdeviceptr beside;
	int rc;

	SL_CUDA_TRY(map_anywhere(&beside, b, fresh));
	rc = sl_cu.cuCtxSynchronize();
	if (!rc)
		rc = copy_all(beside, b->at, b->mapped);
	sl_cu.cuMemUnmap(beside, b->mapped);
	sl_cu.cuMemAddressFree(beside, b->mapped);
	return rc ? rc : swap(b, fresh);
}

int sl_cuda_block_renew(struct sl_cuda_block *b)
{
	CUmemGenericAllocationHandle fresh;
	CUmemAllocationProp prop;
	int rc;

	if (!b->owns || !sl_cu.cuCtxSynchronize)
		return -EOPNOTSUPP;
	property(b->device, &prop);
	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(b->context));
	SL_CUDA_TRY(sl_cu.cuMemCreate(&fresh, b->mapped, &prop, 0));
	rc = renew(b, fresh);
	if (rc) {
		sl_cu.cuMemRelease(fresh);
		return rc;
	}
	sl_cu.cuMemRelease(b->handle);
	b->handle = fresh;
	return 0;
}
