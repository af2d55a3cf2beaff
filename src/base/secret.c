/* Secrets: random bytes, keyed hashes and comparisons in constant time, by libsodium. */
#include <pthread.h>
#include <sodium.h>
#include "base/internal.h"

static pthread_once_t sodium_once = PTHREAD_ONCE_INIT;

static void start_sodium(void)
{
	/* Fails only where the system has no random numbers; randombytes_buf then ends the process rather than guess. */
	if (sodium_init() < 0)
		TP_WARN("libsodium can't start: the system gives no random numbers");
}

void tp_secret_random(void *out, size_t bytes)
{
	pthread_once(&sodium_once, start_sodium);
	randombytes_buf(out, bytes);
}

void tp_secret_mac(const uint8_t key[TP_SECRET_BYTES], const void *data, size_t bytes, uint8_t out[TP_SECRET_BYTES])
{
	pthread_once(&sodium_once, start_sodium);
	crypto_generichash(out, TP_SECRET_BYTES, data, bytes, key, TP_SECRET_BYTES);
}

bool tp_secret_equal(const uint8_t a[TP_SECRET_BYTES], const uint8_t b[TP_SECRET_BYTES])
{
	return sodium_memcmp(a, b, TP_SECRET_BYTES) == 0;
}
