/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Batches of the stand-in: a thread does the entries from the last to the first. One that times out
 * is told before it is done, as a library may: it is over when the batch is.
 */
#ifndef STANDIN_BATCH_H
#define STANDIN_BATCH_H

struct batch {
	pthread_mutex_t lock;
	pthread_cond_t news;
	pthread_t thread;
	unsigned max, n, told, ready;
	int runs, cancelled;
	int orphan; /* destroyed with entries under way: its thread frees it */
	CUfileIOParams_t *list;
	CUfileIOEvents_t *events; /* `ready` of them, of which `told` were told */
};

CUfileError_t cuFileBatchIOSetUp(CUfileBatchHandle_t *handle, unsigned max)
{
	struct batch *b;

	if (WORD(batch_result))
		return says((int)WORD(batch_result));
	if (!max || max > 128)
		return says(INVALID_VALUE);
	b = calloc(1, sizeof *b);
	b->max = max;
	b->list = calloc(max, sizeof *b->list);
	b->events = calloc(max, sizeof *b->events);
	pthread_mutex_init(&b->lock, NULL);
	pthread_cond_init(&b->news, NULL);
	COUNT(batches, 1);
	*handle = b;
	return says(OK);
}

static void tell(struct batch *b, const CUfileIOParams_t *p, int status, ssize_t ret)
{
	pthread_mutex_lock(&b->lock);
	b->events[b->ready++] = (CUfileIOEvents_t){p->cookie, status, (size_t)ret};
	pthread_cond_broadcast(&b->news);
	pthread_mutex_unlock(&b->lock);
}

static void do_entry(struct batch *b, const CUfileIOParams_t *p)
{
	int failed, late = WORD(fail_status) == CUFILE_TIMEOUT && WORD(fail_after) == 1;
	ssize_t n;

	if (late) {
		__atomic_store_n((unsigned *)&panel->fail_after, 0, __ATOMIC_SEQ_CST);
		tell(b, p, CUFILE_TIMEOUT, 0);
		usleep(20000); /* and then it lands all the same, unless a caller waits */
	}
	n = move(p->fh, p->u.batch.devPtr_base, p->u.batch.size, p->u.batch.file_offset,
		 p->u.batch.devPtr_offset, p->opcode == CUFILE_WRITE, &failed);
	if (late)
		return;
	if (n >= 0)
		tell(b, p, CUFILE_COMPLETE, n);
	else
		tell(b, p, failed && WORD(fail_status) ? (int)WORD(fail_status) : CUFILE_FAILED, n);
}

static void free_batch(struct batch *b)
{
	pthread_mutex_destroy(&b->lock);
	pthread_cond_destroy(&b->news);
	free(b->list);
	free(b->events);
	free(b);
	COUNT(batches, -1);
}

static void *work(void *arg)
{
	struct batch *b = arg;
	int orphan;

	looked = 1;
	for (unsigned i = b->n; i-- > 0;) {
		int cancelled;

		pthread_mutex_lock(&b->lock);
		cancelled = b->cancelled;
		pthread_mutex_unlock(&b->lock);
		if (cancelled)
			tell(b, &b->list[i], CUFILE_CANCELED, 0);
		else
			do_entry(b, &b->list[i]);
	}
	pthread_mutex_lock(&b->lock);
	orphan = b->orphan;
	pthread_mutex_unlock(&b->lock);
	if (orphan)
		free_batch(b);
	return NULL;
}

static int well_formed(const CUfileIOParams_t *p)
{
	return p->mode == CUFILE_BATCH && p->fh && p->u.batch.size &&
	       (p->opcode == CUFILE_READ || p->opcode == CUFILE_WRITE) &&
	       !wrong(p->u.batch.devPtr_base, p->u.batch.devPtr_offset, p->u.batch.size);
}

CUfileError_t cuFileBatchIOSubmit(CUfileBatchHandle_t handle, unsigned n, CUfileIOParams_t *list,
				  unsigned flags)
{
	struct batch *b = handle;

	if (!n || flags || b->told != b->n)
		return says(INVALID_VALUE);
	if (n > b->max || (WORD(batch_limit) && n > WORD(batch_limit)))
		return says(BATCH_FULL);
	for (unsigned i = 0; i < n; i++)
		if (!well_formed(&list[i]))
			return says(INVALID_VALUE);
	if (b->runs)
		pthread_join(b->thread, NULL);
	b->n = n;
	b->told = b->ready = 0;
	b->runs = b->cancelled = 0;
	memcpy(b->list, list, n * sizeof *list);
	COUNT(submits, 1);
	b->runs = !pthread_create(&b->thread, NULL, work, b);
	return says(b->runs ? OK : INVALID_VALUE);
}

CUfileError_t cuFileBatchIOGetStatus(CUfileBatchHandle_t handle, unsigned min, unsigned *nr,
				     CUfileIOEvents_t *events, struct timespec *limit)
{
	struct batch *b = handle;
	unsigned most = *nr, n = 0, once = WORD(status_result);
	struct timespec until;

	if (once && __atomic_compare_exchange_n((unsigned *)&panel->status_result, &once, 0, 0,
						__ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
		return says((int)once);
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += limit->tv_sec;
	until.tv_nsec += limit->tv_nsec;
	if (until.tv_nsec >= 1000000000) {
		until.tv_nsec -= 1000000000;
		until.tv_sec++;
	}
	pthread_mutex_lock(&b->lock);
	while (b->ready - b->told < min &&
	       pthread_cond_timedwait(&b->news, &b->lock, &until) != ETIMEDOUT)
		;
	while (n < most && b->told < b->ready)
		events[n++] = b->events[b->told++];
	pthread_mutex_unlock(&b->lock);
	*nr = n;
	return says(OK);
}

CUfileError_t cuFileBatchIOCancel(CUfileBatchHandle_t handle)
{
	struct batch *b = handle;
	unsigned refused = WORD(cancel_refused);

	if (refused) {
		__atomic_compare_exchange_n((unsigned *)&panel->cancel_refused, &refused,
					    refused - 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
		return says(INVALID_VALUE);
	}
	pthread_mutex_lock(&b->lock);
	b->cancelled = 1;
	pthread_mutex_unlock(&b->lock);
	return says(OK);
}

/* It waits for what was cancelled, and for nothing else. */
void cuFileBatchIODestroy(CUfileBatchHandle_t handle)
{
	struct batch *b = handle;
	pthread_t thread = b->thread;
	int orphan;

	pthread_mutex_lock(&b->lock);
	orphan = b->orphan = b->runs && !b->cancelled && b->ready < b->n;
	pthread_mutex_unlock(&b->lock);
	if (orphan) {
		pthread_detach(thread);
		return;
	}
	if (b->runs)
		pthread_join(b->thread, NULL);
	free_batch(b);
}

#endif
