/* Time, and the shortest ways of waiting. */
#ifndef TP_BASE_CLOCK_H
#define TP_BASE_CLOCK_H
#include <stdint.h>
#include <time.h>
static inline uint64_t tp_clock_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
static inline uint64_t tp_clock_ms(void) { return tp_clock_ns() / 1000000u; }
/* The same clock as of the last timer tick (1 to 10 ms old): a third of the cost or less, no reading of a counter. */
static inline uint64_t tp_clock_coarse_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
static inline void tp_clock_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield" ::: "memory");
#endif
}
#endif
