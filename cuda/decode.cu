/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A neighbour for the gather kernels: reads a large memory once and multiplies what it read, as a
 * decode step reads weights. How much longer it takes beside a gather is what that one costs
 * others.
 */
#include "gather.h"

#define AHEAD 4u /* loads that a thread has under way */

/* What Go fills in: struct step of neighbour.go. */
struct sl_step {
	sl_u64 weights, words; /* address, multiple of 16; how many times 16 bytes */
	sl_u64 out;            /* address of a word of four bytes for each thread */
	sl_u64 done;           /* address of a counter of steps */
	sl_u32 rounds;         /* multiplications for each word */
	sl_u32 reserved;
};

SL_KERNEL(SL_STEP_THREADS) sl_decode_step(struct sl_step s)
{
	sl_u64 threads = (sl_u64)sl_gdim() * sl_bdim(),
	       thread = (sl_u64)sl_bid() * sl_bdim() + sl_tid();
	sl_u32 sum = 0, word[AHEAD * 4] = {0};

	for (sl_u64 i = thread; i < s.words; i += AHEAD * threads) {
		SL_UNROLL for (sl_u32 k = 0; k < AHEAD; k++)
		    sl_load(&word[4 * k], s.weights + 16 * (i + k * threads), 16,
			    i + k * threads < s.words);
		SL_UNROLL for (sl_u32 k = 0; k < AHEAD; k++)
			if (i + k * threads < s.words)
				for (sl_u32 r = 0; r < s.rounds; r++)
					SL_UNROLL for (sl_u32 w = 0; w < 4; w++)
						sum = sum * 1664525u + word[4 * k + w];
	}
	sl_store(s.out + 4 * thread, &sum, 4, 1);
	if (thread == 0)
		sl_add((sl_u64 *)s.done, 1);
}
