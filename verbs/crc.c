/* CRC-32 of Ethernet and zlib (reflected 0x04c11db7), the ICRC's. On x86 by carry-less multiplication: four lanes of 128 bits are
 * folded by x^512 mod P, then by x^128, then reduced (the method of Gopal et al., "Fast CRC Computation for Generic Polynomials
 * Using PCLMULQDQ"); on ARM by its CRC instructions; else, and for short pieces, by tables of eight bytes at a time. */
#include <pthread.h>
#include <string.h>
#include "verbs/crc.h"

#define POLYNOMIAL 0xedb88320u

static uint32_t tables[8][256];
static pthread_once_t once = PTHREAD_ONCE_INIT;
static uint32_t (*fold)(uint32_t state, const uint8_t *data, size_t bytes);     /* bytes: a multiple of 16, 64 at least */

static uint32_t by_tables(uint32_t state, const uint8_t *data, size_t bytes)
{
	for (; bytes >= 8; data += 8, bytes -= 8) {
		uint32_t low, high;
		memcpy(&low, data, 4);
		memcpy(&high, data + 4, 4);
		low ^= state;
		state = tables[7][low & 0xff] ^ tables[6][low >> 8 & 0xff] ^ tables[5][low >> 16 & 0xff] ^ tables[4][low >> 24] ^
			tables[3][high & 0xff] ^ tables[2][high >> 8 & 0xff] ^ tables[1][high >> 16 & 0xff] ^ tables[0][high >> 24];
	}
	for (; bytes > 0; data++, bytes--)
		state = state >> 8 ^ tables[0][(state ^ *data) & 0xff];
	return state;
}

#if defined(__x86_64__)
#include <immintrin.h>

#define TP_CRC_CLMUL __attribute__((target("pclmul,sse4.1")))

TP_CRC_CLMUL static inline __m128i fold_one(__m128i x, __m128i by, __m128i next)
{
	__m128i low = _mm_clmulepi64_si128(x, by, 0x00), high = _mm_clmulepi64_si128(x, by, 0x11);
	return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

TP_CRC_CLMUL static inline __m128i load(const uint8_t *data) { return _mm_loadu_si128((const __m128i *)(const void *)data); }

TP_CRC_CLMUL static uint32_t by_clmul(uint32_t state, const uint8_t *data, size_t bytes)
{
	const __m128i by_512 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), by_128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
	const __m128i by_64 = _mm_set_epi64x(0, 0x163cd6124), barrett = _mm_set_epi64x(0x1f7011641, 0x1db710641);
	const __m128i low_words = _mm_setr_epi32(~0, 0, ~0, 0);
	__m128i a = _mm_xor_si128(load(data), _mm_cvtsi32_si128((int)state));
	__m128i b = load(data + 16), c = load(data + 32), d = load(data + 48);
	for (data += 64, bytes -= 64; bytes >= 64; data += 64, bytes -= 64) {
		a = fold_one(a, by_512, load(data));
		b = fold_one(b, by_512, load(data + 16));
		c = fold_one(c, by_512, load(data + 32));
		d = fold_one(d, by_512, load(data + 48));
	}
	a = fold_one(fold_one(fold_one(a, by_128, b), by_128, c), by_128, d);
	for (; bytes >= 16; data += 16, bytes -= 16)
		a = fold_one(a, by_128, load(data));
	a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by_128, 0x10));
	a = _mm_xor_si128(_mm_srli_si128(a, 4), _mm_clmulepi64_si128(_mm_and_si128(a, low_words), by_64, 0x00));
	b = _mm_clmulepi64_si128(_mm_and_si128(a, low_words), barrett, 0x10);
	b = _mm_clmulepi64_si128(_mm_and_si128(b, low_words), barrett, 0x00);
	return (uint32_t)_mm_extract_epi32(_mm_xor_si128(a, b), 1);
}
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif

__attribute__((target("+crc"))) static uint32_t by_instruction(uint32_t state, const uint8_t *data, size_t bytes)
{
	for (; bytes >= 8; data += 8, bytes -= 8) {
		uint64_t word;
		memcpy(&word, data, 8);
		state = __crc32d(state, word);
	}
	return state;
}
#endif

static void prepare(void)
{
	for (uint32_t i = 0; i < 256; i++) {
		uint32_t value = i;
		for (int bit = 0; bit < 8; bit++)
			value = value & 1 ? value >> 1 ^ POLYNOMIAL : value >> 1;
		tables[0][i] = value;
	}
	for (int t = 1; t < 8; t++)
		for (uint32_t i = 0; i < 256; i++)
			tables[t][i] = tables[t - 1][i] >> 8 ^ tables[0][tables[t - 1][i] & 0xff];
	fold = by_tables;
#if defined(__x86_64__)
	if (__builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"))
		fold = by_clmul;
#elif defined(__aarch64__)
	if (getauxval(AT_HWCAP) & HWCAP_CRC32)
		fold = by_instruction;
#endif
}

uint32_t tp_crc_update(uint32_t state, const void *data, size_t bytes)
{
	pthread_once(&once, prepare);
	const uint8_t *at = data;
	if (bytes >= 64) {
		size_t whole = bytes & ~(size_t)15;
		state = fold(state, at, whole);
		at += whole;
		bytes -= whole;
	}
	return by_tables(state, at, bytes);
}

uint32_t tp_crc_update_plain(uint32_t state, const void *data, size_t bytes)
{
	pthread_once(&once, prepare);
	return by_tables(state, data, bytes);
}
