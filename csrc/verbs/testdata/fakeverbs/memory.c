/* SPDX-License-Identifier: Apache-2.0 */
/* Protection domains and registered memory. */
#define _GNU_SOURCE
#include "fake.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* since Linux 5.14 */
#define MADV_POPULATE_WRITE 23
#endif

/*
 * By the upper bits of a key. A key comes back with the next registration after its own has ended,
 * the last first, as mlx5 has it since Linux 6.7.
 */
static struct region **regions;
static uint32_t regions_len;
static uint32_t *vacant; /* places in regions, the last first */
static uint32_t vacant_len;

EXPORT struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
	struct domain *d = calloc(1, sizeof(*d));

	if (!d)
		return NULL;
	d->base.context = context;
	device_of(context)->panel->pds++;
	return &d->base;
}

EXPORT int ibv_dealloc_pd(struct ibv_pd *pd)
{
	struct domain *d = (struct domain *)pd;
	uint32_t users;

	lock();
	users = d->users;
	unlock();
	if (users)
		return EBUSY;
	device_of(pd->context)->panel->pds--;
	free(d);
	return 0;
}

static struct region *region_of(uint32_t key)
{
	uint32_t i = (key >> 8) - 1;
	struct region *r = i < regions_len ? regions[i] : NULL;

	return r && r->base.lkey == key ? r : NULL;
}

/* A place in the table; 0: no memory. */
static uint32_t new_key(struct region *r)
{
	uint32_t i;

	if (vacant_len == 0) {
		uint32_t wider = regions_len ? regions_len * 2 : 64;
		struct region **more = realloc(regions, wider * sizeof(*regions));
		uint32_t *more_vacant = more ? realloc(vacant, wider * sizeof(*vacant)) : NULL;

		regions = more ? more : regions;
		vacant = more_vacant ? more_vacant : vacant;
		if (!more_vacant)
			return 0;
		memset(regions + regions_len, 0, (wider - regions_len) * sizeof(*regions));
		while (wider > regions_len)
			vacant[vacant_len++] = --wider;
		regions_len += vacant_len;
	}
	i = vacant[--vacant_len];
	regions[i] = r;
	return (i + 1) << 8 | 1;
}

uint8_t *reach(uint32_t key, struct ibv_pd *pd, uint64_t at, uint64_t len, unsigned rights)
{
	struct region *r = region_of(key);

	if (!r || r->base.pd != pd || (r->access & rights) != rights)
		return NULL;
	if (at < r->iova || at - r->iova > r->base.length || len > r->base.length - (at - r->iova))
		return NULL;
	return r->at + (at - r->iova);
}

/* As a real one would find when it looks for the pages. */
static int mapped(void *addr, size_t len)
{
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), from = (uintptr_t)addr & ~(page - 1);
	size_t pages = ((uintptr_t)addr + len - from + page - 1) / page;
	unsigned char resident[1024];

	for (size_t done = 0, n; done < pages; done += n) {
		n = pages - done < sizeof(resident) ? pages - done : sizeof(resident);
		if (mincore((void *)(from + done * page), n * page, resident) != 0)
			return 0;
	}
	return 1;
}

/* On this thread, one by one. 0, or EFAULT as pinning has it; kernels before 5.14 find none. */
static int walk(void *addr, size_t len, unsigned access)
{
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), from = (uintptr_t)addr & ~(page - 1);
	size_t whole = ((uintptr_t)addr + len - from + page - 1) & ~(page - 1);

	if (madvise((void *)from, whole,
		    access & IBV_ACCESS_LOCAL_WRITE ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) ==
	    0)
		return 0;
	return errno == EINVAL && madvise((void *)from, whole, MADV_POPULATE_READ) != 0 ? 0
											: EFAULT;
}

static int admit(struct fake_panel *p, void *addr, size_t len, unsigned access, int there)
{
	uint32_t kib = (uint32_t)(len >> 10), limit = p->locked_kib;

	pause_us(p->register_us);
	if (p->register_errno)
		return (int)p->register_errno;
	if (p->fatal)
		return EIO;
	if (len == 0 || (access & IBV_ACCESS_REMOTE_WRITE && !(access & IBV_ACCESS_LOCAL_WRITE)))
		return EINVAL;
	if (!there && !mapped(addr, len))
		return EFAULT;
	if (!there && p->register_walks && walk(addr, len, access) != 0)
		return EFAULT;
	return limit && p->kib_locked + kib > limit ? ENOMEM : 0;
}

static struct ibv_mr *enroll(struct ibv_pd *pd, uint8_t *at, size_t len, uint64_t iova,
			     unsigned access, void *mapping)
{
	struct fake_panel *p = device_of(pd->context)->panel;
	struct region *r;
	int rc = admit(p, at, len, access, mapping != NULL);

	errno = rc;
	r = rc == 0 ? calloc(1, sizeof(*r)) : NULL;
	if (!r)
		return NULL;
	r->base.context = pd->context;
	r->base.pd = pd;
	r->base.addr = (void *)(uintptr_t)iova;
	r->base.length = len;
	r->at = at;
	r->iova = iova;
	r->access = access;
	r->mapping = mapping;
	lock();
	r->base.lkey = r->base.rkey = new_key(r);
	((struct domain *)pd)->users++;
	p->kib_locked += (uint32_t)(len >> 10);
	p->mrs++;
	unlock();
	return &r->base;
}

EXPORT struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t len, int access)
{
	return enroll(pd, addr, len, (uintptr_t)addr, (unsigned)access, NULL);
}

EXPORT struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t len, uint64_t iova,
				       unsigned access)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);

	if ((uintptr_t)addr % page != iova % page) { /* the kernel takes no other */
		errno = EINVAL;
		return NULL;
	}
	return enroll(pd, addr, len, iova, access, NULL);
}

/* 0, or what the kernel would answer. */
static int admit_dmabuf(const struct fake_panel *p, uint64_t offset, size_t len, uint64_t iova,
			int fd)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), end;
	struct stat st;

	if (p->dmabuf_errno)
		return (int)p->dmabuf_errno;
	if (fstat(fd, &st) != 0)
		return EBADF;
	if (__builtin_add_overflow(offset, len, &end) || end > (uint64_t)st.st_size ||
	    offset % page != iova % page)
		return EINVAL;
	return 0;
}

/*
 * A file that can be mapped stands in for a dma-buf. The mapping keeps it, as a driver does when
 * the descriptor is closed.
 */
EXPORT struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t len,
					uint64_t iova, int fd, int access)
{
	struct fake_panel *p = device_of(pd->context)->panel;
	size_t head = offset % (uint64_t)sysconf(_SC_PAGESIZE);
	struct ibv_mr *mr;
	uint8_t *map;

	errno = admit_dmabuf(p, offset, len, iova, fd);
	if (errno != 0)
		return NULL;
	map =
	    mmap(NULL, len + head, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)(offset - head));
	if (map == MAP_FAILED)
		return NULL;
	mr = enroll(pd, map + head, len, iova, (unsigned)access, map);
	if (!mr) {
		munmap(map, len + head);
		return NULL;
	}
	((struct region *)mr)->mapping_len = len + head;
	p->dmabufs++;
	return mr;
}

EXPORT int ibv_dereg_mr(struct ibv_mr *mr)
{
	struct region *r = (struct region *)mr;
	struct fake_panel *p = device_of(mr->context)->panel;

	pause_us(p->deregister_us);
	if (take_one(&p->deregister_busy))
		return EBUSY;
	if (p->deregister_eio) {
		if (p->deregister_eio == 1) {
			p->deregister_eio = 2;
			tell_of(mr->context, IBV_EVENT_CQ_ERR, NULL);
		}
		return EIO;
	}
	lock(); /* no chunk is being moved */
	if (!r->lost) {
		vacant[vacant_len] = (mr->lkey >> 8) - 1;
		regions[vacant[vacant_len++]] = NULL;
		((struct domain *)mr->pd)->users--;
		p->kib_locked -= (uint32_t)(mr->length >> 10);
		p->mrs--;
	}
	r->lost = p->fatal == 2;
	unlock();
	if (r->lost)
		return EIO; /* and it keeps the memory, as the real library does */
	if (r->mapping)
		munmap(r->mapping, r->mapping_len);
	free(r);
	return 0;
}
