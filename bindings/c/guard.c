// SPDX-License-Identifier: Apache-2.0
// Forks, the text of the last error of each thread, and the sizes of structs.
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "faces.h"

static __thread struct slgo_fault fault;

struct slgo_fault *slgo_fault(void) { return &fault; }

const char *sluice_error(void) { return fault.text; }

uint32_t sluice_abi_version(void) { return SLUICE_ABI_VERSION; }

const char *sluice_version(void) { return SLUICE_VERSION; }

// Written by the child before it has any other thread, so a plain word will do.
static volatile int forked;

static void in_child(void) { forked = 1; }

// The library cannot be unloaded, so the handler is never left behind.
__attribute__((constructor)) static void watch_forks(void)
{
	(void)pthread_atfork(NULL, NULL, in_child);
}

int slgo_check_fork(void)
{
	if (!forked)
		return 0;
	return slgo_refuse(
	    SLUICE_ERR_FORK,
	    "this process was forked from one that had loaded sluice, and the threads that "
	    "do the work stayed there: call exec, or fork before the library is loaded");
}

int slgo_refuse(int code, const char *text)
{
	snprintf(fault.text, sizeof fault.text, "%s", text);
	return code;
}

int slgo_missing(const char *name)
{
	int code = slgo_check_fork();
	if (code)
		return code;
	snprintf(fault.text, sizeof fault.text, "%s is NULL", name);
	return SLUICE_ERR_ARGUMENT;
}

int slgo_copy(void *known, size_t known_size, size_t least, const void *given, const char *name)
{
	uint32_t size;
	int code = slgo_check_fork();
	if (code)
		return code;
	if (!given)
		return slgo_missing(name);
	memcpy(&size, given, sizeof size);
	if (size < least || size > 4096) {
		snprintf(fault.text, sizeof fault.text,
			 "%s.size is %u, at least %zu: set it to sizeof(struct %s)", name, size,
			 least, name);
		return SLUICE_ERR_ARGUMENT;
	}
	for (size_t i = known_size; i < size; i++) {
		if (((const unsigned char *)given)[i]) {
			snprintf(fault.text, sizeof fault.text,
				 "%s: a field at offset %zu is set, which this library (version %d "
				 "of the ABI) does not know: use a newer one",
				 name, i, SLUICE_ABI_VERSION);
			return SLUICE_ERR_VERSION;
		}
	}
	memcpy(known, given, size < known_size ? size : known_size);
	return 0;
}

const char *sluice_code_name(int code)
{
	static const char *const names[] = {
	    "SLUICE_OK",
	    "SLUICE_ERR_HANDLE",
	    "SLUICE_ERR_ARGUMENT",
	    "SLUICE_ERR_FORK",
	    "SLUICE_ERR_SPACE",
	    "SLUICE_ERR_SYSTEM",
	    "SLUICE_ERR_CLOSED",
	    "SLUICE_ERR_UNAVAILABLE",
	    "SLUICE_ERR_NOT_SUPPORTED",
	    "SLUICE_ERR_FULL",
	    "SLUICE_ERR_BUSY",
	    "SLUICE_ERR_BOUNDS",
	    "SLUICE_ERR_PEER_LOST",
	    "SLUICE_ERR_ABORTED",
	    "SLUICE_ERR_REVOKED",
	    "SLUICE_ERR_VERSION",
	    "SLUICE_ERR_NO_ROUTE",
	    "SLUICE_ERR_CORRUPT",
	    "SLUICE_ERR_TOKEN",
	    "SLUICE_ERR_UNPROVEN",
	    "SLUICE_ERR_READ_ONLY",
	    "SLUICE_ERR_TIMEOUT",
	    "SLUICE_ERR_FAULT",
	    "SLUICE_ERR_MISSING",
	};
	if (code == SLUICE_PENDING)
		return "SLUICE_PENDING";
	if (code > 0 || code <= -(int)(sizeof names / sizeof *names))
		return "unknown";
	return names[-code];
}
