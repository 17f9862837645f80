/* SPDX-License-Identifier: Apache-2.0 */
/* The ways to sum cells, and the choice among them. */
#include "cells.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

static void plain(const struct cell *list, uint64_t n, uint64_t ahead, const struct shape *c,
		  uint64_t sums[2])
{
	for (uint64_t i = 0; i < n; i++) {
		uint64_t nh[2] = {0, 0};

		__builtin_prefetch(list[i + ahead].at);
		pairs(list[i].at, 0, c, nh);
		put(nh, list[i].coord, c, sums);
	}
}

#if defined(__x86_64__)

#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f,avx512bw")))

AVX2 static inline __m256i product4(__m256i m, const uint64_t *key)
{
	__m256i t = _mm256_add_epi32(m, _mm256_loadu_si256((const __m256i *)key));

	return _mm256_mul_epu32(t, _mm256_srli_epi64(t, 32));
}

AVX2 static void avx2(const struct cell *list, uint64_t n, uint64_t ahead, const struct shape *c,
		      uint64_t sums[2])
{
	for (uint64_t i = 0; i < n; i++) {
		const uint8_t *at = list[i].at, *next = list[i + ahead].at;
		__m256i a = _mm256_setzero_si256(), b = a;
		uint64_t nh[2], j = 0;

		for (; j + 32 <= c->size; j += 32) {
			__m256i m = _mm256_loadu_si256((const __m256i *)(at + j));

			__builtin_prefetch(next + j);
			a = _mm256_add_epi64(a, product4(m, c->keys[0] + j / 8));
			b = _mm256_add_epi64(b, product4(m, c->keys[1] + j / 8));
		}
		__builtin_prefetch(next + c->size - 1);
		/* a0+a1, b0+b1, a2+a3, b2+b3 */
		a = _mm256_add_epi64(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
		_mm_storeu_si128((__m128i *)nh, _mm_add_epi64(_mm256_castsi256_si128(a),
							      _mm256_extracti128_si256(a, 1)));
		pairs(at, j, c, nh);
		put(nh, list[i].coord, c, sums);
	}
}

AVX512 static inline __m512i product8(__m512i m, __m512i key)
{
	__m512i t = _mm512_add_epi32(m, key);

	return _mm512_mul_epu32(t, _mm512_srli_epi64(t, 32));
}

/* Writes the sums of both vectors to nh. */
AVX512 static inline void lanes(__m512i a, __m512i b, uint64_t nh[2])
{
	__m256i half;

	a = _mm512_add_epi64(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
	half = _mm256_add_epi64(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
	_mm_storeu_si128((__m128i *)nh, _mm_add_epi64(_mm256_castsi256_si128(half),
						      _mm256_extracti128_si256(half, 1)));
}

AVX512 static void avx512(const struct cell *list, uint64_t n, uint64_t ahead,
			  const struct shape *c, uint64_t sums[2])
{
	/* What is left of a cell: its bytes and its pairs of words. Others are not read. */
	uint64_t whole = c->size & ~63ull, left = c->size & 63;
	__mmask64 bytes = (1ull << left) - 1;
	__mmask8 words = (__mmask8)((1u << (left + 7) / 8) - 1);
	__m512i key[2] = {_mm512_maskz_loadu_epi64(words, c->keys[0] + whole / 8),
			  _mm512_maskz_loadu_epi64(words, c->keys[1] + whole / 8)};

	for (uint64_t i = 0; i < n; i++) {
		const uint8_t *at = list[i].at, *next = list[i + ahead].at;
		__m512i a = _mm512_setzero_si512(), b = a, m, first, second;
		uint64_t nh[2];

		for (uint64_t j = 0; j < whole; j += 64) {
			m = _mm512_loadu_si512(at + j);
			__builtin_prefetch(next + j);
			first = _mm512_loadu_si512(c->keys[0] + j / 8);
			second = _mm512_loadu_si512(c->keys[1] + j / 8);
			a = _mm512_add_epi64(a, product8(m, first));
			b = _mm512_add_epi64(b, product8(m, second));
		}
		if (left) {
			m = _mm512_maskz_loadu_epi8(bytes, at + whole);
			__builtin_prefetch(next + whole);
			a = _mm512_add_epi64(a, product8(m, key[0]));
			b = _mm512_add_epi64(b, product8(m, key[1]));
		}
		__builtin_prefetch(next + c->size - 1);
		lanes(a, b, nh);
		put(nh, list[i].coord, c, sums);
	}
}

sum_cells *sl_digest_choose(int way)
{
	int has2 = __builtin_cpu_supports("avx2");
	int has512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");

	switch (way) {
	case SL_DIGEST_BEST:
		return has512 ? avx512 : has2 ? avx2 : plain;
	case SL_DIGEST_PLAIN:
		return plain;
	case SL_DIGEST_AVX2:
		return has2 ? avx2 : NULL;
	case SL_DIGEST_AVX512:
		return has512 ? avx512 : NULL;
	}
	return NULL;
}

#elif defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__

static inline uint64x2_t product2(uint64x2_t sum, const uint8_t *at, const uint64_t *key)
{
	uint32x4_t m = vreinterpretq_u32_u8(vld1q_u8(at));
	uint64x2_t t = vreinterpretq_u64_u32(vaddq_u32(m, vreinterpretq_u32_u64(vld1q_u64(key))));

	return vmlal_u32(sum, vmovn_u64(t), vshrn_n_u64(t, 32));
}

static void neon(const struct cell *list, uint64_t n, uint64_t ahead, const struct shape *c,
		 uint64_t sums[2])
{
	for (uint64_t i = 0; i < n; i++) {
		const uint8_t *at = list[i].at, *next = list[i + ahead].at;
		uint64x2_t a = vdupq_n_u64(0), b = a, d = a, e = a;
		uint64_t nh[2], j = 0;

		for (; j + 32 <= c->size; j += 32) {
			__builtin_prefetch(next + j);
			a = product2(a, at + j, c->keys[0] + j / 8);
			b = product2(b, at + j, c->keys[1] + j / 8);
			d = product2(d, at + j + 16, c->keys[0] + j / 8 + 2);
			e = product2(e, at + j + 16, c->keys[1] + j / 8 + 2);
		}
		__builtin_prefetch(next + c->size - 1);
		nh[0] = vaddvq_u64(vaddq_u64(a, d));
		nh[1] = vaddvq_u64(vaddq_u64(b, e));
		pairs(at, j, c, nh);
		put(nh, list[i].coord, c, sums);
	}
}

sum_cells *sl_digest_choose(int way)
{
	if (way == SL_DIGEST_BEST || way == SL_DIGEST_NEON)
		return neon;
	return way == SL_DIGEST_PLAIN ? plain : NULL;
}

#else

sum_cells *sl_digest_choose(int way)
{
	return way == SL_DIGEST_BEST || way == SL_DIGEST_PLAIN ? plain : NULL;
}

#endif
