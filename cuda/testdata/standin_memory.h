/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the stand-in knows of memory: allocations of devices, pinned memory of the host, and the
 * driver's virtual memory management, over descriptors so that mappings share what
 * they map. All memory is the host's.
 */
#ifndef STANDIN_MEMORY_H
#define STANDIN_MEMORY_H

#include <sys/mman.h>
#include <unistd.h>

enum what { FREE, DEVICE, PINNED, RESERVED };

/* A range of addresses. Reserved ones have no owner until something is mapped there. */
struct range {
	enum what what;
	unsigned long from, bytes;
	int device;
	int fd;	     /* of what is mapped; -1: none */
	int ours;    /* allocated, not registered */
	unsigned id;
};

#define RANGES 8192
static struct range ranges[RANGES];
static pthread_mutex_t ranges_lock = PTHREAD_MUTEX_INITIALIZER;

/* The range that an address lies in, mappings before reservations. */
static struct range *range_at(unsigned long at)
{
	struct range *found = NULL;

	for (int i = 0; i < RANGES; i++) {
		struct range *r = &ranges[i];

		if (r->what != FREE && at >= r->from && at - r->from < r->bytes &&
		    (!found || found->what == RESERVED))
			found = r;
	}
	return found;
}

static int overlaps(enum what what, unsigned long from, unsigned long bytes)
{
	for (int i = 0; i < RANGES; i++)
		if (ranges[i].what == what && ranges[i].from < from + bytes &&
		    from < ranges[i].from + ranges[i].bytes)
			return 1;
	return 0;
}

static int range_add(struct range r)
{
	for (int i = 0; i < RANGES; i++)
		if (ranges[i].what == FREE) {
			ranges[i] = r;
			return 0;
		}
	return OUT_OF_MEMORY;
}

/* Finds a range by where it begins, and forgets it. */
static int range_drop(enum what what, unsigned long from, struct range *was)
{
	for (int i = 0; i < RANGES; i++)
		if (ranges[i].what == what && ranges[i].from == from) {
			*was = ranges[i];
			ranges[i].what = FREE;
			return 0;
		}
	return INVALID_VALUE;
}

/* Whether all of it is of that kind, in one range. */
static int is(enum what what, unsigned long at, unsigned long bytes)
{
	pthread_mutex_lock(&ranges_lock);
	const struct range *r = range_at(at);
	int ok = r && r->what == what && r->from + r->bytes - at >= bytes;

	pthread_mutex_unlock(&ranges_lock);
	return ok;
}

static CUresult add(struct range r)
{
	int rc;

	pthread_mutex_lock(&ranges_lock);
	rc = range_add(r);
	pthread_mutex_unlock(&ranges_lock);
	return rc;
}

static CUresult drop(enum what what, unsigned long from, struct range *was)
{
	int rc;

	pthread_mutex_lock(&ranges_lock);
	rc = range_drop(what, from, was);
	pthread_mutex_unlock(&ranges_lock);
	return rc;
}

static void *pages(unsigned long n)
{
	void *mem = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	return mem == MAP_FAILED ? NULL : mem;
}

/* Behind device memory, so that none borders on other: a byte too far is nobody's. */
#define GAP 4096ul

static void *apart(unsigned long n)
{
	char *mem = pages(n + GAP);

	if (mem)
		mprotect(mem + (n + GAP - 1) / GAP * GAP, GAP, PROT_NONE);
	return mem;
}

CUresult cuMemAlloc_v2(CUdeviceptr *at, size_t n)
{
	void *mem;

	CONTEXT();
	if (!n)
		return INVALID_VALUE;
	mem = n < 1ul << 40 ? apart(n) : NULL;
	if (!mem)
		return OUT_OF_MEMORY;
	*at = (CUdeviceptr)mem;
	COUNT(allocations, 1);
	return add((struct range){DEVICE, *at, n, current->device, -1, 1, 0});
}

CUresult cuMemFree_v2(CUdeviceptr at)
{
	struct range was;

	CONTEXT();
	quiet(); /* as the driver waits */
	if (drop(DEVICE, at, &was))
		return INVALID_VALUE;
	munmap((void *)at, was.bytes + GAP);
	COUNT(allocations, -1);
	return 0;
}

CUresult cuMemHostAlloc(void **at, size_t n, unsigned flags)
{
	CONTEXT();
	*at = n ? pages(n) : NULL;
	if (!*at || flags & ~7u)
		return INVALID_VALUE;
	COUNT(host_allocations, 1);
	return add((struct range){PINNED, (unsigned long)*at, n, current->device, -1, 1, 0});
}

CUresult cuMemFreeHost(void *at)
{
	struct range was;

	CONTEXT();
	quiet();
	if (drop(PINNED, (unsigned long)at, &was))
		return INVALID_VALUE;
	munmap(at, was.bytes);
	COUNT(host_allocations, -1);
	return 0;
}

CUresult cuMemHostRegister_v2(void *mem, size_t n, unsigned flags)
{
	int taken;

	CONTEXT();
	if (!mem || !n || flags != (CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP))
		return INVALID_VALUE;
	if (WORD(pin_result))
		return (CUresult)WORD(pin_result);
	pthread_mutex_lock(&ranges_lock);
	taken = overlaps(PINNED, (unsigned long)mem, n);
	pthread_mutex_unlock(&ranges_lock);
	if (taken)
		return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
	COUNT(pins, 1);
	return add((struct range){PINNED, (unsigned long)mem, n, current->device, -1, 0, 0});
}

CUresult cuMemHostUnregister(void *mem)
{
	struct range was;

	CONTEXT();
	if (WORD(unpin_result))
		return (CUresult)WORD(unpin_result);
	if (drop(PINNED, (unsigned long)mem, &was))
		return NOT_MAPPED;
	COUNT(pins, -1);
	return 0;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *at, void *mem, unsigned flags)
{
	CONTEXT();
	*at = (CUdeviceptr)mem;
	return is(PINNED, *at, 1) && !flags ? 0 : INVALID_VALUE;
}

static CUresult attribute(void *data, CUpointer_attribute what, const struct range *r)
{
	if (!r || r->what == RESERVED)
		return INVALID_VALUE;
	switch (what) {
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
		return *(unsigned *)data = r->what == DEVICE ? CU_MEMORYTYPE_DEVICE : 1, 0;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
		return *(int *)data = r->device, 0;
	case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
		return *(CUdeviceptr *)data = r->from, 0;
	case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
		return *(size_t *)data = r->bytes, 0;
	}
	return INVALID_VALUE;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute what, CUdeviceptr at)
{
	CUresult rc;

	CONTEXT();
	pthread_mutex_lock(&ranges_lock);
	rc = attribute(data, what, range_at(at));
	pthread_mutex_unlock(&ranges_lock);
	return rc;
}

/* What goes with a context that has faulted. */
static void forget_all(void)
{
	pthread_mutex_lock(&ranges_lock);
	for (int i = 0; i < RANGES; i++) {
		struct range *r = &ranges[i];

		if (r->what == DEVICE && r->fd >= 0)
			close(r->fd);
		if (r->what == RESERVED || (r->what != FREE && r->ours))
			munmap((void *)r->from, r->bytes + (r->what == DEVICE ? GAP : 0));
		r->what = FREE;
	}
	panel->allocations = panel->host_allocations = panel->pins = panel->reservations =
	    panel->mappings = 0;
	pthread_mutex_unlock(&ranges_lock);
}

#ifndef STANDIN_OLD
#define UNIT (2ul << 20)

CUresult cuMemGetAllocationGranularity(size_t *unit, const CUmemAllocationProp *p,
				       CUmemAllocationGranularity_flags f)
{
	CONTEXT();
	*unit = UNIT;
	return p->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
		       p->location.type == CU_MEM_LOCATION_TYPE_DEVICE && !f
		   ? 0
		   : INVALID_VALUE;
}

CUresult cuMemAddressReserve(CUdeviceptr *at, size_t n, size_t align, CUdeviceptr hint,
			     unsigned long long flags)
{
	char *mem;

	CONTEXT();
	if (!n || n % UNIT || align || hint || flags)
		return INVALID_VALUE;
	mem = mmap(NULL, n + UNIT, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (mem == MAP_FAILED)
		return OUT_OF_MEMORY;
	*at = ((unsigned long)mem + UNIT - 1) / UNIT * UNIT;
	munmap(mem, *at - (unsigned long)mem);
	munmap((void *)(*at + n), UNIT - (*at - (unsigned long)mem));
	COUNT(reservations, 1);
	return add((struct range){RESERVED, *at, n, -1, -1, 1, 0});
}

CUresult cuMemAddressFree(CUdeviceptr at, size_t n)
{
	struct range was;

	CONTEXT();
	if (overlaps(DEVICE, at, n) || drop(RESERVED, at, &was) || was.bytes != n)
		return INVALID_VALUE;
	munmap((void *)at, n);
	COUNT(reservations, -1);
	return 0;
}

/* A handle is a descriptor, with the device above it. */
CUresult cuMemCreate(CUmemGenericAllocationHandle *h, size_t n, const CUmemAllocationProp *p,
		     unsigned long long flags)
{
	char name[64];
	int fd;

	CONTEXT();
	if (!n || n % UNIT || flags || p->location.id < 0 || p->location.id >= standin_devices())
		return INVALID_VALUE;
	if (n >= 1ul << 40)
		return OUT_OF_MEMORY;
	snprintf(name, sizeof name, "standin-device-memory-%d", p->location.id);
	fd = memfd_create(name, MFD_CLOEXEC);
	if (fd < 0 || ftruncate(fd, (off_t)n))
		return OUT_OF_MEMORY;
	*h = (unsigned long long)p->location.id << 32 | (unsigned)fd;
	COUNT(handles, 1);
	return 0;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle h)
{
	CONTEXT();
	COUNT(handles, -1);
	return close((int)(unsigned)h) ? INVALID_VALUE : 0;
}

/* Not to be touched before access is set. */
CUresult cuMemMap(CUdeviceptr at, size_t n, size_t off, CUmemGenericAllocationHandle h,
		  unsigned long long flags)
{
	int fd = dup((int)(unsigned)h);

	CONTEXT();
	if (fd < 0 || at % UNIT || n % UNIT || off || flags || !is(RESERVED, at, n) ||
	    overlaps(DEVICE, at, n))
		return INVALID_VALUE;
	if (mmap((void *)at, n, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
		return INVALID_VALUE;
	COUNT(mappings, 1);
	return add((struct range){DEVICE, at, n, (int)(h >> 32), fd, 0, 0});
}

CUresult cuMemSetAccess(CUdeviceptr at, size_t n, const CUmemAccessDesc *d, size_t count)
{
	CONTEXT();
	if (count != 1 || d->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE || !is(DEVICE, at, n))
		return INVALID_VALUE;
	return mprotect((void *)at, n, PROT_READ | PROT_WRITE) ? INVALID_VALUE : 0;
}

CUresult cuMemUnmap(CUdeviceptr at, size_t n)
{
	struct range was;

	CONTEXT();
	quiet();
	if (drop(DEVICE, at, &was) || was.bytes != n)
		return INVALID_VALUE;
	close(was.fd);
	if (mmap((void *)at, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
		 -1, 0) == MAP_FAILED)
		return INVALID_VALUE;
	COUNT(mappings, -1);
	return 0;
}

CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr at, size_t n,
				       CUmemRangeHandleType type, unsigned long long flags)
{
	const struct range *r;
	int fd = -1;

	CONTEXT();
	pthread_mutex_lock(&ranges_lock);
	r = range_at(at);
	if (type == CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD && !flags && at % 4096 == 0 &&
	    n % 4096 == 0 && r && r->what == DEVICE && r->fd >= 0 && r->from == at && r->bytes == n)
		fd = fcntl(r->fd, F_DUPFD_CLOEXEC, 0);
	pthread_mutex_unlock(&ranges_lock);
	*(int *)handle = fd;
	return fd < 0 ? INVALID_VALUE : 0;
}

#include "standin_share.h"
#endif

#endif
