// SPDX-License-Identifier: Apache-2.0
// The functions of sluice.h that hand requests over between groups of ranks.
#include "_cgo_export.h"
#include "faces.h"

int sluice_handoff_open(sluice_engine engine, const struct sluice_handoff_config *config,
			sluice_handoff *handoff)
{
	struct sluice_handoff_config known = {0};
	int code = slgo_copy(&known, sizeof known,
			     SLGO_THROUGH(struct sluice_handoff_config, options), config,
			     "sluice_handoff_config");
	if (code)
		return code;
	SLGO_NEED(handoff);
	if (!known.plan)
		return slgo_missing("sluice_handoff_config.plan");
	SLGO_CALL(slgoHandoffOpen, engine, &known, handoff);
}

int sluice_handoff_begin(sluice_handoff handoff, uint64_t number,
			 const struct sluice_handoff_table *tables, size_t count, uint64_t from,
			 uint64_t to, sluice_handoff_request *request)
{
	SLGO_NEED(request);
	SLGO_CALL(slgoHandoffBegin, handoff, number, (struct sluice_handoff_table *)tables, count,
		  from, to, request);
}

int sluice_handoff_layer(sluice_handoff_request request, uint32_t layer)
{
	SLGO_CALL(slgoHandoffLayer, request, layer);
}

int sluice_handoff_fd(sluice_handoff_request request, int *fd)
{
	SLGO_NEED(fd);
	SLGO_CALL(slgoHandoffFd, request, fd);
}

int sluice_handoff_wait(sluice_handoff_request request, int64_t timeout_ns)
{
	SLGO_CALL(slgoHandoffWait, request, timeout_ns);
}

int sluice_handoff_abort(sluice_handoff_request request, int64_t timeout_ns)
{
	SLGO_CALL(slgoHandoffAbort, request, timeout_ns);
}

int sluice_handoff_request_close(sluice_handoff_request request)
{
	SLGO_CALL(slgoHandoffRequestClose, request);
}

int sluice_handoff_stats(sluice_handoff handoff, void *buffer, size_t capacity, size_t *length)
{
	SLGO_NEED(length);
	SLGO_NEED(buffer || !capacity);
	SLGO_CALL(slgoHandoffStats, handoff, buffer, capacity, length);
}

int sluice_handoff_close(sluice_handoff handoff) { SLGO_CALL(slgoHandoffClose, handoff); }
