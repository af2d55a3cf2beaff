/* src/exec/cuda/shim.h for machines without a GPU: kernels compiled as C++, run by coroutines.
 *
 * A warp has one thread: a block launched with N threads runs N / 32 coroutines, and tp_threads() is N / 32. All counts of
 * threads that kernels pass or get (tp_group_sync's too) are in these. All blocks of a kernel run on one OS thread, the
 * stream's, in turns; a coroutine gives way in tp_nap and at barriers only, so a loop that waits without tp_nap hangs.
 * Peers' kernels run on other OS threads or in other processes, truly at once.
 *
 * Memory order is what the CPU gives: flags are C++ atomics with the orders of their names; bulk loads and stores are plain, so
 * that the thread sanitizer sees a chunk that is read without its flag. Lines: see tp_load_line. Shared memory starts as rubbish, as
 * on a GPU. What a GPU would trap at (a misaligned line, a barrier with two counts, a barrier that nobody else can reach)
 * ends the program with a message. */
#ifndef TP_TESTS_CUDA_EMULATOR_H
#define TP_TESTS_CUDA_EMULATOR_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined __SANITIZE_THREAD__ && !defined TP_EMULATE_TSAN
#define TP_EMULATE_TSAN 1
#elif defined __has_feature
#if __has_feature(thread_sanitizer) && !defined TP_EMULATE_TSAN
#define TP_EMULATE_TSAN 1
#endif
#endif

#define TP_WARP 1
#define TP_DEVICE [[maybe_unused]] static inline

/* The running coroutine, as kernels see it. */
struct tp_emulated { int thread, threads, block, blocks; bool fenced; };
extern __thread struct tp_emulated *tp_emulated_now __attribute__((tls_model("initial-exec"), visibility("hidden")));
void tp_emulated_barrier(int barrier, int threads);
void tp_emulated_nap(unsigned turn);
void *tp_emulated_shared(const void *key, size_t bytes, size_t alignment);
void tp_emulated_register(const char *name, void (*run)(const void *args), size_t args_bytes);
[[noreturn]] void tp_emulated_die(const char *format, ...) __attribute__((format(printf, 1, 2)));

struct tp_emulated_entry {
	tp_emulated_entry(const char *name, void (*run)(const void *), size_t args_bytes) { tp_emulated_register(name, run, args_bytes); }
};
#define TP_KERNEL(name, type) TP_KERNEL_EMULATED(name, type)
#define TP_KERNEL_EMULATED(name, type) \
	static void name(const type &args); \
	static void name##_emulated(const void *args) { name(*static_cast<const type *>(args)); } \
	static const tp_emulated_entry name##_entry(#name, name##_emulated, sizeof(type)); \
	static void name([[maybe_unused]] const type &args)
#define TP_SHARED(type, name) \
	static const char name##_key = 0; \
	type &name = *static_cast<type *>(tp_emulated_shared(&name##_key, sizeof(type), alignof(type)))

TP_DEVICE int tp_thread() { return tp_emulated_now->thread; }
TP_DEVICE int tp_threads() { return tp_emulated_now->threads; }
TP_DEVICE int tp_block() { return tp_emulated_now->block; }
TP_DEVICE int tp_blocks() { return tp_emulated_now->blocks; }
TP_DEVICE void tp_block_sync() { tp_emulated_barrier(0, tp_threads()); }
TP_DEVICE void tp_group_sync(int barrier, int threads) { tp_emulated_barrier(barrier, threads); }
TP_DEVICE void tp_warp_sync() { }
TP_DEVICE bool tp_warp_any(bool x) { return x; }
TP_DEVICE bool tp_warp_all(bool x) { return x; }
TP_DEVICE void tp_nap(unsigned turn, bool) { tp_emulated_nap(turn); }

#ifdef TP_EMULATE_TSAN
/* The thread sanitizer knows no fences: a fence is an acquire and release of one place, and a relaxed store after one is a
 * releasing store. Nor does it see other processes: what one coroutine reads and another one later overwrites, because a peer's
 * answer came, would be a race. Once other processes take part, that place is their clock too: who publishes anything tells it,
 * who acquires anything hears from it. Ranks that are threads of one process are seen exactly. */
extern uint32_t tp_emulated_fence;
extern bool tp_emulated_others;
TP_DEVICE bool tp_emulated_together() { return __atomic_load_n(&tp_emulated_others, __ATOMIC_RELAXED); }
TP_DEVICE void tp_emulated_tell() { if (tp_emulated_together()) __atomic_fetch_add(&tp_emulated_fence, 1, __ATOMIC_RELEASE); }
TP_DEVICE void tp_emulated_hear() { if (tp_emulated_together()) (void)__atomic_load_n(&tp_emulated_fence, __ATOMIC_ACQUIRE); }
TP_DEVICE void tp_fence() { tp_emulated_now->fenced = true; __atomic_fetch_add(&tp_emulated_fence, 1, __ATOMIC_ACQ_REL); }
TP_DEVICE void tp_store_relaxed(uint32_t *p, uint32_t v)
{
	if (tp_emulated_now->fenced) __atomic_store_n(p, v, __ATOMIC_RELEASE);
	else __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
#else
TP_DEVICE void tp_emulated_tell() { }
TP_DEVICE void tp_emulated_hear() { }
TP_DEVICE void tp_fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
TP_DEVICE void tp_store_relaxed(uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
#endif
TP_DEVICE void tp_fence_whole() { tp_fence(); }         /* is a whole one here */
TP_DEVICE uint32_t tp_load_relaxed(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
TP_DEVICE uint32_t tp_load_acquire(const uint32_t *p)
{
	uint32_t v = __atomic_load_n(p, __ATOMIC_ACQUIRE);
	tp_emulated_hear();
	return v;
}
TP_DEVICE uint64_t tp_load_acquire64(const uint64_t *p)
{
	uint64_t v = __atomic_load_n(p, __ATOMIC_ACQUIRE);
	tp_emulated_hear();
	return v;
}
TP_DEVICE void tp_store_release(uint32_t *p, uint32_t v)
{
	tp_emulated_tell();
	__atomic_store_n(p, v, __ATOMIC_RELEASE);
}
TP_DEVICE void tp_store_release64(uint64_t *p, uint64_t v)
{
	tp_emulated_tell();
	__atomic_store_n(p, v, __ATOMIC_RELEASE);
}
TP_DEVICE uint32_t tp_add_device(uint32_t *p, uint32_t v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }

struct alignas(16) tp_four { uint32_t x, y, z, w; };
TP_DEVICE void tp_emulated_check(const void *p, const char *what)
{
	if (__builtin_expect((uintptr_t)p % 16 != 0, 0)) tp_emulated_die("%s at %p: not aligned to 16 bytes", what, p);
}
/* Two halves of 8 bytes. Stored: {x, y}, then {z, w}; loaded: {z, w}, then {x, y}. So {data, flag, data, flag} and {data, data, data,
 * flag} both are whole where the flags are right. Lines of 128 bytes with their flag in the last 16 bytes: one thread stores and
 * loads all eight pieces here, and must store them from first to last and load them from last to first. */
TP_DEVICE tp_four tp_load_line(const void *p)
{
	tp_emulated_check(p, "tp_load_line");
	const uint64_t *halves = static_cast<const uint64_t *>(p);
	uint64_t high = __atomic_load_n(halves + 1, __ATOMIC_ACQUIRE), low = __atomic_load_n(halves, __ATOMIC_ACQUIRE);
	return { (uint32_t)low, (uint32_t)(low >> 32), (uint32_t)high, (uint32_t)(high >> 32) };
}
TP_DEVICE void tp_store_line(void *p, tp_four v)
{
	tp_emulated_check(p, "tp_store_line");
	uint64_t *halves = static_cast<uint64_t *>(p);
	__atomic_store_n(halves, (uint64_t)v.x | (uint64_t)v.y << 32, __ATOMIC_RELEASE);
	__atomic_store_n(halves + 1, (uint64_t)v.z | (uint64_t)v.w << 32, __ATOMIC_RELEASE);
}
TP_DEVICE tp_four tp_load16(const void *p)
{
	tp_emulated_check(p, "tp_load16");
	tp_four v;
	memcpy(&v, p, sizeof v);
	return v;
}
TP_DEVICE void tp_store16(void *p, tp_four v)
{
	tp_emulated_check(p, "tp_store16");
	memcpy(p, &v, sizeof v);
}

#endif
