/* What a UD QP keeps as a sender; all of it belongs to who runs its send queue, but what says otherwise. */
#ifndef TP_VERBS_UD_H
#define TP_VERBS_UD_H

#include "verbs/path.h"

struct tp_ud {
	struct tp_timer *timer;
	uint32_t psn;                   /* of the next one on the wire */
	uint64_t wait_until_ns;         /* the datagram at sq.exec waits at most so long; 0: it doesn't */
	/* It waits for room in this link's ring; we are one of its users. NULL: it doesn't. */
	struct tp_path_link *full;
	struct tp_path_waiter waiter;   /* under the link's lock */
	uint64_t full_head;             /* where its reader stood, */
	uint64_t full_since_ns;         /* and since when, */
	uint64_t full_looked_ns;        /* when that was looked at last */
	uint32_t full_looks;            /* and how often, with a pause before each */
	/* By slot: whether the address used last is this machine's, as found out lately. */
	struct tp_ud_place { union ibv_gid dgid; uint64_t until_ns; bool here, told; enum tp_path_reason reason; } places[TP_PATH_SLOTS];
};
static inline struct tp_ud *tp_ud_of(struct tp_qp *qp) { return qp->carrier_data; }
/* What a datagram's headers say. Bytes above UDP: BTH, DETH, immediate, padding and ICRC are part of them. The Q_Key: the high bit
 * asks for the QP's own. */
static inline uint32_t tp_ud_wire_bytes(const struct tp_wqe *wqe)
{
	return 12 + 8 + (wqe->opcode == IBV_WR_SEND_WITH_IMM ? 4u : 0u) + (uint32_t)tp_align_up(wqe->length, 4) + 4;
}
static inline uint32_t tp_ud_qkey(const struct tp_qp *qp, const struct tp_wqe *wqe)
{
	return wqe->ud.qkey & 0x80000000u ? qp->attr.qkey : wqe->ud.qkey;
}

#endif
