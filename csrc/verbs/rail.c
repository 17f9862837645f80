/* SPDX-License-Identifier: Apache-2.0 */
/* Rails: a rail is a port of a device that is open, with its queues and its receives. */
#define _GNU_SOURCE
#include "context.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SGE_MAX 32     /* entries of a request: 32 pages of 656 bytes are 20 KiB */
#define READS_MAX 128

/* Writes the reason of a failure to why, and returns -error. error is positive. */
static int explain(char *why, size_t size, const char *device, const char *what, int error)
{
	char text[96];

	if (error <= 0)
		error = EIO;
	if (error == ENOMEM)
		snprintf(why, size, "%s: %s: out of memory, or of what may be locked (ulimit -l)",
			 device, what);
	else
		snprintf(why, size, "%s: %s: %s", device, what,
			 strerror_r(error, text, sizeof(text)));
	return -error;
}

static struct ibv_context *open_device(const char *name, char *why, size_t size, int *rc)
{
	struct ibv_context *device = NULL;
	struct ibv_device **list;
	int n = 0, found = 0;

	errno = 0;
	list = sl_verbs.ibv_get_device_list(&n);
	if (!list) {
		*rc = explain(why, size, name, "list the devices", errno ? errno : ENOSYS);
		return NULL;
	}
	for (int i = 0; i < n && !found; i++) {
		if (strncmp(list[i]->name, name, sizeof(list[i]->name)) != 0)
			continue;
		found = 1;
		errno = 0;
		device = sl_verbs.ibv_open_device(list[i]); /* before the list is freed */
	}
	if (!found) {
		snprintf(why, size, "there is no device %s among %d", name, n);
		*rc = -ENODEV;
	} else if (!device) {
		*rc = explain(why, size, name, "open the device", errno ? errno : ENODEV);
	}
	sl_verbs.ibv_free_device_list(list);
	return device;
}

static int unblock(int fd)
{
	int flags = fcntl(fd, F_GETFL);

	return flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ? errno : 0;
}

static uint32_t at_most(uint64_t want, int limit)
{
	return limit > 0 && want > (uint64_t)limit ? (uint32_t)limit : (uint32_t)want;
}

/* Queries the device, the port and the GID. */
static int query_rail(struct sl_verbs_rail *p, char *why, size_t size, const char *name)
{
	static const uint8_t none[16];
	struct ibv_port_attr attr;
	union ibv_gid gid;
	int rc = sl_verbs.ibv_query_device(p->device, &p->limits);

	if (rc != 0)
		return explain(why, size, name, "query the device", rc);
	if (p->config.port == 0 || p->config.port > p->limits.phys_port_cnt) {
		snprintf(why, size, "%s: no port %d: it has %d", name, p->config.port,
			 p->limits.phys_port_cnt);
		return -EINVAL;
	}
	memset(&attr, 0, sizeof(attr));
	rc = sl_verbs.ibv_query_port(p->device, p->config.port,
				     (struct _compat_ibv_port_attr *)&attr);
	if (rc != 0)
		return explain(why, size, name, "query the port", rc);
	memset(&gid, 0, sizeof(gid));
	if (p->config.gid >= attr.gid_tbl_len ||
	    sl_verbs.ibv_query_gid(p->device, p->config.port, p->config.gid, &gid) != 0 ||
	    memcmp(&gid, none, sizeof(none)) == 0) {
		snprintf(why, size, "%s: no GID at index %d of port %d", name, p->config.gid,
			 p->config.port);
		return -EADDRNOTAVAIL;
	}
	memcpy(p->info.gid, gid.raw, sizeof(p->info.gid));
	p->info.mtu = (uint8_t)attr.active_mtu;
	if (p->config.mtu && p->config.mtu < p->info.mtu)
		p->info.mtu = p->config.mtu;
	p->info.link_layer = attr.link_layer;
	p->info.lid = attr.lid;
	p->info.reads =
	    at_most(at_most(READS_MAX, p->limits.max_qp_rd_atom), p->limits.max_qp_init_rd_atom);
	return 0;
}

static int make_queues(struct sl_verbs_rail *p, char *why, size_t size, const char *name)
{
	const struct sl_verbs_config *c = &p->context->config;
	uint64_t receives = (uint64_t)c->conns * ((uint64_t)c->notifs + SL_VERBS_SPARE);
	uint64_t sends = 2 * (uint64_t)c->conns * ((uint64_t)c->depth + SL_VERBS_SPARE);
	struct ibv_srq_init_attr srq = {.attr = {.max_sge = 1}};
	int rc = unblock(p->device->async_fd);

	errno = rc;
	p->pd = rc == 0 ? sl_verbs.ibv_alloc_pd(p->device) : NULL;
	if (!p->pd)
		return explain(why, size, name, "make a protection domain", errno);
	p->channel = sl_verbs.ibv_create_comp_channel(p->device);
	if (!p->channel || unblock(p->channel->fd) != 0)
		return explain(why, size, name, "make a channel of completions", errno);
	p->receives_max = at_most(at_most(receives, p->limits.max_srq_wr), p->limits.max_cqe);
	p->send_cq = sl_verbs.ibv_create_cq(p->device, (int)at_most(sends, p->limits.max_cqe), p,
					    p->channel, 0);
	p->receive_cq =
	    p->send_cq ? sl_verbs.ibv_create_cq(p->device, (int)p->receives_max, p, p->channel, 0)
		       : NULL;
	if (!p->receive_cq)
		return explain(why, size, name, "make a completion queue", errno);
	srq.attr.max_wr = p->receives_max;
	p->srq = sl_verbs.ibv_create_srq(p->pd, &srq);
	return p->srq ? 0 : explain(why, size, name, "make a shared receive queue", errno);
}

/* The first receives: they show whether the limit of locked memory allows any. */
static int make_receives(struct sl_verbs_rail *p, char *why, size_t size, const char *name)
{
	int rc;

	p->buffers_max = (p->receives_max + SL_VERBS_BUFFERS - 1) / SL_VERBS_BUFFERS;
	p->buffers = calloc(p->buffers_max, sizeof(*p->buffers));
	rc = p->buffers ? sl_verbs_grow_receives(p) : -ENOMEM;
	return rc == 0 ? 0 : explain(why, size, name, "register the room for messages", -rc);
}

static int can_make_qp(struct sl_verbs_rail *p, uint32_t depth, uint32_t entries, uint32_t bytes)
{
	struct ibv_qp_init_attr attr = {
	    .send_cq = p->send_cq,
	    .recv_cq = p->receive_cq,
	    .srq = p->srq,
	    .cap = {.max_send_wr = depth + SL_VERBS_SPARE,
		    .max_send_sge = entries,
		    .max_inline_data = bytes},
	    .qp_type = IBV_QPT_RC,
	};
	struct ibv_qp *qp = sl_verbs.ibv_create_qp(p->pd, &attr);

	if (!qp)
		return 0;
	sl_verbs.ibv_destroy_qp(qp);
	return 1;
}

/*
 * Finds the depth, entries and inline bytes of queue pairs by trial: a device does not have all its
 * limits at the same time.
 */
static int find_limits(struct sl_verbs_rail *p, char *why, size_t size, const char *name)
{
	uint32_t depth = at_most(p->context->config.depth, p->limits.max_qp_wr - SL_VERBS_SPARE);
	uint32_t entries = at_most(at_most(at_most(SGE_MAX, p->config.entries), p->limits.max_sge),
				   p->limits.max_sge_rd),
		 bytes;

	for (; depth > 0; depth /= 2)
		for (uint32_t e = entries; e > 0; e /= 2)
			for (bytes = SL_VERBS_INLINE;; bytes = bytes > 32 ? bytes / 2 : 0) {
				if (can_make_qp(p, depth, e, bytes)) {
					p->info.depth_max = depth;
					p->info.sge_max = e;
					p->info.inline_max = bytes;
					return 0;
				}
				if (bytes == 0)
					break;
			}
	return explain(why, size, name, "make a queue pair", errno);
}

/*
 * Whether the driver can register dma-bufs: such a driver answers EBADF for a descriptor that is
 * not open.
 */
static int knows_dmabuf(struct sl_verbs_rail *p)
{
	struct ibv_mr *mr;

	if (!sl_verbs.ibv_reg_dmabuf_mr)
		return 0;
	errno = 0;
	mr = sl_verbs.ibv_reg_dmabuf_mr(p->pd, 0, 1, 0, -1, 0);
	if (mr)
		sl_verbs.ibv_dereg_mr(mr);
	return mr || errno == EBADF;
}

static int open_objects(struct sl_verbs_rail *p, const char *name, char *why, size_t size)
{
	int rc = 0;

	p->device = open_device(name, why, size, &rc);
	if (rc == 0)
		rc = query_rail(p, why, size, name);
	if (rc == 0)
		rc = make_queues(p, why, size, name);
	if (rc == 0)
		rc = make_receives(p, why, size, name);
	if (rc == 0)
		rc = find_limits(p, why, size, name);
	if (rc == 0)
		p->info.dmabuf = knows_dmabuf(p) != 0;
	return rc;
}

/*
 * Closes what open_objects has made so far. The struct stays: counters are read as long as the
 * context is there.
 */
static void close_objects(struct sl_verbs_rail *p)
{
	if (p->srq)
		sl_verbs.ibv_destroy_srq(p->srq);
	sl_verbs_free_receives(p);
	if (p->receive_cq)
		sl_verbs.ibv_destroy_cq(p->receive_cq);
	if (p->send_cq)
		sl_verbs.ibv_destroy_cq(p->send_cq);
	if (p->channel)
		sl_verbs.ibv_destroy_comp_channel(p->channel);
	if (p->pd)
		sl_verbs.ibv_dealloc_pd(p->pd);
	if (p->device)
		sl_verbs.ibv_close_device(p->device);
	p->srq = NULL;
	p->send_cq = p->receive_cq = NULL;
	p->channel = NULL;
	p->pd = NULL;
	p->device = NULL;
}

void sl_verbs_rail_close(struct sl_verbs_rail *p)
{
	sl_verbs_rail_traffic_close(p);
	/* ibv_destroy_cq waits for events that are not acknowledged. */
	if (p->send_cq && p->send_events)
		sl_verbs.ibv_ack_cq_events(p->send_cq, p->send_events);
	if (p->receive_cq && p->receive_events)
		sl_verbs.ibv_ack_cq_events(p->receive_cq, p->receive_events);
	p->send_events = p->receive_events = 0;
	close_objects(p);
}

static int add_rail(struct sl_verbs_context *c, struct sl_verbs_rail *p, char *why, size_t size)
{
	int rc;

	if (c->closed)
		return -EBADF;
	if (c->rails_len == SL_VERBS_RAILS) {
		snprintf(why, size, "there are %d rails already", SL_VERBS_RAILS);
		return -ENOSPC;
	}
	p->index = c->rails_len;
	rc = sl_verbs_rail_traffic_open(p);
	if (rc != 0) {
		snprintf(why, size, "no memory, or descriptors, for the queue pairs of a rail");
		return rc;
	}
	c->rails[c->rails_len++] = p;
	return 0;
}

int sl_verbs_rail_open(struct sl_verbs_context *c, const struct sl_verbs_rail_config *r,
		       uint32_t *rail, char *why, size_t size)
{
	struct sl_verbs_rail *p = calloc(1, sizeof(*p));
	int rc;

	snprintf(why, size, "out of memory, or the context is closed");
	if (!p)
		return -ENOMEM;
	p->context = c;
	p->config = *r;
	p->config.device = NULL;
	pthread_mutex_init(&p->grow_lock, NULL);
	sl_verbs_lock(c);
	rc = c->closed ? -EBADF : 0;
	c->registering += rc == 0;
	sl_verbs_unlock(c);
	if (rc == 0) {
		rc = open_objects(p, r->device, why, size);
		sl_verbs_lock(c);
		if (rc == 0)
			rc = add_rail(c, p, why, size);
		*rail = p->index;
		sl_verbs_unlock(c);
		if (rc != 0)
			close_objects(p);
		sl_verbs_lock(c);
		c->registering--;
		pthread_cond_broadcast(&c->changed);
		sl_verbs_unlock(c);
	}
	if (rc != 0)
		free(p);
	return rc;
}

int sl_verbs_rail_info(struct sl_verbs_context *c, uint32_t rail, struct sl_verbs_rail_info *out)
{
	struct sl_verbs_rail *p;

	sl_verbs_lock(c);
	p = c->closed ? NULL : sl_verbs_rail_of(c, rail);
	if (p)
		*out = p->info;
	sl_verbs_unlock(c);
	return p ? 0 : -EBADF;
}

int sl_verbs_rail_counters(struct sl_verbs_context *c, uint32_t rail, struct sl_verbs_counters *out)
{
	struct sl_verbs_rail *p;

	sl_verbs_lock(c);
	p = sl_verbs_rail_of(c, rail);
	if (p)
		*out = p->counters;
	sl_verbs_unlock(c);
	return p ? 0 : -EBADF;
}
