/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arguments of the kernel that digests cells, which Go fills in. What a kernel is written in
 * is in gather.h, and here what digest.cu needs beyond: threads of a warp that add up what they
 * have, and loads of other widths.
 */
#ifndef SLUICE_CUDA_DIGEST_H
#define SLUICE_CUDA_DIGEST_H

#include "gather.h"

/* Cells of one memory, as Cells of csrc/digest: a grid of cells for each entry. */
struct sl_cells {
	sl_u64 at;           /* address of the memory and Cells.At.Base */
	sl_u64 room;         /* an entry may begin so many bytes behind it, and no further */
	sl_u64 slots;        /* a slot that is not below begins further */
	sl_u64 list;         /* address of slots of 32 bits; 0: they count up */
	sl_u64 stride, step; /* from a slot to the next, from an entry of a slot to the next */
	sl_u64 first;        /* entries that the first slot leaves out */
	sl_u64 per;          /* entries of a slot, 1 or more */
	sl_u64 coord, turn;  /* of the first cell; from an entry to the next */
	sl_u64 n[2];         /* cells of an entry along its axes, the outer first */
	sl_u64 by[2], on[2]; /* bytes and coordinate from one to the next */
	sl_u64 cells;        /* of all entries */
	sl_u64 keys;         /* address of two pairs of words, of either lane, for each 8 bytes */
	sl_u64 s[2];
	sl_u32 cell;         /* bytes */
	sl_u32 width;        /* 16, 8, 4 or 1: divides the addresses of all cells */
	sl_u32 threads;      /* that share a cell: a power of two, SL_CELL_THREADS at most */
	sl_u32 reserved;
};

struct sl_digest {
	sl_u64 list;  /* address of struct sl_cells, n of them */
	sl_u64 total; /* address of a struct sl_digest_total, which is added to */
	sl_u32 n, reserved;
};

struct sl_digest_total {
	sl_u64 sum[2];
	sl_u64 outside; /* cells that leave the memory: nothing of them was read */
};

#define SL_DIGEST_THREADS 768 /* of a block, at most */
#define SL_CELL_THREADS 8
#define SL_CELL_LOADS 4 /* that a thread has under way */

#if defined(SL_HOST)

/*
 * Threads run one by one, so that the first of those that share a cell does the work of all: it
 * takes each of n pieces, and the others none.
 */
SL_DEV sl_u32 sl_piece(sl_u32 threads, sl_u32 n) { return sl_tid() % threads ? n : 0; }
SL_DEV sl_u32 sl_pieces(sl_u32 threads) { return threads ? 1 : 0; }
SL_DEV sl_u64 sl_together(sl_u64 v, sl_u32 threads) { return threads ? v : 0; }

SL_DEV void sl_load_key(sl_u64 *key, sl_u64 at)
{
	key[0] = ((const sl_u64 *)at)[0];
	key[1] = ((const sl_u64 *)at)[1];
}

SL_DEV sl_u32 sl_load1(sl_u64 at) { return *(const unsigned char *)at; }

#elif defined(__NVCC__) || defined(__CUDACC_RTC__) || defined(__CUDA__)

/* Thread i of those that share a cell takes pieces i, i + threads and so on. */
SL_DEV sl_u32 sl_piece(sl_u32 threads, sl_u32 n) { return sl_tid() % threads; }
SL_DEV sl_u32 sl_pieces(sl_u32 threads) { return threads; }

/* What as many threads of a warp have together. All threads of the warp are here. */
SL_DEV sl_u64 sl_together(sl_u64 v, sl_u32 threads)
{
	for (sl_u32 d = threads / 2; d; d /= 2) {
		sl_u32 low = (sl_u32)v, high = (sl_u32)(v >> 32);

		asm volatile("shfl.sync.bfly.b32 %0, %0, %2, 0x1f, 0xffffffff;\n\t"
			     "shfl.sync.bfly.b32 %1, %1, %2, 0x1f, 0xffffffff;"
			     : "+r"(low), "+r"(high)
			     : "r"(d));
		v += (sl_u64)high << 32 | low;
	}
	return v;
}

/* All cells want the same keys, so these loads may stay in the caches. */
SL_DEV void sl_load_key(sl_u64 *key, sl_u64 at)
{
	asm volatile("ld.global.nc.v2.u64 {%0, %1}, [%2];" : "=l"(key[0]), "=l"(key[1]) : "l"(at));
}

SL_DEV sl_u32 sl_load1(sl_u64 at)
{
	sl_u32 v;

	asm volatile("{ .reg .u16 t; ld.global.nc.u8 t, [%1]; cvt.u32.u16 %0, t; }"
		     : "=r"(v)
		     : "l"(at));
	return v;
}

#endif

#endif
