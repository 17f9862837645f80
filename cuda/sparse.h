/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arguments of the kernels that look up entries of sparse attention, which Go fills in. What a
 * kernel is written in is in gather.h, and here what sparse.cu needs beyond: threads of a block
 * that wait for one another.
 */
#ifndef SLUICE_CUDA_SPARSE_H
#define SLUICE_CUDA_SPARSE_H

#include "gather.h"

#define SL_LOOKUP_WAYS 16u /* SL_SPARSE_WAYS */
#define SL_LOOKUP_NONE ~0u /* SL_SPARSE_NONE */

/*
 * A table and a batch of csrc/sparse/sparse.h, in a card's memory and laid out as there, all by
 * address. Misses are not compact: those of set i of the batch begin at i * n of each list, which
 * have room for n entries of each set, and counts says how many they are. So no set waits to learn
 * what those before it have missed.
 */
struct sl_lookup {
	sl_u64 tags, stamps, beyond, clocks;   /* struct sl_sparse_table */
	sl_u64 sets, entries, blocks, starts;  /* struct sl_sparse_batch */
	sl_u64 slots, counts;                  /* written */
	sl_u64 miss_slots, miss_from, miss_at; /* struct sl_sparse_misses: slots, from and place */
	sl_u64 bad;                            /* a struct sl_lookup_bad */
	sl_u32 groups, all;                    /* of a set, two at least; sets of the table */
	sl_u32 count, n, shift;                /* sets of the batch; n is 16 groups at most */
	sl_u32 blocks_n;                       /* of all sets */
};

/* What refuses the batch. The launcher sets it to {~0, ~0}. */
struct sl_lookup_bad {
	sl_u64 set;   /* the first of the batch that is not there, not in order, or has no blocks */
	sl_u64 entry; /* the first that lies behind the blocks of its set */
};

#define SL_LOOKUP_THREADS 640 /* of a block, at most: two share a multiprocessor */
#define SL_LOOKUP_AHEAD 4      /* entries whose tags SL_LOOKUP_WAYS threads read at a time */

#if defined(SL_HOST)

/* The test says which thread goes on when all of them have come. */
void sl_barrier(void);
void sl_half_barrier(void);
sl_u32 sl_half_ballot(sl_u32 v);
sl_u32 sl_half_max(sl_u32 v);

SL_DEV sl_u32 sl_lowest(sl_u32 bits) { return (sl_u32)__builtin_ctz(bits); }

#elif defined(__NVCC__) || defined(__CUDACC_RTC__) || defined(__CUDA__)

/*
 * All threads of the block, wherever those of a warp are when they come. What each has written
 * before, the others read behind.
 */
SL_DEV void sl_barrier(void) { asm volatile("barrier.sync 0;" ::: "memory"); }

/* The threads of half a warp, as a mask; the other half may be elsewhere. */
SL_DEV sl_u32 sl_half(void) { return 0xffffu << (sl_tid() & 16); }

/* The same for them. */
SL_DEV void sl_half_barrier(void)
{
	asm volatile("bar.warp.sync %0;" :: "r"(sl_half()) : "memory");
}

/* Those of them that have something, the first in bit 0. */
SL_DEV sl_u32 sl_half_ballot(sl_u32 v)
{
	sl_u32 all;

	asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; vote.sync.ballot.b32 %0, p, %2; }"
		     : "=r"(all)
		     : "r"(v), "r"(sl_half()));
	return all >> (sl_tid() & 16) & 0xffff;
}

/* The most that one of them has. */
SL_DEV sl_u32 sl_half_max(sl_u32 v)
{
	sl_u32 most;

	asm volatile("redux.sync.max.u32 %0, %1, %2;" : "=r"(most) : "r"(v), "r"(sl_half()));
	return most;
}

SL_DEV sl_u32 sl_lowest(sl_u32 bits)
{
	sl_u32 at;

	asm("{ .reg .u32 t; brev.b32 t, %1; clz.b32 %0, t; }" : "=r"(at) : "r"(bits));
	return at;
}

#endif

#endif
