/* SPDX-License-Identifier: Apache-2.0 */
/* The lock of a context, the thread that takes completions when no other does, and waiting. */
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
 * How often the thread looks at what devices say while it is busy, and at the time while queue
 * pairs drain.
 */
#define TICK_NS 1000000u
#define DRAIN_TICK_MS 10
/*
 * Requests that wait for room are posted when completions arrive. If memory was missing instead, no
 * completion may be due, so the thread also tries again after this time.
 */
#define QUEUED_TICK_MS 100
/*
 * How often the thread runs sl_verbs_watch while it sleeps, since a post does not wake it.
 */
#define WATCH_TICK_MS 1000
/* Completion queue events are acknowledged in groups of this size. */
#define EVENTS 64
/*
 * How long the thread stands back, in ns: a caller that drove it, or submitted, may lose its core.
 * A caller that is about to sleep says so first, and is not kept waiting.
 */
#define PAUSE_MIN 20000
#define PAUSE_MAX 2000000

/* The channel says once that there is something; what it has said is over. */
static void take_channel_events(struct sl_verbs_port *p)
{
	struct ibv_cq *cq;
	void *arg;

	while (sl_verbs.ibv_get_cq_event(p->channel, &cq, &arg) == 0) {
		uint32_t *events = cq == p->sends ? &p->sends_events : &p->receives_events;

		p->pairs->armed = 0;
		if (++*events == EVENTS) {
			sl_verbs.ibv_ack_cq_events(cq, EVENTS);
			*events = 0;
		}
	}
}

/* What the descriptors say. Under the lock. */
static void check_descriptors(struct sl_verbs_context *c)
{
	for (uint32_t i = 0; i < c->ports_len; i++) {
		struct sl_verbs_port *p = c->ports[i];

		if (!p->pairs)
			continue;
		if (p->pairs->armed)
			take_channel_events(p);
		sl_verbs_handle_events(p);
	}
}

/* Whether there is nothing: from now on the channels speak when there is. Under the lock. */
static int arm(struct sl_verbs_context *c)
{
	for (uint32_t i = 0; i < c->ports_len; i++) {
		struct sl_verbs_port *p = c->ports[i];

		if (!p->pairs || p->pairs->armed || p->gone)
			continue;
		/* A device that does not take them is going, and says so elsewhere. */
		(void)sl_verbs_req_notify_cq(p->sends);
		(void)sl_verbs_req_notify_cq(p->receives);
		p->pairs->armed = 1;
	}
	return sl_verbs_step(c) == 0;
}

/* How long it may sleep in ms, unless something comes; -1: as long as it likes. */
static int sleep_max_ms(const struct sl_verbs_context *c)
{
	uint64_t watch;

	if (c->traffic->draining)
		return DRAIN_TICK_MS;
	if (c->traffic->pump_queue)
		return QUEUED_TICK_MS;
	if (!c->config.stall_ns || c->traffic->conns.next == &c->traffic->conns)
		return -1;
	watch = c->config.stall_ns / SL_VERBS_WATCHES / 1000000u + 1;
	return watch < WATCH_TICK_MS ? (int)watch : WATCH_TICK_MS;
}

static void clear_event(struct sl_verbs_traffic *t)
{
	uint64_t n;

	(void)!read(t->event_fd, &n, sizeof(n));
}

static void sleep_until_something(struct sl_verbs_context *c)
{
	struct sl_verbs_traffic *t = c->traffic;
	struct epoll_event e;
	int quiet, timeout, n;

	sl_verbs_enter(c);
	quiet = arm(c);
	timeout = sleep_max_ms(c);
	sl_verbs_unlock(c);
	if (!quiet)
		return;
	do
		n = epoll_wait(t->epoll_fd, &e, 1, timeout);
	while (n < 0 && errno == EINTR);
	clear_event(t);
}

/* A poller sleeps, or is about to: it is for the thread to find what wakes it. */
static int poller_sleeps(struct sl_verbs_context *c)
{
	return __atomic_load_n(&c->ring->armed, __ATOMIC_SEQ_CST) != 0;
}

/*
 * Sleeps a moment while a caller takes the completions. A caller that arms then looks whether it
 * does.
 */
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

/* However busy it is, devices are heard. */
static void tick(struct sl_verbs_context *c, uint64_t now, uint64_t *ticked)
{
	if (now - *ticked < TICK_NS)
		return;
	*ticked = now;
	sl_verbs_enter(c);
	check_descriptors(c);
	sl_verbs_tick(c, now);
	sl_verbs_watch(c, now);
	if (c->traffic->pump_queue)
		sl_verbs_pump_queued(c);
	sl_verbs_unlock(c);
}

static unsigned look(struct sl_verbs_context *c)
{
	unsigned n;

	sl_verbs_enter(c);
	n = sl_verbs_step(c);
	sl_verbs_unlock(c);
	return n;
}

void *sl_verbs_progress(void *context)
{
	struct sl_verbs_context *c = context;
	struct sl_verbs_traffic *t = c->traffic;
	uint64_t last = sl_verbs_now(), ticked = 0, now;
	uint32_t seen = 0;
	long pause = PAUSE_MIN;

	while (!atomic_load(&t->stop)) {
		uint32_t drives = atomic_load_explicit(&t->drives, memory_order_relaxed);

		now = sl_verbs_now();
		tick(c, now, &ticked);
		if (drives != seen &&
		    !poller_sleeps(c)) { /* a caller was here since we looked, and goes on */
			seen = drives;
			stand_back(c, pause);
			pause = pause < PAUSE_MAX ? pause * 2 : PAUSE_MAX;
			last = sl_verbs_now();
			continue;
		}
		seen = drives;
		pause = PAUSE_MIN;
		if (look(c)) {
			last = now;
		} else if (now - last >= c->config.spin_ns) {
			sleep_until_something(c);
			last = sl_verbs_now();
			ticked = 0; /* whatever woke it */
		}
		sl_verbs_yield_lock(t);
	}
	return NULL;
}
