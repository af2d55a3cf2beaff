/* Whatever comes in as a UDP payload is parsed or refused; what was parsed lies inside of it and is built back alike. */
#include <stdlib.h>
#include <string.h>
#include "verbs/wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct tp_packet packet, again;
	if (!tp_wire_parse(data, bytes, &packet))
		return 0;
	size_t headers = (size_t)(packet.payload - data);
	if (headers + packet.bytes + packet.pad + TP_WIRE_ICRC_BYTES != bytes)
		abort();
	uint8_t out[TP_WIRE_PACKET_MAX] = { 0 };
	if (tp_wire_build(&packet, out) != headers)
		abort();
	size_t pad = -packet.bytes & 3;
	if (headers + packet.bytes + pad + TP_WIRE_ICRC_BYTES > sizeof(out))
		return 0;
	if (!tp_wire_parse(out, headers + packet.bytes + pad + TP_WIRE_ICRC_BYTES, &again) || again.psn != packet.psn || again.rkey != packet.rkey)
		abort();
	return 0;
}
