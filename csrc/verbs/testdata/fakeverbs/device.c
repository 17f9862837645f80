/* SPDX-License-Identifier: Apache-2.0 */
/* Devices, their ports, their events and their threads. */
#define _GNU_SOURCE
#include "fake.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* How often a device looks at its panel. */
#define TICK_NS 1000000u

static pthread_mutex_t everything = PTHREAD_MUTEX_INITIALIZER;
static atomic_uint waiting;
static struct fake_control *control;
static struct device devices[FAKE_DEVICES];

void lock(void)
{
	atomic_fetch_add(&waiting, 1);
	pthread_mutex_lock(&everything);
	atomic_fetch_sub(&waiting, 1);
}

void unlock(void)
{
	pthread_mutex_unlock(&everything);
}

/* A mutex is not fair. Under the lock, of which it lets go. */
void yield_to_others(void)
{
	unlock();
	for (int i = 0; atomic_load(&waiting) && i < 100; i++)
		sched_yield();
	pthread_mutex_lock(&everything);
}

uint64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

int take_one(_Atomic uint32_t *left)
{
	uint32_t n = *left;

	while (n)
		if (atomic_compare_exchange_weak(left, &n, n - 1))
			return 1;
	return 0;
}

void pause_us(uint32_t us)
{
	if (us)
		usleep(us);
}

struct device *device_at(int index)
{
	return &devices[index];
}

static void name_devices(void)
{
	for (int i = 0; i < FAKE_DEVICES; i++) {
		struct device *d = &devices[i];
		pthread_condattr_t clock;
		static const uint8_t local[16] = {0xfe, 0x80},
				     mapped[16] = {[10] = 0xff, 0xff, 10, 99, 0, 0};

		d->index = i;
		d->panel = &control->device[i].panel;
		d->base.node_type = IBV_NODE_CA;
		d->base.transport_type = IBV_TRANSPORT_IB;
		snprintf(d->base.name, sizeof(d->base.name), "fake%d", i);
		snprintf(d->base.dev_name, sizeof(d->base.dev_name), "uverbs%d", i);
		memcpy(d->gids[0].raw, local, 16);
		memcpy(d->gids[1].raw, mapped, 16);
		d->gids[0].raw[15] = d->gids[1].raw[15] = (uint8_t)(i + 1);
		pthread_condattr_init(&clock);
		pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
		pthread_cond_init(&d->kick, &clock);
		pthread_condattr_destroy(&clock);
	}
}

/* CONTROL is where it is: the library is built for one test program. */
__attribute__((constructor)) static void find_control(void)
{
	int fd = open(CONTROL, O_RDWR | O_CLOEXEC);
	void *map = MAP_FAILED;

	if (fd >= 0) {
		map = mmap(NULL, sizeof(*control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		close(fd);
	}
	if (map == MAP_FAILED)
		return;
	control = map;
	name_devices();
}

/* Without a control file it is a kernel that knows no RDMA. */
EXPORT struct ibv_device **ibv_get_device_list(int *n)
{
	struct ibv_device **list = NULL;
	uint32_t count = 0;

	if (control)
		count = control->devices < FAKE_DEVICES ? control->devices : FAKE_DEVICES;
	if (control)
		list = calloc(count + 1, sizeof(*list));
	for (uint32_t i = 0; list && i < count; i++)
		list[i] = &devices[i].base;
	if (n)
		*n = (int)count;
	if (!list)
		errno = ENOSYS;
	return list;
}

EXPORT void ibv_free_device_list(struct ibv_device **list)
{
	free(list);
}

/* No event: the kernel has ended all that there was, and closes the file of events. */
#define PULLED_OUT ((enum ibv_event_type)0x7fff)

void tell(struct device *d, enum ibv_event_type type)
{
	for (struct context *c = d->contexts; c; c = c->next)
		mailbox_put(&c->events, NULL, type, 1);
}

void tell_of(struct ibv_context *c, enum ibv_event_type type, void *about)
{
	mailbox_put(&context_of(c)->events, about, type, 0);
}

void forget(struct ibv_context *c, void *about)
{
	mailbox_purge(&context_of(c)->events, about);
}

/* What the test has changed. Under the lock. */
static void look_at_panel(struct device *d)
{
	uint32_t link = d->panel->link, fatal = d->panel->fatal;

	if (link != d->link) {
		d->link = link;
		tell(d, link ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR);
	}
	if (fatal != d->fatal) {
		d->fatal = fatal;
		if (fatal)
			tell(d, IBV_EVENT_DEVICE_FATAL);
		if (fatal == 2)
			tell(d, PULLED_OUT);
		for (struct pair *p = d->pairs; p && fatal; p = p->next)
			fail_pair(p);
	}
}

static void *run(void *arg)
{
	struct device *d = arg;

	lock();
	while (!d->stop) {
		uint64_t wake = now() + TICK_NS;
		struct timespec until;

		look_at_panel(d);
		if (work(d, &wake)) {
			yield_to_others();
			continue;
		}
		until.tv_sec = (time_t)(wake / 1000000000u);
		until.tv_nsec = (long)(wake % 1000000000u);
		pthread_cond_timedwait(&d->kick, &everything, &until);
	}
	unlock();
	return NULL;
}

static int start(struct device *d)
{
	sigset_t all, before;
	int rc;

	if (d->open++)
		return 0;
	d->stop = 0;
	d->link = d->panel->link;
	d->fatal = d->panel->fatal;
	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, &before);
	rc = pthread_create(&d->thread, NULL, run, d);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	d->open -= rc != 0;
	return rc;
}

EXPORT struct ibv_context *ibv_open_device(struct ibv_device *device)
{
	struct device *d = (struct device *)device;
	struct context *c = calloc(1, sizeof(*c));
	int rc = ENOMEM;

	if (!c)
		return NULL;
	c->device = d;
	c->base.device = device;
	c->base.ops.poll_cq = poll_cq;
	c->base.ops.req_notify_cq = req_notify_cq;
	c->base.ops.post_send = post_send;
	c->base.ops.post_recv = post_recv;
	c->base.ops.post_srq_recv = post_srq_recv;
	c->base.cmd_fd = -1;
	c->base.num_comp_vectors = 1;
	pthread_mutex_init(&c->base.mutex, NULL);
	lock();
	if (d->panel->fatal)
		rc = EIO;
	else if (mailbox_open(&c->events) == 0 && (rc = start(d)) != 0)
		mailbox_close(&c->events);
	if (rc == 0) {
		c->base.async_fd = c->events.fd;
		c->next = d->contexts;
		d->contexts = c;
		d->panel->contexts++;
	}
	unlock();
	if (rc == 0)
		return &c->base;
	free(c);
	errno = rc;
	return NULL;
}

EXPORT int ibv_close_device(struct ibv_context *context)
{
	struct context *c = context_of(context), **at;
	struct device *d = c->device;
	int last;

	lock();
	for (at = &d->contexts; *at != c; at = &(*at)->next)
		;
	*at = c->next;
	mailbox_close(&c->events);
	d->panel->contexts--;
	last = --d->open == 0;
	if (last) {
		d->stop = 1;
		pthread_cond_signal(&d->kick);
	}
	unlock();
	if (last)
		pthread_join(d->thread, NULL);
	free(c);
	return 0;
}

EXPORT int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
	struct mail m;

	if (mailbox_get(&context_of(context)->events, &m, NULL) != 0)
		return -1;
	if (m.type == PULLED_OUT) {
		errno = EIO;
		return -1;
	}
	event->event_type = m.type;
	if (m.about)
		event->element.qp = m.about;
	else
		event->element.port_num = m.port;
	return 0;
}

EXPORT void ibv_ack_async_event(struct ibv_async_event *event)
{
	(void)event;
}

static int limit(uint32_t set, int usual)
{
	return set ? (int)set : usual;
}

EXPORT int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
	struct fake_panel *p = device_of(context)->panel;

	memset(attr, 0, sizeof(*attr));
	snprintf(attr->fw_ver, sizeof(attr->fw_ver), "a stand-in");
	attr->max_mr_size = UINT64_C(1) << 40;
	attr->page_size_cap = 4096;
	attr->max_qp = attr->max_cq = attr->max_mr = attr->max_pd = attr->max_srq = 65536;
	attr->max_qp_wr = limit(p->max_wr, 8192);
	attr->max_sge = attr->max_sge_rd = limit(p->max_sge, 30);
	attr->max_cqe = limit(p->max_cqe, 1 << 20);
	attr->max_srq_wr = limit(p->max_srq_wr, 32768);
	attr->max_srq_sge = 4;
	attr->max_qp_rd_atom = attr->max_qp_init_rd_atom = 16;
	attr->phys_port_cnt = 1;
	attr->max_pkeys = 1;
	return p->fatal ? EIO : 0;
}

EXPORT int ibv_query_port(struct ibv_context *context, uint8_t port,
			  struct _compat_ibv_port_attr *old)
{
	struct fake_panel *p = device_of(context)->panel;
	struct ibv_port_attr *attr = (struct ibv_port_attr *)old;

	if (port != 1)
		return EINVAL;
	if (p->fatal)
		return EIO;
	/* Without what came after the struct that old programs know. */
	memset(attr, 0, offsetof(struct ibv_port_attr, port_cap_flags2));
	attr->state = p->link ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
	attr->max_mtu = IBV_MTU_4096;
	attr->active_mtu = MTU;
	attr->gid_tbl_len = GIDS;
	attr->max_msg_sz = 1u << 30;
	attr->pkey_tbl_len = 1;
	attr->active_width = 2;
	attr->active_speed = 32;
	attr->phys_state = p->link ? 5 : 3;
	attr->link_layer = IBV_LINK_LAYER_ETHERNET;
	return 0;
}

EXPORT int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
	if (port != 1 || index < 0 || index >= GIDS) {
		errno = EINVAL;
		return -1;
	}
	*gid = device_of(context)->gids[index];
	return 0;
}
