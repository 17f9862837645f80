/* SPDX-License-Identifier: Apache-2.0 */
/* Opens and closes a mover with its workers, and queues requests for them. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "mover.h"
#include "../threads.h"

/* The worker blocks all signals but its own faults: threads of Go's runtime handle them. */
static int start(struct sl_cufile_worker *l)
{
	sigset_t all, before;
	int rc;

	sl_signals_of_others(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	rc = -pthread_create(&l->thread, NULL, sl_cufile_attend, l);
	if (!rc)
		(void)pthread_setname_np(l->thread, "sluice-gds");
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	l->runs = !rc;
	return rc;
}

static int prepare(struct sl_cufile_mover *m, unsigned most)
{
	int rc = 0;

	m->queue = calloc(m->slots, sizeof *m->queue);
	m->cancel = calloc(m->slots, sizeof *m->cancel);
	m->worker = calloc(m->workers, sizeof *m->worker);
	if (!m->queue || !m->cancel || !m->worker)
		return -ENOMEM;
	for (uint32_t i = 0; i < m->workers; i++) {
		struct sl_cufile_worker *l = &m->worker[i];

		l->mover = m;
		l->most = most;
		l->params = calloc(most, sizeof *l->params);
		l->events = calloc(most, sizeof *l->events);
		l->told = calloc(most, sizeof *l->told);
		if (!l->params || !l->events || !l->told)
			return -ENOMEM;
	}
	for (uint32_t i = 0; i < m->workers && !rc; i++)
		rc = start(&m->worker[i]);
	return rc;
}

int sl_cufile_mover_open(struct sl_cufile_mover **mover, struct sl_cuda_ends *ends, uint32_t slots,
			 uint32_t workers, unsigned most)
{
	struct sl_cufile_mover *m = calloc(1, sizeof *m);
	int rc;

	if (!m)
		return -ENOMEM;
	m->ends = ends;
	m->slots = slots;
	m->workers = workers;
	pthread_mutex_init(&m->lock, NULL);
	pthread_cond_init(&m->more, NULL);
	rc = prepare(m, most < 1 ? 1 : most > SL_CUFILE_BATCH_MAX ? SL_CUFILE_BATCH_MAX : most);
	if (rc)
		sl_cufile_mover_close(m);
	else
		*mover = m;
	return rc;
}

void sl_cufile_mover_close(struct sl_cufile_mover *m)
{
	pthread_mutex_lock(&m->lock);
	m->stop = true;
	pthread_cond_broadcast(&m->more);
	pthread_mutex_unlock(&m->lock);
	for (uint32_t i = 0; m->worker && i < m->workers; i++) {
		struct sl_cufile_worker *l = &m->worker[i];

		if (l->runs)
			pthread_join(l->thread, NULL);
		sl_cufile_discard(l);
		free(l->params);
		free(l->events);
		free(l->told);
	}
	for (int i = 0; i < SL_CUFILE_DEVICES; i++)
		if (m->context[i])
			sl_cu.cuDevicePrimaryCtxRelease_v2(i);
	free(m->worker);
	free(m->queue);
	free(m->cancel);
	pthread_mutex_destroy(&m->lock);
	pthread_cond_destroy(&m->more);
	free(m);
}

void sl_cufile_put(struct sl_cufile_mover *m, const struct sl_cufile_request *r, size_t n)
{
	pthread_mutex_lock(&m->lock);
	for (size_t i = 0; i < n; i++)
		m->queue[(m->head + m->count++) & (m->slots - 1)] = r[i];
	if (n == 1)
		pthread_cond_signal(&m->more);
	else
		pthread_cond_broadcast(&m->more);
	pthread_mutex_unlock(&m->lock);
}
