/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who steps a worker, and its lock.
 *
 * A step (sl_ucx_step) is one call of UCX's progress, which handles what has arrived, and the next
 * bytes of each connection's batches. Any thread may step a worker under its lock:
 *
 *   - the worker's thread (sl_ucx_progress): it steps while there is work, spins for
 *     config.spin_ns more, and then sleeps until UCX has an event;
 *   - a caller that polls without pause (sl_ucx_drive): the thread pauses meanwhile;
 *   - a caller that waits for one batch (sl_ucx_help, batch.c), or for a request of UCX
 *     (sl_ucx_await).
 *
 * The thread also calls sl_ucx_tick in time, which pings silent peers and ends lost ones.
 */
#define _GNU_SOURCE
#include "../spin.h"
#include "worker.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

/* The most steps of the thread between a lock and its unlock. */
#define STEPS_MAX 16
/* How often the thread tries to write to memory whose pages are being replaced, in ms. */
#define STALLED_MS 1
/* Attempts to take the lock before the caller sleeps: some ten microseconds. */
#define SPINS 1000

void sl_ucx_lock(struct sl_ucx_worker *w)
{
	int busy = pthread_mutex_trylock(&w->lock);

	if (!busy) {
		atomic_fetch_add_explicit(&w->times_locked, 1, memory_order_relaxed);
		return;
	}
	/* The thread sees w->waiting and unlocks after one step, which takes less time than to
	 * sleep and to be woken. */
	atomic_fetch_add(&w->waiting, 1);
	for (int i = 0; i < SPINS && busy; i++) {
		busy = pthread_mutex_trylock(&w->lock);
		if (busy)
			sl_relax();
	}
	if (busy)
		pthread_mutex_lock(&w->lock);
	atomic_fetch_sub(&w->waiting, 1);
	atomic_fetch_add_explicit(&w->times_locked, 1, memory_order_relaxed);
}

/* Tries SPINS times, then sleeps for 20 us and looks at the deadline, and so on. */
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
	atomic_fetch_add_explicit(&w->times_locked, 1, memory_order_relaxed);
	return 0;
}

/*
 * A mutex is not fair: a thread that unlocks it and locks it again at once takes it before the
 * threads that it has woken, again and again. So it waits here until another thread has had the
 * lock, for SPINS at most.
 */
void sl_ucx_yield_lock(struct sl_ucx_worker *w)
{
	unsigned before = atomic_load_explicit(&w->times_locked, memory_order_relaxed);

	for (int i = 0; i < SPINS && atomic_load(&w->waiting); i++) {
		if (atomic_load_explicit(&w->times_locked, memory_order_relaxed) != before)
			return;
		sl_relax();
		if (i % 16 == 15) /* the waiting thread may need this core */
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

	return pthread_cond_timedwait(&w->changed, &w->lock, &t) == ETIMEDOUT ? -ETIMEDOUT : 0;
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

/* Sends a quantum of each connection's batches, so that no connection delays the others. */
static unsigned send_quanta(struct sl_ucx_worker *w)
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
	return n + (w->batches_live ? send_quanta(w) : 0);
}

/* Steps the worker while there is work, no other thread waits for the lock, and at most STEPS_MAX
 * times. Returns 0 if there was no work. */
static unsigned run_steps(struct sl_ucx_worker *w)
{
	unsigned moved = 0;

	sl_ucx_lock(w);
	w->pending = 0;
	for (int i = 0; i < STEPS_MAX; i++) {
		unsigned n = sl_ucx_step(w);

		moved += n;
		if (!n || atomic_load(&w->waiting))
			break;
	}
	sl_ucx_unlock(w);
	return moved;
}

/* Sleeps until UCX has an event, another thread calls sl_ucx_wake_thread, or a tick is due. */
static void sleep_until_event(struct sl_ucx_worker *w)
{
	struct pollfd p = {.fd = w->event_fd, .events = POLLIN};
	ucs_status_t status;
	int timeout;

	/* UCX has no event for a batch that was submitted since the last step: see pending. */
	pthread_mutex_lock(&w->lock);
	status = w->pending ? UCS_ERR_BUSY : sl_ucx.ucp_worker_arm(w->handle);
	w->asleep = status == UCS_OK;
	timeout = w->conns_live || w->closing_conns
		      ? (int)(w->context->config.grace_ns / 8000000u) + 1
		      : -1;
	if (w->stalled)
		timeout = STALLED_MS;
	pthread_mutex_unlock(&w->lock);
	if (status != UCS_OK) /* there is work */
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
			continue; /* its thread may be the holder, and need not pause */
		atomic_fetch_add_explicit(&w->drives, 1, memory_order_relaxed);
		if (w->handle && !atomic_load(&c->stop)) {
			uint64_t ended = w->ring->head;

			w->caller_polls = 1;
			sl_ucx_step(w);
			w->caller_polls = 0;
			/* The caller may poll for messages only, and another goroutine for ends. */
			if (w->ring->head != ended)
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
		if (w->handle && (w->asleep || w->paused)) {
			w->asleep = w->paused = 0;
			sl_ucx.ucp_worker_signal(w->handle);
		}
		sl_ucx_unlock(w);
	}
}

/* How long the thread pauses, in ns. It is bounded: the driving caller may lose its core. */
#define PAUSE_MIN 20000
#define PAUSE_MAX 200000

/*
 * Pauses the thread while a caller steps the worker. sl_ucx_undrive ends the pause early. A
 * submission does not: two cores that take turns at one copy are slower than one.
 */
static void pause_thread(struct sl_ucx_worker *w, long ns)
{
	const struct timespec pause = {.tv_nsec = ns};
	struct pollfd p = {.fd = w->event_fd, .events = POLLIN};

	sl_ucx_lock(w);
	w->paused = 1;
	sl_ucx_unlock(w);
	(void)ppoll(&p, 1, &pause, NULL);
	sl_ucx_lock(w);
	w->paused = 0;
	sl_ucx_unlock(w);
}

/*
 * Calls sl_ucx_tick every eighth of the grace, however busy the worker is. If this process was
 * stopped for long, the tick must not judge peers as silent: their messages have not been read yet.
 */
static void tick(struct sl_ucx_worker *w, uint64_t now)
{
	uint64_t grace = w->context->config.grace_ns, away = now - w->ticked;

	if (away < grace / 8)
		return;
	sl_ucx_lock(w);
	w->ticked = sl_ucx_now(); /* under the lock, so that no time in a connection is later */
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

		if (drives != seen) { /* a caller steps the worker */
			seen = drives;
			tick(w, sl_ucx_now());
			pause_thread(w, pause);
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
			sleep_until_event(w);
			last = sl_ucx_now();
		}
		sl_ucx_yield_lock(w);
	}
	return NULL;
}
