/* Anybody can send a MAD to QP 1: what parses must mean the same when built again. */
#include <string.h>
#include "verbs/cm_mad.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct tp_cm_mad mad, again;
	struct tp_cm_ip ip;
	uint8_t built[TP_MAD_BYTES], rebuilt[TP_MAD_BYTES];
	if (!tp_cm_parse(data, bytes, &mad))
		return 0;
	tp_cm_parse_ip(mad.private_data, mad.private_bytes, &ip);
	tp_cm_build(&mad, built);
	if (!tp_cm_parse(built, sizeof(built), &again))
		__builtin_trap();
	tp_cm_build(&again, rebuilt);
	if (memcmp(built, rebuilt, sizeof(built)))
		__builtin_trap();
	return 0;
}
