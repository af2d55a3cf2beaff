/* What kernels are written with: CUDA's words for threads, memory order and shared memory under names of ours, so that the
 * same sources also compile as C++ for the emulator in tests/cuda, which runs them on machines without a GPU.
 *
 * In the emulator a warp has one thread (TP_WARP is 1), a block of N threads is N / 32 coroutines, and whoever waits must call
 * tp_nap in its loop, or nobody else runs. So kernels never assume a number of threads: they loop from tp_thread() in steps
 * of tp_threads() (or a group's), and code that needs a warp's lock-step goes by TP_WARP. */
#ifndef TP_EXEC_CUDA_SHIM_H
#define TP_EXEC_CUDA_SHIM_H

#include "exec/cuda/device.h"

#ifdef TP_EMULATE
#include "emulator.h"           /* tests/cuda/emulator.h: the same names */
TP_DEVICE void tp_block_add(uint32_t *p, uint32_t v) { __atomic_fetch_add(p, v, __ATOMIC_RELEASE); }
TP_DEVICE uint32_t tp_block_load(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
TP_DEVICE uint32_t tp_block_take(uint32_t *p, uint32_t v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
TP_DEVICE void tp_block_set(uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
#define TP_UNROLL
#define TP_NO_UNROLL
#define TP_HIDE(number)
#define TP_METHOD static inline
#define TP_FAR [[maybe_unused]] static
#define TP_KERNEL_BLOCKS(name, type, blocks) TP_KERNEL(name, type)
#define TP_SHARED_DYNAMIC(name, bytes) struct alignas(128) name##_type { char all[bytes]; }; TP_SHARED(name##_type, name##_all); char *const name = name##_all.all
/* See below; here the order is said, so that the thread sanitizer sees it. */
TP_DEVICE void tp_store_read(uint32_t *p, uint32_t v) { tp_store_release(p, v); }
TP_DEVICE uint32_t tp_load_read(const uint32_t *p) { return tp_load_acquire(p); }
/* Bulk copies (below): done as soon as they are begun. */
TP_DEVICE void tp_bulk_init(uint64_t *) { }
TP_DEVICE void tp_bulk_load(void *to, const void *from, uint32_t bytes, uint64_t *) { memcpy(to, from, bytes); }
TP_DEVICE void tp_bulk_loaded(uint64_t *, uint32_t) { }
TP_DEVICE void tp_bulk_store(void *to, const void *from, uint32_t bytes) { memcpy(to, from, bytes); }
TP_DEVICE void tp_bulk_commit() { }
template <int PENDING> TP_DEVICE void tp_bulk_read() { }
template <int PENDING> TP_DEVICE void tp_bulk_stored() { }
TP_DEVICE void tp_bulk_fence() { }
TP_DEVICE void tp_bulk_acquired() { }
#else

#define TP_WARP 32
#define TP_DEVICE static __device__ __forceinline__
/* A kernel: one argument, a struct by value. TP_KERNEL(name, struct args) { … args … } */
#define TP_KERNEL(name, type) extern "C" __global__ void __launch_bounds__(TP_DEV_THREADS) name(const __grid_constant__ type args)
/* The same with registers few enough for so many blocks of TP_DEV_THREADS on a multiprocessor. */
#define TP_KERNEL_BLOCKS(name, type, blocks) \
	extern "C" __global__ void __launch_bounds__(TP_DEV_THREADS, blocks) name(const __grid_constant__ type args)
#define TP_SHARED(type, name) __shared__ type name      /* one object a block; at the top of a kernel only */
#define TP_FAR static __device__ __noinline__           /* called, not inlined: what is rare, or needs many registers for a short time */
#define TP_METHOD static __device__ __forceinline__     /* of a struct without data */
#define TP_UNROLL _Pragma("unroll")
#define TP_NO_UNROLL _Pragma("unroll 1")
/* What is computed from this number is computed here, not before some loop around, where it would occupy registers. */
#define TP_HIDE(number) asm volatile("" : "+r"(number))

TP_DEVICE int tp_thread() { return threadIdx.x; }
TP_DEVICE int tp_threads() { return blockDim.x; }
TP_DEVICE int tp_block() { return blockIdx.x; }
TP_DEVICE int tp_blocks() { return gridDim.x; }
TP_DEVICE void tp_block_sync() { __syncthreads(); }
/* Some warps of a block: barrier number 1 … 15, `threads` of them take part (a multiple of a warp). */
TP_DEVICE void tp_group_sync(int barrier, int threads) { asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory"); }
TP_DEVICE void tp_warp_sync() { __syncwarp(); }
TP_DEVICE bool tp_warp_any(bool x) { return __any_sync(0xffffffffu, x); }
TP_DEVICE bool tp_warp_all(bool x) { return __all_sync(0xffffffffu, x); }
/* In a loop that waits; turn counts its turns. gives_way: peers may need this very multiprocessor. */
TP_DEVICE void tp_nap(unsigned turn, bool gives_way) { if (gives_way && turn > 64) __nanosleep(turn > 4096 ? 1000 : 40); }

/* A counter in shared memory: what a thread did before tp_block_add is seen by whoever has seen the sum by tp_block_load. take: adds,
 * and returns what was there. */
TP_DEVICE void tp_block_add(uint32_t *p, uint32_t v) { asm volatile("fence.acq_rel.cta;" ::: "memory"); atomicAdd(p, v); }
TP_DEVICE uint32_t tp_block_load(const uint32_t *p)
{ uint32_t v = *(const volatile uint32_t *)p; asm volatile("fence.acq_rel.cta;" ::: "memory"); return v; }
TP_DEVICE uint32_t tp_block_take(uint32_t *p, uint32_t v) { return atomicAdd(p, v); }
/* Several may, all the same value. */
TP_DEVICE void tp_block_set(uint32_t *p, uint32_t v) { asm volatile("fence.acq_rel.cta;" ::: "memory"); *(volatile uint32_t *)p = v; }

/* Order, over all of the machine (other GPUs, the host). */
TP_DEVICE uint32_t tp_load_acquire(const uint32_t *p)
{ uint32_t v; asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
TP_DEVICE uint32_t tp_load_relaxed(const uint32_t *p)
{ uint32_t v; asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
TP_DEVICE void tp_store_release(uint32_t *p, uint32_t v)
{ asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
TP_DEVICE void tp_store_relaxed(uint32_t *p, uint32_t v)
{ asm volatile("st.relaxed.sys.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
/* How far memory has been read, for whoever writes over it: what was loaded before is in registers, or it could not have been stored or added up by then, so
 * there is nothing to wait for. */
TP_DEVICE void tp_store_read(uint32_t *p, uint32_t v) { tp_store_relaxed(p, v); }
TP_DEVICE uint32_t tp_load_read(const uint32_t *p) { return tp_load_relaxed(p); }
TP_DEVICE uint64_t tp_load_acquire64(const uint64_t *p)
{ uint64_t v; asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
TP_DEVICE void tp_store_release64(uint64_t *p, uint64_t v)
{ asm volatile("st.release.sys.global.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory"); }
TP_DEVICE void tp_fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
TP_DEVICE void tp_fence_whole() { asm volatile("fence.sc.sys;" ::: "memory"); }             /* also what is loaded after it behind what was stored before */
TP_DEVICE uint32_t tp_add_device(uint32_t *p, uint32_t v) { return atomicAdd(p, v); }   /* the rank's own device memory */

/* 16 bytes at once, whole; for lines with flags in them. Volatile: not cached, not torn. */
struct alignas(16) tp_four { uint32_t x, y, z, w; };
TP_DEVICE tp_four tp_load_line(const void *p)
{
	tp_four v;
	asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
	return v;
}
TP_DEVICE void tp_store_line(void *p, tp_four v)
{ asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" :: "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory"); }
/* Bulk data: 16 bytes, aligned; ordered by the flags around it only. */
TP_DEVICE tp_four tp_load16(const void *p)
{
	tp_four v;
	asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
	return v;
}
TP_DEVICE void tp_store16(void *p, tp_four v)
{ asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" :: "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory"); }

/* Memory of a block that the launch gives it, so many bytes (a constant). */
#define TP_SHARED_DYNAMIC(name, bytes) extern __shared__ __align__(128) char name[]

/* Bulk copies between global and shared memory, by one thread, which goes on meanwhile: multiples of 16 bytes, aligned to 16. A load tells a
 * barrier in shared memory, which counts its loads by parity; a thread's stores are committed in groups. A fence comes between
 * ordinary stores to shared memory and bulk stores from there, tp_bulk_acquired between an acquire and bulk loads of what it acquired. Before sm_90
 * the thread copies. */
#if __CUDA_ARCH__ >= 900
TP_DEVICE uint32_t tp_shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
TP_DEVICE void tp_bulk_init(uint64_t *bar)
{ asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; fence.proxy.async.shared::cta;" :: "r"(tp_shared_address(bar)) : "memory"); }
TP_DEVICE void tp_bulk_load(void *to, const void *from, uint32_t bytes, uint64_t *bar)
{
	asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(tp_shared_address(bar)), "r"(bytes) : "memory");
	asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
		:: "r"(tp_shared_address(to)), "l"(from), "r"(bytes), "r"(tp_shared_address(bar)) : "memory");
}
TP_DEVICE void tp_bulk_loaded(uint64_t *bar, uint32_t parity)
{
	uint32_t ok = 0;
	while (!ok)
		asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
			: "=r"(ok) : "r"(tp_shared_address(bar)), "r"(parity) : "memory");
}
TP_DEVICE void tp_bulk_store(void *to, const void *from, uint32_t bytes)
{
	asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" :: "l"(to), "r"(tp_shared_address(from)), "r"(bytes) : "memory");
}
TP_DEVICE void tp_bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/* Until all but the last PENDING groups have been read from shared memory; have arrived. */
template <int PENDING> TP_DEVICE void tp_bulk_read() { asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(PENDING) : "memory"); }
template <int PENDING> TP_DEVICE void tp_bulk_stored() { asm volatile("cp.async.bulk.wait_group %0;" :: "n"(PENDING) : "memory"); }
TP_DEVICE void tp_bulk_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
TP_DEVICE void tp_bulk_acquired() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
#else
TP_DEVICE void tp_bulk_init(uint64_t *) { }
TP_DEVICE void tp_bulk_load(void *to, const void *from, uint32_t bytes, uint64_t *)
{
	TP_NO_UNROLL
	for (uint32_t i = 0; i < bytes; i += 16) *(tp_four *)((char *)to + i) = *(const tp_four *)((const char *)from + i);
}
TP_DEVICE void tp_bulk_loaded(uint64_t *, uint32_t) { }
TP_DEVICE void tp_bulk_store(void *to, const void *from, uint32_t bytes)
{
	TP_NO_UNROLL
	for (uint32_t i = 0; i < bytes; i += 16) tp_store16((char *)to + i, *(const tp_four *)((const char *)from + i));
}
TP_DEVICE void tp_bulk_commit() { }
template <int PENDING> TP_DEVICE void tp_bulk_read() { }
template <int PENDING> TP_DEVICE void tp_bulk_stored() { tp_fence(); }
TP_DEVICE void tp_bulk_fence() { }
TP_DEVICE void tp_bulk_acquired() { }
#endif

#endif
#endif
