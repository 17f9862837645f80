// SPDX-License-Identifier: Apache-2.0
// The functions of sluice.h around pools of entries.
#include "_cgo_export.h"
#include "faces.h"

int sluice_sparse_open(const struct sluice_sparse_config *config, sluice_sparse *pool,
		       uint32_t *slots)
{
	struct sluice_sparse_config known = {0};
	int code = slgo_copy(&known, sizeof known, SLGO_THROUGH(struct sluice_sparse_config, slots),
			     config, "sluice_sparse_config");
	if (code)
		return code;
	SLGO_NEED(pool);
	SLGO_NEED(slots);
	SLGO_CALL(slgoSparseOpen, &known, pool, slots);
}

int sluice_sparse_reset(sluice_sparse pool, uint32_t set)
{
	SLGO_CALL(slgoSparseReset, pool, set);
}

int sluice_sparse_close(sluice_sparse pool) { SLGO_CALL(slgoSparseClose, pool); }

int sluice_sparse_step_new(sluice_sparse pool, sluice_remote remote, uint64_t stride,
			   const struct sluice_route *route, sluice_sparse_step *step)
{
	struct sluice_route known = {0};
	int code = route ? slgo_copy(&known, sizeof known, SLGO_THROUGH(struct sluice_route, only),
				     route, "sluice_route")
			 : slgo_check_fork();
	if (code)
		return code;
	SLGO_NEED(step);
	SLGO_CALL(slgoSparseStepNew, pool, remote, stride, &known, step);
}

static int copy_batch(struct sluice_sparse_batch *known, const struct sluice_sparse_batch *batch)
{
	return slgo_copy(known, sizeof *known, SLGO_THROUGH(struct sluice_sparse_batch, counts),
			 batch, "sluice_sparse_batch");
}

int sluice_sparse_lookup(sluice_sparse_step step, const struct sluice_sparse_batch *batch,
			 size_t *count)
{
	struct sluice_sparse_batch known = {0};
	int code = copy_batch(&known, batch);
	if (code)
		return code;
	SLGO_NEED(count);
	SLGO_CALL(slgoSparseLookup, step, &known, count);
}

int sluice_sparse_warm(sluice_sparse_step step, const struct sluice_sparse_batch *batch,
		       size_t windows, size_t *count)
{
	struct sluice_sparse_batch known = {0};
	int code = copy_batch(&known, batch);
	if (code)
		return code;
	SLGO_NEED(count);
	SLGO_CALL(slgoSparseWarm, step, &known, windows, count);
}

int sluice_sparse_fetch(sluice_sparse_step step, const uint64_t *bases, size_t count)
{
	SLGO_CALL(slgoSparseFetch, step, (uint64_t *)bases, count);
}

int sluice_sparse_store(sluice_sparse_step step, const uint64_t *bases, size_t count)
{
	SLGO_CALL(slgoSparseStore, step, (uint64_t *)bases, count);
}

int sluice_sparse_fd(sluice_sparse_step step, int *fd)
{
	SLGO_NEED(fd);
	SLGO_CALL(slgoSparseFd, step, fd);
}

int sluice_sparse_wait(sluice_sparse_step step, int64_t timeout_ns)
{
	SLGO_CALL(slgoSparseWait, step, timeout_ns);
}

int sluice_sparse_abort(sluice_sparse_step step, int64_t timeout_ns)
{
	SLGO_CALL(slgoSparseAbort, step, timeout_ns);
}

int sluice_sparse_step_close(sluice_sparse_step step) { SLGO_CALL(slgoSparseStepClose, step); }
