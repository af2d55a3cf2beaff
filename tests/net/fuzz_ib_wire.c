/* Records of the IB transport's control connection, from bytes. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "net/ib/wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct tp_ib_wire_refusal refusal;
	struct tp_ib_wire_token token;
	struct tp_ib_record record;
	const char *why = NULL;

	/* What rdma_cm brings. */
	if (!tp_ib_token_read(data, size, &token) && (token.path >= TP_IB_MAX_PATHS || token.qp >= TP_IB_MAX_QPS)) abort();
	if (tp_ib_refusal_read(data, size, &refusal) && strlen(refusal.text) >= sizeof(refusal.text)) abort();
	while (size > 0) {
		size_t have = size < sizeof(record) ? size : sizeof(record);
		long whole = tp_ib_record_check(data, have, &why);
		if (whole < 0 && !why) abort();
		if (whole <= 0) return 0;
		if ((size_t)whole > have) abort();
		memcpy(&record, data, (size_t)whole);
		if (record.head.type == TP_IB_META && !tp_ib_wire_check_meta(&record.as.meta)) {
			if (record.as.meta.npaths > TP_IB_MAX_PATHS) abort();
			for (uint32_t p = 0; p < record.as.meta.npaths; p++)
				if (record.as.meta.paths[p].port && (record.as.meta.paths[p].key >= TP_IB_MAX_KEYS || record.as.meta.paths[p].way >= TP_IB_MAX_PATHS)) abort();
		}
		if (record.head.type == TP_IB_SWITCH && !tp_ib_wire_check_switch(&record.as.change) && strlen(record.as.change.why) >= sizeof(record.as.change.why)) abort();
		if (record.head.type == TP_IB_REVIVE && !tp_ib_wire_check_revive(&record.as.revive) && record.as.revive.path >= TP_IB_MAX_PATHS) abort();
		data += whole;
		size -= (size_t)whole;
	}
	return 0;
}
