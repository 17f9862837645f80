/* SPDX-License-Identifier: Apache-2.0 */
/* From batches to copies and launches on a stream. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "mover.h"

static int copy(uint32_t way, uint64_t dst, uint64_t src, uint64_t len, CUstream s)
{
	switch (way) {
	case SL_CUDA_UP:
		return sl_cu.cuMemcpyHtoDAsync_v2(dst, (void *)(uintptr_t)src, len, s);
	case SL_CUDA_DOWN:
		return sl_cu.cuMemcpyDtoHAsync_v2((void *)(uintptr_t)dst, src, len, s);
	case SL_CUDA_WITHIN:
		return sl_cu.cuMemcpyDtoDAsync_v2(dst, src, len, s);
	}
	return sl_cu.cuMemcpyAsync(dst, src, len, s);
}

/* The first failure is that of the batch. */
static void fail(struct sl_cuda_batch *b, int rc, int piece)
{
	if (!rc || b->status)
		return;
	b->status = rc;
	b->piece = piece;
}

/* An event behind what is on the stream. Without it the thread waits for the stream. */
static void mark(struct sl_cuda_worker *l, struct sl_cuda_batch *b, uint32_t batch, int event)
{
	int rc = sl_cu.cuEventRecord(b->event[event], l->stream);

	fail(b, rc, -1);
	b->flying++;
	b->last = event;
	sl_cuda_note(l, batch, rc ? SL_CUDA_STREAM : event);
}

/* Takes at most `room` bytes of the batch's present piece. */
static struct sl_cuda_piece cut(struct sl_cuda_batch *b, uint64_t room)
{
	const struct sl_cuda_piece *p = &b->pieces[b->at];
	uint64_t left = p->len - b->off, n = left < room ? left : room;
	struct sl_cuda_piece c = {p->dst + b->off, p->src + b->off, n, p->way, p->index};

	b->off += n;
	if (n == left) {
		b->at++;
		b->off = 0;
	}
	return c;
}

/*
 * One call for each piece. cuMemcpyBatchAsync takes all at once, but on an H100 (driver 580.159) a
 * batch that it had taken lacked one of its copies, at times, and nothing said so.
 */
static void feed(struct sl_cuda_worker *l, struct sl_cuda_batch *b, uint64_t bytes)
{
	for (int calls = 0; b->at < b->n && bytes > 0 && calls < SL_CUDA_CHUNK_CALLS && !b->status;
	     calls++) {
		struct sl_cuda_piece c = cut(b, bytes);

		bytes -= c.len;
		fail(b, copy(c.way, c.dst, c.src, c.len, l->stream), (int)c.index);
	}
}

static bool patient(const struct sl_cuda_worker *l)
{
	return l == &l->mover->worker[l->mover->streams];
}

void sl_cuda_feed(struct sl_cuda_worker *l, struct sl_cuda_batch *b, uint32_t batch, int event)
{
	feed(l, b, SL_CUDA_CHUNK_BYTES);
	mark(l, b, batch, event);
}

int sl_cuda_begin(struct sl_cuda_mover *m, struct sl_cuda_worker *l, uint32_t batch,
		  uint64_t serial)
{
	struct sl_cuda_batch *b = &m->batches[batch];

	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(m->context));
	for (int i = 0; i <= SL_CUDA_AHEAD; i++)
		if (!b->event[i])
			SL_CUDA_TRY(sl_cu.cuEventCreate(&b->event[i], CU_EVENT_BLOCKING_SYNC |
									  CU_EVENT_DISABLE_TIMING));
	b->worker = l;
	b->n = b->at = 0;
	b->off = 0;
	b->flying = b->turn = b->last = 0;
	b->status = 0;
	b->piece = -1;
	b->entries.count = 0;
	b->serial = serial;
	return 0;
}

bool sl_cuda_cancelled(const struct sl_cuda_batch *b)
{
	return __atomic_load_n(&b->cancel, __ATOMIC_RELAXED) == b->serial;
}

/*
 * What a batch has beyond the call that submits it lies in memory that is given back at its end, or
 * at the next.
 */
static int keep(struct sl_cuda_batch *b, const struct sl_cuda_piece *pieces, size_t n)
{
	struct sl_cuda_piece *kept = realloc(b->kept, n * sizeof *kept);

	if (!kept)
		return -ENOMEM;
	b->kept = b->pieces = memcpy(kept, pieces, n * sizeof *kept);
	b->n = n;
	return 0;
}

/*
 * An event that was recorded on a stream which a thread captures makes the stream that waits for it
 * part of the capture: what comes then is recorded into the program's graph, and moves nothing now.
 */
static int look_for_capture(struct sl_cuda_worker *l)
{
	CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;

	if (sl_cu.cuStreamIsCapturing)
		SL_CUDA_TRY(sl_cu.cuStreamIsCapturing(l->stream, &status));
	l->captured = status != CU_STREAM_CAPTURE_STATUS_NONE;
	return l->captured ? CUDA_ERROR_CAPTURED_EVENT : 0;
}

static int wait_for(struct sl_cuda_worker *l, const uint64_t *events, size_t waits)
{
	int rc = 0, captured;

	if (waits == 0 && !l->captured)
		return 0;
	for (size_t i = 0; i < waits && !rc; i++)
		rc = sl_cu.cuStreamWaitEvent(l->stream, (CUevent)(uintptr_t)events[i], 0);
	captured = look_for_capture(l);
	return rc ? rc : captured;
}

/* As much as may be ahead; the rest is the thread's. */
static void head(struct sl_cuda_worker *l, struct sl_cuda_batch *b, uint32_t batch,
		 const struct sl_cuda_piece *pieces, size_t n)
{
	b->pieces = (struct sl_cuda_piece *)pieces;
	b->n = n;
	for (int i = 0; i < SL_CUDA_AHEAD && b->at < b->n && !b->status; i++)
		sl_cuda_feed(l, b, batch, i);
	if (b->at < b->n && !b->status) {
		size_t at = b->at;

		b->at = 0;
		fail(b, keep(b, pieces + at, n - at) ? CUDA_ERROR_OUT_OF_MEMORY : 0, -1);
	}
}

int sl_cuda_submit(struct sl_cuda_mover *m, int worker, uint32_t batch, uint64_t serial,
		   const struct sl_cuda_piece *pieces, size_t n, const uint64_t *events,
		   size_t waits)
{
	struct sl_cuda_worker *l = &m->worker[worker];
	struct sl_cuda_batch *b = &m->batches[batch];
	int rc;

	SL_CUDA_TRY(sl_cuda_begin(m, l, batch, serial));
	if (patient(l)) {
		SL_CUDA_TRY(keep(b, pieces, n));
		sl_cuda_note(l, batch, SL_CUDA_NOTHING);
		return 0;
	}
	pthread_mutex_lock(&l->order);
	rc = wait_for(l, events, waits);
	if (!rc)
		head(l, b, batch, pieces, n);
	pthread_mutex_unlock(&l->order);
	return rc;
}

/* Beyond 48 KiB a kernel must be told. */
static int allow(struct sl_cuda_mover *m, uint32_t kernel, uint32_t shared)
{
	int rc = 0;

	pthread_mutex_lock(&m->lock);
	if (shared > m->shared[kernel]) {
		rc = sl_cu.cuFuncSetAttribute(m->kernel[kernel],
					      CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
					      (int)shared);
		if (!rc)
			m->shared[kernel] = shared;
	}
	pthread_mutex_unlock(&m->lock);
	return rc;
}

static int launch(struct sl_cuda_worker *l, const struct sl_cuda_run *r)
{
	void *params[] = {(void *)r->args};

	SL_CUDA_TRY(sl_cu.cuMemcpyHtoDAsync_v2(r->to, (void *)(uintptr_t)r->from, r->n, l->stream));
	return sl_cu.cuLaunchKernel(l->mover->kernel[r->kernel], r->blocks, 1, 1, r->threads, 1, 1,
				    r->shared, l->stream, params, NULL);
}

static int still_there(struct sl_cuda_mover *m, const struct sl_cuda_run *r)
{
	uint64_t until;
	int device;

	for (int i = 0; i < 2; i++)
		if (r->own_len[i])
			SL_CUDA_TRY(sl_cuda_whose(m, r->own_at[i], r->own_len[i], &device, &until));
	return 0;
}

int sl_cuda_submit_run(struct sl_cuda_mover *m, int worker, uint32_t batch, uint64_t serial,
		       const struct sl_cuda_run *r, const uint64_t *events, size_t waits)
{
	struct sl_cuda_worker *l = &m->worker[worker];
	struct sl_cuda_batch *b = &m->batches[batch];
	int rc;

	SL_CUDA_TRY(sl_cuda_begin(m, l, batch, serial));
	SL_CUDA_TRY(still_there(m, r));
	SL_CUDA_TRY(allow(m, r->kernel, r->shared));
	pthread_mutex_lock(&l->order);
	rc = wait_for(l, events, waits);
	if (!rc) {
		fail(b, launch(l, r), -1);
		mark(l, b, batch, 0);
	}
	pthread_mutex_unlock(&l->order);
	return rc;
}

void sl_cuda_cancel(struct sl_cuda_mover *m, uint32_t batch, uint64_t serial)
{
	__atomic_store_n(&m->batches[batch].cancel, serial, __ATOMIC_RELAXED);
}

int sl_cuda_follow(struct sl_cuda_mover *m, uint32_t batch, uint64_t stream)
{
	struct sl_cuda_batch *b = &m->batches[batch];
	struct sl_cuda_worker *l = b->worker;
	int rc;

	if (patient(l))
		return -EOPNOTSUPP;
	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(m->context));
	pthread_mutex_lock(&l->order);
	if (b->at < b->n && !b->status) {
		while (b->at < b->n && !b->status)
			feed(l, b, UINT64_MAX);
		mark(l, b, batch, SL_CUDA_AHEAD);
	}
	rc = sl_cu.cuStreamWaitEvent((CUstream)(uintptr_t)stream, b->event[b->last], 0);
	pthread_mutex_unlock(&l->order);
	return rc;
}
