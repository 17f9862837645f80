// SPDX-License-Identifier: Apache-2.0
// The functions of sluice.h around transfers and their completions.
#include "_cgo_export.h"
#include "faces.h"

int sluice_transfer_new(sluice_peer peer, uint32_t op, const char *only, sluice_transfer *transfer)
{
	struct sluice_route route = {.size = sizeof route, .only = only};
	SLGO_NEED(transfer);
	SLGO_CALL(slgoTransferNew, peer, op, &route, transfer);
}

int sluice_transfer_new_route(sluice_peer peer, uint32_t op, const struct sluice_route *route,
			      sluice_transfer *transfer)
{
	struct sluice_route known = {0};
	int code = route ? slgo_copy(&known, sizeof known, SLGO_THROUGH(struct sluice_route, only),
				     route, "sluice_route")
			 : slgo_check_fork();
	if (code)
		return code;
	SLGO_NEED(transfer);
	SLGO_CALL(slgoTransferNew, peer, op, &known, transfer);
}

int sluice_transfer_add(sluice_transfer transfer, sluice_region region, sluice_remote remote,
			const struct sluice_desc *descs, size_t count)
{
	SLGO_CALL(slgoTransferAdd, transfer, region, remote, (struct sluice_desc *)descs, count);
}

int sluice_transfer_add_many(sluice_transfer transfer, const struct sluice_copy *copies,
			     size_t count)
{
	SLGO_CALL(slgoTransferAddMany, transfer, (struct sluice_copy *)copies, count);
}

int sluice_transfer_add_pages(sluice_transfer transfer, sluice_region region, sluice_remote remote,
			      const struct sluice_pages *pages)
{
	struct sluice_pages known = {0};
	int code = slgo_copy(&known, sizeof known, SLGO_THROUGH(struct sluice_pages, remote), pages,
			     "sluice_pages");
	if (code)
		return code;
	SLGO_CALL(slgoTransferAddPages, transfer, region, remote, &known);
}

int sluice_transfer_add_pattern(sluice_transfer transfer, sluice_region region,
				sluice_remote remote, const struct sluice_pattern *pattern)
{
	struct sluice_pattern known = {0};
	int code = slgo_copy(&known, sizeof known, SLGO_THROUGH(struct sluice_pattern, remote),
			     pattern, "sluice_pattern");
	if (code)
		return code;
	SLGO_CALL(slgoTransferAddPattern, transfer, region, remote, &known);
}

int sluice_transfer_message(sluice_transfer transfer, const void *message, size_t length)
{
	SLGO_CALL(slgoTransferMessage, transfer, (uint8_t *)message, length);
}

int sluice_transfer_watch(sluice_transfer transfer, uint64_t word)
{
	SLGO_CALL(slgoTransferWatch, transfer, word);
}

int sluice_post(sluice_transfer transfer) { SLGO_CALL(slgoPost, transfer); }

int sluice_test(sluice_transfer transfer) { SLGO_CALL(slgoTest, transfer); }

int sluice_wait(sluice_transfer transfer, int64_t timeout_ns)
{
	SLGO_CALL(slgoWait, transfer, timeout_ns);
}

int sluice_post_and_wait(sluice_transfer transfer, int64_t timeout_ns)
{
	SLGO_CALL(slgoPostAndWait, transfer, timeout_ns);
}

int sluice_send(sluice_transfer transfer, const void *message, size_t length, int64_t timeout_ns)
{
	SLGO_CALL(slgoSend, transfer, (uint8_t *)message, length, timeout_ns);
}

int sluice_abort(sluice_transfer transfer, int64_t timeout_ns)
{
	SLGO_CALL(slgoAbort, transfer, timeout_ns);
}

int sluice_reset(sluice_transfer transfer) { SLGO_CALL(slgoReset, transfer); }

int sluice_transfer_close(sluice_transfer transfer) { SLGO_CALL(slgoTransferClose, transfer); }

int sluice_completion_fd(sluice_engine engine, int *fd)
{
	SLGO_NEED(fd);
	SLGO_CALL(slgoCompletionFd, engine, fd);
}

int sluice_completions(sluice_engine engine, struct sluice_completion *list, size_t max,
		       size_t *count)
{
	SLGO_NEED(count);
	SLGO_CALL(slgoCompletions, engine, list, max, count);
}
