/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Moving entries between places, in words that nvcc, clang without a CUDA SDK and a C or
 * C++ compiler of the host understand alike. First the arguments, which Go fills in and the
 * kernels take; then what kernels are written in.
 */
#ifndef SLUICE_GATHER_H
#define SLUICE_GATHER_H

typedef unsigned int sl_u32;
typedef unsigned long long sl_u64;

/* An index that says: leave this entry out. In a list of 32 bits it is ~0u. */
#define SL_SKIP (~0ull)

/* One array of entries on each side. All parts of a move go by the same indices. */
struct sl_part {
	sl_u64 dst, src;               /* addresses of place 0 */
	sl_u64 dst_stride, src_stride; /* bytes from one place to the next */
	sl_u32 entry;                  /* bytes of an entry */
	sl_u32 width;                  /* 16, 8 or 4: divides all of the above */
};

#define SL_PARTS_MAX 2

/* The bits of sl_move.flags. */
#define SL_DST_WIDE 1u /* dst_index has 64 bits an index */
#define SL_SRC_WIDE 2u /* src_index, too */
#define SL_FAR_DST 4u  /* the destination lies behind the bus: cut entries at its lines */

struct sl_move {
	struct sl_part part[SL_PARTS_MAX];
	sl_u64 dst_index, src_index;   /* addresses of count indices; 0: entry i is at place i */
	sl_u64 dst_places, src_places; /* an index that is not below is bad */
	sl_u64 tally;                  /* address of a struct sl_tally */
	sl_u64 count;                  /* entries */
	sl_u32 parts, flags;
};

#define SL_LOOPS_MAX 3

/*
 * What makes a nest of each entry: up to three loops over runs of part[0].entry bytes, and
 * several entries in each place of a side. Run e of a move is run e % runs of entry e / runs, and
 * entry i of a side lies in place (first + i) / per, (first + i) % per steps behind its beginning.
 */
struct sl_nest {
	sl_u64 dst_loop[SL_LOOPS_MAX], src_loop[SL_LOOPS_MAX]; /* bytes a round, outermost first */
	sl_u64 dst_step, src_step;
	sl_u32 loop[SL_LOOPS_MAX]; /* rounds; 1: there is no such loop */
	sl_u32 runs;               /* of an entry: the product of the rounds */
	sl_u32 dst_per, src_per, dst_first, src_first;
};

/* move.count counts runs, of one part; the lists have an index for each place. */
struct sl_nested {
	struct sl_move move;
	struct sl_nest nest;
};

/* What did not move. The launcher sets it to {0, 0, ~0}. */
struct sl_tally {
	sl_u64 skipped, bad;
	sl_u64 first_bad; /* the lowest entry with a bad index */
};

/* The most threads of a block: what leaves each enough registers. */
#define SL_ROWS_THREADS 768
#define SL_ASYNC_THREADS 1024

/* Entries that a warp has under way by asynchronous copies, each in a slot of shared memory. */
#define SL_AHEAD 3u

#if defined(SL_HOST)

/* Kernels as functions of the host: a test calls them once for each thread. */
#define SL_KERNEL(threads) void
#define SL_DEV static inline
#define SL_UNROLL
#define SL_ROLL

struct sl_at {
	sl_u32 tid, bid, bdim, gdim;
};
extern struct sl_at sl_at;
SL_DEV sl_u32 sl_tid(void) { return sl_at.tid; }
SL_DEV sl_u32 sl_bid(void) { return sl_at.bid; }
SL_DEV sl_u32 sl_bdim(void) { return sl_at.bdim; }
SL_DEV sl_u32 sl_gdim(void) { return sl_at.gdim; }

/* By types of that alignment, so that sanitizers see what a card would fault on. */
struct sl_16 {
	sl_u32 w[4];
} __attribute__((aligned(16), may_alias));
struct sl_8 {
	sl_u32 w[2];
} __attribute__((aligned(8), may_alias));
struct sl_4 {
	sl_u32 w[1];
} __attribute__((aligned(4), may_alias));

#define SL_HOST_WIDTH(n) \
	if (width == n && on) \
		for (sl_u32 i = 0; i < n / 4; i++)

SL_DEV void sl_load(sl_u32 *r, sl_u64 at, sl_u32 width, sl_u32 on)
{
	SL_HOST_WIDTH(16) r[i] = ((const struct sl_16 *)at)->w[i];
	SL_HOST_WIDTH(8) r[i] = ((const struct sl_8 *)at)->w[i];
	SL_HOST_WIDTH(4) r[i] = ((const struct sl_4 *)at)->w[i];
}

SL_DEV void sl_store(sl_u64 at, const sl_u32 *r, sl_u32 width, sl_u32 on)
{
	SL_HOST_WIDTH(16) ((struct sl_16 *)at)->w[i] = r[i];
	SL_HOST_WIDTH(8) ((struct sl_8 *)at)->w[i] = r[i];
	SL_HOST_WIDTH(4) ((struct sl_4 *)at)->w[i] = r[i];
}

/* With `on` alone: *v is index i of the list. */
SL_DEV void sl_index(sl_u64 *v, sl_u64 list, sl_u64 i, sl_u32 wide, sl_u32 on)
{
	if (on)
		*v = wide ? ((const sl_u64 *)list)[i] : ((const sl_u32 *)list)[i];
}

SL_DEV void sl_add(sl_u64 *at, sl_u64 n) { *at += n; }
SL_DEV void sl_least(sl_u64 *at, sl_u64 n) { *at = n < *at ? n : *at; }

/* The test says when asynchronous copies happen: as early or as late as they may. */
sl_u32 sl_ring(void);
void sl_ahead(sl_u32 slot, sl_u64 at, sl_u32 width, sl_u32 on);
void sl_ahead_group(void);
void sl_ahead_wait(void);
void sl_onward(sl_u64 at, sl_u32 slot, sl_u32 width, sl_u32 on);

#elif defined(__NVCC__) || defined(__CUDACC_RTC__) || defined(__CUDA__)
#include "gather_device.h"
#endif

#endif
