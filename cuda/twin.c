/* SPDX-License-Identifier: Apache-2.0 */
#include "twin.h"

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/*
 * How many entries ahead are fetched: enough for the misses of one to be over when its turn
 * comes, few enough for the buffers that misses wait in.
 */
#define AHEAD 8u
/* Above this the hardware's prefetcher follows by itself. */
#define FETCH_MAX 4096u
/*
 * A scatter over at least as much goes past the caches: they will not hold it, and a line
 * that is overwritten need not be read. Below it, later readers find it in a cache.
 */
#define PAST_MIN (128ull << 20)
#define LINE 64u

/* A line at any address. Where registers are as wide, one load and one store. */
typedef long long line __attribute__((vector_size(LINE), aligned(1), may_alias));

/* The two ends of one part. */
struct ends {
	const struct sl_move *m;
	const struct sl_part *p;
	uint8_t *dst;
	const uint8_t *src;
	const void *dst_index, *src_index;
	int past; /* the caches */
};

/* Where an entry goes and comes from; NULL: nowhere. */
struct way {
	uint8_t *dst;
	const uint8_t *src;
};

static inline uint64_t at(const void *list, int wide, uint64_t i)
{
	if (!list)
		return i;
	return wide ? ((const uint64_t *)list)[i] : ((const uint32_t *)list)[i];
}

static inline int skips(const void *list, int wide, uint64_t index)
{
	return list && index == (wide ? SL_SKIP : 0xffffffffull);
}

#if defined(__x86_64__)
#define NAME(x) x##_128
#define TARGET
#define STREAM(dst, src) \
	for (unsigned b = 0; b < LINE; b += 16) \
	_mm_stream_si128((__m128i *)((dst) + b), _mm_loadu_si128((const __m128i *)((src) + b)))
#include "twin_move.h"

#define NAME(x) x##_512
#define TARGET __attribute__((target("avx512f")))
#define STREAM(dst, src) _mm512_stream_si512((void *)(dst), _mm512_loadu_si512(src))
#include "twin_move.h"

static void move(const struct ends *e, uint64_t first, uint64_t end, struct sl_tally *t)
{
	if (__builtin_cpu_supports("avx512f"))
		move_512(e, first, end, t);
	else
		move_128(e, first, end, t);
	if (e->past)
		_mm_sfence(); /* what was streamed is there before the caller says so to others */
}
#else
#define NAME(x) x##_any
#define TARGET
#define STREAM(dst, src) *(line *)(dst) = *(const line *)(src)
#include "twin_move.h"

static void move(const struct ends *e, uint64_t first, uint64_t end, struct sl_tally *t)
{
	move_any(e, first, end, t);
}
#endif

void sl_twin_move(const struct sl_move *m, sl_u64 first, sl_u64 n, unsigned char *dst0,
		  const unsigned char *src0, unsigned char *dst1, const unsigned char *src1,
		  const unsigned char *dst_index, const unsigned char *src_index,
		  struct sl_tally *tally)
{
	for (uint32_t k = 0; k < m->parts; k++) {
		struct ends e =
		    {m, &m->part[k], k ? dst1 : dst0, k ? src1 : src0, dst_index, src_index, 0};

		e.past = dst_index && m->dst_places * e.p->dst_stride >= PAST_MIN;
		move(&e, first, first + n, k ? NULL : tally);
	}
}
