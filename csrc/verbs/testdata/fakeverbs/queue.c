/* SPDX-License-Identifier: Apache-2.0 */
/* Events, completion queues and shared receive queues. */
#define _GNU_SOURCE
#include "fake.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

/* A real library waits for ever for a program that does not acknowledge an event. */
#define UNACKNOWLEDGED_S 5

int mailbox_open(struct mailbox *b)
{
	b->first = NULL;
	b->fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
	return b->fd < 0 ? errno : 0;
}

void mailbox_close(struct mailbox *b)
{
	for (struct mail *m = b->first, *next; m; m = next) {
		next = m->next;
		free(m);
	}
	b->first = NULL;
	close(b->fd);
}

void mailbox_put(struct mailbox *b, void *about, enum ibv_event_type type, int port)
{
	struct mail *m = calloc(1, sizeof(*m)), **at;
	uint64_t one = 1;

	if (!m)
		abort();
	m->about = about;
	m->type = type;
	m->port = port;
	for (at = &b->first; *at; at = &(*at)->next)
		;
	*at = m;
	(void)!write(b->fd, &one, sizeof(one));
}

/*
 * What tells of something that is no more is not told. The descriptor may say that there is
 * something, then.
 */
void mailbox_purge(struct mailbox *b, const void *about)
{
	for (struct mail **at = &b->first, *m; (m = *at);) {
		if (m->about != about) {
			at = &m->next;
			continue;
		}
		*at = m->next;
		free(m);
	}
}

int mailbox_get(struct mailbox *b, struct mail *out, void (*taken)(void *about))
{
	uint64_t one;

	for (;;) {
		struct mail *m;

		if (read(b->fd, &one, sizeof(one)) != sizeof(one))
			return -1;
		lock();
		m = b->first;
		if (m) {
			b->first = m->next;
			if (taken)
				taken(m->about);
		}
		unlock();
		if (m) {
			*out = *m;
			free(m);
			return 0;
		}
	}
}

EXPORT struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
	struct channel *c = calloc(1, sizeof(*c));

	if (!c)
		return NULL;
	if (mailbox_open(&c->events) != 0) {
		free(c);
		return NULL;
	}
	c->base.context = context;
	c->base.fd = c->events.fd;
	device_of(context)->panel->channels++;
	return &c->base;
}

EXPORT int ibv_destroy_comp_channel(struct ibv_comp_channel *channel)
{
	struct channel *c = (struct channel *)channel;

	lock();
	if (c->base.refcnt) {
		unlock();
		return EBUSY;
	}
	mailbox_close(&c->events);
	unlock();
	device_of(channel->context)->panel->channels--;
	free(c);
	return 0;
}

EXPORT struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context,
				    struct ibv_comp_channel *channel, int vector)
{
	struct ibv_device_attr limits;
	struct cq *q = NULL;

	errno = EINVAL;
	(void)ibv_query_device(context, &limits);
	if (cqe <= 0 || cqe > limits.max_cqe || vector != 0)
		return NULL;
	errno = ENOMEM;
	q = calloc(1, sizeof(*q));
	if (q)
		q->ring = calloc((size_t)cqe, sizeof(*q->ring));
	if (!q || !q->ring) {
		free(q);
		return NULL;
	}
	q->size = (uint32_t)cqe;
	q->base.context = context;
	q->base.channel = channel;
	q->base.cq_context = cq_context;
	q->base.cqe = cqe;
	pthread_mutex_init(&q->base.mutex, NULL);
	pthread_cond_init(&q->base.cond, NULL);
	lock();
	if (channel)
		channel->refcnt++;
	unlock();
	device_of(context)->panel->cqs++;
	return &q->base;
}

EXPORT int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq,
			    void **cq_context);

static void taken(void *about)
{
	((struct cq *)about)->delivered++;
}

EXPORT int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context)
{
	struct mail m;

	if (mailbox_get(&((struct channel *)channel)->events, &m, taken) != 0)
		return -1;
	*cq = m.about;
	*cq_context = (*cq)->cq_context;
	return 0;
}

EXPORT void ibv_ack_cq_events(struct ibv_cq *cq, unsigned n)
{
	pthread_mutex_lock(&cq->mutex);
	cq->comp_events_completed += n;
	pthread_cond_signal(&cq->cond);
	pthread_mutex_unlock(&cq->mutex);
}

/* No test is to hang by this. */
static void await_acknowledgements(struct cq *q)
{
	struct timespec until;

	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += UNACKNOWLEDGED_S;
	pthread_mutex_lock(&q->base.mutex);
	while (q->base.comp_events_completed != q->delivered) {
		if (pthread_cond_timedwait(&q->base.cond, &q->base.mutex, &until) != ETIMEDOUT)
			continue;
		fprintf(stderr,
			"fakeverbs: %u events of a completion queue that ends, %u acknowledged\n",
			q->delivered, q->base.comp_events_completed);
		abort();
	}
	pthread_mutex_unlock(&q->base.mutex);
}

EXPORT int ibv_destroy_cq(struct ibv_cq *cq)
{
	struct cq *q = (struct cq *)cq;

	lock();
	if (q->users) {
		unlock();
		return EBUSY;
	}
	if (cq->channel) {
		mailbox_purge(&((struct channel *)cq->channel)->events, cq);
		cq->channel->refcnt--;
	}
	forget(cq->context, cq);
	unlock();
	await_acknowledgements(q);
	device_of(cq->context)->panel->cqs--;
	free(q->ring);
	free(q);
	return 0;
}

void complete(struct ibv_cq *cq, const struct ibv_wc *wc, uint32_t pair, uint64_t upto)
{
	struct cq *q = (struct cq *)cq;
	struct fake_panel *p = device_of(cq->context)->panel;
	struct cqe *e = &q->ring[q->head % q->size];

	if (q->head - q->tail == q->size) {
		p->overruns++;
		tell_of(cq->context, IBV_EVENT_CQ_ERR, cq);
		return;
	}
	q->receives |= wc->opcode >= IBV_WC_RECV;
	e->wc = *wc;
	e->pair = pair;
	e->upto = upto;
	q->head++;
	p->completions++;
	if (q->armed && cq->channel) {
		q->armed = 0;
		mailbox_put(&((struct channel *)cq->channel)->events, cq, 0, 0);
	}
}

void purge(struct ibv_cq *cq, uint32_t pair)
{
	struct cq *q = (struct cq *)cq;
	uint64_t to = q->tail;

	for (uint64_t from = q->tail; from != q->head; from++)
		if (q->ring[from % q->size].pair != pair)
			q->ring[to++ % q->size] = q->ring[from % q->size];
	q->head = to;
}

int poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc)
{
	struct cq *q = (struct cq *)cq;
	struct device *d = device_of(cq->context);
	int got = 0;

	lock();
	if (q->receives && (d->panel->blind == 1 || d->panel->blind == 3 ||
			    (d->panel->blind == 2 && d->looked != q)))
		n = 0;
	d->looked = q;
	for (; got < n && q->tail != q->head; q->tail++) {
		struct cqe *e = &q->ring[q->tail % q->size];
		struct pair *p = e->upto == NONE ? NULL : pair_of(e->pair);

		if (e->wc.status == IBV_WC_WR_FLUSH_ERR && d->panel->blind != 3)
			d->panel->blind = 0;
		wc[got++] = e->wc;
		if (p && p->reclaimed < e->upto)
			/* those without a completion of their own are over with it */
			p->reclaimed = e->upto;
	}
	unlock();
	return got;
}

int req_notify_cq(struct ibv_cq *cq, int solicited)
{
	(void)solicited; /* to be woken too often is allowed */
	lock();
	((struct cq *)cq)->armed = 1;
	unlock();
	return 0;
}

EXPORT struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *init)
{
	struct ibv_device_attr limits;
	struct srq *s;

	errno = EINVAL;
	(void)ibv_query_device(pd->context, &limits);
	if (init->attr.max_wr == 0 || init->attr.max_wr > (uint32_t)limits.max_srq_wr ||
	    init->attr.max_sge > 4)
		return NULL;
	errno = ENOMEM;
	s = calloc(1, sizeof(*s));
	if (s)
		s->ring = calloc(init->attr.max_wr, sizeof(*s->ring));
	if (!s || !s->ring) {
		free(s);
		return NULL;
	}
	s->size = init->attr.max_wr;
	s->base.context = pd->context;
	s->base.srq_context = init->srq_context;
	s->base.pd = pd;
	lock();
	((struct domain *)pd)->users++;
	unlock();
	device_of(pd->context)->panel->srqs++;
	return &s->base;
}

EXPORT int ibv_destroy_srq(struct ibv_srq *srq)
{
	struct srq *s = (struct srq *)srq;

	lock();
	if (s->users) {
		unlock();
		return EBUSY;
	}
	((struct domain *)srq->pd)->users--;
	forget(srq->context, srq);
	unlock();
	device_of(srq->context)->panel->srqs--;
	free(s->ring);
	free(s);
	return 0;
}

int post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct srq *s = (struct srq *)srq;
	struct fake_panel *p = device_of(srq->context)->panel;
	int rc = 0;

	lock();
	for (; wr && rc == 0; wr = wr->next) {
		struct receive *r = &s->ring[s->head % s->size];

		*bad = wr;
		if (wr->num_sge < 0 || wr->num_sge > 4) {
			rc = EINVAL;
		} else if (s->head - s->tail == s->size ||
			   (!wr->next && take_one(&p->receives_full))) {
			rc = ENOMEM;
		} else {
			r->wr_id = wr->wr_id;
			r->sges = wr->num_sge;
			memcpy(r->sge, wr->sg_list, (size_t)wr->num_sge * sizeof(*wr->sg_list));
			s->head++;
			p->receives++;
		}
	}
	unlock();
	return rc;
}
