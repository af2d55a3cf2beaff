/* Records of the probe's exchange, from bytes. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "probe/wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_hello(const struct probe_hello *h)
{
	if (h->op >= PROBE_OPS || h->nqps < 1 || h->nqps > PROBE_MAX_QPS || h->bytes < 1 || h->bytes > PROBE_MAX_BYTES || h->max_message < 1) abort();
	if (!memchr(h->host, 0, sizeof(h->host)) || !memchr(h->port, 0, sizeof(h->port))) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct probe_record record;
	char why[256] = "";

	while (size > 0) {
		size_t have = size < sizeof(record) ? size : sizeof(record);
		long whole = probe_record_check(data, have, why, sizeof(why));
		if (whole < 0 && !why[0]) abort();
		if (whole <= 0 || (size_t)whole > have) return 0;
		memset(&record, 0, sizeof(record));
		memcpy(&record, data, (size_t)whole);
		bool good = probe_record_accept(&record, why, sizeof(why));
		if (!good && !why[0]) abort();
		if (good && record.head.type == PROBE_HELLO) check_hello(&record.as.hello);
		if (good && record.head.type == PROBE_STEP && (record.as.step.count < 1 || record.as.step.bytes < 1)) abort();
		if (record.head.type == PROBE_FAILED && !memchr(record.as.failed.text, 0, sizeof(record.as.failed.text))) abort();
		if (record.head.type == PROBE_DONE && !memchr(record.as.done.text, 0, sizeof(record.as.done.text))) abort();
		data += whole;
		size -= (size_t)whole;
	}
	return 0;
}
