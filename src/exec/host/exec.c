/* The host executor's life: plans made ready and kept, operations started, run and ended.
 *
 * The operations of a communicator run one after the other, in the order of their start: that is what lets links, scratch
 * memory and the lanes of a plan be shared by all of them. */
#include <stdlib.h>
#include <string.h>

#include "exec/host/internal.h"

enum { LOCAL_SLOTS = 4, PASSES_A_RUN = 32 };

ncclResult_t tp_exec_create(struct tp_boot *boot, struct tp_links *links, struct tp_exec **out)
{
	tp_engine_prepare();
	struct tp_exec *exec = tp_alloc(1, sizeof(*exec), "a host executor");
	if (!exec) return ncclSystemError;
	exec->boot = boot;
	exec->links = links;
	exec->nchannels = tp_links_channels(links);
	exec->scratch = tp_alloc((size_t)exec->nchannels, sizeof(*exec->scratch), "scratch memory");
	exec->scratch_bytes = tp_alloc((size_t)exec->nchannels, sizeof(*exec->scratch_bytes), "scratch memory");
	if (!exec->scratch || !exec->scratch_bytes) {
		tp_exec_destroy(exec);
		return ncclSystemError;
	}
	*out = exec;
	return ncclSuccess;
}

void tp_exec_destroy(struct tp_exec *exec)
{
	if (!exec) return;
	for (struct tp_exec_plan *p = exec->plans, *next; p; p = next) {
		next = p->next;
		tp_exec_plan_free(p);
	}
	for (struct tp_exec_op *op = exec->free_ops, *next; op; op = next) {
		next = op->next_free;
		free(op->active);
		free(op->drain);
		free(op);
	}
	for (int c = 0; exec->scratch && c < exec->nchannels; c++) free(exec->scratch[c]);
	free(exec->scratch);
	free(exec->scratch_bytes);
	free(exec->sources);
	free(exec->addresses);
	free(exec->blocks);
	free(exec);
}

/* A plan that was freed and another made at its place with the same specification has the same programs: generators
 * depend on nothing else. */
static bool is_plan(const struct tp_exec_plan *p, const struct tp_plan *plan)
{
	return p->plan == plan && p->source == plan->programs && p->spec.coll == plan->spec.coll && p->spec.algo == plan->spec.algo &&
		p->spec.root == plan->spec.root && p->spec.nchannels == plan->spec.nchannels;
}

ncclResult_t tp_exec_find_plan(struct tp_exec *exec, const struct tp_plan *plan, struct tp_exec_plan **out)
{
	struct tp_exec_plan *p = exec->last;
	if (__builtin_expect(!p || !is_plan(p, plan), 0)) {
		for (p = exec->plans; p && !is_plan(p, plan); p = p->next) {}
		if (!p) {
			TP_TRY(tp_exec_compile(exec, plan, &p));
			p->next = exec->plans;
			exec->plans = p;
		}
		exec->last = p;
	}
	*out = p;
	return ncclSuccess;
}

ncclResult_t tp_exec_prepare(struct tp_exec *exec, const struct tp_plan *plan)
{
	struct tp_exec_plan *ready;
	return tp_exec_find_plan(exec, plan, &ready);
}

void tp_exec_forget(struct tp_exec *exec, const struct tp_plan *plan)
{
	for (struct tp_exec_plan **at = &exec->plans; *at;) {
		struct tp_exec_plan *p = *at;
		if (p->plan != plan) {
			at = &p->next;
			continue;
		}
		*at = p->next;
		if (exec->last == p) exec->last = NULL;
		tp_exec_plan_free(p);
	}
}

static void recycle(struct tp_exec *exec, struct tp_exec_op *op)
{
	if (op->plan && op->plan->p2p) tp_exec_plan_free(op->plan);
	op->plan = NULL;
	op->next_free = exec->free_ops;
	exec->free_ops = op;
}

ncclResult_t tp_exec_start(struct tp_exec *exec, const struct tp_exec_call *call, struct tp_exec_op **out)
{
	struct tp_exec_op *op = exec->free_ops;
	if (op) exec->free_ops = op->next_free;
	else op = tp_alloc(1, sizeof(*op), "an operation");
	if (!op) return ncclSystemError;
	op->plan = NULL;
	/* Send/recv plans are made for one group, so there is no use in keeping them. */
	ncclResult_t result = call->plan->spec.coll == TP_SEND_RECV ? tp_exec_compile(exec, call->plan, &op->plan)
		: tp_exec_find_plan(exec, call->plan, &op->plan);
	if (result == ncclSuccess && op->active_room < op->plan->nlanes) {
		free(op->active);
		op->active = tp_alloc(op->plan->nlanes, sizeof(struct tp_exec_lane *), "lanes");
		op->active_room = op->active ? op->plan->nlanes : 0;
		if (!op->active) result = ncclSystemError;
	}
	if (result != ncclSuccess) {
		recycle(exec, op);
		return result;
	}
	op->call = *call;
	op->begun = false;
	op->nactive = op->ndrain = 0;
	*out = op;
	return ncclSuccess;
}

/* The largest chunk, from what all ranks agree on only. */
static size_t chunk_limit(const struct tp_exec *exec, const struct tp_exec_op *op)
{
	size_t limit = op->call.chunk_bytes, room = SIZE_MAX;
	if (!tp_links_by_ref(exec->links)) room = tp_links_inline_capacity(exec->links, false);
	if (tp_links_have_net(exec->links)) room = TP_MIN(room, tp_links_inline_capacity(exec->links, true));
	if (op->plan->p2p && room != SIZE_MAX) room -= TP_TOTAL_BYTES;
	return TP_MIN(limit, room);
}

static ncclResult_t grow_scratch(struct tp_exec *exec, struct tp_exec_op *op, struct tp_exec_program *program)
{
	size_t bytes = op->plan->plan->scratch_chunks * program->geometry.chunk_bytes;
	unsigned char **scratch = &exec->scratch[program->channel];
	if (bytes > exec->scratch_bytes[program->channel]) {
		free(*scratch);
		exec->scratch_bytes[program->channel] = 0;
		*scratch = aligned_alloc(TP_CACHE_LINE, tp_align_up(bytes, TP_CACHE_LINE));
		if (!*scratch)
			return TP_FAIL(ncclSystemError, "rank %d: no memory for %zu bytes of scratch of a %s", exec->boot->rank, bytes,
				tp_coll_name(op->plan->spec.coll));
		exec->scratch_bytes[program->channel] = bytes;
	}
	program->scratch = *scratch;
	return ncclSuccess;
}

/* Local rings hold any chunk of this operation. Nothing is in them: the last operation is over. */
static ncclResult_t ready_local_links(struct tp_exec *exec, struct tp_exec_program *program, size_t capacity)
{
	for (uint32_t e = 0; e < program->nends; e += 2) {
		struct tp_exec_end *ends = &program->ends[e];
		if (ends[0].token || (ends[0].link != NULL) != (ends[1].link != NULL)) continue;
		if (ends[0].link && ends[0].link->capacity >= capacity) continue;
		if (ends[0].link) tp_link_self_destroy(&ends[0].own);
		ends[0].link = ends[1].link = NULL;
		TP_TRY(tp_link_self_create(capacity, LOCAL_SLOTS, exec->boot->rank, &ends[0].own, &ends[1].own));
		ends[0].link = &ends[0].own;
		ends[1].link = &ends[1].own;
	}
	return ncclSuccess;
}

static void begin_lane(struct tp_exec_op *op, struct tp_exec_program *program, struct tp_exec_lane *lane)
{
	if (op->plan->p2p) {
		const struct tp_exec_transfer *t = lane->transfer >= 0 ? &op->call.transfers[lane->transfer] : NULL;
		tp_geometry_fit(op->plan->plan, t ? t->bytes : 0, op->limit, op->call.line_bytes, program->channel, &lane->own_geometry);
		lane->geometry = &lane->own_geometry;
		lane->input = t ? t->buf : NULL;
		lane->output = t ? t->buf : NULL;
	} else {
		lane->geometry = &program->geometry;
		lane->input = op->call.input;
		lane->output = op->call.output;
	}
	lane->at = lane->first;
	lane->round = 0;
	lane->ready = 0;
	lane->round_at = 0;
	lane->chunk = lane->geometry->nrounds == 1 ? lane->geometry->last_chunk_bytes : lane->geometry->chunk_bytes;
	lane->done = lane->first == lane->end;
	if (!lane->done) op->active[op->nactive++] = lane;
}

ncclResult_t tp_exec_op_begin(struct tp_exec *exec, struct tp_exec_op *op)
{
	struct tp_exec_plan *plan = op->plan;
	const struct tp_exec_call *call = &op->call;
	op->pre = plan->reduces && call->reduce.pre;
	op->post = plan->reduces && call->reduce.post;
	op->round_first = op->pre && tp_type_bytes(call->reduce.type) <= 2 && call->reduce.type >= ncclFloat16;
	op->limit = chunk_limit(exec, op);
	op->moves_net = tp_links_have_net(exec->links);
	op->streams = call->block_bytes >= TP_STREAM_BYTES / plan->plan->output_blocks;
	op->ref_bytes = call->ref_bytes ? call->ref_bytes : TP_REF_BYTES;
	bool fitted = plan->fit_block == call->block_bytes && plan->fit_chunk == op->limit && plan->fit_line == call->line_bytes;
	for (uint32_t p = 0; p < plan->nprograms; p++) {
		struct tp_exec_program *program = &plan->programs[p];
		if (!fitted)
			tp_geometry_fit(plan->plan, call->block_bytes, op->limit, call->line_bytes, program->channel, &program->geometry);
		if (plan->plan->scratch_chunks) TP_TRY(grow_scratch(exec, op, program));
		if (!plan->all_shm) {
			size_t room = plan->p2p ? op->limit + TP_TOTAL_BYTES : program->geometry.chunk_bytes;
			TP_TRY(ready_local_links(exec, program, TP_MIN(room, TP_LOCAL_BYTES)));
		}
		for (uint32_t l = 0; l < program->nlanes; l++) begin_lane(op, program, &program->lanes[l]);
	}
	plan->fit_block = call->block_bytes;
	plan->fit_chunk = op->limit;
	plan->fit_line = call->line_bytes;
	op->begun = true;
	return ncclSuccess;
}

ncclResult_t tp_exec_op_mark(struct tp_exec *exec, struct tp_exec_op *op, struct tp_exec_end *end)
{
	end->mark = end->link->next;
	if (end->marked) return ncclSuccess;
	if (op->ndrain == op->drain_room) {
		uint32_t room = op->drain_room ? 2 * op->drain_room : 16;
		struct tp_exec_end **drain = realloc(op->drain, room * sizeof(*drain));
		if (!drain) return TP_FAIL(ncclSystemError, "rank %d: no memory for a list of %u links", exec->boot->rank, room);
		op->drain = drain;
		op->drain_room = room;
	}
	op->drain[op->ndrain++] = end;
	end->marked = true;
	return ncclSuccess;
}

/* Waits for what was sent by reference to be read, and for what the network took to be on its way. */
static bool is_drained(struct tp_exec_op *op)
{
	while (op->ndrain) {
		struct tp_exec_end *end = op->drain[op->ndrain - 1];
		struct tp_link *link = end->link;
		if ((int32_t)(link->head_seen - end->mark) < 0) {
			link->head_seen = atomic_load_explicit(link->head, memory_order_acquire);   /* pairs with tp_link_release */
			if ((int32_t)(link->head_seen - end->mark) < 0) return false;
		}
		end->marked = false;
		op->ndrain--;
	}
	return true;
}

static ncclResult_t run_lanes(struct tp_exec *exec, struct tp_exec_op *op, bool *moved)
{
	for (int pass = 0; pass < PASSES_A_RUN && op->nactive; pass++) {
		bool any = false, slow = false;
		for (uint32_t i = 0; i < op->nactive;) {
			struct tp_exec_lane *lane = op->active[i];
			slow |= tp_exec_lane_is_slow(op, lane);
			TP_TRY(tp_exec_lane_run(exec, op, lane, &any));
			if (!lane->done) {
				i++;
				continue;
			}
			/* The order of the lanes is kept: it is the order in which they share links. */
			memmove(&op->active[i], &op->active[i + 1], (op->nactive - i - 1) * sizeof(*op->active));
			op->nactive--;
		}
		if (!any) return ncclSuccess;
		*moved = true;
		if (slow) return ncclSuccess;
	}
	return ncclSuccess;
}

/* A lane that waits for a chunk of somebody who has left waits for ever. */
static ncclResult_t check_lane(const struct tp_exec_lane *lane)
{
	const struct tp_exec_step *step = lane->at;
	if (lane->ready >= (uint32_t)step->nsrc + step->ntake) return ncclSuccess;
	const struct tp_exec_operand *o = lane->ready < step->nsrc ? &step->src[lane->ready] : &step->take[lane->ready - step->nsrc];
	return o->end && o->end->net && !tp_link_peek(o->end->link) ? tp_link_check(o->end->link) : ncclSuccess;
}

ncclResult_t tp_exec_run(struct tp_exec *exec, struct tp_exec_op *op, bool *moved, bool *done)
{
	*moved = *done = false;
	if (!op->begun) TP_TRY(tp_exec_op_begin(exec, op));
	if (op->nactive) TP_TRY(run_lanes(exec, op, moved));
	if (tp_links_have_net(exec->links)) {
		bool net_moved;
		TP_TRY(tp_links_progress(exec->links, &net_moved));
		*moved |= net_moved;
		for (uint32_t i = 0; i < op->nactive && !*moved; i++) TP_TRY(check_lane(op->active[i]));
	}
	if (op->nactive || !is_drained(op)) return ncclSuccess;
	*moved = *done = true;
	recycle(exec, op);
	return ncclSuccess;
}

void tp_exec_cancel(struct tp_exec *exec, struct tp_exec_op *op)
{
	tp_links_recall(exec->links);
	for (uint32_t i = 0; i < op->ndrain; i++) op->drain[i]->marked = false;
	op->ndrain = op->nactive = 0;
	recycle(exec, op);
}
