/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The thread of a context. It takes completions when no caller does, handles the events of devices,
 * gives up queue pairs that do not drain, and sleeps when nothing is under way.
 */
#define _GNU_SOURCE
#include "../spin.h"
#include "pair.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

/*
 * How often a busy thread checks for events of devices, and how often a sleeping one checks the
 * deadlines of draining queue pairs.
 */
#define TICK_NS 1000000u
#define DRAIN_TICK_MS 10
/*
 * Requests that wait for room are posted when completions arrive. If memory was missing instead, no
 * completion may be due, so the thread also tries again after this time.
 */
#define QUEUED_TICK_MS 100
/*
 * How often the thread runs sl_verbs_fail_stalled while it sleeps, since a post does not wake it.
 */
#define STALL_TICK_MS 1000
/* Completion queue events are acknowledged in groups of this size. */
#define EVENTS 64
/*
 * How long the thread stands back for a caller that takes completions or submits, in ns. It is
 * bounded, since the caller may lose its CPU. One that is about to sleep ends it at once, by
 * arming.
 */
#define PAUSE_MIN 20000
#define PAUSE_MAX 2000000

/* Takes the events of the channel, which reports one completion each time that it is armed. */
static void take_channel_events(struct sl_verbs_rail *p)
{
	struct ibv_cq *cq;
	void *arg;

	while (sl_verbs.ibv_get_cq_event(p->channel, &cq, &arg) == 0) {
		uint32_t *events = cq == p->send_cq ? &p->send_events : &p->receive_events;

		p->traffic->armed = 0;
		if (++*events == EVENTS) {
			sl_verbs.ibv_ack_cq_events(cq, EVENTS);
			*events = 0;
		}
	}
}

/* Handles what the descriptors of the rails report. Under the lock. */
static void check_descriptors(struct sl_verbs_context *c)
{
	for (uint32_t i = 0; i < c->rails_len; i++) {
		struct sl_verbs_rail *p = c->rails[i];

		if (!p->traffic)
			continue;
		if (p->traffic->armed)
			take_channel_events(p);
		sl_verbs_handle_events(p);
	}
}

/* Makes the channels report the next completions. Whether there is none now. Under the lock. */
static int arm_channels(struct sl_verbs_context *c)
{
	for (uint32_t i = 0; i < c->rails_len; i++) {
		struct sl_verbs_rail *p = c->rails[i];

		if (!p->traffic || p->traffic->armed || p->gone)
			continue;
		/* Fails only for a device that is being removed, of which an event tells. */
		(void)sl_verbs_req_notify_cq(p->send_cq);
		(void)sl_verbs_req_notify_cq(p->receive_cq);
		p->traffic->armed = 1;
	}
	return sl_verbs_step(c) == 0;
}

/* How long the thread may sleep without an event, in ms; -1: without limit. */
static int sleep_max_ms(const struct sl_verbs_context *c)
{
	uint64_t interval;

	if (c->traffic->draining)
		return DRAIN_TICK_MS;
	if (c->traffic->queued_conns)
		return QUEUED_TICK_MS;
	if (!c->config.stall_ns || c->traffic->conns.next == &c->traffic->conns)
		return -1;
	interval = c->config.stall_ns / SL_VERBS_STALL_CHECKS / 1000000u + 1;
	return interval < STALL_TICK_MS ? (int)interval : STALL_TICK_MS;
}

static void clear_event(struct sl_verbs_traffic *t)
{
	uint64_t n;

	(void)!read(t->event_fd, &n, sizeof(n));
}

static void sleep_until_event(struct sl_verbs_context *c)
{
	struct sl_verbs_traffic *t = c->traffic;
	struct epoll_event e;
	int quiet, timeout, n;

	sl_verbs_lock(c);
	quiet = arm_channels(c);
	timeout = sleep_max_ms(c);
	sl_verbs_unlock(c);
	if (!quiet)
		return;
	do
		n = epoll_wait(t->epoll_fd, &e, 1, timeout);
	while (n < 0 && errno == EINTR);
	clear_event(t);
}

/* Whether the program sleeps, or is about to: then the thread takes its completions. */
static int poller_sleeps(struct sl_verbs_context *c)
{
	return __atomic_load_n(&c->ring->armed, __ATOMIC_SEQ_CST) != 0;
}

/* Sleeps while a caller takes the completions. The caller wakes the thread when it arms. */
static void stand_back(struct sl_verbs_context *c, long ns)
{
	struct sl_verbs_traffic *t = c->traffic;
	const struct timespec pause = {.tv_nsec = ns};
	struct pollfd p = {.fd = t->event_fd, .events = POLLIN};

	atomic_store(&t->standing_back, 1);
	if (!poller_sleeps(c) && ppoll(&p, 1, &pause, NULL) > 0)
		clear_event(t);
	atomic_store(&t->standing_back, 0);
}

/* What the thread does at intervals, however busy it is. */
static void check_rest(struct sl_verbs_context *c, uint64_t now, uint64_t *ticked)
{
	if (now - *ticked < TICK_NS)
		return;
	*ticked = now;
	sl_verbs_lock(c);
	check_descriptors(c);
	sl_verbs_give_up_draining(c, now);
	sl_verbs_fail_stalled(c, now);
	if (c->traffic->queued_conns)
		sl_verbs_post_queued(c);
	sl_verbs_unlock(c);
}

void *sl_verbs_progress(void *context)
{
	struct sl_verbs_context *c = context;
	struct sl_verbs_traffic *t = c->traffic;
	uint64_t last = sl_verbs_now(), ticked = 0, now;
	uint32_t seen = 0;
	unsigned taken;
	long pause = PAUSE_MIN;

	while (!atomic_load(&t->stop)) {
		uint32_t drives = atomic_load_explicit(&t->drives, memory_order_relaxed);

		now = sl_verbs_now();
		check_rest(c, now, &ticked);
		if (drives != seen && !poller_sleeps(c)) { /* a caller came since the last step */
			seen = drives;
			stand_back(c, pause);
			pause = pause < PAUSE_MAX ? pause * 2 : PAUSE_MAX;
			last = sl_verbs_now();
			continue;
		}
		seen = drives;
		pause = PAUSE_MIN;
		sl_verbs_lock(c);
		taken = sl_verbs_step(c);
		sl_verbs_unlock(c);
		if (taken) {
			last = now;
		} else if (now - last >= c->config.spin_ns) {
			sleep_until_event(c);
			last = sl_verbs_now();
			ticked = 0; /* an event may have woken it */
		}
		sl_verbs_yield_lock(t);
	}
	return NULL;
}
