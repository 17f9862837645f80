/* SPDX-License-Identifier: Apache-2.0 */
/* The lock of a context, what it wakes, and what waits for room. Calls none of the other files. */
#define _GNU_SOURCE
#include "../spin.h"
#include "pair.h"

#include <errno.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

/* Looks at a lock that is held before sleeping on it: some ten microseconds. */
#define SPINS 1000

uint64_t sl_verbs_now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void sl_verbs_lock(struct sl_verbs_context *c)
{
	pthread_mutex_lock(&c->lock);
}

void sl_verbs_unlock(struct sl_verbs_context *c)
{
	pthread_mutex_unlock(&c->lock);
}

void sl_verbs_enter(struct sl_verbs_context *c)
{
	int busy = pthread_mutex_trylock(&c->lock);

	if (!busy)
		return;
	/* The thread lets go after one look. To sleep and be woken would take longer than that. */
	atomic_fetch_add(&c->traffic->waiting, 1);
	for (int i = 0; i < SPINS && busy; i++) {
		busy = pthread_mutex_trylock(&c->lock);
		if (busy)
			sl_relax();
	}
	if (busy)
		pthread_mutex_lock(&c->lock);
	atomic_fetch_sub(&c->traffic->waiting, 1);
}

/* A mutex is not fair: a thread that spins on it keeps the others out. */
void sl_verbs_yield_lock(struct sl_verbs_traffic *t)
{
	for (int i = 0; atomic_load(&t->waiting) && i < SPINS; i++) {
		sl_relax();
		if (i % 16 == 15) /* a waiter may want this core */
			sched_yield();
	}
}

static void signal_fd(int fd)
{
	uint64_t one = 1;

	(void)!write(fd, &one, sizeof(one));
}

void sl_verbs_wake_thread(struct sl_verbs_context *c)
{
	signal_fd(c->traffic->event_fd);
}

void sl_verbs_wake_poller(struct sl_verbs_context *c)
{
	if (__atomic_exchange_n(&c->ring->armed, 0, __ATOMIC_SEQ_CST))
		signal_fd(c->config.wake_fd);
}

void sl_verbs_signal_news(struct sl_verbs_context *c)
{
	signal_fd(c->config.control_fd);
}

int sl_verbs_wait(struct sl_verbs_context *c, uint64_t deadline)
{
	struct timespec t = {.tv_sec = (time_t)(deadline / 1000000000u),
			     .tv_nsec = (long)(deadline % 1000000000u)};

	return pthread_cond_timedwait(&c->news, &c->lock, &t) == ETIMEDOUT ? -ETIMEDOUT : 0;
}

void sl_verbs_queue_pump(struct sl_verbs_conn *n)
{
	struct sl_verbs_traffic *t = n->context->traffic;

	if (n->in_pump_queue)
		return;
	n->in_pump_queue = 1;
	n->next_queued = t->pump_queue;
	t->pump_queue = n;
}

void sl_verbs_unqueue_pump(struct sl_verbs_conn *n)
{
	struct sl_verbs_conn **at = &n->context->traffic->pump_queue;

	if (!n->in_pump_queue)
		return;
	while (*at != n)
		at = &(*at)->next_queued;
	*at = n->next_queued;
	n->in_pump_queue = 0;
}
