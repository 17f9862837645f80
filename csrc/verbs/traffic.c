/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What connections add to a context (batches, inboxes, the thread) and to a rail (its table of
 * queue pairs): made when these are opened, and freed with them.
 */
#define _GNU_SOURCE
#include "pair.h"
#include "../threads.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

static int watch_fd(struct sl_verbs_traffic *t, int fd)
{
	struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};

	return epoll_ctl(t->epoll_fd, EPOLL_CTL_ADD, fd, &e) != 0 ? -errno : 0;
}

static int make_batches(struct sl_verbs_context *c)
{
	struct sl_verbs_traffic *t = c->traffic;

	t->batches = calloc(c->config.batches, sizeof(t->batches[0]));
	if (!t->batches)
		return -ENOMEM;
	for (uint32_t i = c->config.batches; i > 0; i--) {
		t->batches[i - 1].next = t->free_batches;
		t->free_batches = &t->batches[i - 1];
	}
	return 0;
}

static int start_thread(struct sl_verbs_context *c)
{
	sigset_t all, before;
	int rc;

	sl_signals_of_others(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	rc = -pthread_create(&c->traffic->thread, NULL, sl_verbs_progress, c);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	c->traffic->has_thread = rc == 0;
	if (rc == 0)
		(void)pthread_setname_np(c->traffic->thread, "sluice-verbs");
	return rc;
}

int sl_verbs_traffic_open(struct sl_verbs_context *c)
{
	struct sl_verbs_traffic *t = calloc(1, sizeof(*t));
	int rc;

	if (!t)
		return -ENOMEM;
	c->traffic = t;
	t->conns.prev = t->conns.next = &t->conns;
	t->inboxes.prev = t->inboxes.next = &t->inboxes;
	t->arrived_end = &t->arrived;
	t->event_fd = -1;
	t->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	if (t->epoll_fd < 0)
		return -errno;
	t->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (t->event_fd < 0)
		return -errno;
	rc = watch_fd(t, t->event_fd);
	if (rc == 0)
		rc = make_batches(c);
	return rc == 0 ? start_thread(c) : rc;
}

static void close_fd(int *fd)
{
	int gone = *fd;

	*fd = -1; /* first: a thread may still call */
	if (gone >= 0)
		close(gone);
}

/* Ends all connections. They stay until they are disconnected, or the context is freed. */
static int end_conns(struct sl_verbs_context *c)
{
	struct sl_verbs_conn *head = &c->traffic->conns, *n;
	int rc = 0, one;

	do {
		sl_verbs_lock(c);
		for (n = head->next; n != head && (n->ended || n->end_tried); n = n->next)
			;
		if (n != head)
			n->end_tried = 1;
		sl_verbs_unlock(c);
		one = n != head ? sl_verbs_end(n, SL_VERBS_CLOSED, 0) : 0;
		rc = rc != 0 ? rc : one;
	} while (n != head);
	return rc;
}

int sl_verbs_traffic_stop(struct sl_verbs_context *c)
{
	struct sl_verbs_traffic *t = c->traffic;
	int rc = end_conns(c);

	atomic_store(&t->stop, 1);
	sl_verbs_wake_thread(c);
	if (t->has_thread)
		pthread_join(t->thread, NULL);
	t->has_thread = 0;
	close_fd(&t->event_fd);
	close_fd(&t->epoll_fd);
	return rc;
}

void sl_verbs_traffic_free(struct sl_verbs_context *c)
{
	struct sl_verbs_traffic *t = c->traffic;

	if (!t)
		return;
	for (uint32_t i = 0; t->batches && i < c->config.batches; i++)
		sl_pieces_free(&t->batches[i].pieces);
	free(t->batches);
	sl_verbs_free_conns(c);
	sl_verbs_free_inboxes(c);
	sl_verbs_free_record_slabs(c);
	close_fd(&t->event_fd);
	close_fd(&t->epoll_fd);
	free(t);
	c->traffic = NULL;
}

int sl_verbs_rail_traffic_open(struct sl_verbs_rail *p)
{
	struct sl_verbs_traffic *t = p->context->traffic;
	int rc;

	p->traffic = calloc(1, sizeof(*p->traffic));
	if (!p->traffic)
		return -ENOMEM;
	rc = watch_fd(t, p->channel->fd);
	if (rc == 0) {
		rc = watch_fd(t, p->device->async_fd);
		if (rc != 0)
			(void)epoll_ctl(t->epoll_fd, EPOLL_CTL_DEL, p->channel->fd, NULL);
	}
	if (rc != 0) {
		free(p->traffic);
		p->traffic = NULL;
	}
	sl_verbs_wake_thread(p->context); /* it must arm the rail */
	return rc;
}

void sl_verbs_rail_traffic_close(struct sl_verbs_rail *p)
{
	int fd = p->context->traffic->epoll_fd;

	if (!p->traffic)
		return;
	(void)epoll_ctl(fd, EPOLL_CTL_DEL, p->channel->fd, NULL);
	(void)epoll_ctl(fd, EPOLL_CTL_DEL, p->device->async_fd, NULL);
	free(p->traffic);
	p->traffic = NULL;
}
