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

static inline __attribute__((always_inline)) __m256i tp_words_load(const char *from)
{
	return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
}

static inline __attribute__((always_inline)) void tp_words_store(char *to, __m256i bits)
{
	__m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0x08);
	_mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(packed));
}

static inline __attribute__((always_inline)) __m256i tp_bytes_load(const char *from)
{
	return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
}

static inline __attribute__((always_inline)) void tp_bytes_store(char *to, __m256i bits)
{
	__m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0x08);
	__m128i low = _mm256_castsi256_si128(words);
	_mm_storel_epi64((__m128i *)to, _mm_packus_epi16(low, low));
}

static inline __attribute__((always_inline)) __m256 tp_e5m2_load(const char *from)
{
	__m128i bytes = _mm_loadl_epi64((const __m128i *)from);
	return _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), bytes));
}

static inline __attribute__((always_inline)) __m256 tp_e4m3_load(const char *from)
{
	__m128i words = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)from));
	/* s eeee mmm with the sign repeated above: bit 14 is a sign too many */
	return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(words, 7), _mm_set1_epi16((short)0xbfff)));
}

static inline __attribute__((always_inline)) __m256 tp_float_min(__m256 a, __m256 b) { return _mm256_min_ps(a, b); }
static inline __attribute__((always_inline)) __m256 tp_float_max(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }

#define TP_WIDE 32
#define TP_NATIVE_W 32
#define TP_MASK_W 0
#define TP_NATIVE __m256i
#define TP_HALF_W 32
#define TP_TABLE tp_reduce_kernels_avx2
#include "exec/host/reduce_kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
