/* Arbitrary bytes where a hello, an answer, a proof, a welcome or a handle is expected. */
#include <stdlib.h>
#include <string.h>
#include "net/socket_hello.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static const struct { enum tp_wire_type type; size_t bytes; } messages[] = {
		{ TP_WIRE_HELLO, sizeof(struct tp_wire_hello) }, { TP_WIRE_ANSWER, sizeof(struct tp_wire_answer) },
		{ TP_WIRE_PROOF, sizeof(struct tp_wire_proof) }, { TP_WIRE_WELCOME, sizeof(struct tp_wire_welcome) },
	};
	union tp_addr addr;
	uint64_t id;

	/* Copies of exact size, so that a read beyond is seen. */
	for (size_t i = 0; i < TP_ARRAY_LEN(messages); i++) {
		size_t have = TP_MIN(size, messages[i].bytes);
		uint8_t *copy = malloc(have ? have : 1);
		memcpy(copy, data, have);
		enum tp_wire_verdict verdict = tp_wire_check(copy, have, messages[i].type, messages[i].bytes);
		if (verdict == TP_WIRE_DONE && have != messages[i].bytes) abort();
		if (tp_wire_describe_stranger(copy, have) == NULL) abort();
		if (verdict == TP_WIRE_DONE && i == 0) {
			struct tp_wire_hello hello;
			memcpy(&hello, copy, sizeof(hello));
			if (!tp_wire_check_hello(&hello) && (hello.socket >= hello.nsockets || hello.nsockets > 65)) abort();
		}
		free(copy);
	}
	if (size >= TP_NET_HANDLE_BYTES) tp_wire_read_handle(data, &addr, &id);
	return 0;
}
