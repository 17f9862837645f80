/* SPDX-License-Identifier: Apache-2.0 */
/* Movers, their workers, what the thread of a worker does, and where the ends are told. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "mover.h"
#include "../threads.h"

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

static bool take(struct sl_cuda_worker *l, struct sl_cuda_note *n)
{
	bool there;

	pthread_mutex_lock(&l->lock);
	while (l->head == l->tail && !l->stop)
		pthread_cond_wait(&l->more, &l->lock);
	there = l->head != l->tail;
	if (there)
		*n = l->notes[l->tail++ & l->mask];
	pthread_mutex_unlock(&l->lock);
	return there;
}

static bool stopped(struct sl_cuda_worker *l)
{
	bool stop;

	pthread_mutex_lock(&l->lock);
	stop = l->stop;
	pthread_mutex_unlock(&l->lock);
	return stop;
}

/* There are places for all notes that batches can have. */
void sl_cuda_note(struct sl_cuda_worker *l, uint32_t batch, int event)
{
	pthread_mutex_lock(&l->lock);
	l->notes[l->head++ & l->mask] = (struct sl_cuda_note){batch, event};
	pthread_cond_signal(&l->more);
	pthread_mutex_unlock(&l->lock);
}

static int await(struct sl_cuda_worker *l, const struct sl_cuda_batch *b, int event)
{
	if (event == SL_CUDA_NOTHING)
		return 0;
	return sl_cuda_settled(event == SL_CUDA_STREAM
				   ? sl_cu.cuStreamSynchronize(l->stream)
				   : sl_cu.cuEventSynchronize(b->event[event]),
			       l->stream);
}

static void heed(struct sl_cuda_worker *l, const struct sl_cuda_note *n)
{
	struct sl_cuda_mover *m = l->mover;
	struct sl_cuda_batch *b = &m->batches[n->batch];
	int rc = await(l, b, n->event), status, piece;
	bool over;

	pthread_mutex_lock(&l->order);
	if (n->event != SL_CUDA_NOTHING)
		b->flying--;
	if (rc && !b->status) {
		b->status = rc;
		b->piece = -1;
	}
	if (b->entries.count)
		sl_cuda_stage(l, b);
	while (b->flying < SL_CUDA_AHEAD && !b->status && b->at < b->n) {
		if (sl_cuda_cancelled(b)) {
			b->status = -ECANCELED;
			b->piece = -1;
			break;
		}
		sl_cuda_feed(l, b, n->batch, b->turn);
		b->turn = (b->turn + 1) % SL_CUDA_AHEAD;
	}
	over = b->flying == 0 && (b->status || b->at == b->n);
	status = b->status;
	piece = b->piece;
	if (over) {
		free(b->kept);
		b->kept = NULL;
	}
	pthread_mutex_unlock(&l->order);
	if (over) /* and the batch may be another one at once */
		sl_cuda_ended(m->ends, n->batch, status, piece);
}

static void *attend(void *arg)
{
	struct sl_cuda_worker *l = arg;
	struct sl_cuda_note n;

	/* Without it a wait says nothing of the work, and a batch would end before its copies. */
	while (sl_cu.cuCtxSetCurrent(l->mover->context) && !stopped(l))
		sl_cuda_pause();
	sl_cuda_ignore_captures();
	while (take(l, &n))
		heed(l, &n);
	return NULL;
}

static int scratch(struct sl_cuda_worker *l)
{
	/* A batch has at most a note for each chunk, and one more at its beginning. */
	uint32_t notes = 4 * l->mover->places;

	l->mask = notes - 1;
	l->notes = calloc(notes, sizeof *l->notes);
	return l->notes ? 0 : -ENOMEM;
}

static void discard(struct sl_cuda_worker *l)
{
	if (l->stream)
		sl_cu.cuStreamDestroy_v2(l->stream);
	l->stream = NULL;
	free(l->notes);
	l->notes = NULL;
}

/* Threads of Go's runtime take the signals of a program. */
static int start(struct sl_cuda_worker *l)
{
	pthread_attr_t small;
	sigset_t all, before;
	int rc;

	pthread_attr_init(&small);
	pthread_attr_setstacksize(&small, 256 << 10);
	sl_signals_of_others(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	rc = -pthread_create(&l->thread, &small, attend, l);
	if (!rc)
		(void)pthread_setname_np(l->thread, "sluice-cuda");
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_attr_destroy(&small);
	return rc;
}

int sl_cuda_worker_open(struct sl_cuda_worker *l)
{
	int rc;

	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(l->mover->context));
	if (l->open)
		return 0;
	l->stop = false;
	rc = scratch(l);
	if (!rc)
		rc = sl_cuda_make_stream(&l->stream);
	if (!rc)
		rc = start(l);
	if (rc)
		discard(l);
	l->open = !rc;
	return rc;
}

void sl_cuda_worker_close(struct sl_cuda_worker *l)
{
	if (!l->open)
		return;
	pthread_mutex_lock(&l->lock);
	l->stop = true;
	pthread_cond_signal(&l->more);
	pthread_mutex_unlock(&l->lock);
	pthread_join(l->thread, NULL);
	discard(l);
	l->open = false;
}

static int prepare(struct sl_cuda_mover *m, int streams, int gated)
{
	m->streams = streams;
	m->workers = streams + 1 + gated;
	m->batches = calloc(m->places, sizeof *m->batches);
	m->worker = calloc((size_t)m->workers, sizeof *m->worker);
	if (!m->batches || !m->worker)
		return -ENOMEM;
	for (int i = 0; i < m->workers; i++) {
		m->worker[i].mover = m;
		pthread_mutex_init(&m->worker[i].order, NULL);
		pthread_mutex_init(&m->worker[i].lock, NULL);
		pthread_cond_init(&m->worker[i].more, NULL);
	}
	for (int i = 0; i <= streams; i++)
		SL_CUDA_TRY(sl_cuda_worker_open(&m->worker[i]));
	return 0;
}

int sl_cuda_mover_open(struct sl_cuda_mover **mover, int ordinal, struct sl_cuda_ends *ends,
		       uint32_t places, int streams, int gated)
{
	struct sl_cuda_mover *m;
	CUdevice device;
	int rc;

	SL_CUDA_TRY(sl_cuda_find(&device, ordinal));
	m = calloc(1, sizeof *m);
	if (!m)
		return -ENOMEM;
	m->device = device;
	m->ends = ends;
	m->places = places;
	pthread_mutex_init(&m->lock, NULL);
	rc = sl_cu.cuDevicePrimaryCtxRetain(&m->context, device);
	if (rc) {
		free(m);
		return rc;
	}
	rc = prepare(m, streams, gated);
	if (rc)
		sl_cuda_mover_close(m);
	else
		*mover = m;
	return rc;
}

static void drop_batches(struct sl_cuda_mover *m)
{
	for (uint32_t i = 0; m->batches && i < m->places; i++) {
		for (int k = 0; k <= SL_CUDA_AHEAD; k++)
			if (m->batches[i].event[k])
				sl_cu.cuEventDestroy_v2(m->batches[i].event[k]);
		free(m->batches[i].kept);
		free(m->batches[i].list);
	}
	free(m->batches);
}

void sl_cuda_mover_close(struct sl_cuda_mover *m)
{
	sl_cu.cuCtxSetCurrent(m->context);
	for (int i = 0; m->worker && i < m->workers; i++) {
		sl_cuda_worker_close(&m->worker[i]);
		pthread_mutex_destroy(&m->worker[i].order);
		pthread_mutex_destroy(&m->worker[i].lock);
		pthread_cond_destroy(&m->worker[i].more);
	}
	drop_batches(m);
	free(m->worker);
	if (m->stage)
		sl_cu.cuMemFreeHost(m->stage);
	if (m->module)
		sl_cu.cuModuleUnload(m->module);
	sl_cu.cuDevicePrimaryCtxRelease_v2(m->device);
	pthread_mutex_destroy(&m->lock);
	free(m);
}

int sl_cuda_mover_module(struct sl_cuda_mover *m, const char *ptx, const char *const *names)
{
	SL_CUDA_TRY(sl_cu.cuCtxSetCurrent(m->context));
	return sl_cuda_module(&m->module, m->kernel, ptx, names);
}

int sl_cuda_gated_open(struct sl_cuda_mover *m, int worker)
{
	return sl_cuda_worker_open(&m->worker[worker]);
}
