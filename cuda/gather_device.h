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

/* Bulk copies need sm_90. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define SL_BULK 1

/* Bulk copies want multiples of 16. */
extern SL_SHARED __attribute__((aligned(128))) sl_u64 sl_ring_memory[];

/* Addresses in shared memory have 32 bits. */
SL_DEV sl_u32 sl_ring(void)
{
	sl_u32 at;
	asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }"
	    : "=r"(at)
	    : "l"((sl_u64)sl_ring_memory));
	return at;
}

SL_DEV void sl_ring_keep(sl_u32 at, sl_u64 v)
{
	asm volatile("st.shared.u64 [%0], %1;" :: "r"(at), "l"(v) : "memory");
}

SL_DEV sl_u64 sl_ring_kept(sl_u32 at)
{
	sl_u64 v;
	asm volatile("ld.shared.u64 %0, [%1];" : "=l"(v) : "r"(at) : "memory");
	return v;
}

SL_DEV void sl_ring_barrier(sl_u32 bar)
{
	asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar) : "memory");
}

/* Shows barriers to the unit that copies. */
SL_DEV void sl_ring_fence(void)
{
	asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::
			 : "memory");
}

SL_DEV void sl_ring_load(sl_u32 slot, sl_u64 src, sl_u32 bytes, sl_u32 bar)
{
	asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
		     : "memory");
	asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
		     "[%1], %2, [%3];" ::"r"(slot),
		     "l"(src), "r"(bytes), "r"(bar)
		     : "memory");
}

SL_DEV void sl_ring_wait(sl_u32 bar, sl_u32 phase)
{
	sl_u32 done = 0;

	while (!done)
		asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], "
			     "%2; selp.u32 %0, 1, 0, p; }"
			     : "=r"(done)
			     : "r"(bar), "r"(phase)
			     : "memory");
}

SL_DEV void sl_ring_store(sl_u64 dst, sl_u32 slot, sl_u32 bytes)
{
	asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], "
		     "%2;\n\tcp.async.bulk.commit_group;" ::"l"(dst),
		     "r"(slot), "r"(bytes)
		     : "memory");
}

/* Returns when all stores of this thread but the last SL_LAG have read their slots. */
SL_DEV void sl_ring_reuse(void)
{
	asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(SL_LAG) : "memory");
}

/* Returns when all stores of this thread have landed. */
SL_DEV void sl_ring_drain(void)
{
	asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
#endif

#endif
