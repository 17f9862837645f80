/* SPDX-License-Identifier: Apache-2.0 */
/* Contiguous copies of a batch: neighbours among its pieces are one. */
#include "worker.h"

int sl_ucx_run_at(struct sl_ucx_batch *b, uint32_t piece, struct sl_ucx_run *run)
{
	struct sl_ucx_conn *n = b->conn;
	struct sl_ucx_import *im;
	struct sl_ucx_memory *m;
	struct sl_desc d, e;
	uint32_t count = 1;

	if (piece >= b->pieces.count)
		return 0;
	d = sl_piece(&b->pieces, piece);
	for (; piece + count < b->pieces.count; count++) {
		e = sl_piece(&b->pieces, piece + count);
		if (e.local != d.local + d.len || e.remote != d.remote + d.len ||
		    e.local_key != d.local_key || e.remote_key != d.remote_key)
			break;
		d.len += e.len;
	}
	/* there until the batch ends: the engine's promise */
	m = sl_ucx_find(n->worker->context, d.local_key);
	im = sl_ucx_import_of(n, d.remote_key);
	/* A list may have changed since it was checked. */
	if (!m || !im || !sl_within(d.local, d.len, m->len) ||
	    !sl_within(d.remote, d.len, im->size))
		return 0;
	*run = (struct sl_ucx_run){
		.local = m->base + d.local,
		.remote = d.remote,
		.len = d.len,
		.import = im,
		.memory = m,
		.first = piece,
		.count = count,
	};
	return 1;
}

int sl_ucx_next_run(struct sl_ucx_batch *b)
{
	if (b->next_piece >= b->pieces.count)
		return 0;
	if (!sl_ucx_run_at(b, b->next_piece, &b->run)) {
		sl_ucx_fail(b, SL_UCX_RANGE, (int32_t)b->next_piece);
		return 0;
	}
	b->next_piece += b->run.count;
	return 1;
}
