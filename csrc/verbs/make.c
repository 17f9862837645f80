/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a queue pair is made (sl_verbs_pair_make), and connected to the peer's end
 * (sl_verbs_pair_begin). The control plane carries struct sl_verbs_end from one to the other.
 */
#define _GNU_SOURCE
#include "pair.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

/* Routers that a RoCE packet may pass; InfiniBand has no such limit within a subnet. */
#define HOPS 64
/* A receiver that is not ready, which credit excludes: the sender waits 0.64 ms, so many times. */
#define RNR_TIMER 12
#define RNR_RETRIES 6

/* Reserves the receives of a rail that a queue pair needs. -ENOSPC: it has too few left. */
static int reserve(struct sl_verbs_conn *n, struct sl_verbs_rail *p, uint32_t *reserved)
{
	uint32_t need = n->initiator ? SL_VERBS_CREDITS : n->context->config.notifs + 1;

	if (p->receives_reserved + need > p->receives_max ||
	    2 * p->traffic->len + 2 > (uint32_t)p->send_cq->cqe)
		return -ENOSPC;
	p->receives_reserved += need;
	*reserved = need;
	return 0;
}

static int register_frames(struct sl_verbs_conn *n, struct sl_verbs_rail *p)
{
	if (n->frame_mrs[p->index])
		return 0;
	errno = 0;
	n->frame_mrs[p->index] = sl_verbs.ibv_reg_mr(p->pd, n->frame_memory, n->frame_memory_size,
						     IBV_ACCESS_LOCAL_WRITE);
	if (n->frame_mrs[p->index])
		return 0;
	return errno ? -errno : -ENOMEM;
}

static struct ibv_qp *make_queue_pair(const struct sl_verbs_conn *n, struct sl_verbs_rail *p,
				      int *rc)
{
	struct ibv_qp_init_attr init = {
	    .send_cq = p->send_cq,
	    .recv_cq = p->receive_cq,
	    .srq = p->srq,
	    .cap = {.max_send_wr = p->info.depth_max + SL_VERBS_SPARE,
		    .max_send_sge = p->info.sge_max,
		    .max_inline_data = p->info.inline_max},
	    .qp_type = IBV_QPT_RC,
	};
	/* Peers may reach the memory of an owner alone. */
	struct ibv_qp_attr attr = {
	    .qp_state = IBV_QPS_INIT,
	    .port_num = p->config.port,
	    .qp_access_flags = n->initiator ? 0 : IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
	};
	struct ibv_qp *qp;

	errno = 0;
	qp = sl_verbs.ibv_create_qp(p->pd, &init);
	if (!qp) {
		*rc = errno ? -errno : -ENOMEM;
		return NULL;
	}
	*rc = -sl_verbs.ibv_modify_qp(
	    qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
	if (*rc == 0)
		return qp;
	(void)sl_verbs.ibv_destroy_qp(qp); /* it was never connected: nothing moves over it */
	return NULL;
}

static uint32_t first_packet(void)
{
	uint32_t n = 0;

	(void)!getrandom(&n, sizeof(n), 0);
	return n & 0xffffff;
}

/* Finds the struct of a queue pair, or makes it at its first use. -EBUSY: it is in use. */
static int find_pair(struct sl_verbs_conn *n, uint32_t index, struct sl_verbs_rail *p,
		     struct sl_verbs_pair **out)
{
	struct sl_verbs_pair *l = n->pairs[index];

	if (n->ending)
		return -EBADF;
	if (!l) {
		l = calloc(1, sizeof(*l));
		if (!l ||
		    sl_verbs_reserve_records(n->context, p->info.depth_max + SL_VERBS_SPARE) != 0) {
			free(l);
			return -ENOMEM;
		}
		l->conn = n;
		l->index = index;
		l->rail = p;
		n->pairs[index] = l;
		n->pairs_made |= 1u << index;
	}
	*out = l;
	return l->state == SL_VERBS_NONE || l->state == SL_VERBS_FAILED || l->destroy_error
		   ? 0
		   : -EBUSY;
}

static void describe_end(const struct sl_verbs_pair *l, struct sl_verbs_end *mine)
{
	const struct sl_verbs_rail *p = l->rail;

	*mine = (struct sl_verbs_end){
	    .queue_pair = l->number,
	    .packet = l->first_psn,
	    .lid = p->info.lid,
	    .mtu = p->info.mtu,
	    .reads = (uint8_t)(p->info.reads < UINT8_MAX ? p->info.reads : UINT8_MAX),
	    .link_layer = p->info.link_layer,
	};
	memcpy(mine->gid, p->info.gid, sizeof(mine->gid));
}

static void set_pair(struct sl_verbs_pair *l, struct sl_verbs_rail *p, struct ibv_qp *qp,
		     uint32_t reserved)
{
	l->rail = p;
	l->qp = qp;
	l->number = qp->qp_num;
	l->first_psn = first_packet();
	l->depth = p->info.depth_max;
	l->receives_reserved = reserved;
	l->unsignalled = 0;
	l->idle_checks = 0;
	l->state = SL_VERBS_MADE;
	l->status = 0;
	sl_verbs_enlist(l);
}

/* With n->setup_lock, without the context's lock. */
static int make_pair(struct sl_verbs_conn *n, uint32_t pair, uint32_t rail,
		     struct sl_verbs_end *mine)
{
	struct sl_verbs_context *c = n->context;
	struct sl_verbs_pair *l = NULL;
	struct sl_verbs_rail *p;
	struct ibv_qp *qp;
	uint32_t reserved = 0;
	int rc;

	sl_verbs_lock(c);
	p = sl_verbs_rail_of(c, rail);
	rc = !p || p->gone ? -ENODEV : find_pair(n, pair, p, &l);
	sl_verbs_unlock(c);
	if (rc != 0)
		return rc;
	rc = sl_verbs_destroy_pair(l); /* that of an earlier time */
	if (rc != 0)
		return rc;
	sl_verbs_lock(c);
	rc = reserve(n, p, &reserved);
	sl_verbs_unlock(c);
	if (rc == 0)
		rc = sl_verbs_grow_receives(p);
	if (rc == 0)
		rc = register_frames(n, p);
	qp = rc == 0 ? make_queue_pair(n, p, &rc) : NULL;
	sl_verbs_lock(c);
	if (qp) {
		set_pair(l, p, qp, reserved);
		describe_end(l, mine);
	} else {
		p->receives_reserved -= reserved;
	}
	sl_verbs_unlock(c);
	return rc;
}

int sl_verbs_pair_make(struct sl_verbs_conn *n, uint32_t pair, uint32_t rail,
		       struct sl_verbs_end *mine)
{
	int rc;

	if (pair >= SL_VERBS_PAIRS)
		return -ERANGE;
	pthread_mutex_lock(&n->setup_lock);
	rc = make_pair(n, pair, rail, mine);
	pthread_mutex_unlock(&n->setup_lock);
	return rc;
}

static struct ibv_ah_attr address_of(const struct sl_verbs_rail *p,
				     const struct sl_verbs_end *theirs)
{
	struct ibv_ah_attr ah = {
	    .dlid = theirs->lid,
	    .sl = p->config.level,
	    .port_num = p->config.port,
	    .grh = {.sgid_index = p->config.gid,
		    .hop_limit = HOPS,
		    .traffic_class = p->config.traffic_class},
	};

	memcpy(ah.grh.dgid.raw, theirs->gid, sizeof(theirs->gid));
	/* Without a global address a packet stays in its InfiniBand subnet. */
	ah.is_global = p->info.link_layer == IBV_LINK_LAYER_ETHERNET || theirs->lid == 0 ||
		       memcmp(theirs->gid, p->info.gid, 8) != 0;
	return ah;
}

static uint8_t fewer(uint32_t a, uint32_t b)
{
	return (uint8_t)(a < b ? a : b);
}

/* To the states ready-to-receive and ready-to-send. */
static int connect_qp(struct sl_verbs_pair *l, const struct sl_verbs_end *theirs)
{
	const struct sl_verbs_rail *p = l->rail;
	struct ibv_qp_attr receive = {
	    .qp_state = IBV_QPS_RTR,
	    .path_mtu = (enum ibv_mtu)fewer(p->info.mtu, theirs->mtu),
	    .dest_qp_num = theirs->queue_pair,
	    .rq_psn = theirs->packet,
	    .max_dest_rd_atomic = fewer(p->info.reads, UINT8_MAX),
	    .min_rnr_timer = RNR_TIMER,
	    .ah_attr = address_of(p, theirs),
	};
	struct ibv_qp_attr send = {
	    .qp_state = IBV_QPS_RTS,
	    .sq_psn = l->first_psn,
	    .timeout = p->config.timeout,
	    .retry_cnt = p->config.retries,
	    .rnr_retry = RNR_RETRIES,
	    .max_rd_atomic = fewer(p->info.reads, theirs->reads),
	};
	int rc = sl_verbs.ibv_modify_qp(l->qp, &receive,
					IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
					    IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);

	if (rc == 0)
		rc = sl_verbs.ibv_modify_qp(l->qp, &send,
					    IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
						IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
						IBV_QP_MAX_QP_RD_ATOMIC);
	return rc > 0 ? -rc : rc;
}

static int post_probe(struct sl_verbs_pair *l)
{
	struct sl_verbs_record *r = sl_verbs_new_record(l->conn->context);
	struct ibv_send_wr *wr;

	if (!r)
		return -ENOMEM;
	r->kind = SL_VERBS_PROBE;
	wr = sl_verbs_build(l, r, sl_verbs_next_entries(l->conn), 0);
	wr->opcode = IBV_WR_RDMA_WRITE;
	wr->wr.rdma.remote_addr = 0;
	wr->wr.rdma.rkey = 0;
	sl_verbs_post_built(l->conn);
	return 0;
}

/* With n->setup_lock, without the context's lock. */
static int begin_pair(struct sl_verbs_conn *n, struct sl_verbs_pair *l,
		      const struct sl_verbs_end *theirs)
{
	struct sl_verbs_context *c = n->context;
	int rc;

	sl_verbs_lock(c);
	rc = n->ended || !l || l->state != SL_VERBS_MADE ? -EBADF : l->unproved.first ? -EBUSY : 0;
	sl_verbs_unlock(c);
	if (rc == 0)
		rc = connect_qp(l, theirs);
	if (rc != 0)
		return rc;
	sl_verbs_lock(c);
	if (l->state != SL_VERBS_MADE) { /* the device has failed meanwhile */
		rc = -ENODEV;
	} else {
		l->state = SL_VERBS_BEGUN;
		if (n->initiator)
			rc = post_probe(l);
		else
			sl_verbs_set_live(l);
	}
	if (rc == 0 && !n->initiator)
		sl_verbs_post_waiting(n);
	sl_verbs_unlock(c);
	return rc;
}

int sl_verbs_pair_begin(struct sl_verbs_conn *n, uint32_t pair, const struct sl_verbs_end *theirs)
{
	int rc;

	if (pair >= SL_VERBS_PAIRS)
		return -ERANGE;
	pthread_mutex_lock(&n->setup_lock);
	rc = begin_pair(n, n->pairs[pair], theirs);
	pthread_mutex_unlock(&n->setup_lock);
	return rc;
}
