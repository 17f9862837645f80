/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Events that devices report by themselves (a port is down, a queue pair failed, the device is
 * gone), and the news for the control plane.
 */
#include "pair.h"

#include <errno.h>
#include <sys/epoll.h>

static void report(struct sl_verbs_rail *p, uint32_t news)
{
	p->context->traffic->news_waiting += !p->traffic->unreported;
	if (p->traffic->unreported != SL_VERBS_DEVICE_GONE)
		p->traffic->unreported = news;
	sl_verbs_signal_news(p->context);
}

static void fail_pairs(struct sl_verbs_rail *p)
{
	for (uint32_t i = 0; i < SL_VERBS_BUCKETS; i++)
		for (struct sl_verbs_pair *l = p->traffic->buckets[i]; l; l = l->next_in_bucket)
			sl_verbs_fail_pair(l, IBV_WC_FATAL_ERR);
}

static void lose_device(struct sl_verbs_rail *p)
{
	if (p->gone)
		return;
	p->gone = 1;
	/* Without a driver its descriptor is readable for ever. */
	(void)epoll_ctl(p->context->traffic->epoll_fd, EPOLL_CTL_DEL, p->channel->fd, NULL);
	fail_pairs(p);
	report(p, SL_VERBS_DEVICE_GONE);
}

static void pump_all(struct sl_verbs_context *c)
{
	for (struct sl_verbs_conn *n = c->traffic->conns.next; n != &c->traffic->conns; n = n->next)
		sl_verbs_queue_conn(n);
}

/* Called before the event is acknowledged: until then its queue pair is not destroyed. */
static void handle_event(struct sl_verbs_rail *p, const struct ibv_async_event *e)
{
	struct sl_verbs_pair *l;

	switch (e->event_type) {
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
		l = sl_verbs_pair_of(p, e->element.qp->qp_num);
		if (l)
			sl_verbs_fail_pair(l, IBV_WC_GENERAL_ERR);
		break;
	case IBV_EVENT_CQ_ERR:
	case IBV_EVENT_SRQ_ERR:
	case IBV_EVENT_DEVICE_FATAL:
		lose_device(p);
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

void sl_verbs_handle_events(struct sl_verbs_rail *p)
{
	struct ibv_async_event e;

	while (!p->traffic->events_ended) {
		errno = 0;
		if (sl_verbs.ibv_get_async_event(p->device, &e) != 0) {
			if (errno == EAGAIN || errno == EINTR)
				return;
			/*
			 * The device reports nothing any more, but its descriptor would be readable
			 * for ever. EIO proves that the device was removed: the kernel ends all
			 * objects of a device before it closes the file of its events. No event
			 * proves that.
			 */
			p->pulled = errno == EIO;
			p->traffic->events_ended = 1;
			(void)epoll_ctl(p->context->traffic->epoll_fd, EPOLL_CTL_DEL,
					p->device->async_fd, NULL);
			lose_device(p);
			return;
		}
		handle_event(p, &e);
		sl_verbs.ibv_ack_async_event(&e);
	}
}

static int news_of_pair(struct sl_verbs_conn *n, struct sl_verbs_news *out)
{
	for (uint32_t i = 0; i < SL_VERBS_PAIRS; i++) {
		struct sl_verbs_pair *l = n->pairs[i];

		if (!l || !l->unreported)
			continue;
		*out = (struct sl_verbs_news){.conn = n->id,
					      .kind = l->unreported,
					      .pair = i,
					      .rail = l->rail->index,
					      .status = l->status};
		l->unreported = 0;
		return 1;
	}
	return 0;
}

static int news_of_rail(struct sl_verbs_rail *p, struct sl_verbs_news *out)
{
	if (!p->traffic->unreported)
		return 0;
	*out = (struct sl_verbs_news){.kind = p->traffic->unreported, .rail = p->index};
	p->traffic->unreported = 0;
	return 1;
}

int sl_verbs_news(struct sl_verbs_context *c, struct sl_verbs_news *out)
{
	struct sl_verbs_traffic *t = c->traffic;
	int found = 0;

	sl_verbs_lock(c);
	for (uint32_t i = 0; t->news_waiting && !found && i < c->rails_len; i++)
		found = c->rails[i]->traffic && news_of_rail(c->rails[i], out);
	for (struct sl_verbs_conn *n = t->conns.next; t->news_waiting && !found && n != &t->conns;
	     n = n->next)
		found = news_of_pair(n, out);
	t->news_waiting -= (uint32_t)found;
	sl_verbs_unlock(c);
	return found;
}
