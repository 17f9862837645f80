/* SPDX-License-Identifier: Apache-2.0 */
/* The lock of a worker, the thread that steps it, and how others wait. */
#define _GNU_SOURCE
#include "../spin.h"
#include "worker.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

/* Calls of progress under one hold of the lock, while they find something. */
#define ROUNDS 16
/* Between two looks at memory whose pages are being moved. */
#define STALLED_MS 1
/* Looks at a lock that is held before sleeping on it: some ten microseconds. */
#define SPINS 1000

void sl_ucx_lock(struct sl_ucx_worker *w)
{
	int busy = pthread_mutex_trylock(&w->lock);

	if (!busy) {
		atomic_fetch_add_explicit(&w->turns, 1, memory_order_relaxed);
		return;
	}
	/* The thread lets go after one call of progress. To sleep and be woken would
	 * take longer than that. */
	atomic_fetch_add(&w->waiting, 1);
	for (int i = 0; i < SPINS && busy; i++) {
		busy = pthread_mutex_trylock(&w->lock);
		if (busy)
			sl_relax();
	}
	if (busy)
		pthread_mutex_lock(&w->lock);
	atomic_fetch_sub(&w->waiting, 1);
	atomic_fetch_add_explicit(&w->turns, 1, memory_order_relaxed);
}

int sl_ucx_lock_by(struct sl_ucx_worker *w, uint64_t deadline)
{
	int busy = pthread_mutex_trylock(&w->lock);

	atomic_fetch_add(&w->waiting, 1);
	for (int i = 1; busy && (i % SPINS != 0 || sl_ucx_now() < deadline); i++) {
		if (i % SPINS == 0)
			usleep(20);
		else
			sl_relax();
		busy = pthread_mutex_trylock(&w->lock);
	}
	atomic_fetch_sub(&w->waiting, 1);
	if (busy)
		return -ETIMEDOUT;
	atomic_fetch_add_explicit(&w->turns, 1, memory_order_relaxed);
	return 0;
}

/*
 * A mutex is not fair: a thread that lets go of it and comes back at once, for the next piece,
 * finds it free before those that it woke, again and again. So one of them goes first.
 */
void sl_ucx_yield_lock(struct sl_ucx_worker *w)
{
	unsigned turn = atomic_load_explicit(&w->turns, memory_order_relaxed);

	for (int i = 0; i < SPINS && atomic_load(&w->waiting); i++) {
		if (atomic_load_explicit(&w->turns, memory_order_relaxed) != turn)
			return;
		sl_relax();
		if (i % 16 == 15) /* a waiter may want this core */
			sched_yield();
	}
}

void sl_ucx_unlock(struct sl_ucx_worker *w)
{
	pthread_mutex_unlock(&w->lock);
}

void sl_ucx_wake_thread(struct sl_ucx_worker *w)
{
	w->pending = 1;
	if (!w->asleep)
		return;
	w->asleep = 0;
	sl_ucx.ucp_worker_signal(w->handle);
}

void sl_ucx_wake_poller(struct sl_ucx_worker *w)
{
	uint64_t one = 1;

	if (__atomic_exchange_n(&w->ring->armed, 0, __ATOMIC_SEQ_CST))
		(void)!write(w->context->config.wake_fd, &one, sizeof(one));
}

int sl_ucx_wait(struct sl_ucx_worker *w, uint64_t deadline)
{
	uint64_t at = sl_ucx_monotonic(deadline);
	struct timespec t = {.tv_sec = (time_t)(at / 1000000000u),
			     .tv_nsec = (long)(at % 1000000000u)};

	return pthread_cond_timedwait(&w->news, &w->lock, &t) == ETIMEDOUT ? -ETIMEDOUT : 0;
}

int sl_ucx_await(struct sl_ucx_worker *w, ucs_status_ptr_t request, uint64_t ns)
{
	uint64_t deadline = sl_ucx_now() + ns;
	int late = 0;

	if (!request || UCS_PTR_IS_ERR(request))
		return 0;
	while (sl_ucx.ucp_request_check_status(request) == UCS_INPROGRESS && !late) {
		unsigned n = sl_ucx.ucp_worker_progress(w->handle);

		pthread_mutex_unlock(&w->lock);
		if (!n)
			usleep(20);
		pthread_mutex_lock(&w->lock);
		late = sl_ucx_now() > deadline;
	}
	sl_ucx_wake_thread(w); /* progress here may have left work to the thread */
	if (sl_ucx.ucp_request_check_status(request) == UCS_INPROGRESS)
		return -ETIMEDOUT;
	sl_ucx.ucp_request_free(request);
	return 0;
}

int sl_ucx_finish(struct sl_ucx_worker *w, ucs_status_ptr_t request, uint64_t ns)
{
	int rc = sl_ucx_await(w, request, ns);

	if (rc != 0)
		sl_ucx.ucp_request_free(request);
	return rc;
}

/* Sends a quantum of each connection's batches, so that none delays the others. */
static unsigned move_all(struct sl_ucx_worker *w)
{
	unsigned moved = 0;

	for (uint32_t k = 0; k < w->conns_len; k++) {
		struct sl_ucx_conn *n = w->conns[k];

		if (n && n->head != &n->live)
			moved += (unsigned)sl_ucx_send_batches(n, SL_UCX_QUANTUM);
	}
	return moved;
}

unsigned sl_ucx_step(struct sl_ucx_worker *w)
{
	unsigned n = sl_ucx.ucp_worker_progress(w->handle);

	if (w->stalled)
		sl_ucx_resume(w);
	return n + (w->batches_live ? move_all(w) : 0);
}

static unsigned run_steps(struct sl_ucx_worker *w)
{
	unsigned moved = 0;

	sl_ucx_lock(w);
	w->pending = 0;
	for (int i = 0; i < ROUNDS; i++) {
		unsigned n = sl_ucx_step(w);

		moved += n;
		if (!n || atomic_load(&w->waiting))
			break;
	}
	sl_ucx_unlock(w);
	return moved;
}

/* Sleeps until UCX has an event, the thread is woken, or a tick is due. */
static void sleep_until_something(struct sl_ucx_worker *w)
{
	struct pollfd p = {.fd = w->event_fd, .events = POLLIN};
	ucs_status_t status;
	int timeout;

	/* UCX has no event for a batch that was submitted since we looked. */
	pthread_mutex_lock(&w->lock);
	status = w->pending ? UCS_ERR_BUSY : sl_ucx.ucp_worker_arm(w->handle);
	w->asleep = status == UCS_OK;
	timeout = w->conns_live || w->closing_conns
		      ? (int)(w->context->config.grace_ns / 8000000u) + 1
		      : -1;
	if (w->stalled)
		timeout = STALLED_MS;
	pthread_mutex_unlock(&w->lock);
	if (status != UCS_OK) /* something came meanwhile */
		return;
	while (!atomic_load(&w->context->stop) && poll(&p, 1, timeout) < 0 && errno == EINTR)
		;
	pthread_mutex_lock(&w->lock);
	w->asleep = 0;
	pthread_mutex_unlock(&w->lock);
}

void sl_ucx_drive(struct sl_ucx_context *c)
{
	for (uint32_t i = 0; i < c->config.workers; i++) {
		struct sl_ucx_worker *w = &c->workers[i];

		if (pthread_mutex_trylock(&w->lock))
			continue; /* not counted as a drive: the thread need not pause */
		atomic_fetch_add_explicit(&w->drives, 1, memory_order_relaxed);
		if (w->handle && !atomic_load(&c->stop)) {
			uint64_t ended = w->ring->head;

			w->polled = 1; /* the caller polls next */
			sl_ucx_step(w);
			w->polled = 0;
			if (w->ring->head != ended) /* it may poll for messages alone */
				sl_ucx_wake_poller(w);
		}
		pthread_mutex_unlock(&w->lock);
	}
}

void sl_ucx_undrive(struct sl_ucx_context *c)
{
	for (uint32_t i = 0; i < c->config.workers; i++) {
		struct sl_ucx_worker *w = &c->workers[i];

		sl_ucx_lock(w);
		if (w->handle && (w->asleep || w->standing_back)) {
			w->asleep = w->standing_back = 0;
			sl_ucx.ucp_worker_signal(w->handle);
		}
		sl_ucx_unlock(w);
	}
}

/* How long the thread pauses, in ns. It is bounded: the driving caller may lose its core. */
#define PAUSE_MIN 20000
#define PAUSE_MAX 200000

/*
 * Pauses the thread while a caller steps the worker. Submit does not end the pause: two cores that
 * take turns at one copy are slower than one.
 */
static void stand_back(struct sl_ucx_worker *w, long ns)
{
	const struct timespec pause = {.tv_nsec = ns};
	struct pollfd p = {.fd = w->event_fd, .events = POLLIN};

	sl_ucx_lock(w);
	w->standing_back = 1;
	sl_ucx_unlock(w);
	(void)ppoll(&p, 1, &pause, NULL);
	sl_ucx_lock(w);
	w->standing_back = 0;
	sl_ucx_unlock(w);
}

/*
 * Pings peers in time, however busy the worker is. If this process was stopped, peers were not
 * silent: their messages have not been read.
 */
static void tick(struct sl_ucx_worker *w, uint64_t now)
{
	uint64_t grace = w->context->config.grace_ns, away = now - w->ticked;

	if (away < grace / 8)
		return;
	sl_ucx_lock(w);
	w->ticked = sl_ucx_now(); /* not before what others have noted under the lock */
	sl_ucx_tick(w, w->ticked, away < grace / 2);
	sl_ucx_unlock(w);
}

void *sl_ucx_progress(void *worker)
{
	struct sl_ucx_worker *w = worker;
	uint64_t last = sl_ucx_now();
	uint32_t seen = 0;
	long pause = PAUSE_MIN;

	while (!atomic_load(&w->context->stop)) {
		uint32_t drives = atomic_load_explicit(&w->drives, memory_order_relaxed);
		uint64_t now;

		if (drives != seen) { /* a caller has moved it since we looked, and goes on */
			seen = drives;
			tick(w, sl_ucx_now());
			stand_back(w, pause);
			pause = pause < PAUSE_MAX ? pause * 2 : PAUSE_MAX;
			last = sl_ucx_now();
			continue;
		}
		pause = PAUSE_MIN;
		if (run_steps(w)) {
			last = sl_ucx_now();
			tick(w, last);
			sl_ucx_yield_lock(w);
			continue;
		}
		now = sl_ucx_now();
		tick(w, now);
		if (now - last >= w->context->config.spin_ns) {
			sleep_until_something(w);
			last = sl_ucx_now();
		}
		sl_ucx_yield_lock(w);
	}
	return NULL;
}
