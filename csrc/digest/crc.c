/* SPDX-License-Identifier: Apache-2.0 */
/*
 * CRC-32C by carry-less products. Bytes are a polynomial, first bit first; a part of it that lies D
 * bits before another may be replaced by what has the same remainder there, and is no longer: its
 * two halves of 64 bits times x^(D+32) and x^(D-32), both modulo the polynomial. Four vectors of
 * bytes at a time are so folded into the next four; what is left in the end are 128 bits, which the
 * instruction for CRC-32C takes.
 */
#include "crc.h"

#include "../guard.h"

#if defined(__x86_64__)
#include <immintrin.h>

/* x^(D+32) and x^(D-32), bits turned over, as a product of such wants them. */
#define FOLD_128 0xf20c0dfe, 0x14cd00bd6
#define FOLD_256 0x1384aa63a, 0xba4fc28e
#define FOLD_512 0x740eef02, 0x9e4addf8
#define FOLD_1024 0x6992cea2, 0xd3b6092
#define FOLD_2048 0xdcb17aa4, 0xb9e02b86

#define WITH_SSE __attribute__((target("sse4.2,pclmul")))
#define WITH_256 __attribute__((target("sse4.2,pclmul,vpclmulqdq,avx2")))
#define WITH_512 __attribute__((target("sse4.2,pclmul,vpclmulqdq,avx512f,avx512vl")))

/* Appends n bytes, fewer than many. */
WITH_SSE static uint32_t append(uint32_t sum, const uint8_t *at, uint64_t n)
{
	uint64_t wide = sum, word;

	for (; n >= 8; at += 8, n -= 8) {
		__builtin_memcpy(&word, at, 8);
		wide = _mm_crc32_u64(wide, word);
	}
	sum = (uint32_t)wide;
	for (; n > 0; at++, n--)
		sum = _mm_crc32_u8(sum, *at);
	return sum;
}

WITH_SSE static inline __m128i pair128(long long low, long long high)
{
	return _mm_set_epi64x(high, low);
}

WITH_SSE static inline __m128i fold128(__m128i x, __m128i next)
{
	const __m128i by = pair128(FOLD_128);

	return _mm_xor_si128(next, _mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x00),
						 _mm_clmulepi64_si128(x, by, 0x11)));
}

WITH_SSE static inline uint32_t last(__m128i x)
{
	return (uint32_t)_mm_crc32_u64(_mm_crc32_u64(0, (uint64_t)_mm_extract_epi64(x, 0)),
				       (uint64_t)_mm_extract_epi64(x, 1));
}

WITH_256 static inline __m256i pair256(long long low, long long high)
{
	return _mm256_set_epi64x(high, low, high, low);
}

WITH_256 static inline __m256i load256(const uint8_t *at)
{
	return _mm256_loadu_si256((const __m256i *)at);
}

WITH_256 static inline __m256i fold256(__m256i x, __m256i by, __m256i next)
{
	return _mm256_xor_si256(next, _mm256_xor_si256(_mm256_clmulepi64_epi128(x, by, 0x00),
						       _mm256_clmulepi64_epi128(x, by, 0x11)));
}

WITH_256 static uint32_t by256(uint32_t sum, const uint8_t *at, uint64_t n)
{
	const __m256i far = pair256(FOLD_1024), near = pair256(FOLD_256);
	__m256i x[4];
	__m128i y;

	if (n < 128)
		return append(sum, at, n);
	for (int i = 0; i < 4; i++)
		x[i] = load256(at + 32 * i);
	x[0] = _mm256_xor_si256(x[0], _mm256_set_epi32(0, 0, 0, 0, 0, 0, 0, (int)sum));
	for (at += 128, n -= 128; n >= 128; at += 128, n -= 128)
		for (int i = 0; i < 4; i++)
			x[i] = fold256(x[i], far, load256(at + 32 * i));
	for (int i = 1; i < 4; i++)
		x[i] = fold256(x[i - 1], near, x[i]);
	y = fold128(_mm256_castsi256_si128(x[3]), _mm256_extracti128_si256(x[3], 1));
	return append(last(y), at, n);
}

WITH_512 static inline __m512i pair512(long long low, long long high)
{
	return _mm512_set_epi64(high, low, high, low, high, low, high, low);
}

WITH_512 static inline __m512i fold512(__m512i x, __m512i by, __m512i next)
{
	return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, by, 0x00),
					 _mm512_clmulepi64_epi128(x, by, 0x11), next, 0x96);
}

WITH_512 static uint32_t by512(uint32_t sum, const uint8_t *at, uint64_t n)
{
	const __m512i far = pair512(FOLD_2048), near = pair512(FOLD_512);
	__m512i x[4];
	__m128i y;

	if (n < 256)
		return append(sum, at, n);
	for (int i = 0; i < 4; i++)
		x[i] = _mm512_loadu_si512(at + 64 * i);
	x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)sum)));
	for (at += 256, n -= 256; n >= 256; at += 256, n -= 256)
		for (int i = 0; i < 4; i++)
			x[i] = fold512(x[i], far, _mm512_loadu_si512(at + 64 * i));
	for (int i = 1; i < 4; i++)
		x[i] = fold512(x[i - 1], near, x[i]);
	y = fold128(_mm512_extracti32x4_epi32(x[3], 0), _mm512_extracti32x4_epi32(x[3], 1));
	y = fold128(y, _mm512_extracti32x4_epi32(x[3], 2));
	y = fold128(y, _mm512_extracti32x4_epi32(x[3], 3));
	return append(last(y), at, n);
}

int sl_crc_has(int way)
{
	if (!__builtin_cpu_supports("sse4.2") || !__builtin_cpu_supports("pclmul") ||
	    !__builtin_cpu_supports("vpclmulqdq"))
		return 0;
	if (way == SL_CRC_VECTOR256)
		return __builtin_cpu_supports("avx2") != 0;
	return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl");
}

int sl_crc(int way, uint32_t *sum, const uint8_t *at, uint64_t n)
{
	struct sl_guard g;

	sl_guard_over(&g, at, n, NULL, 0);
	if (setjmp(g.back))
		return -EFAULT;
	sl_guard_arm(&g);
	*sum = ~(way == SL_CRC_VECTOR256 ? by256(~*sum, at, n) : by512(~*sum, at, n));
	sl_guard_disarm();
	return 0;
}

#else

int sl_crc_has(int way)
{
	(void)way;
	return 0;
}

int sl_crc(int way, uint32_t *sum, const uint8_t *at, uint64_t n)
{
	(void)way, (void)sum, (void)at, (void)n;
	return -ENOSYS;
}

#endif
