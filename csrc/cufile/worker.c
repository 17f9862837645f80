/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a worker does: it takes requests off the queue (take), leaves out those that were cancelled
 * and writes edges (sift), hands the others to libcufile by single calls (one) or as a batch, and
 * completes each in the ends (end).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "mover.h"

static void end(struct sl_cufile_worker *l, const struct sl_cufile_request *r, ssize_t status,
		int cuda)
{
	sl_cuda_ended(l->mover->ends, r->slot, (int)status, cuda);
}

/*
 * Waits for requests and takes the share of one worker, all of one device, off the queue. Returns
 * how many; 0: the mover closes.
 */
static unsigned take(struct sl_cufile_worker *l)
{
	struct sl_cufile_mover *m = l->mover;
	unsigned n = 0, share;

	pthread_mutex_lock(&m->lock);
	while (!m->count && !m->stop)
		pthread_cond_wait(&m->more, &m->lock);
	share = (m->count + m->workers - 1) / m->workers;
	share = share < l->most ? share : l->most;
	while (n < share && (!n || m->queue[m->head].device == l->taken[0].device)) {
		l->taken[n++] = m->queue[m->head];
		m->head = (m->head + 1) & (m->slots - 1);
		m->count--;
	}
	pthread_mutex_unlock(&m->lock);
	return n;
}

static int stream_of(struct sl_cufile_worker *l, unsigned device)
{
	int lowest, highest, rc;

	if (l->stream[device])
		return 0;
	SL_CUDA_TRY(sl_cu.cuCtxGetStreamPriorityRange(&lowest, &highest));
	rc = sl_cu.cuStreamCreateWithPriority(&l->stream[device], CU_STREAM_NON_BLOCKING, lowest);
	if (rc)
		l->stream[device] = NULL;
	return rc;
}

static int fetch(struct sl_cufile_worker *l, const struct sl_cufile_request *r)
{
	SL_CUDA_TRY(stream_of(l, r->device));
	SL_CUDA_TRY(
	    sl_cu.cuMemcpyDtoHAsync_v2(l->edge, r->base + r->offset, r->len, l->stream[r->device]));
	return sl_cuda_settled(sl_cu.cuStreamSynchronize(l->stream[r->device]),
			       l->stream[r->device]);
}

static void write_edge(struct sl_cufile_worker *l, const struct sl_cufile_request *r)
{
	int rc = fetch(l, r);
	ssize_t n = rc ? -1 : pwrite(r->fd, l->edge, r->len, (off_t)r->at);

	end(l, r, rc ? -EIO : n < 0 ? -errno : n, rc);
}

/* Completes requests that were cancelled, writes edges, and keeps the others in order. */
static unsigned sift(struct sl_cufile_worker *l, unsigned n)
{
	unsigned kept = 0;

	for (unsigned i = 0; i < n; i++)
		if (__atomic_load_n(&l->mover->cancel[l->taken[i].slot], __ATOMIC_SEQ_CST))
			end(l, &l->taken[i], -ECANCELED, 0);
		else if (l->taken[i].kind == SL_CUFILE_EDGE)
			write_edge(l, &l->taken[i]);
		else
			l->taken[kept++] = l->taken[i];
	return kept;
}

/* The status of a request from the result of a call or an event: -1 stands for errno. */
static ssize_t outcome(ssize_t rc, int number)
{
	if (rc == -1)
		return number ? -number : -EIO;
	return rc;
}

static void one(struct sl_cufile_worker *l, const struct sl_cufile_request *r)
{
	CUfileHandle_t h = (CUfileHandle_t)(uintptr_t)r->handle;
	void *base = (void *)(uintptr_t)r->base;
	ssize_t rc;

	errno = 0;
	if (r->kind == SL_CUFILE_WRITE)
		rc = sl_cufile.cuFileWrite(h, base, r->len, (off_t)r->at, (off_t)r->offset);
	else
		rc = sl_cufile.cuFileRead(h, base, r->len, (off_t)r->at, (off_t)r->offset);
	end(l, r, outcome(rc, errno), 0);
}

static void lessen(struct sl_cufile_worker *l, unsigned most)
{
	l->most = most;
	__atomic_add_fetch(&l->mover->lessened, 1, __ATOMIC_RELAXED);
}

/* No request of the batch may be under way. */
static void drop_batch(struct sl_cufile_worker *l)
{
	if (!l->batch)
		return;
	sl_cufile.cuFileBatchIODestroy(l->batch);
	l->batch = NULL;
}

/* Longer each time that there was no news. */
static void rest(long *ns)
{
	nanosleep(&(struct timespec){0, *ns}, NULL);
	*ns = *ns < 1000000 ? 2 * *ns : *ns;
}

static bool submit_batch(struct sl_cufile_worker *l, unsigned first, unsigned n)
{
	if (!l->batch && sl_cufile.cuFileBatchIOSetUp(&l->batch, l->most).err) {
		l->batch = NULL;
		return false;
	}
	for (unsigned i = 0; i < n; i++) {
		const struct sl_cufile_request *r = &l->taken[first + i];
		CUfileIOParams_t *p = &l->params[i];

		memset(p, 0, sizeof *p);
		p->mode = CUFILE_BATCH;
		p->u.batch.devPtr_base = (void *)(uintptr_t)r->base;
		p->u.batch.file_offset = (off_t)r->at;
		p->u.batch.devPtr_offset = (off_t)r->offset;
		p->u.batch.size = r->len;
		p->fh = (CUfileHandle_t)(uintptr_t)r->handle;
		p->opcode = r->kind == SL_CUFILE_WRITE ? CUFILE_WRITE : CUFILE_READ;
		p->cookie = &l->taken[first + i];
		l->told[i] = 0;
	}
	return sl_cufile.cuFileBatchIOSubmit(l->batch, n, l->params, 0).err == 0;
}

/* The status of an entry as an end has it. */
static ssize_t judge(const CUfileIOEvents_t *e)
{
	ssize_t rc = (ssize_t)e->ret;

	switch (e->status) {
	case CUFILE_COMPLETE:
		return rc;
	case CUFILE_TIMEOUT:
		return -ETIMEDOUT;
	case CUFILE_CANCELED:
		return -ECANCELED;
	case CUFILE_INVALID:
		return rc < 0 ? rc : -EINVAL;
	}
	return rc < 0 ? rc : -EIO;
}

/*
 * Waits for all entries. One that failed is told only when the batch is quiet: what has timed out
 * may still be under way until the batch is cancelled and gone. So may be all of a batch that the
 * library does not tell of. While the library refuses to cancel it, nothing of it is over.
 */
static void await_batch(struct sl_cufile_worker *l, unsigned first, unsigned n)
{
	unsigned left = n, failed = 0;
	bool stale = false;
	long pause = 20000; /* ns, where the library does not wait itself */

	while (left) {
		struct timespec limit = {1, 0};
		unsigned nr = left, before = left;

		if (sl_cufile.cuFileBatchIOGetStatus(l->batch, 1, &nr, l->events, &limit).err) {
			if (!sl_cufile.cuFileBatchIOCancel(l->batch).err)
				break;
			rest(&pause);
			continue;
		}
		for (unsigned i = 0; i < nr && left; i++) {
			const CUfileIOEvents_t *e = &l->events[i];
			struct sl_cufile_request *r = e->cookie;
			size_t at = (size_t)(r - &l->taken[first]);

			if (e->status == CUFILE_WAITING || e->status == CUFILE_PENDING || at >= n ||
			    l->told[at])
				continue;
			l->told[at] = 1;
			left--;
			if (judge(e) >= 0) {
				end(l, r, judge(e), 0);
				continue;
			}
			stale = stale || e->status == CUFILE_TIMEOUT;
			l->told[at] = judge(e);
			failed++;
		}
		if (left == before)
			rest(&pause);
	}
	while (stale && !left && sl_cufile.cuFileBatchIOCancel(l->batch).err)
		rest(&pause);
	if (stale || left)
		drop_batch(l);
	for (unsigned i = 0; i < n && (failed || left); i++)
		if (l->told[i] <= 0)
			end(l, &l->taken[first + i], l->told[i] ? l->told[i] : -EIO, 0);
}

/* A batch that the library does not take is halved; what it takes in no batch goes by itself. */
static void as_batch(struct sl_cufile_worker *l, unsigned first, unsigned n)
{
	while (n) {
		unsigned now = n < l->most ? n : l->most;

		if (now < 2) {
			one(l, &l->taken[first]);
		} else if (submit_batch(l, first, now)) {
			await_batch(l, first, now);
		} else {
			drop_batch(l);
			lessen(l, now / 2);
			continue;
		}
		first += now;
		n -= now;
	}
}

void *sl_cufile_attend(void *arg)
{
	struct sl_cufile_worker *l = arg;
	unsigned n;

	sl_cuda_ignore_captures();
	while ((n = take(l))) {
		/* if it fails, so will all that follows, and say so */
		sl_cu.cuCtxSetCurrent(l->mover->context[l->taken[0].device]);
		n = sift(l, n);
		as_batch(l, 0, n);
	}
	return NULL;
}

void sl_cufile_discard(struct sl_cufile_worker *l)
{
	drop_batch(l);
	for (int i = 0; i < SL_CUFILE_DEVICES; i++) {
		if (!l->stream[i] || sl_cu.cuCtxSetCurrent(l->mover->context[i]))
			continue;
		sl_cu.cuStreamDestroy_v2(l->stream[i]);
	}
}
