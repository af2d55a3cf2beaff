/* The kernels for any processor: 16-byte vectors of the baseline (SSE2, NEON), or whatever the compiler makes of them. */
#if defined(__SSE2__)
#include <emmintrin.h>
#include <stdint.h>
#include <string.h>

static inline __attribute__((always_inline)) __m128i tp_words_load(const char *from)
{
	return _mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i *)from), _mm_setzero_si128());
}

/* SSE2 packs signed words only. */
static inline __attribute__((always_inline)) void tp_words_store(char *to, __m128i bits)
{
	bits = _mm_srai_epi32(_mm_slli_epi32(bits, 16), 16);
	_mm_storel_epi64((__m128i *)to, _mm_packs_epi32(bits, bits));
}

static inline __attribute__((always_inline)) __m128i tp_bytes_load(const char *from)
{
	int32_t four;
	memcpy(&four, from, sizeof(four));
	__m128i words = _mm_unpacklo_epi8(_mm_cvtsi32_si128(four), _mm_setzero_si128());
	return _mm_unpacklo_epi16(words, _mm_setzero_si128());
}

static inline __attribute__((always_inline)) void tp_bytes_store(char *to, __m128i bits)
{
	__m128i words = _mm_packs_epi32(bits, bits);
	int32_t four = _mm_cvtsi128_si32(_mm_packus_epi16(words, words));
	memcpy(to, &four, sizeof(four));
}

static inline __attribute__((always_inline)) __m128 tp_float_min(__m128 a, __m128 b) { return _mm_min_ps(a, b); }
static inline __attribute__((always_inline)) __m128 tp_float_max(__m128 a, __m128 b) { return _mm_max_ps(a, b); }

#define TP_NATIVE_W 16
#define TP_NATIVE __m128i
#else
#define TP_NATIVE_W 0
#endif

#define TP_WIDE 16
#define TP_HALF_W 0
#define TP_MASK_W 0
#define TP_TABLE tp_reduce_kernels_scalar
#include "exec/host/reduce_kernels.h"
