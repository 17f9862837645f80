/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "load.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

struct sl_ucx_api sl_ucx;

/*
 * UCX reads these in its constructors, so they must stand before dlopen. What the
 * user has set stays.
 */
static void quiet(void)
{
	/* Its handlers of SEGV, BUS, ILL and FPE would end the process where Go turns
	 * a nil dereference into a panic. */
	setenv("UCX_HANDLE_ERRORS", "none", 0);
	/* It would take SIGHUP from the program. */
	setenv("UCX_DEBUG_SIGNO", "0", 0);
	/* Hooks in libc's mmap and munmap see nothing of what Go unmaps, which goes
	 * to the kernel directly: a cache of registrations that trusts them goes stale. */
	setenv("UCX_MEM_EVENTS", "n", 0);
	/* What goes wrong comes back as a status. It would print it, too, and on
	 * standard output. */
	setenv("UCX_LOG_LEVEL", "fatal", 0);
	setenv("UCX_LOG_FILE", "stderr", 0);
}

/* By memory, since ISO C has no cast from void * to a function. */
static int find(void *lib, const char *name, void *slot)
{
	return (*(void **)slot = dlsym(lib, name)) != NULL;
}

int sl_ucx_load(const char *path, char *why, size_t size)
{
	struct sl_ucx_api api;
	unsigned major = 0, minor = 0, release = 0;
	void *lib;

	quiet();
	lib = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
	if (!lib) {
		snprintf(why, size, "%s", dlerror());
		return -ENOENT;
	}
	/* Before the rest: an old library lacks functions because it is old. */
	if (find(lib, "ucp_get_version", &api.ucp_get_version)) {
		api.ucp_get_version(&major, &minor, &release);
		if (major != SL_UCX_MAJOR || minor < SL_UCX_MINOR) {
			snprintf(why, size, "%s is UCX %u.%u.%u, want %d.%d or a later %d.x", path,
				 major, minor, release, SL_UCX_MAJOR, SL_UCX_MINOR, SL_UCX_MAJOR);
			return -EPROTO;
		}
	}
#define X(ret, name, args) \
	if (!find(lib, #name, &api.name)) { \
		snprintf(why, size, "%s has no function %s", path, #name); \
		return -ENOSYS; \
	}
	SL_UCX_CALLS(X)
#undef X
	sl_ucx = api;
	return 0;
}
