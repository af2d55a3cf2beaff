/* A fault: the packets of a WRITE land in another order than they came, as in a network with adaptive routing; its immediate
 * comes last, as ever. Programs that look for the last byte to have changed see it before others have come. */
#ifndef TP_VERBS_SCATTER_H
#define TP_VERBS_SCATTER_H

#include "verbs/engine.h"
#include "verbs/fault.h"

bool tp_scatter_keeps(struct tp_qp *qp, uint64_t addr, const void *data, uint32_t bytes, bool first);
enum tp_reply tp_scatter_places(struct tp_qp *qp, uint32_t srqn, uint32_t rkey);

/* Takes a packet's bytes into keeping; false: they are to be written now. first: of its message. The QP's lock is held. */
static inline bool tp_scatter_keep(struct tp_qp *qp, uint64_t addr, const void *data, uint32_t bytes, bool first)
{
	return tp_fault_on(TP_FAULT_SCATTER) && tp_scatter_keeps(qp, addr, data, bytes, first);
}
/* The message is whole: what was kept is written. */
static inline enum tp_reply tp_scatter_place(struct tp_qp *qp, uint32_t srqn, uint32_t rkey)
{
	return tp_fault_on(TP_FAULT_SCATTER) ? tp_scatter_places(qp, srqn, rkey) : TP_REPLY_ACK;
}

#endif
