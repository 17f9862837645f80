/* SPDX-License-Identifier: Apache-2.0 */
/* Queue pairs: their states, and what is posted to them. */
#define _GNU_SOURCE
#include "fake.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define FIRST 0x100

static struct pair **pairs; /* by their number, which is never used again */
static uint32_t pairs_len, pairs_next;

struct pair *pair_of(uint32_t number)
{
	uint32_t i = number - FIRST;

	return i < pairs_next ? pairs[i] : NULL;
}

static int number(struct pair *p)
{
	if (pairs_next == pairs_len) {
		uint32_t wider = pairs_len ? pairs_len * 2 : 64;
		struct pair **more = realloc(pairs, wider * sizeof(*pairs));

		if (!more)
			return ENOMEM;
		pairs = more;
		pairs_len = wider;
	}
	pairs[pairs_next] = p;
	p->base.qp_num = FIRST + pairs_next++;
	return 0;
}

static int allowed(struct ibv_pd *pd, const struct ibv_qp_init_attr *init)
{
	uint32_t bytes = device_of(pd->context)->panel->max_inline;
	struct ibv_device_attr limits;

	if (ibv_query_device(pd->context, &limits) != 0)
		return EIO;
	if (init->qp_type != IBV_QPT_RC || !init->send_cq || !init->recv_cq ||
	    init->cap.max_send_wr == 0 || init->cap.max_send_wr > (uint32_t)limits.max_qp_wr ||
	    init->cap.max_send_sge > (uint32_t)limits.max_sge ||
	    init->cap.max_inline_data > (bytes ? bytes : 220))
		return EINVAL;
	return 0;
}

static struct pair *allocate(const struct ibv_qp_init_attr *init)
{
	struct pair *p = calloc(1, sizeof(*p));
	uint32_t n = init->cap.max_send_wr, sges = init->cap.max_send_sge,
		 bytes = init->cap.max_inline_data;

	if (!p)
		return NULL;
	p->ring = calloc(n, sizeof(*p->ring));
	p->sges = calloc((size_t)n * (sges ? sges : 1), sizeof(*p->sges));
	p->inlines = calloc(n, bytes ? bytes : 1);
	if (!p->ring || !p->sges || !p->inlines) {
		free(p->ring);
		free(p->sges);
		free(p->inlines);
		free(p);
		return NULL;
	}
	for (uint32_t i = 0; i < n; i++) {
		p->ring[i].sge = p->sges + (size_t)i * (sges ? sges : 1);
		p->ring[i].inlined = p->inlines + (size_t)i * (bytes ? bytes : 1);
	}
	return p;
}

static void count(struct pair *p, uint32_t by)
{
	((struct cq *)p->base.send_cq)->users += by;
	((struct cq *)p->base.recv_cq)->users += by;
	((struct domain *)p->base.pd)->users += by;
	if (p->base.srq)
		((struct srq *)p->base.srq)->users += by;
	p->device->panel->qps += by;
}

EXPORT struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init)
{
	struct pair *p;
	int rc = allowed(pd, init);

	errno = rc;
	p = rc == 0 ? allocate(init) : NULL;
	if (!p)
		return NULL;
	p->init = *init;
	p->base.context = pd->context;
	p->base.qp_context = init->qp_context;
	p->base.pd = pd;
	p->base.send_cq = init->send_cq;
	p->base.recv_cq = init->recv_cq;
	p->base.srq = init->srq;
	p->base.qp_type = init->qp_type;
	p->base.state = IBV_QPS_RESET;
	pthread_mutex_init(&p->base.mutex, NULL);
	pthread_cond_init(&p->base.cond, NULL);
	p->device = device_of(pd->context);
	lock();
	if (number(p) != 0)
		abort();
	p->next = p->device->pairs;
	p->device->pairs = p;
	count(p, 1);
	unlock();
	return &p->base;
}

EXPORT int ibv_destroy_qp(struct ibv_qp *qp)
{
	struct pair *p = (struct pair *)qp, **at;

	if (take_one(&p->device->panel->destroy_busy))
		return EBUSY;
	lock();
	for (at = &p->device->pairs; *at != p; at = &(*at)->next)
		;
	*at = p->next;
	pairs[qp->qp_num - FIRST] = NULL;
	forget(qp->context, qp);
	if (p->device->panel->purge)
		purge(qp->recv_cq, qp->qp_num);
	if (p->device->panel->blind == 3)
		p->device->panel->blind = 0;
	count(p, UINT32_MAX); /* -1 */
	unlock();
	free(p->ring);
	free(p->sges);
	free(p->inlines);
	free(p);
	return 0;
}

void fail_pair(struct pair *p)
{
	if (p->base.state == IBV_QPS_ERR)
		return;
	p->base.state = IBV_QPS_ERR;
	if (p->base.srq)
		tell_of(p->base.context, IBV_EVENT_QP_LAST_WQE_REACHED, &p->base);
}

static int to_ready(struct pair *p, const struct ibv_qp_attr *a)
{
	if (a->path_mtu < IBV_MTU_256 || a->path_mtu > MTU)
		return EINVAL;
	if (!a->ah_attr.is_global || a->ah_attr.port_num != 1 || a->ah_attr.grh.sgid_index >= GIDS)
		return EINVAL;
	p->attr.ah_attr = a->ah_attr;
	p->attr.path_mtu = a->path_mtu;
	p->attr.dest_qp_num = a->dest_qp_num;
	p->attr.rq_psn = a->rq_psn;
	p->attr.max_dest_rd_atomic = a->max_dest_rd_atomic;
	p->attr.min_rnr_timer = a->min_rnr_timer;
	p->base.state = IBV_QPS_RTR;
	return 0;
}

static int to_send(struct pair *p, const struct ibv_qp_attr *a)
{
	if (a->retry_cnt > 7 || a->rnr_retry > 7 || a->timeout > 31 || a->max_rd_atomic > 16)
		return EINVAL;
	p->attr.sq_psn = a->sq_psn;
	p->attr.timeout = a->timeout;
	p->attr.retry_cnt = a->retry_cnt;
	p->attr.rnr_retry = a->rnr_retry;
	p->base.state = IBV_QPS_RTS;
	return 0;
}

/* What each step must bring, as the specification has it. */
static int modify(struct pair *p, const struct ibv_qp_attr *a, int mask)
{
	const int init = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
	const int ready = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
			  IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	const int send = IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
			 IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
	enum ibv_qp_state from = p->base.state;

	if (!(mask & IBV_QP_STATE))
		return EINVAL;
	if (a->qp_state == IBV_QPS_ERR) {
		if (take_one(&p->device->panel->modify_busy))
			return EBUSY;
		fail_pair(p);
		return 0;
	}
	if (a->qp_state == IBV_QPS_INIT && from == IBV_QPS_RESET && mask == init &&
	    a->port_num == 1 && a->pkey_index == 0) {
		p->attr.qp_access_flags = a->qp_access_flags;
		p->base.state = IBV_QPS_INIT;
		return 0;
	}
	if (a->qp_state == IBV_QPS_RTR && from == IBV_QPS_INIT && mask == ready)
		return to_ready(p, a);
	if (a->qp_state == IBV_QPS_RTS && from == IBV_QPS_RTR && mask == send)
		return to_send(p, a);
	return EINVAL;
}

EXPORT int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	struct pair *p = (struct pair *)qp;
	int rc;

	lock();
	rc = p->device->fatal == 2 ? EIO : modify(p, attr, mask);
	pthread_cond_signal(&p->device->kick);
	unlock();
	return rc;
}

int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	(void)qp;
	*bad = wr;
	return EINVAL; /* all have a shared queue */
}

/* 0, or errno. */
static int accept_request(struct pair *p, const struct ibv_send_wr *wr)
{
	const struct ibv_qp_cap *cap = &p->init.cap;
	struct request *r = &p->ring[p->posted % cap->max_send_wr];
	struct fake_panel *panel = p->device->panel;

	if (p->base.state != IBV_QPS_RTS && p->base.state != IBV_QPS_ERR)
		return EINVAL;
	if (p->posted - p->reclaimed >= cap->max_send_wr)
		return ENOMEM;
	if (wr->num_sge < 0 || (uint32_t)wr->num_sge > cap->max_send_sge ||
	    wr->opcode > IBV_WR_RDMA_READ)
		return EINVAL;
	r->len = 0;
	for (int i = 0; i < wr->num_sge; i++)
		r->len += wr->sg_list[i].length;
	if (wr->send_flags & IBV_SEND_INLINE &&
	    (r->len > cap->max_inline_data || wr->opcode == IBV_WR_RDMA_READ))
		return EINVAL;
	r->wr_id = wr->wr_id;
	r->opcode = wr->opcode;
	r->flags = wr->send_flags | (p->init.sq_sig_all ? IBV_SEND_SIGNALED : 0);
	r->remote = wr->wr.rdma.remote_addr;
	r->key = wr->wr.rdma.rkey;
	r->sges = wr->num_sge;
	r->posted = now();
	memcpy(r->sge, wr->sg_list, (size_t)wr->num_sge * sizeof(*wr->sg_list));
	for (int i = 0, at = 0; wr->send_flags & IBV_SEND_INLINE && i < wr->num_sge;
	     at += (int)wr->sg_list[i++].length)
		memcpy(r->inlined + at, (const void *)(uintptr_t)wr->sg_list[i].addr,
		       wr->sg_list[i].length);
	p->posted++;
	panel->inlined += (wr->send_flags & IBV_SEND_INLINE) != 0;
	return 0;
}

int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct pair *p = (struct pair *)qp;
	int rc = 0;

	lock();
	for (; wr && rc == 0; wr = wr->next) {
		*bad = wr;
		rc = accept_request(p, wr);
	}
	pthread_cond_signal(&p->device->kick);
	unlock();
	return rc;
}
