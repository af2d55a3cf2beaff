/* Fused code: a small message between ranks of one host, run to its end in the caller's thread.
 *
 * It does what the plan's steps say, on the same slots, so a rank may run it while another runs the steps. What it leaves
 * out is the machinery between: no lanes, no operation. Two shapes:
 *   one-shot  gives INPUT to everyone and reduces everyone's in rank order; without a look at `head`, too: operations run in
 *             the same order everywhere, so a peer whose chunk of this one is here has ended all earlier ones, and has
 *             consumed all that was sent to it before;
 *   direct    runs the steps one after the other, lane by lane. All that is given comes before all that is taken, so nobody
 *             waits in a circle: of those who wait, the one that is furthest behind waits for somebody who is further on, and
 *             has what he waits for. */
#include <string.h>

#include "exec/host/internal.h"

enum { QUICK_LOOKS = 256, TURNS_A_POLL = 64 };

struct patience {
	struct tp_wait wait;
	bool begun, crowded;
	ncclResult_t (*poll)(void *arg, uint64_t waited_ns);
	void *arg;
};

/* One round of the general path, too: all ranks must agree on the number of slots. */
static bool is_one_chunk(const struct tp_exec *exec, const struct tp_exec_call *call)
{
	size_t bytes = call->block_bytes, line = call->line_bytes;
	size_t limit = TP_MIN(call->chunk_bytes, tp_links_inline_capacity(exec->links, false));
	if (bytes > TP_EXEC_FUSED_BYTES) return false;
	return bytes <= line || bytes + line <= limit || (bytes <= limit && !(line & (line - 1)) && !(limit & (line - 1)));
}

static bool is_open(struct tp_link *link, bool to_give) { return to_give ? tp_link_claim(link) != NULL : tp_link_peek(link) != NULL; }

/* For a chunk to come or (to_give) for a slot to be free. */
static ncclResult_t wait_longer(struct tp_exec *exec, struct tp_link *link, bool to_give, struct patience *p)
{
	struct tp_bell *bell = &exec->boot->bells[exec->boot->local];
	if (!p->begun) {
		tp_wait_begin(&p->wait, p->crowded);
		p->begun = true;
	}
	while (!is_open(link, to_give)) {
		bool awake = tp_wait_turn(&p->wait);
		if (!awake) {
			uint32_t armed = tp_bell_arm(bell);
			if (!is_open(link, to_give)) tp_bell_sleep(bell, armed);
			tp_bell_disarm(bell);
		}
		if (p->poll && (!awake || p->wait.turns % TURNS_A_POLL == 0)) TP_TRY(p->poll(p->arg, tp_wait_lasted_ns(&p->wait)));
	}
	return ncclSuccess;
}

static inline struct tp_slot *look_quickly(struct tp_link *link, bool crowded)
{
	struct tp_slot *slot = tp_link_peek(link);
	for (int i = crowded ? QUICK_LOOKS : 0; !slot && i < QUICK_LOOKS; i++) slot = tp_link_peek(link);
	return slot;
}

static ncclResult_t fail_chunk(const struct tp_exec *exec, const struct tp_exec_call *call, const struct tp_link *link,
	const struct tp_slot *slot)
{
	if (slot->tag != call->tag)
		return TP_FAIL(ncclInvalidUsage, "rank %d: what came from rank %d on channel 0 belongs to another call (tag 0x%08x) than this %s (tag "
			"0x%08x): the ranks' calls differ", exec->boot->rank, link->peer, slot->tag, tp_coll_name(call->plan->spec.coll), call->tag);
	return TP_FAIL(ncclInvalidUsage, "rank %d expects %zu bytes from rank %d in this %s, and %u came: the ranks' calls differ",
		exec->boot->rank, call->block_bytes, link->peer, tp_coll_name(call->plan->spec.coll), slot->bytes);
}

/* One's own contribution, as everybody sees it: own[0] is where it lies. */
static void give_all(const struct tp_exec *exec, const struct tp_exec_plan *plan, const struct tp_exec_call *call, const void **own)
{
	int n = exec->boot->nranks;
	size_t bytes = call->block_bytes;
	*own = call->input;
	for (int i = 1, peer = exec->boot->rank; i < n; i++) {
		if (++peer == n) peer = 0;
		struct tp_link *link = plan->sends[peer];
		struct tp_slot *slot = (struct tp_slot *)(link->slots + (size_t)(link->next & link->mask) * link->stride);
		if (__builtin_expect(call->reduce.pre && i == 1 && bytes, 0)) {
			tp_reduce_run(&call->reduce, false, slot->data, own, 1, 1, bytes);
			*own = slot->data;
		} else {
			tp_exec_fill(slot->data, *own, bytes);
		}
		slot->bytes = (uint32_t)bytes;
		slot->tag = call->tag;
		slot->kind = TP_SLOT_INLINE;
		tp_link_publish(link, slot);
		tp_exec_own_next(link, bytes);
	}
}

static void *buffer_of(const struct tp_exec_call *call, const struct tp_exec_operand *o)
{
	return (char *)(o->where == TP_INPUT ? (void *)(uintptr_t)call->input : call->output) + o->block * call->block_bytes;
}

static ncclResult_t give(struct tp_exec *exec, const struct tp_exec_call *call, const struct tp_exec_step *step, struct patience *p)
{
	const void *from = buffer_of(call, step->src);
	size_t bytes = call->block_bytes;
	for (int i = 0; i < step->nbuf; i++) {
		void *to = buffer_of(call, &step->buf[i]);
		if (to != from && bytes) memcpy(to, from, bytes);
	}
	for (int i = 0; i < step->nout; i++) {
		struct tp_link *link = step->out[i].end->link;
		struct tp_slot *slot = tp_link_claim(link);
		if (__builtin_expect(!slot, 0)) {
			TP_TRY(wait_longer(exec, link, true, p));
			slot = tp_link_claim(link);
		}
		tp_exec_fill(slot->data, from, bytes);
		slot->bytes = (uint32_t)bytes;
		slot->tag = call->tag;
		slot->kind = TP_SLOT_INLINE;
		tp_link_publish(link, slot);
		tp_exec_own_next(link, bytes);
	}
	return ncclSuccess;
}

static ncclResult_t take(struct tp_exec *exec, const struct tp_exec_call *call, const struct tp_exec_step *step, struct patience *p)
{
	const void **from = exec->addresses;
	void *to = buffer_of(call, step->buf);
	size_t bytes = call->block_bytes;
	for (int i = 0; i < step->nsrc; i++) {
		if (!step->src[i].end) {
			from[i] = buffer_of(call, &step->src[i]);
			continue;
		}
		struct tp_link *link = step->src[i].end->link;
		struct tp_slot *slot = look_quickly(link, p->crowded);
		if (__builtin_expect(!slot, 0)) {
			TP_TRY(wait_longer(exec, link, false, p));
			slot = tp_link_peek(link);
		}
		bool refers = slot->kind == TP_SLOT_REF;
		if (__builtin_expect(slot->tag != call->tag || slot->bytes != bytes || (refers && !link->same_process), 0))
			return fail_chunk(exec, call, link, slot);
		from[i] = refers ? (const void *)(uintptr_t)((const struct tp_exec_ref *)slot->data)->addr : slot->data;
	}
	if (step->flags & TP_STEP_REDUCE)
		tp_reduce_run(&call->reduce, call->reduce.post && (step->flags & TP_STEP_FINAL), to, from, step->nsrc, 0, bytes);
	else if (bytes == 4) memcpy(to, from[0], 4);
	else if (bytes == 8) memcpy(to, from[0], 8);
	else memcpy(to, from[0], bytes);
	for (int i = 0; i < step->nsrc; i++)
		if (step->src[i].end) tp_link_release(step->src[i].end->link);
	return ncclSuccess;
}

static ncclResult_t run_direct(struct tp_exec *exec, const struct tp_exec_plan *plan, const struct tp_exec_call *call,
	struct patience *patience)
{
	const struct tp_exec_program *program = &plan->programs[0];
	for (uint32_t l = 0; l < program->nlanes; l++) {
		const struct tp_exec_lane *lane = &program->lanes[l];
		for (const struct tp_exec_step *step = lane->first; step < lane->end; step++)
			TP_TRY((step->nout || !step->src[0].end) && !(step->flags & TP_STEP_REDUCE) ? give(exec, call, step, patience)
				: take(exec, call, step, patience));
	}
	return ncclSuccess;
}

/* Too small for references, but within a process: there one may come from a rank that runs the steps. */
static bool is_direct(const struct tp_exec_call *call, const struct tp_exec_plan *plan)
{
	size_t ref_bytes = call->ref_bytes ? call->ref_bytes : TP_REF_BYTES;
	return plan->all_shm && plan->nprograms == 1 && !call->reduce.pre && call->block_bytes < ref_bytes && call->block_bytes;
}

ncclResult_t tp_exec_one_shot(struct tp_exec *exec, const struct tp_exec_call *call, bool crowded,
	ncclResult_t (*poll)(void *arg, uint64_t waited_ns), void *arg, bool *handled)
{
	*handled = false;
	if (call->plan->shape != TP_SHAPE_ONE_SHOT && call->plan->shape != TP_SHAPE_DIRECT) return ncclSuccess;
	if (!is_one_chunk(exec, call)) return ncclSuccess;
	struct tp_exec_plan *plan;
	TP_TRY(tp_exec_find_plan(exec, call->plan, &plan));
	if (call->plan->shape == TP_SHAPE_DIRECT) {
		if (!is_direct(call, plan)) return ncclSuccess;
		struct patience calm = { .crowded = crowded, .poll = poll, .arg = arg };
		*handled = true;
		return run_direct(exec, plan, call, &calm);
	}
	if (!plan->sends) return ncclSuccess;
	int n = exec->boot->nranks, rank = exec->boot->rank;
	for (int p = 0; p < n; p++)
		if (p != rank && !tp_link_claim(plan->sends[p])) return ncclSuccess;
	*handled = true;

	const void *own, **from = exec->addresses;
	give_all(exec, plan, call, &own);
	struct patience patience = { .crowded = crowded, .poll = poll, .arg = arg };
	for (int p = 0; p < n; p++) {
		if (p == rank) {
			from[p] = own;
			continue;
		}
		struct tp_link *link = plan->receives[p];
		struct tp_slot *slot = look_quickly(link, crowded);
		if (__builtin_expect(!slot, 0)) {
			TP_TRY(wait_longer(exec, link, false, &patience));
			slot = tp_link_peek(link);
		}
		if (__builtin_expect(slot->tag != call->tag || slot->bytes != call->block_bytes, 0))
			return fail_chunk(exec, call, link, slot);
		from[p] = slot->data;
		plan->sends[p]->head_seen = plan->sends[p]->next - 1;
	}
	if (call->block_bytes)
		tp_reduce_run(&call->reduce, call->reduce.post, call->output, from, n, 0, call->block_bytes);
	for (int p = 0; p < n; p++)
		if (p != rank) tp_link_release(plan->receives[p]);
	return ncclSuccess;
}
