// SPDX-License-Identifier: Apache-2.0
// The functions of sluice.h around rings.
#include "_cgo_export.h"
#include "faces.h"

int sluice_ring_open(const struct sluice_ring_config *config, sluice_ring *ring)
{
	struct sluice_ring_config known = {0};
	int code = slgo_copy(&known, sizeof known,
			     SLGO_THROUGH(struct sluice_ring_config, frozen_ns), config,
			     "sluice_ring_config");
	if (code)
		return code;
	SLGO_NEED(ring);
	if (!known.path)
		return slgo_missing("sluice_ring_config.path");
	code = slgoRingOpen(&known, ring, slgo_fault());
	if (!code)
		slgo_watch_exit();
	return code;
}

int sluice_ring_put(sluice_ring ring, const char *key, const struct sluice_ring_part *parts,
		    size_t count, int64_t timeout_ns, struct sluice_ring_handle *handle)
{
	SLGO_NEED(key);
	SLGO_NEED(handle);
	SLGO_CALL(slgoRingPut, ring, (char *)key, (struct sluice_ring_part *)parts, count,
		  timeout_ns, handle);
}

int sluice_ring_hand_out(sluice_ring ring, const char *key, struct sluice_ring_handle *handle)
{
	SLGO_NEED(key);
	SLGO_NEED(handle);
	SLGO_CALL(slgoRingHandOut, ring, (char *)key, handle);
}

int sluice_ring_find(sluice_ring ring, const char *key, struct sluice_ring_handle *handle)
{
	SLGO_NEED(key);
	SLGO_NEED(handle);
	SLGO_CALL(slgoRingFind, ring, (char *)key, handle);
}

int sluice_ring_touch(sluice_ring ring, const char *key)
{
	SLGO_NEED(key);
	SLGO_CALL(slgoRingTouch, ring, (char *)key);
}

int sluice_ring_end_touches(sluice_ring ring) { SLGO_CALL(slgoRingEndTouches, ring); }

int sluice_ring_remove(sluice_ring ring, const char *key)
{
	SLGO_NEED(key);
	SLGO_CALL(slgoRingRemove, ring, (char *)key);
}

int sluice_ring_clear(sluice_ring ring) { SLGO_CALL(slgoRingClear, ring); }

int sluice_ring_stats(sluice_ring ring, void *buffer, size_t capacity, size_t *length)
{
	SLGO_NEED(length);
	SLGO_NEED(buffer || !capacity);
	SLGO_CALL(slgoRingStats, ring, buffer, capacity, length);
}

int sluice_ring_close(sluice_ring ring) { SLGO_CALL(slgoRingClose, ring); }

int sluice_ring_join(const char *path, int64_t timeout_ns, sluice_ring_reader *reader)
{
	SLGO_NEED(path);
	SLGO_NEED(reader);
	SLGO_CALL(slgoRingJoin, (char *)path, timeout_ns, reader);
}

int sluice_ring_note(sluice_ring_reader reader, void *buffer, size_t capacity, size_t *length)
{
	SLGO_NEED(length);
	SLGO_NEED(buffer || !capacity);
	SLGO_CALL(slgoRingNote, reader, buffer, capacity, length);
}

int sluice_ring_gone(sluice_ring_reader reader, int *gone)
{
	SLGO_NEED(gone);
	SLGO_CALL(slgoRingGone, reader, gone);
}

int sluice_ring_get(uint64_t reader, const struct sluice_ring_handle *handle, const void **bytes,
		    uint64_t *length, sluice_ring_view *view)
{
	SLGO_NEED(handle);
	SLGO_NEED(bytes);
	SLGO_NEED(length);
	SLGO_NEED(view);
	SLGO_CALL(slgoRingGet, reader, (struct sluice_ring_handle *)handle, (uint64_t *)bytes,
		  length, view);
}

int sluice_ring_verify(sluice_ring_view view) { SLGO_CALL(slgoRingVerify, view); }

int sluice_ring_view_close(sluice_ring_view view) { SLGO_CALL(slgoRingViewClose, view); }

int sluice_ring_leave(sluice_ring_reader reader) { SLGO_CALL(slgoRingLeave, reader); }
