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

/*
 * Copies n descriptors from src to dst. to_remote says that local offsets name
 * the source. Adjacent descriptors become one copy. -ERANGE: a descriptor
 * leaves a span, and nothing was copied.
 */
int sl_copy_descs(uint8_t *local, uint64_t local_len, uint8_t *remote, uint64_t remote_len,
		  const struct sl_desc *d, size_t n, int to_remote);

/* A pattern, as driver.Pages; the lists are beside it, and may be NULL. */
struct sl_pages {
	uint64_t count, entry;
	uint64_t local_base, remote_base, local_stride, remote_stride;
	uint32_t local_key, remote_key;
};

/*
 * Copies entries [first, first + n) of a pattern. A list may be NULL: then
 * index[i] is i. -ERANGE: an entry leaves a span; what went before it was copied.
 */
int sl_copy_pages(uint8_t *local, uint64_t local_len, uint8_t *remote, uint64_t remote_len,
		  const uint32_t *local_index, uint64_t local_base, uint64_t local_stride,
		  const uint32_t *remote_index, uint64_t remote_base, uint64_t remote_stride,
		  uint64_t entry_len, size_t first, size_t n, int to_remote);

#endif
