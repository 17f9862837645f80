/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the stand-in shares with other processes: descriptors of device memory, and names of
 * devices.
 */
#ifndef STANDIN_SHARE_H
#define STANDIN_SHARE_H

CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle h,
				      CUmemAllocationHandleType type, unsigned long long flags)
{
	int fd;

	CONTEXT();
	if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags)
		return INVALID_VALUE;
	fd = fcntl((int)(unsigned)h, F_DUPFD_CLOEXEC, 0);
	*(int *)out = fd;
	return fd < 0 ? INVALID_VALUE : 0;
}

/* Which device it is of, the name says. */
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *h, void *in,
					CUmemAllocationHandleType type)
{
	char link[64], name[128] = "";
	int fd = (int)(intptr_t)in, device;

	CONTEXT();
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
	    readlink(link, name, sizeof name - 1) < 0 ||
	    sscanf(name, "/memfd:standin-device-memory-%d", &device) != 1)
		return INVALID_VALUE;
	fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (fd < 0)
		return OUT_OF_MEMORY;
	*h = (unsigned long long)device << 32 | (unsigned)fd;
	COUNT(handles, 1);
	return 0;
}

CUresult cuDeviceGetUuid_v2(CUuuid *id, CUdevice d)
{
	memset(id, 0, sizeof *id);
	snprintf(id->bytes, sizeof id->bytes, "standin %d", d);
	return 0;
}

CUresult cuCtxSynchronize(void)
{
	CONTEXT();
	quiet();
	return 0;
}

#endif
