/* SPDX-License-Identifier: Apache-2.0 */
/* What devices say without being asked, and the news that come of it. */
#include "lane.h"

#include <errno.h>
#include <sys/epoll.h>

static void tell(struct sl_verbs_port *p, uint32_t news)
{
	p->context->traffic->news += !p->lanes->news;
	if (p->lanes->news != SL_VERBS_DEVICE_GONE)
		p->lanes->news = news;
	sl_verbs_tell(p->context);
}

static void fail_lanes(struct sl_verbs_port *p)
{
	for (uint32_t i = 0; i < SL_VERBS_BUCKETS; i++)
		for (struct sl_verbs_lane *l = p->lanes->buckets[i]; l; l = l->chain)
			sl_verbs_fail_lane(l, IBV_WC_FATAL_ERR);
}

static void lose(struct sl_verbs_port *p)
{
	if (p->gone)
		return;
	p->gone = 1;
	/* Readable for ever, when its driver is gone. */
	(void)epoll_ctl(p->context->traffic->epoll_fd, EPOLL_CTL_DEL, p->channel->fd, NULL);
	fail_lanes(p);
	tell(p, SL_VERBS_DEVICE_GONE);
}

static void pump_all(struct sl_verbs_context *c)
{
	for (struct sl_verbs_conn *n = c->traffic->conns.next; n != &c->traffic->conns; n = n->next)
		sl_verbs_starve(n);
}

static void fail_one(struct sl_verbs_port *p, uint32_t number)
{
	struct sl_verbs_lane *l = sl_verbs_lane_of(p, number);

	if (l)
		sl_verbs_fail_lane(l, IBV_WC_GENERAL_ERR);
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
		p->down |= SL_VERBS_DOWN_PORT;
		tell(p, SL_VERBS_PORT_DOWN);
		break;
	case IBV_EVENT_PORT_ACTIVE:
		if (e->element.port_num != p->config.port)
			break;
		p->down &= ~SL_VERBS_DOWN_PORT;
		tell(p, SL_VERBS_PORT_UP);
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

void sl_verbs_heed(struct sl_verbs_port *p)
{
	struct ibv_async_event e;

	while (!p->lanes->silent) {
		uint32_t number;

		errno = 0;
		if (sl_verbs.ibv_get_async_event(p->device, &e) != 0) {
			if (errno == EAGAIN || errno == EINTR)
				return;
			/*
			 * It says nothing any more, but its descriptor would be readable for ever.
			 */
			p->lanes->silent = 1;
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

void sl_verbs_rail_up(struct sl_verbs_context *c, uint32_t rail, int up)
{
	struct sl_verbs_port *p;

	sl_verbs_enter(c);
	p = sl_verbs_port_of(c, rail);
	if (p && up)
		p->down &= ~(SL_VERBS_DOWN_RAIL | SL_VERBS_DOWN_PORT);
	else if (p)
		p->down |= SL_VERBS_DOWN_RAIL;
	if (p && up) {
		pump_all(c);
		sl_verbs_feed(c);
	}
	sl_verbs_unlock(c);
}

static int news_of_lane(struct sl_verbs_conn *n, struct sl_verbs_news *out)
{
	for (uint32_t i = 0; i < SL_VERBS_LANES; i++) {
		struct sl_verbs_lane *l = n->lanes[i];

		if (!l || !l->news)
			continue;
		*out = (struct sl_verbs_news){.conn = n->id,
					      .kind = l->news,
					      .lane = i,
					      .rail = l->port->index,
					      .status = l->status};
		l->news = 0;
		return 1;
	}
	return 0;
}

static int news_of_rail(struct sl_verbs_port *p, struct sl_verbs_news *out)
{
	if (!p->lanes->news)
		return 0;
	*out = (struct sl_verbs_news){.kind = p->lanes->news, .rail = p->index};
	p->lanes->news = 0;
	return 1;
}

int sl_verbs_news(struct sl_verbs_context *c, struct sl_verbs_news *out)
{
	struct sl_verbs_traffic *t = c->traffic;
	int found = 0;

	sl_verbs_enter(c);
	for (uint32_t i = 0; t->news && !found && i < c->ports_len; i++)
		found = c->ports[i]->lanes && news_of_rail(c->ports[i], out);
	for (struct sl_verbs_conn *n = t->conns.next; t->news && !found && n != &t->conns;
	     n = n->next)
		found = news_of_lane(n, out);
	t->news -= (uint32_t)found;
	sl_verbs_unlock(c);
	return found;
}
