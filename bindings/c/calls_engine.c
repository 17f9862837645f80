// SPDX-License-Identifier: Apache-2.0
// The functions of sluice.h around engines, memory, regions and leases.
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

#include "_cgo_export.h"
#include "faces.h"

// The sizes of version 1 are the least that a program can have.
enum {
	CONFIG_LEAST = SLGO_THROUGH(struct sluice_config, handshakes_max),
	ALLOC_LEAST = SLGO_THROUGH(struct sluice_alloc_options, reserved),
	SEGMENT_LEAST = SLGO_THROUGH(struct sluice_segment, file),
	LEASE_LEAST = SLGO_THROUGH(struct sluice_lease_options, ttl_ns),
};

// The Go runtime needs a stack for its signals in each thread that it runs on, and ends the process
// without. Python's faulthandler has disabled that of the main thread by now.
static void give_signal_stack(void)
{
	static char room[64 << 10];
	stack_t known = {0}, ours = {.ss_sp = room, .ss_size = sizeof room};
	if (!sigaltstack(NULL, &known) && known.ss_flags & SS_DISABLE)
		(void)sigaltstack(&ours, NULL);
}

static void at_exit(void)
{
	if (slgo_check_fork())
		return;
	give_signal_stack();
	slgoExit();
}

static void watch_exit(void) { (void)atexit(at_exit); }

void slgo_watch_exit(void)
{
	static pthread_once_t watched = PTHREAD_ONCE_INIT;
	pthread_once(&watched, watch_exit);
}

int sluice_open(const struct sluice_config *config, sluice_engine *engine)
{
	struct sluice_config known = {0};
	int code = slgo_copy(&known, sizeof known, CONFIG_LEAST, config, "sluice_config");
	if (code)
		return code;
	SLGO_NEED(engine);
	code = slgoOpen(&known, engine, slgo_fault());
	if (!code) // behind what backends have loaded, which must not end before them
		slgo_watch_exit();
	return code;
}

int sluice_close(sluice_engine engine) { SLGO_CALL(slgoClose, engine); }

int sluice_stats(sluice_engine engine, void *buffer, size_t capacity, size_t *length)
{
	SLGO_NEED(length);
	SLGO_NEED(buffer || !capacity);
	SLGO_CALL(slgoStats, engine, buffer, capacity, length);
}

int sluice_alloc(sluice_engine engine, const struct sluice_alloc_options *options, uint64_t length,
		 sluice_memory *memory, void **address)
{
	struct sluice_alloc_options known = {0};
	uint64_t at = 0;
	int code =
	    options ? slgo_copy(&known, sizeof known, ALLOC_LEAST, options, "sluice_alloc_options")
		    : slgo_check_fork();
	if (code)
		return code;
	SLGO_NEED(memory);
	SLGO_NEED(address);
	code = slgoAlloc(engine, &known, length, memory, &at, slgo_fault());
	if (!code)
		*address = (void *)(uintptr_t)at;
	return code;
}

int sluice_memory_close(sluice_memory memory) { SLGO_CALL(slgoMemoryClose, memory); }

int sluice_register(sluice_engine engine, const char *name, const struct sluice_segment *segment,
		    sluice_region *region)
{
	struct sluice_segment known = {0};
	int code = slgo_copy(&known, sizeof known, SEGMENT_LEAST, segment, "sluice_segment");
	if (code)
		return code;
	SLGO_NEED(name);
	SLGO_NEED(region);
	SLGO_CALL(slgoRegister, engine, (char *)name, &known, region);
}

int sluice_register_many(sluice_engine engine, const char *const *names,
			 const struct sluice_segment *segments, size_t count,
			 sluice_region *regions)
{
	int code = slgo_check_fork();
	if (code || !count)
		return code;
	SLGO_NEED(names);
	SLGO_NEED(segments);
	SLGO_NEED(regions);
	struct sluice_segment *known = calloc(count, sizeof *known);
	if (!known)
		return slgo_refuse(SLUICE_ERR_SYSTEM, "no memory for that many segments");
	for (size_t i = 0; i < count && !code; i++) {
		const void *given = (const char *)segments + i * segments->size;
		code = slgo_copy(known + i, sizeof *known, SEGMENT_LEAST, given, "sluice_segment");
		if (!code && ((const struct sluice_segment *)given)->size != segments->size)
			code = slgo_refuse(SLUICE_ERR_ARGUMENT,
					   "segments differ in size: they are one array");
	}
	if (!code)
		code = slgoRegisterMany(engine, (char **)names, known, count, regions,
					slgo_fault());
	free(known);
	return code;
}

int sluice_region_close(sluice_region region) { SLGO_CALL(slgoRegionClose, region); }

int sluice_region_close_many(const sluice_region *regions, size_t count)
{
	SLGO_CALL(slgoRegionCloseMany, (uint64_t *)regions, count);
}

int sluice_lease_grant(sluice_region region, uint64_t offset, uint64_t length,
		       const struct sluice_lease_options *options, sluice_lease *lease)
{
	struct sluice_lease_options known = {0};
	int code =
	    options ? slgo_copy(&known, sizeof known, LEASE_LEAST, options, "sluice_lease_options")
		    : slgo_check_fork();
	if (code)
		return code;
	SLGO_NEED(lease);
	SLGO_CALL(slgoLeaseGrant, region, offset, length, &known, lease);
}

int sluice_lease_token(sluice_lease lease, void *buffer, size_t capacity, size_t *length)
{
	SLGO_NEED(length);
	SLGO_NEED(buffer || !capacity);
	SLGO_CALL(slgoLeaseToken, lease, buffer, capacity, length);
}

int sluice_lease_ended(sluice_lease lease, int *ended)
{
	SLGO_NEED(ended);
	SLGO_CALL(slgoLeaseEnded, lease, ended);
}

int sluice_lease_revoke(sluice_lease lease, int64_t timeout_ns)
{
	SLGO_CALL(slgoLeaseRevoke, lease, timeout_ns);
}
