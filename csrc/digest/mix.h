/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arithmetic of a cell, for C and for the kernel of cuda/digest.cu, which says in
 * SL_DIGEST_FUNCTION what its functions begin with.
 */
#ifndef SLUICE_DIGEST_MIX_H
#define SLUICE_DIGEST_MIX_H

#ifndef SL_DIGEST_FUNCTION
#define SL_DIGEST_FUNCTION static inline
#endif

SL_DIGEST_FUNCTION unsigned long long sl_mix64(unsigned long long x)
{
	x = (x ^ x >> 33) * 0xff51afd7ed558ccdull;
	x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53ull;
	return x ^ x >> 33;
}

/* One pair of words, the first in the low half, and one pair of the key. */
SL_DIGEST_FUNCTION unsigned long long sl_product(unsigned long long m, unsigned long long k)
{
	return (unsigned long long)((unsigned)m + (unsigned)k) *
	       (unsigned)((m >> 32) + (k >> 32));
}

/* What a cell adds to the sum of a lane. */
SL_DIGEST_FUNCTION unsigned long long sl_mixed(unsigned long long nh, unsigned long long s,
					       unsigned long long coord)
{
	return sl_mix64(nh ^ sl_mix64(s ^ coord));
}

#endif
