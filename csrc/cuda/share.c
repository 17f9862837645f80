/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of a device that other processes map, and that can be taken away from them. */
#include <errno.h>
#include <string.h>

#include "mover.h"

int sl_cuda_block_share(const struct sl_cuda_block *b, int *fd)
{
	int can = 0;

	*fd = -1;
	if (!b->owns || !sl_cu.cuMemExportToShareableHandle || !sl_cu.cuCtxSynchronize ||
	    sl_cu.cuDeviceGetAttribute(
		&can, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, b->device) ||
	    !can)
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
	rc = sl_cuda_map_anywhere(&b->at, b, handle);
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
	rc = sl_cuda_map(b->at, b, fresh);
	if (rc)
		sl_cuda_map(b->at, b, b->handle);
	return rc;
}

static int renew(struct sl_cuda_block *b, CUmemGenericAllocationHandle fresh)
{
	CUdeviceptr beside;
	int rc;

	SL_CUDA_TRY(sl_cuda_map_anywhere(&beside, b, fresh));
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
	sl_cuda_property(b->device, &prop);
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
