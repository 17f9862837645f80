/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a post and a completion cost the processor in our own code: the NIC of this program does
 * nothing, and says at once that it is done. Prints the least of several rounds, in the form of
 * Go's benchmarks. BenchmarkVerbsCost runs it.
 *
 *		gcc -O2 -I.. -o cost cost.c ../[a-z]*.c -ldl -lpthread
 */
#define _GNU_SOURCE
#include "pair.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define RAILS 8
#define PEERS 64
#define ROUNDS 7
#define DEPTH 128
#define MEMORY (64u << 20)

/* A queue of completions, as long as a rail's. */
struct queue {
	struct ibv_cq cq;
	uint32_t head, tail;
	struct ibv_wc wc[1 << 16];
};

static uint32_t last_number = 1;

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct queue *q = (struct queue *)qp->send_cq;

	(void)bad;
	for (; wr; wr = wr->next)
		if (wr->send_flags & IBV_SEND_SIGNALED)
			q->wc[q->head++ & 0xffff] =
			    (struct ibv_wc){.wr_id = wr->wr_id, .qp_num = qp->qp_num};
	return 0;
}

static int post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	(void)srq;
	(void)wr;
	(void)bad;
	return 0;
}

static int poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc)
{
	struct queue *q = (struct queue *)cq;
	int k = 0;

	while (k < n && q->tail != q->head)
		wc[k++] = q->wc[q->tail++ & 0xffff];
	return k;
}

static int notify(struct ibv_cq *cq, int solicited)
{
	(void)cq;
	(void)solicited;
	return 0;
}

static struct ibv_context *open_device(struct ibv_device *d)
{
	struct ibv_context *c = calloc(1, sizeof(*c));

	c->device = d;
	c->ops = (struct ibv_context_ops){.post_send = post_send,
					  .post_srq_recv = post_srq_recv,
					  .poll_cq = poll_cq,
					  .req_notify_cq = notify};
	c->async_fd = eventfd(0, EFD_NONBLOCK);
	return c;
}

static struct ibv_device device = {.name = "none"};
static struct ibv_device *devices[] = {&device, NULL};

static struct ibv_device **list(int *n)
{
	*n = 1;
	return devices;
}

static void unlist(struct ibv_device **d)
{
	(void)d;
}

static int close_device(struct ibv_context *c)
{
	close(c->async_fd);
	free(c);
	return 0;
}

static int no_event(struct ibv_context *c, struct ibv_async_event *e)
{
	(void)c;
	(void)e;
	errno = EAGAIN;
	return -1;
}

static int query_device(struct ibv_context *c, struct ibv_device_attr *a)
{
	(void)c;
	*a = (struct ibv_device_attr){.max_qp_wr = 8192,
				      .max_sge = 30,
				      .max_sge_rd = 30,
				      .max_cqe = 60000,
				      .max_qp_rd_atom = 16,
				      .max_qp_init_rd_atom = 16,
				      .max_srq_wr = 32768,
				      .phys_port_cnt = 1};
	return 0;
}

static int query_port(struct ibv_context *c, uint8_t port, struct _compat_ibv_port_attr *a)
{
	(void)c;
	(void)port;
	*(struct ibv_port_attr *)a = (struct ibv_port_attr){.state = IBV_PORT_ACTIVE,
							    .active_mtu = IBV_MTU_4096,
							    .gid_tbl_len = 2,
							    .link_layer = IBV_LINK_LAYER_ETHERNET};
	return 0;
}

static int query_gid(struct ibv_context *c, uint8_t port, int i, union ibv_gid *g)
{
	(void)c;
	(void)port;
	g->raw[15] = (uint8_t)(i + 1);
	return 0;
}

static struct ibv_pd *alloc_pd(struct ibv_context *c)
{
	struct ibv_pd *p = calloc(1, sizeof(*p));
	p->context = c;
	return p;
}

static int free_pd(struct ibv_pd *p)
{
	free(p);
	return 0;
}

static struct ibv_mr *reg(struct ibv_pd *p, void *at, size_t n, int access)
{
	(void)p;
	(void)at;
	(void)n;
	(void)access;
	return calloc(1, sizeof(struct ibv_mr));
}

static struct ibv_mr *reg_at(struct ibv_pd *p, void *base, size_t n, uint64_t at, unsigned access)
{
	(void)at;
	return reg(p, base, n, (int)access);
}

static int dereg(struct ibv_mr *m)
{
	free(m);
	return 0;
}

static struct ibv_comp_channel *channel(struct ibv_context *c)
{
	struct ibv_comp_channel *ch = calloc(1, sizeof(*ch));

	ch->context = c;
	ch->fd = eventfd(0, EFD_NONBLOCK);
	return ch;
}

static int free_channel(struct ibv_comp_channel *ch)
{
	close(ch->fd);
	free(ch);
	return 0;
}

static int no_cq_event(struct ibv_comp_channel *ch, struct ibv_cq **cq, void **arg)
{
	(void)ch;
	(void)cq;
	(void)arg;
	return -1;
}

static void ack(struct ibv_cq *cq, unsigned n)
{
	(void)cq;
	(void)n;
}

static struct ibv_cq *create_cq(struct ibv_context *c, int n, void *arg,
				struct ibv_comp_channel *ch, int vector)
{
	struct queue *q = calloc(1, sizeof(*q));

	(void)arg;
	(void)vector;
	q->cq.context = c;
	q->cq.channel = ch;
	q->cq.cqe = n;
	return &q->cq;
}

static int free_cq(struct ibv_cq *cq)
{
	free(cq);
	return 0;
}

static struct ibv_srq *create_srq(struct ibv_pd *p, struct ibv_srq_init_attr *a)
{
	struct ibv_srq *s = calloc(1, sizeof(*s));
	(void)a;
	s->context = p->context;
	return s;
}

static int free_srq(struct ibv_srq *s)
{
	free(s);
	return 0;
}

static struct ibv_qp *create_qp(struct ibv_pd *p, struct ibv_qp_init_attr *a)
{
	struct ibv_qp *qp = calloc(1, sizeof(*qp));

	qp->context = p->context;
	qp->send_cq = a->send_cq;
	qp->qp_num = ++last_number;
	return qp;
}

static int modify(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask)
{
	(void)qp;
	(void)a;
	(void)mask;
	return 0;
}

static int free_qp(struct ibv_qp *qp)
{
	free(qp);
	return 0;
}

static void load(void)
{
	sl_verbs = (struct sl_verbs_api){
	    .ibv_get_device_list = list,
	    .ibv_free_device_list = unlist,
	    .ibv_open_device = open_device,
	    .ibv_close_device = close_device,
	    .ibv_get_async_event = no_event,
	    .ibv_query_device = query_device,
	    .ibv_query_port = query_port,
	    .ibv_query_gid = query_gid,
	    .ibv_alloc_pd = alloc_pd,
	    .ibv_dealloc_pd = free_pd,
	    .ibv_reg_mr = reg,
	    .ibv_reg_mr_iova2 = reg_at,
	    .ibv_dereg_mr = dereg,
	    .ibv_create_comp_channel = channel,
	    .ibv_destroy_comp_channel = free_channel,
	    .ibv_create_cq = create_cq,
	    .ibv_destroy_cq = free_cq,
	    .ibv_get_cq_event = no_cq_event,
	    .ibv_ack_cq_events = ack,
	    .ibv_create_srq = create_srq,
	    .ibv_destroy_srq = free_srq,
	    .ibv_create_qp = create_qp,
	    .ibv_modify_qp = modify,
	    .ibv_destroy_qp = free_qp,
	};
}

static struct sl_verbs_context *context;
static struct sl_verbs_conn *conns[PEERS];
static uint32_t slots[PEERS];

static void fail(const char *what, int rc)
{
	fprintf(stderr, "%s: %s\n", what, strerror(-rc));
	exit(1);
}

static void set_up(uint32_t rails)
{
	struct sl_verbs_config config = {.batches = 1024,
					 .notifs = 16,
					 .conns = PEERS,
					 .depth = DEPTH,
					 .slice = 1 << 20,
					 .flight = 64 << 20,
					 .wake_fd = eventfd(0, 0),
					 .control_fd = eventfd(0, EFD_NONBLOCK)};
	struct sl_verbs_rail_config rail = {.device = "none",
					    .port = 1,
					    .gid = 1,
					    .timeout = 14,
					    .retries = 3};
	struct sl_verbs_pin *pins[SL_VERBS_RAILS] = {0};
	struct sl_verbs_end end, theirs = {.queue_pair = 1,
					   .mtu = 5,
					   .reads = 16,
					   .link_layer = IBV_LINK_LAYER_ETHERNET};
	uint32_t keys[SL_VERBS_PAIRS], r;
	static uint8_t *memory;
	char why[128];
	int rc = sl_verbs_open(&config, &context);

	if (rc != 0)
		fail("open", rc);
	memory = malloc(MEMORY);
	for (uint32_t i = 0; i < rails; i++) {
		keys[i] = i + 1;
		rc = sl_verbs_rail_open(context, &rail, &r, why, sizeof(why));
		if (rc == 0)
			rc = sl_verbs_pin(context, r, memory, MEMORY, 0, NULL, &pins[r]);
		if (rc != 0)
			fail(why, rc);
	}
	rc = sl_verbs_map(context, 1, memory, MEMORY, pins, 0);
	for (uint32_t k = 0; k < PEERS && rc == 0; k++) {
		rc = sl_verbs_connect(context, 1, 0, &conns[k]);
		for (uint32_t i = 0; i < rails && rc == 0; i++) {
			rc = sl_verbs_pair_make(conns[k], i, i, &end);
			if (rc == 0)
				rc = sl_verbs_pair_begin(conns[k], i, &theirs);
		}
		if (rc == 0)
			rc = sl_verbs_import(conns[k], 4096, MEMORY, 0, keys, rails, &slots[k]);
	}
	if (rc != 0)
		fail("set up", rc);
	sl_verbs_drive(context); /* the probes */
}

/* How many batches have ended, and are forgotten. */
static uint64_t taken(void)
{
	struct sl_ring *r = sl_verbs_ring(context);
	uint64_t n = __atomic_load_n(&r->head, __ATOMIC_ACQUIRE) - r->tail;

	for (uint64_t i = 0; i < n; i++)
		if (r->done[(r->tail + i) & r->mask].status != 0)
			fail("a batch", -EIO);
	__atomic_store_n(&r->tail, r->tail + n, __ATOMIC_RELEASE);
	return n;
}

static void report(const char *name, uint32_t rails, uint64_t batches, uint64_t requests,
		   uint64_t ns)
{
	printf("BenchmarkVerbsCost/%s/rails=%u \t%8llu\t%12.1f ns/op\t%8.2f requests/op\t%8.1f "
	       "ns/request\n",
	       name, rails, (unsigned long long)batches, (double)ns / (double)batches,
	       (double)requests / (double)batches, (double)ns / (double)requests);
}

static uint64_t requests_of(uint32_t rails)
{
	struct sl_verbs_counters n;
	uint64_t all = 0;

	for (uint32_t i = 0; i < rails; i++) {
		sl_verbs_rail_counters(context, i, &n);
		all += n.requests;
	}
	return all;
}

/* Batches in turn to all peers, each under way until the completions of a round are taken. */
static void measure(const char *name, uint32_t rails, uint32_t batches, uint64_t len,
		    const struct sl_pages *p, const uint32_t *local)
{
	uint64_t least = UINT64_MAX, requests = 0;

	for (int round = 0; round < ROUNDS; round++) {
		uint64_t before = requests_of(rails), from = sl_verbs_now(), done = 0, ns;

		for (uint32_t i = 0; i < batches; i++) {
			struct sl_desc d = {.len = len,
					    .local_key = 1,
					    .remote_key = slots[i % PEERS]};
			struct sl_pages form = p ? *p : (struct sl_pages){0};
			int64_t rc;

			form.remote_key = slots[i % PEERS];
			do {
				rc =
				    p ? sl_verbs_submit_pages(conns[i % PEERS], 1, i, &form, NULL,
							      local, NULL, NULL, 0)
				      : sl_verbs_submit(conns[i % PEERS], 1, i, &d, 1, NULL, 0);
				if (i % 16 == 15 || rc == EAGAIN) {
					sl_verbs_drive(context);
					done += taken();
				}
			} while (rc == EAGAIN);
			if (rc != 0)
				fail("submit", (int)-(rc & 0xffff));
		}
		while (done < batches) {
			sl_verbs_drive(context);
			done += taken();
		}
		ns = sl_verbs_now() - from;
		requests = requests_of(rails) - before;
		if (ns < least)
			least = ns;
	}
	report(name, rails, batches, requests, least);
}

int main(int argc, char **argv)
{
	uint32_t rails = argc > 1 ? (uint32_t)atoi(argv[1]) : 1,
		 scale = argc > 2 ? (uint32_t)atoi(argv[2]) : 1;
	struct sl_pages p = {.count = 2048,
			     .entry = 656,
			     .local_stride = 1312,
			     .remote_stride = 656,
			     .local_key = 1};
	uint32_t *local = malloc(2048 * sizeof(*local));

	if (rails == 0 || rails > RAILS)
		return 2;
	for (uint32_t i = 0; i < 2048; i++)
		local[i] = (i * 1237) % 2048;
	load();
	set_up(rails);
	measure("write/8", rails, 20000 / scale, 8, NULL, NULL);
	measure("write/64KiB", rails, 20000 / scale, 64 << 10, NULL, NULL);
	measure("write/1MiB", rails, 20000 / scale, 1 << 20, NULL, NULL);
	measure("write/64MiB", rails, 500 / scale, 64 << 20, NULL, NULL);
	measure("pages/2048x656", rails, 500 / scale, 0, &p, local);
	sl_verbs_close(context);
	sl_verbs_free(context);
	return 0;
}
