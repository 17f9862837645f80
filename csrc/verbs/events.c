/* SPDX-License-Identifier: Apache-2.0 */
/* What devices say without being asked, and the news that come of it. */
#include "pair.h"

#include <errno.h>
#include <sys/epoll.h>

static void report(struct sl_verbs_port *p, uint32_t news)
{
	p->context->traffic->news += !p->pairs->news;
	if (p->pairs->news != SL_VERBS_DEVICE_GONE)
		p->pairs->news = news;
	sl_verbs_signal_news(p->context);
}

static void fail_pairs(struct sl_verbs_port *p)
{
	for (uint32_t i = 0; i < SL_VERBS_BUCKETS; i++)
		for (struct sl_verbs_pair *l = p->pairs->buckets[i]; l; l = l->chain)
			sl_verbs_fail_pair(l, IBV_WC_FATAL_ERR);
}

static void lose(struct sl_verbs_port *p)
{
	if (p->gone)
		return;
	p->gone = 1;
	/* Readable for ever, when its driver is gone. */
	(void)epoll_ctl(p->context->traffic->epoll_fd, EPOLL_CTL_DEL, p->channel->fd, NULL);
	fail_pairs(p);
	report(p, SL_VERBS_DEVICE_GONE);
}

static void pump_all(struct sl_verbs_context *c)
{
	for (struct sl_verbs_conn *n = c->traffic->conns.next; n != &c->traffic->conns; n = n->next)
		sl_verbs_queue_pump(n);
}

static void fail_one(struct sl_verbs_port *p, uint32_t number)
{
	struct sl_verbs_pair *l = sl_verbs_pair_of(p, number);

	if (l)
		sl_verbs_fail_pair(l, IBV_WC_GENERAL_ERR);
}

static void heed(struct sl_verbs_port *p, const struct ibv_async_event *e, uint32_t number)
{
	switch (e->event_type) {
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
		fail_one(p, number);
		break;
	case IBV_EVENT_CQ_ERR:
	case IBV_EVENT_SRQ_ERR:
	case IBV_EVENT_DEVICE_FATAL:
		lose(p);
		break;
	case IBV_EVENT_PORT_ERR:
		if (e->element.port_num != p->config.port)
			break;
		p->down = 1;
		report(p, SL_VERBS_PORT_DOWN);
		break;
	case IBV_EVENT_PORT_ACTIVE:
		if (e->element.port_num != p->config.port)
			break;
		p->down = 0;
		report(p, SL_VERBS_PORT_UP);
		pump_all(p->context);
		break;
	default:
		break;
	}
}

/* Its number is read before the event is acknowledged: then the queue pair may be gone. */
static uint32_t number_of(const struct ibv_async_event *e)
{
	switch (e->event_type) {
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
		return e->element.qp->qp_num;
	default:
		return 0;
	}
}

void sl_verbs_handle_events(struct sl_verbs_port *p)
{
	struct ibv_async_event e;

	while (!p->pairs->silent) {
		uint32_t number;

		errno = 0;
		if (sl_verbs.ibv_get_async_event(p->device, &e) != 0) {
			if (errno == EAGAIN || errno == EINTR)
				return;
			/*
			 * It says nothing any more, but its descriptor would be readable for ever.
			 * The kernel ends all objects of a device that was taken away before it
			 * closes the file of events, which then says EIO. No event proves that.
			 */
			p->pulled = errno == EIO;
			p->pairs->silent = 1;
			(void)epoll_ctl(p->context->traffic->epoll_fd, EPOLL_CTL_DEL,
					p->device->async_fd, NULL);
			lose(p);
			return;
		}
		number = number_of(&e);
		sl_verbs.ibv_ack_async_event(&e);
		heed(p, &e, number);
	}
}

static int news_of_pair(struct sl_verbs_conn *n, struct sl_verbs_news *out)
{
	for (uint32_t i = 0; i < SL_VERBS_PAIRS; i++) {
		struct sl_verbs_pair *l = n->pairs[i];

		if (!l || !l->news)
			continue;
		*out = (struct sl_verbs_news){.conn = n->id,
					      .kind = l->news,
					      .pair = i,
					      .rail = l->port->index,
					      .status = l->status};
		l->news = 0;
		return 1;
	}
	return 0;
}

static int news_of_rail(struct sl_verbs_port *p, struct sl_verbs_news *out)
{
	if (!p->pairs->news)
		return 0;
	*out = (struct sl_verbs_news){.kind = p->pairs->news, .rail = p->index};
	p->pairs->news = 0;
	return 1;
}

int sl_verbs_news(struct sl_verbs_context *c, struct sl_verbs_news *out)
{
	struct sl_verbs_traffic *t = c->traffic;
	int found = 0;

	sl_verbs_enter(c);
	for (uint32_t i = 0; t->news && !found && i < c->ports_len; i++)
		found = c->ports[i]->pairs && news_of_rail(c->ports[i], out);
	for (struct sl_verbs_conn *n = t->conns.next; t->news && !found && n != &t->conns;
	     n = n->next)
		found = news_of_pair(n, out);
	t->news -= (uint32_t)found;
	sl_verbs_unlock(c);
	return found;
}
