/* What each collective has to begin with and to leave behind. */
#include "plan/check.h"

static uint32_t count_transfers(const struct tp_check *c, int op, int rank)
{
	const struct tp_check_memory *m = &c->memory[(size_t)op * (size_t)c->nranks + (size_t)rank];
	uint32_t count = 0;
	for (int32_t l = 0; l < m->nlanes; l++)
		count = TP_MAX(count, (uint32_t)(c->lanes[m->first_lane + l].lane->transfer + 1));
	return count;
}

uint32_t tp_check_input_chunks(const struct tp_check *c, int op, int rank)
{
	const struct tp_plan *plan = c->plans[op];
	if (plan->spec.coll == TP_SEND_RECV) return count_transfers(c, op, rank);
	return plan->input_blocks * plan->pieces;
}

uint32_t tp_check_output_chunks(const struct tp_check *c, int op, int rank)
{
	const struct tp_plan *plan = c->plans[op];
	if (plan->spec.coll == TP_SEND_RECV) return count_transfers(c, op, rank);
	return plan->output_blocks * plan->pieces;
}

bool tp_check_has_input(const struct tp_plan *plan, int rank)
{
	return (plan->spec.coll != TP_BROADCAST && plan->spec.coll != TP_SCATTER) || rank == plan->spec.root;
}

bool tp_check_has_output(const struct tp_plan *plan, int rank)
{
	return (plan->spec.coll != TP_REDUCE && plan->spec.coll != TP_GATHER) || rank == plan->spec.root;
}

/* Which rank's (-1: all ranks', reduced) input chunk belongs into an output chunk. */
static void expected(const struct tp_plan *plan, int rank, int32_t output, int *from, int32_t *chunk)
{
	int32_t pieces = (int32_t)plan->pieces, block = output / pieces, piece = output % pieces;
	*from = -1;
	*chunk = output;
	switch (plan->spec.coll) {
	case TP_REDUCE_SCATTER: *chunk = rank * pieces + piece; break;
	case TP_ALL_GATHER: case TP_GATHER: *from = block; *chunk = piece; break;
	case TP_ALL_TO_ALL: *from = block; *chunk = rank * pieces + piece; break;
	case TP_BROADCAST: *from = plan->spec.root; break;
	case TP_SCATTER: *from = plan->spec.root; *chunk = rank * pieces + piece; break;
	default: break;
	}
}

static int missing_rank(const struct tp_check *c, uint32_t value)
{
	for (int r = 0; r < c->nranks; r++)
		if (!(tp_check_set(c, value)[r / 64] >> r % 64 & 1)) return r;
	return -1;
}

static ncclResult_t check_chunk(struct tp_check *c, int op, int rank, int32_t output, uint32_t round)
{
	const struct tp_plan *plan = c->plans[op];
	const struct tp_check_memory *m = &c->memory[(size_t)op * (size_t)c->nranks + (size_t)rank];
	const struct tp_check_cell *cell = &m->cells[tp_check_cell_of(c, op, rank, NULL, TP_OUTPUT, output, round)];
	int lane = cell->writer < 0 ? -1 : cell->writer - c->ranks[rank].clock_base, from, missing;
	int step = cell->writer < 0 ? -1 : cell->write_step;
	int32_t chunk;
	expected(plan, rank, output, &from, &chunk);
	if (!cell->value)
		return tp_check_fail(c, TP_CHECK_WRONG_RESULT, rank, lane, step, (int)round, "never writes output chunk %d", output);
	const struct tp_check_value *v = &c->values[cell->value];
	if (v->chunk != chunk || v->round != round || v->op != op)
		return tp_check_fail(c, TP_CHECK_WRONG_RESULT, rank, lane, step, (int)round,
			"leaves input chunk %d of round %d (operation %d) in output chunk %d, where chunk %d of round %u belongs",
			v->chunk, v->round, v->op, output, chunk, round);
	if (from >= 0) {
		if (v->rank != from)
			return tp_check_fail(c, TP_CHECK_WRONG_RESULT, rank, lane, step, (int)round,
				"leaves rank %d's data in output chunk %d, where rank %d's belongs", v->rank, output, from);
		return ncclSuccess;
	}
	if ((missing = missing_rank(c, cell->value)) >= 0)
		return tp_check_fail(c, TP_CHECK_WRONG_RESULT, rank, lane, step, (int)round,
			"leaves output chunk %d without rank %d's contribution", output, missing);
	if (!v->final)
		return tp_check_fail(c, TP_CHECK_NOT_FINAL, rank, lane, step, (int)round,
			"leaves output chunk %d complete, but no step of its making is marked final", output);
	if (plan->spec.coll != TP_ALL_REDUCE) return ncclSuccess;
	uint64_t *first = &c->all_reduce_hash[c->hash_base[op] + (size_t)output * c->options->rounds + round];
	if (*first && *first != v->hash)
		return tp_check_fail(c, TP_CHECK_ORDER_DIFFERS, rank, lane, step, (int)round,
			"reduces output chunk %d in another order than another rank", output);
	*first = v->hash;
	return ncclSuccess;
}

/* A lane's place among those of its program that use the same link. */
static int ordinal(const struct tp_check_lane *lane)
{
	int n = 0;
	for (uint32_t after = lane->lane->after; after; after = lane->program->lanes[after - 1].after) n++;
	return n;
}

static const struct tp_operand *link_operand(const struct tp_program *p, const struct tp_lane *l)
{
	const struct tp_step *s = &p->steps[l->first_step];
	for (uint32_t o = s->first; o < s->first + s->nsrc + s->ndst; o++)
		if (p->operands[o].where == TP_LINK) return &p->operands[o];
	return NULL;
}

/* Transfers differ in size; both ends know the number of rounds. */
uint32_t tp_check_p2p_rounds(const struct tp_check *c, const struct tp_check_lane *lane)
{
	const struct tp_operand *o = link_operand(lane->program, lane->lane);
	if (!o) return c->options->rounds;
	const struct tp_plan_link *l = &lane->program->links[o->index];
	return 1 + (uint32_t)(l->from * 7 + l->to * 3 + ordinal(lane)) % c->options->rounds;
}

static ncclResult_t check_transfer(struct tp_check *c, int op, const struct tp_check_lane *lane)
{
	const struct tp_operand *o = link_operand(lane->program, lane->lane);
	const struct tp_step *s = &lane->program->steps[lane->lane->first_step];
	if (!o || o != &lane->program->operands[s->first]) return ncclSuccess;         /* a send */
	int from = lane->program->links[o->index].from, lane_class = lane->program->links[o->index].lane_class;
	const struct tp_check_memory *m = &c->memory[(size_t)op * (size_t)c->nranks + (size_t)from];
	const struct tp_check_memory *mine = &c->memory[(size_t)op * (size_t)c->nranks + (size_t)lane->rank];
	int sent = -1;
	for (int32_t l = m->first_lane; l < m->first_lane + m->nlanes; l++) {
		const struct tp_operand *there = link_operand(c->lanes[l].program, c->lanes[l].lane);
		if (!there) continue;
		const struct tp_plan_link *link = &c->lanes[l].program->links[there->index];
		if (link->from == from && link->to == lane->rank && link->lane_class == lane_class && &c->lanes[l] != lane
			&& ordinal(&c->lanes[l]) == ordinal(lane))
			sent = c->lanes[l].lane->transfer;
	}
	for (uint32_t k = 0; k < lane->nrounds; k++) {
		uint32_t value = mine->cells[tp_check_cell_of(c, op, lane->rank, lane, TP_OUTPUT, 0, k)].value;
		const struct tp_check_value *v = &c->values[value];
		if (!value || v->rank != from || v->chunk != sent || v->round != k || v->op != op)
			return tp_check_fail(c, TP_CHECK_WRONG_RESULT, lane->rank, lane->number, 0, (int)k,
				"receives rank %d's transfer %d round %d, where rank %d's transfer %d belongs", value ? v->rank : -1,
				value ? v->chunk : -1, value ? v->round : -1, from, sent);
	}
	return ncclSuccess;
}

ncclResult_t tp_check_result(struct tp_check *c, int op, int rank)
{
	const struct tp_plan *plan = c->plans[op];
	const struct tp_check_memory *m = &c->memory[(size_t)op * (size_t)c->nranks + (size_t)rank];
	if (plan->spec.coll == TP_SEND_RECV) {
		for (int32_t l = 0; l < m->nlanes; l++) TP_TRY(check_transfer(c, op, &c->lanes[m->first_lane + l]));
		return ncclSuccess;
	}
	if (!tp_check_has_output(plan, rank)) return ncclSuccess;
	int32_t chunks = (int32_t)tp_check_output_chunks(c, op, rank);
	for (int32_t i = 0; i < chunks; i++)
		for (uint32_t k = 0; k < c->options->rounds; k++) TP_TRY(check_chunk(c, op, rank, i, k));
	return ncclSuccess;
}
