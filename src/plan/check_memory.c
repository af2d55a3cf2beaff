/* Buffers under the checker. Every access is compared with the last write (and a write with all reads since) by vector
 * clocks: an access is ordered after another if the lane's clock has seen that one's time. */
#include <stdlib.h>
#include <string.h>

#include "plan/check.h"

static bool grow(void **array, size_t count, size_t bytes)
{
	void *grown = realloc(*array, count * bytes);
	if (!grown) {
		TP_WARN("Out of memory in the plan checker (%zu bytes)", count * bytes);
		return false;
	}
	*array = grown;
	return true;
}

uint32_t tp_check_new_value(struct tp_check *c, struct tp_check_value value)
{
	if (c->nvalues == c->values_room) {
		uint32_t room = c->values_room ? c->values_room * 2 : 4096;
		if (!grow((void **)&c->values, room, sizeof(*c->values))) return 0;
		if (!grow((void **)&c->sets, (size_t)room * c->words, sizeof(*c->sets))) return 0;
		c->values_room = room;
	}
	memset(c->sets + (size_t)c->nvalues * c->words, 0, c->words * sizeof(*c->sets));
	c->values[c->nvalues] = value;
	return c->nvalues++;
}

static int32_t new_read(struct tp_check *c)
{
	if (c->free_read >= 0) {
		int32_t read = c->free_read;
		c->free_read = c->reads[read].next;
		return read;
	}
	if (c->nreads == c->reads_room) {
		int32_t room = c->reads_room ? c->reads_room * 2 : 4096;
		if (!grow((void **)&c->reads, (size_t)room, sizeof(*c->reads))) return -1;
		c->reads_room = room;
	}
	return c->nreads++;
}

static uint32_t rounds_of(const struct tp_check *c) { return c->options->rounds; }

ncclResult_t tp_check_memory_begin(struct tp_check *c, int op, int rank)
{
	const struct tp_plan *plan = c->plans[op];
	struct tp_check_memory *m = &c->memory[(size_t)op * (size_t)c->nranks + (size_t)rank];
	uint32_t inputs = tp_check_input_chunks(c, op, rank), outputs = tp_check_output_chunks(c, op, rank);
	m->output_cell = inputs * rounds_of(c);
	m->scratch_cell = m->output_cell + outputs * rounds_of(c);
	m->ncells = m->scratch_cell + plan->scratch_chunks;
	m->cells = tp_alloc(TP_MAX(m->ncells, 1), sizeof(*m->cells), "the plan checker");
	if (!m->cells) return ncclSystemError;
	for (uint32_t i = 0; i < m->ncells; i++) {
		m->cells[i].writer = -1;
		m->cells[i].reads = -1;
	}
	m->first_leaf = c->nvalues;
	if (!tp_check_has_input(plan, rank)) return ncclSuccess;
	for (uint32_t i = 0; i < inputs; i++) {
		for (uint32_t k = 0; k < rounds_of(c); k++) {
			uint64_t hash = tp_check_mix(tp_check_mix((uint64_t)op << 32 | (uint32_t)rank, i + 1), k + 1);
			uint32_t leaf = tp_check_new_value(c, (struct tp_check_value){ .hash = hash, .chunk = (int32_t)i,
				.round = (uint16_t)k, .op = (uint16_t)op, .rank = rank });
			if (!leaf) return ncclSystemError;
			tp_check_set(c, leaf)[rank / 64] |= 1ull << rank % 64;
			m->cells[tp_check_cell_of(c, op, rank, NULL, TP_INPUT, (int32_t)i, k)].value = leaf;
		}
	}
	return ncclSuccess;
}

uint32_t tp_check_cell_of(const struct tp_check *c, int op, int rank, const struct tp_check_lane *lane, enum tp_where where,
	int32_t index, uint32_t round)
{
	const struct tp_plan *plan = c->plans[op];
	const struct tp_check_memory *m = &c->memory[(size_t)op * (size_t)c->nranks + (size_t)rank];
	int32_t own = rank * (int32_t)plan->pieces;
	bool root = rank == plan->spec.root;
	if (where == TP_SCRATCH) return m->scratch_cell + (uint32_t)index;
	if (plan->spec.coll == TP_SEND_RECV) {
		if (lane) index = lane->lane->transfer;
	} else if (c->options->in_place) {
		switch (plan->spec.coll) {
		case TP_ALL_REDUCE: case TP_BROADCAST: where = TP_INPUT; break;
		case TP_REDUCE: where = TP_INPUT; break;
		case TP_ALL_GATHER: if (where == TP_INPUT) { where = TP_OUTPUT; index += own; } break;
		case TP_REDUCE_SCATTER: if (where == TP_OUTPUT) { where = TP_INPUT; index += own; } break;
		case TP_GATHER: if (where == TP_INPUT && root) { where = TP_OUTPUT; index += own; } break;
		case TP_SCATTER: if (where == TP_OUTPUT && root) { where = TP_INPUT; index += own; } break;
		default: break;
		}
	}
	return (where == TP_OUTPUT ? m->output_cell : 0) + (uint32_t)index * rounds_of(c) + round;
}

static struct tp_check_cell *cell_at(const struct tp_check *c, int op, int rank, uint32_t cell)
{
	return &c->memory[(size_t)op * (size_t)c->nranks + (size_t)rank].cells[cell];
}

/* Who a clock lane is, for the report. */
static void name_lane(const struct tp_check *c, int32_t clock_lane, int *rank, int *lane)
{
	*rank = 0;
	while (*rank + 1 < c->nranks && c->ranks[*rank + 1].clock_base <= clock_lane) ++*rank;
	*lane = clock_lane - c->ranks[*rank].clock_base;
}

static ncclResult_t race(struct tp_check *c, const struct tp_check_lane *lane, const char *does, int owner, int32_t other,
	int other_step, const char *did)
{
	int rank, number;
	name_lane(c, other, &rank, &number);
	return tp_check_fail(c, TP_CHECK_RACE, lane->rank, lane->number, (int)lane->step, (int)lane->round,
		"%s a chunk of rank %d that rank %d lane %d step %d %s, and nothing orders the two", does, owner, rank, number,
		other_step, did);
}

ncclResult_t tp_check_read_cell(struct tp_check *c, const struct tp_check_lane *lane, int op, int rank, uint32_t cell,
	uint32_t *value, uint32_t *depth)
{
	struct tp_check_cell *m = cell_at(c, op, rank, cell);
	if (c->memory[(size_t)op * (size_t)c->nranks + (size_t)rank].ended)
		return tp_check_fail(c, TP_CHECK_RACE, lane->rank, lane->number, (int)lane->step, (int)lane->round,
			"reads a chunk of rank %d, which has gone on to the next operation", rank);
	if (!m->value)
		return tp_check_fail(c, TP_CHECK_UNDEFINED_READ, lane->rank, lane->number, (int)lane->step, (int)lane->round,
			"reads a chunk of rank %d that nobody has written", rank);
	if (m->writer >= 0 && lane->clock[m->writer] < m->write_time)
		return race(c, lane, "reads", rank, m->writer, m->write_step, "writes");
	*value = m->value;
	*depth = TP_MAX(*depth, m->depth);
	for (int32_t i = m->reads; i >= 0; i = c->reads[i].next) {
		if (c->reads[i].lane != lane->clock_lane) continue;
		c->reads[i].time = lane->clock[lane->clock_lane];
		c->reads[i].step = (int16_t)lane->step;
		return ncclSuccess;
	}
	int32_t i = new_read(c);
	if (i < 0) return ncclSystemError;
	c->reads[i] = (struct tp_check_read){ lane->clock_lane, lane->clock[lane->clock_lane], (int16_t)lane->step, m->reads };
	m->reads = i;
	return ncclSuccess;
}

ncclResult_t tp_check_write_cell(struct tp_check *c, const struct tp_check_lane *lane, int op, uint32_t cell, uint32_t value,
	uint32_t depth)
{
	struct tp_check_cell *m = cell_at(c, op, lane->rank, cell);
	if (m->writer >= 0 && lane->clock[m->writer] < m->write_time)
		return race(c, lane, "writes", lane->rank, m->writer, m->write_step, "writes");
	while (m->reads >= 0) {
		struct tp_check_read *r = &c->reads[m->reads];
		if (lane->clock[r->lane] < r->time) return race(c, lane, "writes", lane->rank, r->lane, r->step, "reads");
		int32_t next = r->next;
		r->next = c->free_read;
		c->free_read = m->reads;
		m->reads = next;
	}
	m->value = value;
	m->writer = lane->clock_lane;
	m->write_time = lane->clock[lane->clock_lane];
	m->write_step = (int16_t)lane->step;
	m->depth = depth;
	return ncclSuccess;
}

ncclResult_t tp_check_memory_end(struct tp_check *c, int op, int rank, const int16_t *end_clock)
{
	struct tp_check_memory *m = &c->memory[(size_t)op * (size_t)c->nranks + (size_t)rank];
	m->ended = true;
	for (uint32_t i = 0; c->options->ends_early && i < m->ncells; i++) {
		for (int32_t r = m->cells[i].reads; r >= 0; r = c->reads[r].next) {
			int reader, lane;
			if (end_clock[c->reads[r].lane] >= c->reads[r].time) continue;
			name_lane(c, c->reads[r].lane, &reader, &lane);
			return tp_check_fail(c, TP_CHECK_RACE, reader, lane, c->reads[r].step, -1,
				"reads a chunk of rank %d, which may have gone on to the next operation by then", rank);
		}
	}
	return ncclSuccess;
}
