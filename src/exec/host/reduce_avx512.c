/* The kernels for AVX-512 (F, BW, DQ, VL). */
#if defined(__x86_64__)
#include <immintrin.h>
#include "exec/host/reduce.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

static inline __attribute__((always_inline)) __m512 tp_half_load(const char *from)
{
	return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}

static inline __attribute__((always_inline)) void tp_half_store(char *to, __m512 v)
{
	_mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

#define TP_WIDE 64
#define TP_HALF_W 64
#define TP_TABLE tp_reduce_kernels_avx512
#include "exec/host/reduce_kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
