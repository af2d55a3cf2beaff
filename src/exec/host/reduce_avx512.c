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

static inline __attribute__((always_inline)) __m512i tp_words_load(const char *from)
{
	return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
}

static inline __attribute__((always_inline)) void tp_words_store(char *to, __m512i bits)
{
	_mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(bits));
}

static inline __attribute__((always_inline)) __m512i tp_bytes_load(const char *from)
{
	return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
}

static inline __attribute__((always_inline)) void tp_bytes_store(char *to, __m512i bits)
{
	_mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(bits));
}

static inline __attribute__((always_inline)) __m512 tp_e5m2_load(const char *from)
{
	__m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)from));
	return _mm512_cvtph_ps(_mm256_slli_epi16(words, 8));
}

static inline __attribute__((always_inline)) __m512 tp_e4m3_load(const char *from)
{
	__m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
	/* s eeee mmm with the sign repeated above: bit 14 is a sign too many */
	return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16((short)0xbfff)));
}

static inline __attribute__((always_inline)) __m512 tp_float_min(__m512 a, __m512 b) { return _mm512_min_ps(a, b); }
static inline __attribute__((always_inline)) __m512 tp_float_max(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }

static inline __attribute__((always_inline)) __m512i tp_unless_nan(__m512 v, __m512i bits, uint32_t nan)
{
	return _mm512_mask_mov_epi32(bits, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32((int)nan));
}

#define TP_WIDE 64
#define TP_NATIVE_W 64
#define TP_MASK_W 64
#define TP_NATIVE __m512i
#define TP_HALF_W 64
#define TP_TABLE tp_reduce_kernels_avx512
#include "exec/host/reduce_kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
