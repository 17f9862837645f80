/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libucp, opened at run time. UCX stays loaded for the life of the process: its
 * threads and its constructors do not survive dlclose.
 */
#ifndef SLUICE_UCX_LOAD_H
#define SLUICE_UCX_LOAD_H

#include "abi.h"
#include "calls.h"

struct sl_ucx_api {
#define X(ret, name, args) ret(*name) args;
	SL_UCX_CALLS(X)
#undef X
};

/* All set or all NULL. Written once, by sl_ucx_load. */
extern struct sl_ucx_api sl_ucx;

/*
 * Opens the library and fills the table: all of it or nothing. The caller sees
 * to it that only one call runs, and none after one that returned 0.
 * -ENOENT: dlopen failed; -ENOSYS: a function is missing; -EPROTO: too old. why is then the
 * reason in words, cut at size.
 */
int sl_ucx_load(const char *path, char *why, size_t size);

#endif
