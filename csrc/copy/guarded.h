/* SPDX-License-Identifier: Apache-2.0 */
/* The copies of copy.h behind a guard. -EFAULT: memory is gone; some bytes were copied. */
#ifndef SLUICE_COPY_GUARDED_H
#define SLUICE_COPY_GUARDED_H

#include "../guard.h"
#include "copy.h"

/* What a stream has stored is in its place before anyone is told of the fault. */
#define SL_GUARDED(local, local_len, remote, remote_len, call)                                     \
	struct sl_guard g;                                                                         \
	int rc;                                                                                    \
                                                                                                   \
	sl_guard_over(&g, local, local_len, remote, remote_len);                                   \
	if (setjmp(g.back)) {                                                                      \
		sl_copy_fence(0);                                                                  \
		return -EFAULT;                                                                    \
	}                                                                                          \
	sl_guard_arm(&g);                                                                          \
	rc = call;                                                                                 \
	sl_guard_disarm();                                                                         \
	return rc

static inline int
sl_guarded_descs(uint8_t *local, uint64_t local_len, uint8_t *remote, uint64_t remote_len,
		 const struct sl_desc *d, size_t n, int to_remote, uint64_t stream_from)
{
	SL_GUARDED(local, local_len, remote, remote_len,
		   sl_copy_descs(local, local_len, remote, remote_len, d, n, to_remote,
				 stream_from));
}

static inline int
sl_guarded_pages(uint8_t *local, uint64_t local_len, uint8_t *remote, uint64_t remote_len,
		 const uint32_t *local_index, uint64_t local_base, uint64_t local_stride,
		 const uint32_t *remote_index, uint64_t remote_base, uint64_t remote_stride,
		 uint64_t entry_len, size_t first, size_t n, int to_remote, uint64_t stream_from)
{
	SL_GUARDED(local, local_len, remote, remote_len,
		   sl_copy_pages(local, local_len, remote, remote_len, local_index, local_base,
				 local_stride, remote_index, remote_base, remote_stride, entry_len,
				 first, n, to_remote, stream_from));
}

static inline int
sl_guarded_nest(uint8_t *local, uint64_t local_len, uint8_t *remote, uint64_t remote_len,
		const struct sl_copy_side *sides, const uint32_t *local_list,
		const uint32_t *remote_list, const struct sl_copy_loop *loops, int loop_count,
		uint64_t run, uint64_t first, uint64_t n, int to_remote, uint64_t stream_from)
{
	SL_GUARDED(local, local_len, remote, remote_len,
		   sl_copy_nest(local, local_len, remote, remote_len, sides, local_list,
				remote_list, loops, loop_count, run, first, n, to_remote,
				stream_from));
}

static __attribute__((noinline)) int sl_copy_one(uint8_t *dst, const uint8_t *src, uint64_t len)
{
	sl_copy_stream(dst, src, len);
	sl_copy_fence(0);
	return 0;
}

static inline int sl_guarded_stream(uint8_t *dst, const uint8_t *src, uint64_t len)
{
	SL_GUARDED(dst, len, src, len, sl_copy_one(dst, src, len));
}

#endif
