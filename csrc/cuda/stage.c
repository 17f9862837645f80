/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Entries that a processor gathers into pinned memory, from where one copy takes them, or the
 * other way round: what takes no multiprocessor. All on the thread of the patient worker.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "mover.h"
#include "../copy/guarded.h"

int sl_cuda_gather(struct sl_cuda_mover *m, uint32_t batch, uint64_t serial, uint64_t host,
		   uint64_t host_len, uint64_t base, uint64_t stride, uint64_t entry,
		   const uint32_t *list, size_t count, uint64_t dense, int up)
{
	struct sl_cuda_worker *l = &m->worker[m->streams];
	struct sl_cuda_batch *b = &m->batches[batch];

	SL_CUDA_TRY(sl_cuda_begin(m, l, batch, serial));
	if (list) {
		b->list = malloc(count * sizeof *list);
		if (!b->list)
			return -ENOMEM;
		memcpy(b->list, list, count * sizeof *list);
	}
	b->entries = (struct sl_cuda_entries){
	    (uint8_t *)(uintptr_t)host, host_len, base, stride, entry, dense, count, up};
	sl_cuda_note(l, batch, SL_CUDA_NOTHING);
	return 0;
}

static int gather(const struct sl_cuda_batch *b, uint8_t *half, size_t first, size_t n)
{
	const struct sl_cuda_entries *e = &b->entries;

	/* Without a list entry i is at place i: the base carries what went before. */
	int rc = sl_guarded_pages(
	    e->host, e->host_len, half, SL_CUDA_STAGE_BYTES / 2, b->list ? b->list + first : NULL,
	    e->host_base + (b->list ? 0 : first * e->host_stride), e->host_stride, NULL, 0,
	    e->entry, e->entry, 0, n, e->up, UINT64_MAX);

	/* -ERANGE: the list has changed since it was checked */
	return rc == -ERANGE ? CUDA_ERROR_INVALID_VALUE : rc;
}

/* Up: the other half is on its way while this one fills. */
static int upload(struct sl_cuda_worker *l, struct sl_cuda_batch *b, uint8_t *half, size_t first,
		  size_t n)
{
	SL_CUDA_TRY(gather(b, half, first, n));
	return sl_cu.cuMemcpyHtoDAsync_v2(b->entries.dense + first * b->entries.entry, half,
					  n * b->entries.entry, l->stream);
}

static int download(struct sl_cuda_worker *l, struct sl_cuda_batch *b, uint8_t *half, size_t first,
		    size_t n)
{
	SL_CUDA_TRY(sl_cu.cuMemcpyDtoHAsync_v2(half, b->entries.dense + first * b->entries.entry,
					       n * b->entries.entry, l->stream));
	SL_CUDA_TRY(sl_cu.cuStreamSynchronize(l->stream));
	return gather(b, half, first, n);
}

static int stage(struct sl_cuda_worker *l, struct sl_cuda_batch *b)
{
	const struct sl_cuda_entries *e = &b->entries;
	size_t each = SL_CUDA_STAGE_BYTES / 2 / e->entry, first = 0;
	uint8_t **memory = &l->mover->stage;

	if (!*memory)
		SL_CUDA_TRY(sl_cu.cuMemHostAlloc((void **)memory, SL_CUDA_STAGE_BYTES,
						 CU_MEMHOSTREGISTER_PORTABLE));
	for (int turn = 0; first < e->count; turn++) {
		size_t n = e->count - first < each ? e->count - first : each;
		uint8_t *half = *memory + turn % 2 * (SL_CUDA_STAGE_BYTES / 2);

		if (sl_cuda_cancelled(b))
			return -ECANCELED;
		if (turn >= 2)
			SL_CUDA_TRY(sl_cuda_settled(
			    sl_cu.cuEventSynchronize(b->event[turn % 2]), l->stream));
		SL_CUDA_TRY((e->up ? upload : download)(l, b, half, first, n));
		SL_CUDA_TRY(sl_cu.cuEventRecord(b->event[turn % 2], l->stream));
		first += n;
	}
	return 0;
}

void sl_cuda_stage(struct sl_cuda_worker *l, struct sl_cuda_batch *b)
{
	int rc = stage(l, b);
	int waited = sl_cuda_settled(sl_cu.cuStreamSynchronize(l->stream), l->stream);

	b->entries.count = 0;
	free(b->list);
	b->list = NULL;
	if (!rc)
		rc = waited;
	b->status = rc;
}
