/* SPDX-License-Identifier: Apache-2.0 */
#include "sluice.h"

#include <errno.h>
#include <string.h>

/*
 * How far ahead scattered entries are fetched. Where the pieces of a batch lie
 * is known, so the misses of several can be under way at a time. Fetching the
 * entry ahead line by line, between the lines that are copied, is worth a factor
 * of two over fetching it at once: that only waits for fill buffers.
 */
#define AHEAD 4
/* Above this the hardware prefetcher follows by itself. */
#define FETCH_MAX 4096
#define LINE 64

static int within(uint64_t off, uint64_t len, uint64_t size)
{
	return off <= size && len <= size - off;
}

/* What is copied next but some: fetched, not touched. len 0: nothing. */
struct ahead {
	const uint8_t *src, *dst;
	uint64_t len;
};

/*
 * Inlined, and its tail by words: a call would wait for room in the store buffer,
 * which the stores of earlier entries fill while they miss. That is 80 of 180 ns.
 */
static inline __attribute__((always_inline)) void
copy(uint8_t *restrict dst, const uint8_t *restrict src, uint64_t len, struct ahead a)
{
	uint64_t i = 0, fetched = a.len < len ? a.len : len;

	if (len > FETCH_MAX || a.len > FETCH_MAX || a.len == 0) {
		memcpy(dst, src, len);
		return;
	}
	for (; i + LINE <= fetched; i += LINE) {
		__builtin_prefetch(a.src + i, 0);
		__builtin_prefetch(a.dst + i, 0);
		memcpy(dst + i, src + i, LINE);
	}
	__builtin_prefetch(a.src + fetched - 1, 0);
	__builtin_prefetch(a.dst + fetched - 1, 0);
	for (; i + 8 <= len; i += 8)
		memcpy(dst + i, src + i, 8);
	for (; i < len; i++)
		dst[i] = src[i];
}

int sl_copy_descs(uint8_t *local, uint64_t local_len, uint8_t *remote, uint64_t remote_len,
		  const struct sl_desc *d, size_t n, int to_remote)
{
	for (size_t i = 0; i < n; i++)
		if (!within(d[i].local, d[i].len, local_len) || !within(d[i].remote, d[i].len, remote_len))
			return -ERANGE;
	for (size_t i = 0; i < n;) {
		uint64_t l = d[i].local, r = d[i].remote, len = d[i].len;
		size_t j = i + 1;

		while (j < n && d[j].local == l + len && d[j].remote == r + len)
			len += d[j++].len;
		uint8_t *dst = to_remote ? remote + r : local + l;
		const uint8_t *src = to_remote ? local + l : remote + r;
		struct ahead a = {0};

		if (j + AHEAD - 1 < n) {
			const struct sl_desc *f = &d[j + AHEAD - 1];

			a.src = to_remote ? local + f->local : remote + f->remote;
			a.dst = to_remote ? remote + f->remote : local + f->local;
			a.len = f->len;
		}
		copy(dst, src, len, a);
		i = j;
	}
	return 0;
}

static uint64_t at(const uint32_t *index, size_t i)
{
	return index ? index[i] : i;
}

int sl_copy_pages(uint8_t *local, uint64_t local_len, uint8_t *remote, uint64_t remote_len,
		  const uint32_t *local_index, uint64_t local_base, uint64_t local_stride,
		  const uint32_t *remote_index, uint64_t remote_base, uint64_t remote_stride,
		  uint64_t entry_len, size_t first, size_t n, int to_remote)
{
	uint8_t *dst = to_remote ? remote : local, *src = to_remote ? local : remote;
	uint64_t dst_len = to_remote ? remote_len : local_len, src_len = to_remote ? local_len : remote_len;
	const uint32_t *di = to_remote ? remote_index : local_index, *si = to_remote ? local_index : remote_index;
	uint64_t db = to_remote ? remote_base : local_base, sb = to_remote ? local_base : remote_base;
	uint64_t ds = to_remote ? remote_stride : local_stride, ss = to_remote ? local_stride : remote_stride;
	size_t end = first + n;

	for (size_t i = first; i < end;) {
		uint64_t d = db + at(di, i) * ds, s = sb + at(si, i) * ss, len = entry_len;
		size_t j = i + 1;

		while (j < end && db + at(di, j) * ds == d + len && sb + at(si, j) * ss == s + len) {
			len += entry_len;
			j++;
		}
		if (!within(d, len, dst_len) || !within(s, len, src_len))
			return -ERANGE;
		struct ahead a = {0};

		if (j + AHEAD - 1 < end) {
			a.src = src + sb + at(si, j + AHEAD - 1) * ss;
			a.dst = dst + db + at(di, j + AHEAD - 1) * ds;
			a.len = entry_len;
		}
		copy(dst + d, src + s, len, a);
		i = j;
	}
	return 0;
}
