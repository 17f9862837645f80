// SPDX-License-Identifier: Apache-2.0
// The functions of sluice.h around the KV cache.
#include "_cgo_export.h"
#include "faces.h"

int sluice_kv_open(sluice_engine engine, const char *const *options, int64_t timeout_ns,
		   sluice_kv *kv)
{
	SLGO_NEED(options);
	SLGO_NEED(kv);
	SLGO_CALL(slgoKVOpen, engine, (char **)options, timeout_ns, kv);
}

int sluice_kv_dial(sluice_engine engine, const char *network, const char *address,
		   int64_t timeout_ns, sluice_kv *kv)
{
	SLGO_NEED(network);
	SLGO_NEED(address);
	SLGO_NEED(kv);
	SLGO_CALL(slgoKVDial, engine, (char *)network, (char *)address, timeout_ns, kv);
}

int sluice_kv_serve(sluice_kv kv) { SLGO_CALL(slgoKVServe, kv); }

int sluice_kv_close(sluice_kv kv) { SLGO_CALL(slgoKVClose, kv); }

int sluice_kv_stats(sluice_kv kv, void *buffer, size_t capacity, size_t *length)
{
	SLGO_NEED(length);
	SLGO_NEED(buffer || !capacity);
	SLGO_CALL(slgoKVStats, kv, buffer, capacity, length);
}

int sluice_kv_drain(sluice_kv kv, int64_t timeout_ns)
{
	SLGO_CALL(slgoKVDrain, kv, timeout_ns);
}

int sluice_kv_attach(sluice_kv kv, sluice_region region, int64_t timeout_ns)
{
	SLGO_CALL(slgoKVAttach, kv, region, timeout_ns);
}

int sluice_kv_detach(sluice_kv kv, sluice_region region, int64_t timeout_ns)
{
	SLGO_CALL(slgoKVDetach, kv, region, timeout_ns);
}

int sluice_kv_namespace_open(sluice_kv kv, const struct sluice_kv_namespace_options *options,
			     int64_t timeout_ns, sluice_kv_namespace *space)
{
	struct sluice_kv_namespace_options known = {0};
	int code = slgo_copy(&known, sizeof known,
			     SLGO_THROUGH(struct sluice_kv_namespace_options, reserved), options,
			     "sluice_kv_namespace_options");
	if (code)
		return code;
	SLGO_NEED(space);
	if (!known.name)
		return slgo_missing("sluice_kv_namespace_options.name");
	SLGO_CALL(slgoKVNamespaceOpen, kv, &known, timeout_ns, space);
}

int sluice_kv_namespace_close(sluice_kv_namespace space)
{
	SLGO_CALL(slgoKVNamespaceClose, space);
}

int sluice_kv_chain(sluice_kv_namespace space, const struct sluice_kv_key *before, size_t count,
		    sluice_kv_namespace *chain)
{
	SLGO_NEED(chain);
	SLGO_CALL(slgoKVChain, space, (struct sluice_kv_key *)before, count, chain);
}

int sluice_kv_match(sluice_kv_namespace space, const struct sluice_kv_key *keys, size_t count,
		    int64_t timeout_ns, uint8_t *found, size_t *prefix)
{
	SLGO_CALL(slgoKVMatch, space, (struct sluice_kv_key *)keys, count, timeout_ns, found,
		  prefix);
}

int sluice_kv_remove(sluice_kv_namespace space, const struct sluice_kv_key *keys, size_t count,
		     int64_t timeout_ns)
{
	SLGO_CALL(slgoKVRemove, space, (struct sluice_kv_key *)keys, count, timeout_ns);
}

int sluice_kv_list(sluice_kv_namespace space, uint32_t *at, int64_t timeout_ns,
		   struct sluice_kv_key *keys, size_t *count)
{
	if (!at || !keys || !count)
		return slgo_missing("at, keys or count");
	SLGO_CALL(slgoKVList, space, at, timeout_ns, keys, count);
}

static int move(int how, sluice_kv_namespace space, const struct sluice_kv_key *keys,
		size_t count, const struct sluice_kv_place *place, int64_t timeout_ns,
		sluice_kv_op *op)
{
	struct sluice_kv_place known = {0};
	int code = slgo_copy(&known, sizeof known, SLGO_THROUGH(struct sluice_kv_place, slots),
			     place, "sluice_kv_place");
	if (code)
		return code;
	SLGO_NEED(op);
	SLGO_CALL(slgoKVMove, how, space, (struct sluice_kv_key *)keys, count, &known, timeout_ns,
		  op);
}

int sluice_kv_load(sluice_kv_namespace space, const struct sluice_kv_key *keys, size_t count,
		   const struct sluice_kv_place *place, int64_t timeout_ns, sluice_kv_op *op)
{
	return move(SLGO_LOAD, space, keys, count, place, timeout_ns, op);
}

int sluice_kv_store(sluice_kv_namespace space, const struct sluice_kv_key *keys, size_t count,
		    const struct sluice_kv_place *place, int64_t timeout_ns, sluice_kv_op *op)
{
	return move(SLGO_STORE, space, keys, count, place, timeout_ns, op);
}

int sluice_kv_replace(sluice_kv_namespace space, const struct sluice_kv_key *keys, size_t count,
		      const struct sluice_kv_place *place, int64_t timeout_ns, sluice_kv_op *op)
{
	return move(SLGO_REPLACE, space, keys, count, place, timeout_ns, op);
}

int sluice_kv_prefetch(sluice_kv_namespace space, const struct sluice_kv_key *keys, size_t count,
		       int64_t timeout_ns, sluice_kv_op *op)
{
	SLGO_NEED(op);
	SLGO_CALL(slgoKVPrefetch, space, (struct sluice_kv_key *)keys, count, timeout_ns, op);
}

int sluice_kv_hint(sluice_kv_namespace space, uint32_t kind, int64_t last_ns,
		   const struct sluice_kv_key *keys, size_t count, int64_t timeout_ns,
		   struct sluice_kv_hint_result *result)
{
	SLGO_CALL(slgoKVHint, space, kind, last_ns, (struct sluice_kv_key *)keys, count, timeout_ns,
		  result);
}

int sluice_kv_hint_envelope(sluice_kv_namespace space, const void *envelope, size_t size,
			    int64_t timeout_ns, void *buffer, size_t capacity, size_t *length)
{
	SLGO_NEED(length);
	SLGO_NEED(buffer || !capacity);
	SLGO_CALL(slgoKVHintEnvelope, space, (uint8_t *)envelope, size, timeout_ns, buffer,
		  capacity, length);
}

int sluice_kv_estimate(sluice_kv_namespace space, const struct sluice_kv_key *keys, size_t count,
		       int64_t timeout_ns, struct sluice_kv_estimate *estimate)
{
	struct sluice_kv_estimate known = {0};
	int code = slgo_copy(&known, sizeof known, SLGO_THROUGH(struct sluice_kv_estimate, time_ns),
			     estimate, "sluice_kv_estimate");
	// what a newer program has room for is nothing that it sets
	if (code && code != SLUICE_ERR_VERSION)
		return code;
	SLGO_CALL(slgoKVEstimate, space, (struct sluice_kv_key *)keys, count, timeout_ns, estimate);
}

int sluice_kv_match_pinned(sluice_kv_namespace space, const struct sluice_kv_key *keys,
			   size_t count, size_t chains, int64_t ttl_ns, int64_t timeout_ns,
			   sluice_kv_token *token, size_t *prefix)
{
	SLGO_NEED(token);
	SLGO_NEED(prefix);
	SLGO_CALL(slgoKVMatchPinned, space, (struct sluice_kv_key *)keys, count, chains, ttl_ns,
		  timeout_ns, token, prefix);
}

int sluice_kv_token_bytes(sluice_kv_token token, void *buffer, size_t capacity, size_t *length)
{
	SLGO_NEED(length);
	SLGO_NEED(buffer || !capacity);
	SLGO_CALL(slgoKVTokenBytes, token, buffer, capacity, length);
}

int sluice_kv_token_close(sluice_kv_token token) { SLGO_CALL(slgoKVTokenClose, token); }

int sluice_kv_load_pinned(sluice_kv_namespace space, const void *token, size_t length, size_t chain,
			  const struct sluice_kv_key *keys, size_t count,
			  const struct sluice_kv_place *place, int64_t timeout_ns, sluice_kv_op *op)
{
	struct sluice_kv_place known = {0};
	int code = slgo_copy(&known, sizeof known, SLGO_THROUGH(struct sluice_kv_place, slots),
			     place, "sluice_kv_place");
	if (code)
		return code;
	SLGO_NEED(op);
	SLGO_CALL(slgoKVLoadPinned, space, (uint8_t *)token, length, chain,
		  (struct sluice_kv_key *)keys, count, &known, timeout_ns, op);
}

int sluice_kv_op_fd(sluice_kv_op op, int *fd)
{
	SLGO_NEED(fd);
	SLGO_CALL(slgoKVOpFd, op, fd);
}

int sluice_kv_op_wait(sluice_kv_op op, int64_t timeout_ns, uint8_t *outcomes, size_t count)
{
	SLGO_CALL(slgoKVOpWait, op, timeout_ns, outcomes, count);
}

int sluice_kv_op_cancel(sluice_kv_op op) { SLGO_CALL(slgoKVOpCancel, op); }

int sluice_kv_op_close(sluice_kv_op op) { SLGO_CALL(slgoKVOpClose, op); }
