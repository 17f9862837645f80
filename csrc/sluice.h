/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The C data plane of sluice. Every function returns 0 or -errno, never prints,
 * keeps no state, allocates nothing and never calls back.
 */
#ifndef SLUICE_H
#define SLUICE_H

#include <stddef.h>
#include <stdint.h>

/* One contiguous copy; the same bytes as driver.Desc. */
struct sl_desc {
	uint64_t local, remote, len;
	uint32_t local_key, remote_key;
};
_Static_assert(sizeof(struct sl_desc) == 32, "sl_desc crosses from Go as it is");
_Static_assert(offsetof(struct sl_desc, local_key) == 24, "sl_desc crosses from Go as it is");

#define SL_LOOPS_MAX 3

/* A loop of a pattern, as driver.Loop. */
struct sl_loop {
	uint32_t n;
	uint64_t local, remote;
};

/*
 * A pattern, as driver.Pattern; the lists are beside it, and may be NULL. Entry is the bytes
 * of a run.
 */
struct sl_pages {
	uint64_t count, entry;
	uint64_t local_base, remote_base, local_stride, remote_stride;
	uint32_t local_key, remote_key;
};

/* What a pattern that is not plain has besides. */
struct sl_nest {
	uint32_t runs, loops; /* of an entry */
	struct sl_loop loop[SL_LOOPS_MAX];
	uint32_t local_first, local_per, remote_first, remote_per;
	uint64_t local_step, remote_step;
};

#endif
