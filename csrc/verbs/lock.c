/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The lock of a context, the descriptors that wake its thread and the program, and its queue of
 * connections with requests that wait for room. Calls none of the other files.
 */
#define _GNU_SOURCE
#include "../spin.h"
#include "pair.h"

#include <errno.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

/* Attempts to take a lock before sleeping on it: some ten microseconds. */
#define SPINS 1000

uint64_t sl_verbs_now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void sl_verbs_unlock(struct sl_verbs_context *c)
{
	pthread_mutex_unlock(&c->lock);
}

void sl_verbs_lock(struct sl_verbs_context *c)
{
	int busy = pthread_mutex_trylock(&c->lock);

	if (!busy)
		return;
	/* The thread releases the lock after one step. To sleep and be woken takes longer. */
	atomic_fetch_add(&c->traffic->lock_waiters, 1);
	for (int i = 0; i < SPINS && busy; i++) {
		busy = pthread_mutex_trylock(&c->lock);
		if (busy)
			sl_relax();
	}
	if (busy)
		pthread_mutex_lock(&c->lock);
	atomic_fetch_sub(&c->traffic->lock_waiters, 1);
}

/* A mutex is not fair: a thread that spins on it keeps the others out. */
void sl_verbs_yield_lock(struct sl_verbs_traffic *t)
{
	for (int i = 0; atomic_load(&t->lock_waiters) && i < SPINS; i++) {
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

	return pthread_cond_timedwait(&c->changed, &c->lock, &t) == ETIMEDOUT ? -ETIMEDOUT : 0;
}

void sl_verbs_queue_conn(struct sl_verbs_conn *n)
{
	struct sl_verbs_traffic *t = n->context->traffic;

	if (n->queued)
		return;
	n->queued = 1;
	n->next_queued = t->queued_conns;
	t->queued_conns = n;
}

void sl_verbs_unqueue_conn(struct sl_verbs_conn *n)
{
	struct sl_verbs_conn **at = &n->context->traffic->queued_conns;

	if (!n->queued)
		return;
	while (*at != n)
		at = &(*at)->next_queued;
	*at = n->next_queued;
	n->queued = 0;
}
