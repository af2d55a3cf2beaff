/* The kernels for AVX2 with F16C. FMA stays off: nothing here may be contracted. */
#if defined(__x86_64__)
#include <immintrin.h>
#include "exec/host/reduce.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif

static inline __attribute__((always_inline)) __m256 tp_half_load(const char *from)
{
	return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
}

static inline __attribute__((always_inline)) void tp_half_store(char *to, __m256 v)
{
	_mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

#define TP_WIDE 32
#define TP_HALF_W 32
#define TP_TABLE tp_reduce_kernels_avx2
#include "exec/host/reduce_kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
