/* Whatever comes to QP 1, with a right ICRC: it is a message or it isn't; what is one is the same after its way to its process. */
#include <arpa/inet.h>
#include <string.h>
#include "verbs/gsi.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct tp_gsi_parcel parcel = { .magic = TP_GSI_MAGIC, .ttl = 64 };
	uint8_t raw[TP_MAD_BYTES];
	union ibv_gid from, to;
	struct tp_cm_mad mad;
	struct tp_icrc icrc;
	if (bytes > sizeof(parcel.packet) - TP_WIRE_ICRC_BYTES)
		return 0;
	memcpy(parcel.packet, data, bytes);
	parcel.from.v4 = (struct sockaddr_in){ .sin_family = AF_INET, .sin_port = htons(50000), .sin_addr.s_addr = htonl(0x7f4d0101) };
	parcel.to.v4 = (struct sockaddr_in){ .sin_family = AF_INET, .sin_port = htons(4791), .sin_addr.s_addr = htonl(0x7f4d0102) };
	tp_icrc_prepare(&parcel.from, &parcel.to, &icrc);
	tp_icrc_store(parcel.packet + sizeof(parcel.packet) - TP_WIRE_ICRC_BYTES, tp_icrc_of(&icrc, 0, parcel.packet, sizeof(parcel.packet) - TP_WIRE_ICRC_BYTES));
	struct tp_ingress in = { .from = parcel.from, .to = parcel.to, .data = parcel.packet, .bytes = sizeof(parcel.packet) };
	bool is_message = tp_gsi_parse(&in, &mad);
	if ((tp_gsi_take(&parcel, sizeof(parcel), raw, &from, &to) != 0) != is_message)
		__builtin_trap();
	if (is_message && memcmp(raw, parcel.packet + 20, sizeof(raw)))
		__builtin_trap();
	/* Of any length. */
	tp_gsi_take(data, bytes, raw, &from, &to);
	return 0;
}
