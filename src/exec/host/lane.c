/* A lane: steps in order, once a round. It stops where a link isn't ready and is asked again later. */
#include "exec/host/internal.h"

/* What was ready stays ready, for nobody else takes it: so the look goes on where it stopped. */
static bool is_ready(struct tp_exec_lane *lane, const struct tp_exec_step *step)
{
	uint32_t at = lane->ready, nin = (uint32_t)step->nsrc + step->ntake, nout = (uint32_t)step->nout + step->ngive;
	for (; at < nin; at++) {
		const struct tp_exec_operand *o = at < step->nsrc ? &step->src[at] : &step->take[at - step->nsrc];
		if (o->end && !tp_link_peek(o->end->link)) goto blocked;
	}
	for (; at < nin + nout; at++) {
		uint32_t k = at - nin;
		const struct tp_exec_operand *o = k < step->nout ? &step->out[k] : &step->give[k - step->nout];
		if (!tp_link_claim(o->end->link)) goto blocked;
	}
	return true;
blocked:
	lane->ready = at;
	return false;
}

ncclResult_t tp_exec_lane_run(struct tp_exec *exec, struct tp_exec_op *op, struct tp_exec_lane *lane, bool *moved)
{
	if (lane->after && !lane->after->done) return ncclSuccess;
	const struct tp_geometry *g = lane->geometry;
	while (is_ready(lane, lane->at)) {
		TP_TRY(tp_exec_step_move(exec, op, lane, lane->at));
		*moved = true;
		lane->ready = 0;
		if (++lane->at == lane->end) {
			if (++lane->round == g->nrounds) {
				lane->done = true;
				return ncclSuccess;
			}
			lane->at = lane->first;
			lane->round_at += op->plan->pieces * g->chunk_bytes;
			if (lane->round + 1 == g->nrounds) lane->chunk = g->last_chunk_bytes;
		}
		if (tp_exec_lane_is_slow(op, lane)) return ncclSuccess;
	}
	return ncclSuccess;
}
