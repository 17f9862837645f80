/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libibverbs, opened at run time. It stays loaded for the life of the process: so do the
 * providers that it opens.
 */
#ifndef SLUICE_VERBS_LOAD_H
#define SLUICE_VERBS_LOAD_H

#include "abi.h"
#include "calls.h"

struct sl_verbs_api {
#define X(version, ret, name, args) ret(*name) args;
	SL_VERBS_CALLS(X)
	SL_VERBS_OPTIONAL_CALLS(X)
#undef X
};

/* All set, but for the optional ones, or all NULL. Not written while there is a context. */
extern struct sl_verbs_api sl_verbs;

/*
 * Opens the library and fills the table: all of it or nothing. The caller sees to it that
 * only one call runs, and no context is there. -ENOENT: dlopen failed; -ENOSYS: a
 * function is missing. why is then the reason in words, cut at size.
 */
int sl_verbs_load(const char *path, char *why, size_t size);

/* How many devices there are, or -errno: -ENOSYS where the kernel knows no RDMA. */
int sl_verbs_devices(void);

/*
 * Through the table of the context, as libibverbs' own headers do it. 0 or errno; poll: how many.
 */
static inline int sl_verbs_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr,
				     struct ibv_send_wr **bad)
{
	return qp->context->ops.post_send(qp, wr, bad);
}

static inline int sl_verbs_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr,
					 struct ibv_recv_wr **bad)
{
	return srq->context->ops.post_srq_recv(srq, wr, bad);
}

static inline int sl_verbs_poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc)
{
	return cq->context->ops.poll_cq(cq, n, wc);
}

static inline int sl_verbs_req_notify_cq(struct ibv_cq *cq)
{
	return cq->context->ops.req_notify_cq(cq, 0);
}

#endif
