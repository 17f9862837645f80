/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Variants of one contiguous copy. Which of them is fast, from which length on, differs between
 * processors and libraries: choice.go measures it. Variants that stream store past the caches:
 * sl_copy_fence comes behind the last of them, before anything says that the bytes are there.
 * No variant reads, fetches or writes a byte outside its range; the ranges must not overlap.
 */
#ifndef SLUICE_COPY_VARIANTS_H
#define SLUICE_COPY_VARIANTS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

/* The numbers of copy.Variant. */
enum sl_copy_variant {
	SL_COPY_LIBC,
	SL_COPY_MOVSB,
	SL_COPY_AVX2,
	SL_COPY_AVX2_STREAM,
	SL_COPY_AVX512,
	SL_COPY_AVX512_STREAM,
	SL_COPY_PAIRS,
	SL_COPY_PAIRS_STREAM,
	SL_COPY_VARIANTS,
};

/* How the long runs of a batch are copied: those of at least so many bytes. */
struct sl_copy_way {
	uint64_t run;
	enum sl_copy_variant variant;
};

/* Bytes of a turn of a loop, and how far ahead of it the source is fetched. */
#define SL_COPY_TURN 256
#define SL_COPY_FETCH 512
#define SL_COPY_ALIGN 64

#if defined(__x86_64__)
static inline void sl_copy_fetch(const uint8_t *src, uint64_t i, uint64_t len)
{
	const uint8_t *at = src + (i + SL_COPY_FETCH + SL_COPY_TURN <= len ? i + SL_COPY_FETCH : i);

	for (int k = 0; k < SL_COPY_TURN; k += SL_COPY_ALIGN)
		_mm_prefetch((const char *)at + k, _MM_HINT_T0);
}

/* Copies whole turns to an aligned place, and returns how many bytes that were. */
#define SL_COPY_TURNS(name, isa, reg, load, store)                                                 \
	static inline __attribute__((target(isa))) uint64_t name(uint8_t *restrict dst,            \
								 const uint8_t *restrict src,      \
								 uint64_t len)                     \
	{                                                                                          \
		uint64_t i = 0;                                                                    \
                                                                                                   \
		for (; i + SL_COPY_TURN <= len; i += SL_COPY_TURN) {                               \
			reg r[SL_COPY_TURN / sizeof(reg)];                                         \
                                                                                                   \
			sl_copy_fetch(src, i, len);                                                \
			_Pragma("GCC unroll 8") for (size_t k = 0; k < SL_COPY_TURN / sizeof(reg); \
						     k++) r[k] =                                   \
			    load((const void *)(src + i + k * sizeof(reg)));                       \
			_Pragma("GCC unroll 8") for (size_t k = 0; k < SL_COPY_TURN / sizeof(reg); \
						     k++)                                          \
			    store((void *)(dst + i + k * sizeof(reg)), r[k]);                      \
		}                                                                                  \
		return i;                                                                          \
	}

SL_COPY_TURNS(sl_copy_avx2, "avx2", __m256i, _mm256_loadu_si256, _mm256_store_si256)
SL_COPY_TURNS(sl_copy_avx2_stream, "avx2", __m256i, _mm256_loadu_si256, _mm256_stream_si256)
SL_COPY_TURNS(sl_copy_avx512, "avx512f", __m512i, _mm512_loadu_si512, _mm512_store_si512)
SL_COPY_TURNS(sl_copy_avx512_stream, "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512)
#elif defined(__aarch64__)
#define SL_COPY_TURNS(name, store)                                                                 \
	static inline uint64_t name(uint8_t *restrict dst, const uint8_t *restrict src,            \
				    uint64_t len)                                                  \
	{                                                                                          \
		uint64_t i = 0;                                                                    \
                                                                                                   \
		for (; i + 64 <= len; i += 64)                                                     \
			__asm__ volatile("ldp q0, q1, [%1]\n\tldp q2, q3, [%1, #32]\n\t" store     \
					 " q0, q1, [%0]\n\t" store " q2, q3, [%0, #32]"            \
					 :                                                         \
					 : "r"(dst + i), "r"(src + i)                              \
					 : "v0", "v1", "v2", "v3", "memory");                      \
		return i;                                                                          \
	}

SL_COPY_TURNS(sl_copy_pairs, "stp")
SL_COPY_TURNS(sl_copy_pairs_stream, "stnp")
#endif

/* Whether this processor and its kernel have what a variant needs. */
static inline int sl_copy_has(enum sl_copy_variant v)
{
#if defined(__x86_64__)
	unsigned a, b = 0, c, d;

	switch (v) {
	case SL_COPY_LIBC:
		return 1;
	case SL_COPY_MOVSB: /* anywhere, but slow without ERMS */
		return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & 1u << 9);
	case SL_COPY_AVX2:
	case SL_COPY_AVX2_STREAM:
		return __builtin_cpu_supports("avx2") != 0;
	case SL_COPY_AVX512:
	case SL_COPY_AVX512_STREAM:
		return __builtin_cpu_supports("avx512f") != 0;
	default:
		return 0;
	}
#elif defined(__aarch64__)
	return v == SL_COPY_LIBC || v == SL_COPY_PAIRS || v == SL_COPY_PAIRS_STREAM;
#else
	return v == SL_COPY_LIBC;
#endif
}

static inline uint64_t sl_copy_turns(uint8_t *restrict dst, const uint8_t *restrict src,
				     uint64_t len, enum sl_copy_variant v)
{
	switch (v) {
#if defined(__x86_64__)
	case SL_COPY_AVX2:
		return sl_copy_avx2(dst, src, len);
	case SL_COPY_AVX2_STREAM:
		return sl_copy_avx2_stream(dst, src, len);
	case SL_COPY_AVX512:
		return sl_copy_avx512(dst, src, len);
	case SL_COPY_AVX512_STREAM:
		return sl_copy_avx512_stream(dst, src, len);
#elif defined(__aarch64__)
	case SL_COPY_PAIRS:
		return sl_copy_pairs(dst, src, len);
	case SL_COPY_PAIRS_STREAM:
		return sl_copy_pairs_stream(dst, src, len);
#endif
	default:
		return 0;
	}
}

/* Copies one run. The processor has the variant; a stream is not fenced. */
static __attribute__((noinline, unused)) void
sl_copy_by(uint8_t *restrict dst, const uint8_t *restrict src, uint64_t len,
	   enum sl_copy_variant v)
{
	uint64_t head = -(uintptr_t)dst % SL_COPY_ALIGN;

	if (v == SL_COPY_LIBC || len < SL_COPY_ALIGN + SL_COPY_TURN) {
		memcpy(dst, src, len);
		return;
	}
#if defined(__x86_64__)
	if (v == SL_COPY_MOVSB) {
		__asm__ volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(len) : : "memory");
		return;
	}
#endif
	memcpy(dst, src, head);
	head += sl_copy_turns(dst + head, src + head, len - head, v);
	memcpy(dst + head, src + head, len - head);
}

/* Orders the stores of a stream before those that follow. On arm64 they are ordinary stores. */
static inline void sl_copy_fence(enum sl_copy_variant v)
{
#if defined(__x86_64__)
	if (v == SL_COPY_AVX2_STREAM || v == SL_COPY_AVX512_STREAM)
		_mm_sfence();
#else
	(void)v;
#endif
}

/* Takes a range out of all caches. Returns 0 where that cannot be done. */
static inline int sl_copy_evict(const uint8_t *mem, uint64_t len)
{
#if defined(__x86_64__)
	for (uint64_t i = 0; i < len; i += SL_COPY_ALIGN)
		_mm_clflush(mem + i);
	_mm_mfence();
	return 1;
#elif defined(__aarch64__)
	for (uint64_t i = 0; i < len; i += SL_COPY_ALIGN)
		__asm__ volatile("dc civac, %0" : : "r"(mem + i) : "memory");
	__asm__ volatile("dsb ish" : : : "memory");
	return 1;
#else
	(void)mem, (void)len;
	return 0;
#endif
}

#endif
