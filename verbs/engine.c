/* Who carries a QP, and the figures that carriers share. */
#include <errno.h>
#include <string.h>
#include "verbs/internal.h"
#include "verbs/path.h"

const struct tp_carrier *tp_engine_wire;

int (*tp_engine_wire_slot)(void);
bool tp_engine_wire_always, tp_engine_path_always;

int tp_engine_slot(void) { return tp_engine_wire_slot ? tp_engine_wire_slot() : 1; }

bool tp_engine_is_local(const struct tp_av *av, uint32_t qpn)
{
	struct tp_device *devices;
	int count = tp_card_devices(&devices);
	if (tp_engine_wire_always || (int)tp_qpn_slot(qpn) != tp_engine_slot())
		return false;
	for (int i = 0; i < count; i++)
		for (int p = 0; p < devices[i].nports; p++)
			if (tp_port_find_gid(&devices[i].ports[p], &av->dgid, (int)av->type) >= 0)
				return true;
	return false;
}

const struct tp_carrier *tp_engine_choose(struct tp_qp *qp)
{
	if (qp->ibv.qp_type == IBV_QPT_UD)      /* each datagram takes its own way */
		return &tp_datagrams;
	bool local = tp_engine_is_local(&qp->av, qp->attr.dest_qp_num) && !tp_engine_path_always;
	const struct tp_carrier *carrier = &tp_self;
	enum tp_path_reason reason = TP_PATH_TAKEN;
	struct tp_path_link *link = NULL;
	if (!local && tp_engine_wire) {
		reason = tp_path_reach(qp, &link);
		carrier = reason == TP_PATH_TAKEN ? &tp_path : tp_engine_wire;
		qp->carrier_data = link;        /* for attach */
	}
	char text[TP_ADDR_TEXT];
	TP_INFO(TP_NET, "QP 0x%06x to QP 0x%06x at %s: carried by %s (%s)", qp->ibv.qp_num, qp->attr.dest_qp_num, tp_addr_format(&qp->av.to, text),
		carrier->name, local ? "both are in this process" : tp_path_reason_text(reason));
	return carrier;
}

uint64_t tp_rnr_delay_ns(uint8_t code)
{
	/* In units of 10 us. */
	static const uint32_t table[32] = { 65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
		3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152 };
	return table[code & 31] * 10000ull;
}

uint64_t tp_retry_limit_ns(uint8_t timeout, uint8_t retry_cnt)
{
	return timeout ? (4096ull << timeout) * (retry_cnt + 1u) : 0;
}
