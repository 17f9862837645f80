/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "load.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>

struct sl_verbs_api sl_verbs;

/* By memory, since ISO C has no cast from void * to a function. */
static int find(void *lib, const char *name, const char *version, void *slot)
{
	return (*(void **)slot = dlvsym(lib, name, version)) != NULL;
}

int sl_verbs_load(const char *path, char *why, size_t size)
{
	struct sl_verbs_api api;
	void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);

	if (!lib) {
		snprintf(why, size, "%s", dlerror());
		return -ENOENT;
	}
#define X(version, ret, name, args) \
	if (!find(lib, #name, version, &api.name)) { \
		snprintf(why, size, "%s has no function %s of version %s", path, #name, version); \
		return -ENOSYS; \
	}
	SL_VERBS_CALLS(X)
#undef X
#define X(version, ret, name, args) (void)find(lib, #name, version, &api.name);
	SL_VERBS_OPTIONAL_CALLS(X)
#undef X
	sl_verbs = api;
	return 0;
}

int sl_verbs_devices(void)
{
	int n = 0;
	struct ibv_device **list;

	errno = 0;
	list = sl_verbs.ibv_get_device_list(&n);
	if (!list)
		return errno ? -errno : -ENOSYS;
	sl_verbs.ibv_free_device_list(list);
	return n;
}
