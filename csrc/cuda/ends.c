/* SPDX-License-Identifier: Apache-2.0 */
/* libcuda's further functions, and where the ends of batches are told. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "mover.h"

struct sl_cuda_api sl_cu;

int sl_cuda_mover_load(const char *path, char *why, size_t size)
{
	struct sl_cuda_api api;
	void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);

	if (!lib) {
		snprintf(why, size, "%s", dlerror());
		return -ENOENT;
	}
	/* By memory, since ISO C has no cast from void * to a function. */
#define OPTIONAL(call, args) *(void **)&api.call = dlsym(lib, #call);
#define REQUIRED(call, args) \
	OPTIONAL(call, args) \
	if (!api.call) { \
		snprintf(why, size, "%s has no function %s", path, #call); \
		return -ENOSYS; \
	}
	SL_CUDA_CALLS(REQUIRED)
	SL_CUDA_MOVER_CALLS(REQUIRED)
	SL_CUDA_OPTIONAL_CALLS(OPTIONAL)
	sl_cu = api;
	return 0;
}

int sl_cuda_ends_open(struct sl_cuda_ends **ends, uint32_t places, int wake_fd, int heed_fd)
{
	size_t bytes = sizeof(struct sl_ring) + places * sizeof(struct sl_done);
	struct sl_cuda_ends *e = calloc(1, sizeof *e);

	if (!e)
		return -ENOMEM;
	e->ring = aligned_alloc(64, (bytes + 63) / 64 * 64);
	if (!e->ring) {
		free(e);
		return -ENOMEM;
	}
	memset(e->ring, 0, bytes);
	e->ring->mask = places - 1;
	e->wake_fd = wake_fd;
	e->heed_fd = heed_fd;
	pthread_mutex_init(&e->lock, NULL);
	*ends = e;
	return 0;
}

void sl_cuda_ends_close(struct sl_cuda_ends *e)
{
	pthread_mutex_destroy(&e->lock);
	free(e->ring);
	free(e);
}

void sl_cuda_ended(struct sl_cuda_ends *e, uint32_t batch, int status, int piece)
{
	const uint64_t one = 1;
	uint64_t head;

	pthread_mutex_lock(&e->lock);
	head = __atomic_load_n(&e->ring->head, __ATOMIC_RELAXED);
	e->ring->done[head & e->ring->mask] = (struct sl_done){batch, status, piece};
	__atomic_store_n(&e->ring->head, head + 1, __ATOMIC_SEQ_CST);
	pthread_mutex_unlock(&e->lock);
	if (__atomic_exchange_n(&e->ring->armed, 0, __ATOMIC_SEQ_CST))
		(void)!write(e->wake_fd, &one, sizeof one);
	if (__atomic_load_n(&e->heed, __ATOMIC_SEQ_CST))
		(void)!write(e->heed_fd, &one, sizeof one);
}
