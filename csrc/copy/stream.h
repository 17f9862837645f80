/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A contiguous copy whose stores go past the caches: the processor does not read the lines that it
 * overwrites, and keeps the other lines in its caches. way.go says when it is used. It reads,
 * fetches and writes no byte outside its ranges, which must not overlap.
 */
#ifndef SLUICE_COPY_STREAM_H
#define SLUICE_COPY_STREAM_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Bytes of a turn of the loop, and how far ahead of it the source is fetched. */
#define SL_COPY_TURN 256
#define SL_COPY_FETCH 512
#define SL_COPY_ALIGN 64

#if defined(__x86_64__)
#include <immintrin.h>

static inline void sl_copy_fetch(const uint8_t *src, uint64_t i, uint64_t len)
{
	const uint8_t *at = src + (i + SL_COPY_FETCH + SL_COPY_TURN <= len ? i + SL_COPY_FETCH : i);

	for (int k = 0; k < SL_COPY_TURN; k += SL_COPY_ALIGN)
		_mm_prefetch((const char *)at + k, _MM_HINT_T0);
}

/* Copies whole turns to an aligned place, count registers at a time. Returns their bytes. */
#define SL_COPY_TURNS(name, isa, reg, count, load, store)                                          \
	static inline __attribute__((target(isa))) uint64_t name(uint8_t *restrict dst,            \
								 const uint8_t *restrict src,      \
								 uint64_t len)                     \
	{                                                                                          \
		uint64_t i = 0;                                                                    \
                                                                                                   \
		while (i + SL_COPY_TURN <= len) {                                                  \
			uint64_t end = i + SL_COPY_TURN;                                           \
                                                                                                   \
			for (sl_copy_fetch(src, i, len); i < end; i += count * sizeof(reg)) {      \
				reg r[count];                                                      \
                                                                                                   \
				_Pragma("GCC unroll 8") for (size_t k = 0; k < count; k++) r[k] =  \
				    load((const void *)(src + i + k * sizeof(reg)));               \
				_Pragma("GCC unroll 8") for (size_t k = 0; k < count; k++)         \
				    store((void *)(dst + i + k * sizeof(reg)), r[k]);              \
			}                                                                          \
		}                                                                                  \
		return i;                                                                          \
	}

/* Whole lines at a time are a sixth faster than quarters of them, which all processors have. */
SL_COPY_TURNS(sl_copy_wide, "avx512f", __m512i, 4, _mm512_loadu_si512, _mm512_stream_si512)
SL_COPY_TURNS(sl_copy_narrow, "sse2", __m128i, 8, _mm_loadu_si128, _mm_stream_si128)

static inline uint64_t sl_copy_turns(uint8_t *restrict dst, const uint8_t *restrict src,
				     uint64_t len)
{
	return __builtin_cpu_supports("avx512f") ? sl_copy_wide(dst, src, len)
						 : sl_copy_narrow(dst, src, len);
}
#elif defined(__aarch64__)
static inline uint64_t sl_copy_turns(uint8_t *restrict dst, const uint8_t *restrict src,
				     uint64_t len)
{
	uint64_t i = 0;

	for (; i + 64 <= len; i += 64)
		__asm__ volatile("ldp q0, q1, [%1]\n\tldp q2, q3, [%1, #32]\n\t"
				 "stnp q0, q1, [%0]\n\tstnp q2, q3, [%0, #32]"
				 :
				 : "r"(dst + i), "r"(src + i)
				 : "v0", "v1", "v2", "v3", "memory");
	return i;
}
#else
static inline uint64_t sl_copy_turns(uint8_t *restrict dst, const uint8_t *restrict src,
				     uint64_t len)
{
	(void)dst, (void)src, (void)len;
	return 0;
}
#endif

/* Copies one run. sl_copy_fence comes behind the last, before anything says that it is there. */
static __attribute__((noinline, unused)) void
sl_copy_stream(uint8_t *restrict dst, const uint8_t *restrict src, uint64_t len)
{
	uint64_t done = -(uintptr_t)dst % SL_COPY_ALIGN;

	if (len < SL_COPY_ALIGN + SL_COPY_TURN) {
		memcpy(dst, src, len);
		return;
	}
	memcpy(dst, src, done);
	done += sl_copy_turns(dst + done, src + done, len - done);
	memcpy(dst + done, src + done, len - done);
}

/*
 * Orders the stores of streams, if runs were streamed at all, before those that follow. On arm64
 * they are ordinary stores.
 */
static inline void sl_copy_fence(uint64_t stream_from)
{
#if defined(__x86_64__)
	if (stream_from != UINT64_MAX)
		_mm_sfence();
#else
	(void)stream_from;
#endif
}

#endif
