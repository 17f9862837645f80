/* SPDX-License-Identifier: Apache-2.0 */
/* Copies to and from memory of a peer that we have mapped: loads and stores. */
#include "worker.h"

#include <errno.h>

/* Whether what was moved under this import counts. */
static int current(const struct sl_ucx_import *im)
{
	/* Stores before must be seen before the word is read. */
	atomic_thread_fence(memory_order_seq_cst);
	return atomic_load_explicit(im->word, memory_order_acquire) == im->generation;
}

/* By our own hand: what faults in UCX's would end the process. */
static int store(uint8_t *to, const uint8_t *from, uint64_t len)
{
	return sl_guard_copy(to, from, len) ? SL_UCX_FAULT : 0;
}

/* 0: it is done. */
static int put(const struct sl_ucx_batch *b, uint64_t len, const ucp_request_param_t *param)
{
	struct sl_ucx_conn *n = b->conn;
	const struct sl_ucx_run *r = &b->run;
	uint64_t remote = r->import->base + r->remote + r->done;
	uint8_t *local = r->local + r->done;
	ucs_status_ptr_t p;
	void *at;

	if (sl_ucx.ucp_rkey_ptr(r->import->rkey, remote, &at) == UCS_OK)
		return b->write ? store(at, local, len) : store(local, at, len);
	p = b->write ? sl_ucx.ucp_put_nbx(n->handle, local, len, remote, r->import->rkey, param)
		     : sl_ucx.ucp_get_nbx(n->handle, local, len, remote, r->import->rkey, param);
	/* Shared memory waits for no peer; the lock is kept since the batch is in our hand. */
	while (p && !UCS_PTR_IS_ERR(p) && sl_ucx.ucp_request_check_status(p) == UCS_INPROGRESS)
		sl_ucx.ucp_worker_progress(n->worker->handle);
	if (UCS_PTR_IS_ERR(p))
		return UCS_PTR_RAW_STATUS(p);
	if (p)
		sl_ucx.ucp_request_free(p);
	return 0;
}

/* The steps check, put and again of spec/ucx_near.pml. */
int sl_ucx_move_direct(struct sl_ucx_batch *b, uint64_t *bytes)
{
	const ucp_request_param_t param = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_MEMORY_TYPE | UCP_OP_ATTR_FLAG_MULTI_SEND,
		.memory_type = UCS_MEMORY_TYPE_HOST,
	};
	struct sl_ucx_conn *n = b->conn;
	struct sl_ucx_run *r = &b->run;
	struct sl_ucx_import *checked = NULL;

	for (;;) {
		uint64_t len;
		int rc;

		if (r->done == r->len) {
			struct sl_ucx_import *before = r->import;

			if (*bytes == 0 || !sl_ucx_next_run(b)) {
				if (before && !current(before))
					return -ESTALE;
				return b->next_piece < b->pieces.count && b->status == 0;
			}
			if (before && before != r->import && !current(before))
				return -ESTALE;
		}
		if (r->import != checked && !current(r->import))
			return -ESTALE;
		checked = r->import;
		len = r->len - r->done;
		if (len > *bytes)
			len = *bytes;
		if (len == 0)
			return current(r->import) ? 1 : -ESTALE;
		if (!b->write && !sl_ucx_enter(r->memory)) {
			n->worker->stalled = 1;
			return -EAGAIN;
		}
		sl_ucx_at(n->worker, SL_UCX_AT_STORE);
		rc = put(b, len, &param);
		sl_ucx_at(n->worker, SL_UCX_AT_STORED);
		if (!b->write)
			sl_ucx_leave(r->memory);
		if (rc != 0) {
			sl_ucx_fail(b, rc, (int32_t)r->first);
			return 0;
		}
		r->done += len;
		*bytes -= len;
	}
}
