/* SPDX-License-Identifier: Apache-2.0 */
/* What gather.h declares for kernels, on a card: for nvcc, NVRTC and clang without an SDK. */
#ifndef SLUICE_GATHER_DEVICE_H
#define SLUICE_GATHER_DEVICE_H

#if defined(__NVCC__) || defined(__CUDACC_RTC__)
#define SL_KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
#define SL_DEV static __device__ __forceinline__
#define SL_SHARED __shared__
SL_DEV sl_u32 sl_tid(void) { return threadIdx.x; }
SL_DEV sl_u32 sl_bid(void) { return blockIdx.x; }
SL_DEV sl_u32 sl_bdim(void) { return blockDim.x; }
SL_DEV sl_u32 sl_gdim(void) { return gridDim.x; }
#else
#define SL_KERNEL(threads) \
	extern "C" __attribute__((global, used, launch_bounds(threads))) void
#define SL_DEV static __attribute__((device)) inline __attribute__((always_inline))
#define SL_SHARED __attribute__((shared))
SL_DEV sl_u32 sl_tid(void) { return __nvvm_read_ptx_sreg_tid_x(); }
SL_DEV sl_u32 sl_bid(void) { return __nvvm_read_ptx_sreg_ctaid_x(); }
SL_DEV sl_u32 sl_bdim(void) { return __nvvm_read_ptx_sreg_ntid_x(); }
SL_DEV sl_u32 sl_gdim(void) { return __nvvm_read_ptx_sreg_nctaid_x(); }
#endif

#define SL_UNROLL _Pragma("unroll")
#define SL_ROLL _Pragma("unroll 1")

/*
 * Loads and stores are volatile to stay in the order in which they are written, loads
 * first, and loads clobber nothing so that they do not wait for one another. The predicate
 * is within: a branch around each would part them. Read once, so kept out of the first-level
 * cache; not read here again, so first to leave it.
 */
#define SL_IF(op) "{ .reg .pred p; setp.ne.u32 p, %[on], 0; @p " op "; }"
#define SL_LD "ld.global.nc.L1::no_allocate."
#define SL_ST "st.global.cs."

SL_DEV void sl_load(sl_u32 *r, sl_u64 at, sl_u32 width, sl_u32 on)
{
	if (width == 16)
		asm volatile(SL_IF(SL_LD "v4.u32 {%0, %1, %2, %3}, [%[at]]")
			     : "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3])
			     : [at] "l"(at), [on] "r"(on));
	else if (width == 8)
		asm volatile(SL_IF(SL_LD "v2.u32 {%0, %1}, [%[at]]")
			     : "+r"(r[0]), "+r"(r[1]) : [at] "l"(at), [on] "r"(on));
	else
		asm volatile(SL_IF(SL_LD "u32 %0, [%[at]]")
			     : "+r"(r[0])
			     : [at] "l"(at), [on] "r"(on));
}

SL_DEV void sl_store(sl_u64 at, const sl_u32 *r, sl_u32 width, sl_u32 on)
{
	if (width == 16)
		asm volatile(SL_IF(SL_ST "v4.u32 [%[at]], {%0, %1, %2, %3}")::"r"(r[0]), "r"(r[1]),
			     "r"(r[2]), "r"(r[3]), [at] "l"(at), [on] "r"(on)
			     : "memory");
	else if (width == 8)
		asm volatile(SL_IF(SL_ST "v2.u32 [%[at]], {%0, %1}")
			     :: "r"(r[0]), "r"(r[1]), [at] "l"(at), [on] "r"(on) : "memory");
	else
		asm volatile(SL_IF(SL_ST "u32 [%[at]], %0")::"r"(r[0]), [at] "l"(at), [on] "r"(on)
			     : "memory");
}

/* Without a branch, so that the loads of several entries are issued together. */
SL_DEV void sl_index(sl_u64 *v, sl_u64 list, sl_u64 i, sl_u32 wide, sl_u32 on)
{
	asm volatile(
	    "{ .reg .pred p, q; .reg .u32 t; setp.ne.u32 p, %[w], 0; setp.ne.u32 q, %[n], 0;"
	    " @p ld.global.nc.u64 %0, [%[at]]; @q ld.global.nc.u32 t, [%[at]]; @q cvt.u64.u32 %0, "
	    "t; }"
	    : "+l"(*v)
	    : [at] "l"(list + (i << (wide ? 3 : 2))), [w] "r"(on && wide), [n] "r"(on && !wide));
}

SL_DEV void sl_add(sl_u64 *at, sl_u64 n)
{
	asm volatile("red.global.add.u64 [%0], %1;" :: "l"(at), "l"(n) : "memory");
}

SL_DEV void sl_least(sl_u64 *at, sl_u64 n)
{
	asm volatile("red.global.min.u64 [%0], %1;" :: "l"(at), "l"(n) : "memory");
}

/* The slots of all warps of a block. */
extern SL_SHARED __attribute__((aligned(16))) sl_u64 sl_ring_memory[];

/* Addresses in shared memory have 32 bits. */
SL_DEV sl_u32 sl_ring(void)
{
	sl_u32 at;
	asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }"
	    : "=r"(at)
	    : "l"((sl_u64)sl_ring_memory));
	return at;
}

/* An asynchronous copy into shared memory. Only 16 bytes may pass by the first-level cache. */
SL_DEV void sl_ahead(sl_u32 slot, sl_u64 at, sl_u32 width, sl_u32 on)
{
	if (width == 16)
		asm volatile(SL_IF("cp.async.cg.shared.global [%[to]], [%[at]], 16")
			     :: [to] "r"(slot), [at] "l"(at), [on] "r"(on) : "memory");
	else if (width == 8)
		asm volatile(SL_IF("cp.async.ca.shared.global [%[to]], [%[at]], 8")
			     :: [to] "r"(slot), [at] "l"(at), [on] "r"(on) : "memory");
	else
		asm volatile(SL_IF("cp.async.ca.shared.global [%[to]], [%[at]], 4")
			     :: [to] "r"(slot), [at] "l"(at), [on] "r"(on) : "memory");
}

SL_DEV void sl_ahead_group(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* Returns when all groups of this thread but the last SL_AHEAD - 1 have come. */
SL_DEV void sl_ahead_wait(void)
{
	asm volatile("cp.async.wait_group %0;" :: "n"(SL_AHEAD - 1) : "memory");
}

/* Stores what this thread has loaded into shared memory. */
SL_DEV void sl_onward(sl_u64 at, sl_u32 slot, sl_u32 width, sl_u32 on)
{
	sl_u32 r[4];

	if (width == 16)
		asm volatile(SL_IF("ld.shared.v4.u32 {%0, %1, %2, %3}, [%[from]]")
			     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
			     : [from] "r"(slot), [on] "r"(on) : "memory");
	else if (width == 8)
		asm volatile(SL_IF("ld.shared.v2.u32 {%0, %1}, [%[from]]")
			     : "=r"(r[0]), "=r"(r[1])
			     : [from] "r"(slot), [on] "r"(on) : "memory");
	else
		asm volatile(SL_IF("ld.shared.u32 %0, [%[from]]")
			     : "=r"(r[0])
			     : [from] "r"(slot), [on] "r"(on) : "memory");
	sl_store(at, r, width, on);
}

#endif
