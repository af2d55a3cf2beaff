/* The steps kernel: runs a rank's programs, a block a channel.
 *
 * A program's lanes are spread over groups of warps (groups.h). A group takes the next step of any of its lanes whose links are
 * all ready, in turn, so that no lane waits for another. What is written here and read by other groups goes through local links like
 * everything else, so groups never meet but at the beginning and the end of a call. */
#ifndef TP_EXEC_CUDA_STEPS_H
#define TP_EXEC_CUDA_STEPS_H

#include "exec/cuda/lend.h"

/* Ends that are kept in shared memory while the kernel runs, and bytes of a program that is read into it; what is larger stays where it
 * is. Few in the emulator, so that its tests go both ways. */
#ifdef TP_EMULATE
enum { TP_STEPS_LINKS = 6, TP_STEPS_PROGRAM = 768 };
#else
enum { TP_STEPS_LINKS = 136, TP_STEPS_PROGRAM = 16 << 10 };
#endif
/* As plan/plan.h's. */
enum { TP_STEPS_LINK, TP_STEPS_INPUT, TP_STEPS_OUTPUT, TP_STEPS_SCRATCH };
enum { TP_STEPS_FLAG_REDUCE = 1, TP_STEPS_FLAG_FINAL = 2 };

struct tp_lane_state { uint32_t at, round; };

/* One call on one channel. In shared memory, for all threads see the same, and registers are for data. */
struct tp_steps_run {
	const tp_dev_call *call;
	const tp_dev_program *program;
	const tp_dev_lane *lanes;
	const tp_dev_step *steps;
	const tp_dev_operand *operands;
	const uint64_t *link_addresses;
	tp_dev_link *links;                         /* in shared memory; NULL: there are too many, link_addresses has them */
	const tp_dev_part *part;
	uint64_t part_offset, part_bytes;
	uint32_t lends, lent;                       /* lends: bits by TP_STEPS_INPUT and OUTPUT; lent: something was */
};
struct alignas(16) tp_steps_shared {
	unsigned char program[TP_STEPS_PROGRAM];
	tp_groups all;
	uint32_t value[2 * TP_DEV_ROOM];            /* as all.at. Links: the chunk's number plus one */
	tp_dev_link links[TP_STEPS_LINKS];
	tp_lane_state lanes[TP_DEV_LANES];
	tp_steps_run run;
	uint32_t looked;                            /* into the table of loans */
};

TP_DEVICE tp_dev_link *tp_steps_link(const tp_steps_run &run, uint32_t number)
{ return run.links ? run.links + number : (tp_dev_link *)run.link_addresses[number]; }
TP_DEVICE volatile uint32_t *tp_steps_scratch_size(const tp_steps_run &run, uint32_t chunk)
{ return (volatile uint32_t *)run.program->scratch + chunk; }

/* Where a buffer operand lies and how much of it there is; scratch memory: all that a chunk may be. */
TP_DEVICE uint64_t tp_steps_buffer(const tp_steps_run &run, const tp_dev_operand &o, uint32_t round, uint32_t *bytes)
{
	const tp_dev_part &part = *run.part;
	if (o.where == TP_STEPS_SCRATCH) {
		*bytes = (uint32_t)part.chunk_bytes;
		return run.program->scratch + run.program->scratch_at + (uint64_t)o.block * part.chunk_bytes;
	}
	const uint64_t chunk = round + 1 == part.nrounds ? part.last_chunk_bytes : part.chunk_bytes;
	const uint64_t at = (uint64_t)round * run.program->pieces * part.chunk_bytes + o.piece * chunk;
	const uint64_t left = at >= run.part_bytes ? 0 : run.part_bytes - at;
	*bytes = (uint32_t)(chunk < left ? chunk : left);
	return (o.where == TP_STEPS_INPUT ? run.call->input : run.call->output) + o.block * run.call->block_bytes + run.part_offset + at;
}

/* Are all links of the step ready? All threads of a warp; relaxed looks. */
TP_DEVICE bool tp_steps_ready(const tp_steps_run &run, const tp_dev_step &step)
{
	const uint32_t nin = step.nsrc + step.ntake, n = nin + step.nbuf + step.nout + step.ngive;
	bool ready = true;
	for (uint32_t i = (uint32_t)tp_warp_thread(); i < n; i += TP_WARP) {
		const tp_dev_operand o = run.operands[step.first + i];
		if (o.where != TP_STEPS_LINK) continue;
		const tp_dev_link *l = tp_steps_link(run, o.block);
		if (i < nin) ready &= tp_load_relaxed(tp_link_flag(*l, l->next)) == l->next + 1;
		else if (l->next - l->head_seen > l->mask) ready &= l->next - tp_load_relaxed((const uint32_t *)l->head) <= l->mask;
	}
	return tp_warp_all(ready);
}

/* The size of the step's chunk: every source link must agree. */
TP_DEVICE uint32_t tp_steps_size(const tp_steps_run &run, const tp_dev_step &step, uint32_t round)
{
	uint32_t bytes = 0;
	if (step.size_from == TP_DEV_SIZE_NONE) return 0;
	const tp_dev_operand o = run.operands[step.first + step.size_operand];
	if (step.size_from == TP_DEV_SIZE_CHUNK) {
		tp_steps_buffer(run, o, round, &bytes);
	} else if (step.size_from == TP_DEV_SIZE_SCRATCH) {
		bytes = *tp_steps_scratch_size(run, o.block);
	} else {
		const tp_dev_link *l = tp_steps_link(run, o.block);
		const uint32_t *flag = tp_link_flag(*l, l->next);
		tp_load_acquire(flag);
		bytes = tp_load_relaxed(flag + 1);
		if (bytes > run.part->chunk_bytes) bytes = (uint32_t)run.part->chunk_bytes;     /* and the check below says so */
	}
	return bytes;
}

/* Claims a link's next chunk (or slot): *at is its data. False: what is there belongs to another call. */
TP_DEVICE bool tp_steps_claim(const tp_steps_shared &sh, tp_dev_link *l, bool source, bool token, uint32_t bytes, uint64_t *at, uint32_t *value)
{
	const uint64_t slot = tp_link_slot(*l, l->next);
	const uint32_t expected = sh.run.call->tag;
	bool fine = true;
	if (source) {
		const uint32_t *flag = tp_link_flag(*l, l->next);
		tp_load_acquire(flag);                                          /* pairs with tp_steps_publish, or with the proxy */
		const uint32_t found = tp_load_relaxed(flag + 1), tag = tp_load_relaxed((const uint32_t *)slot + 2);
		if (!token && tag != expected) {
			tp_block_fault(sh.all.comm, TP_BLOCK_TAG, l->peer, tp_block(), tag, expected);
			fine = false;
		} else if (!token && found != bytes) {
			tp_block_fault(sh.all.comm, TP_BLOCK_SIZE, l->peer, tp_block(), found, bytes);
			fine = false;
		}
	} else if (l->next - l->head_seen > l->mask) {
		l->head_seen = tp_load_acquire((const uint32_t *)l->head);      /* pairs with tp_steps_publish of the receiver */
	}
	*at = slot + 16;
	*value = ++l->next;
	return fine;
}

/* Turns a ready step into work; all threads of a warp. False: a fault. */
TP_DEVICE bool tp_steps_take(const tp_steps_shared &sh, const tp_dev_step &step, uint32_t number, uint32_t round, tp_work *work,
	uint64_t *at, uint32_t *value)
{
	const tp_steps_run &run = sh.run;
	const uint32_t nin = step.nsrc + step.ntake, n = nin + step.nbuf + step.nout + step.ngive;
	const uint32_t bytes = tp_steps_size(run, step, round);
	tp_warp_sync();                             /* the size's own link is claimed below */
	const bool pre = run.call->reduce.pre && run.program->flags & TP_DEV_PROGRAM_REDUCES;
	bool fine = true, aligned = true, raw = false;
	for (uint32_t i = (uint32_t)tp_warp_thread(); i < n; i += TP_WARP) {
		const tp_dev_operand o = run.operands[step.first + i];
		if (o.where == TP_STEPS_LINK) {
			const bool token = (i >= step.nsrc && i < nin) || i >= n - step.ngive;
			fine &= tp_steps_claim(sh, tp_steps_link(run, o.block), i < nin, token, bytes, &at[i], &value[i]);
			continue;
		}
		uint32_t room;
		uint64_t address = tp_steps_buffer(run, o, round, &room);
		aligned &= address % 16 == 0;
		if (o.where == TP_STEPS_SCRATCH && i >= nin) *tp_steps_scratch_size(run, o.block) = bytes;
		if (pre && o.where == TP_STEPS_INPUT && i < step.nsrc) {
			address |= TP_RAW;
			raw = true;
		}
		at[i] = address;
	}
	fine = tp_warp_all(fine);
	aligned = tp_warp_all(aligned);
	raw = tp_warp_any(raw);
	const bool final = step.flags & TP_STEPS_FLAG_FINAL && run.call->reduce.post && run.program->flags & TP_DEV_PROGRAM_REDUCES;
	if (tp_warp_thread() == 0) {
		work->nsrc = step.nsrc;
		work->to = nin;
		work->ndst = step.nbuf + step.nout;
		work->bytes = step.nsrc && work->ndst ? bytes : 0;
		work->flags = (aligned ? TP_WORK_ALIGNED : 0) | (raw ? TP_WORK_RAW : 0) | (final ? TP_WORK_FINAL : 0) |
			(step.nsrc == 1 && !raw && !final ? TP_WORK_PLAIN : 0);
		work->step = number;
		work->chunk_bytes = bytes;
	}
	tp_warp_sync();
	return fine;
}

/* What may be lent of a work that was taken is, where its buffer is registered: its links' slots get a header alone. All threads of a warp. */
TP_FAR void tp_steps_lend(tp_steps_shared &sh, tp_work *work)
{
	const tp_steps_run &run = sh.run;
	const tp_dev_step &step = run.steps[work->step];
	const bool source = step.flags & TP_DEV_STEP_LENDS_SOURCE;
	const uint32_t operand = source ? 0 : step.nsrc + step.ntake;
	if (tp_warp_thread() || !step.nlend || work->chunk_bytes < TP_DEV_LEND_BYTES || (source && !(work->flags & TP_WORK_PLAIN))) return;
	if (!(run.lends >> run.operands[step.first + operand].where & 1)) return;
	work->value = operand;
	work->flags |= TP_WORK_LENT;
	work->ndst -= step.nlend;
	if (!work->ndst) work->bytes = 0;
	tp_block_set(&sh.run.lent, 1);
}

/* The work was moved: its slots are given to peers and back to them; all threads of a warp, which have seen the end of the move. */
TP_FAR void tp_steps_publish(const tp_steps_run &run, const tp_work &work, const uint64_t *at, const uint32_t *value)
{
	const tp_dev_step &step = run.steps[work.step];
	const uint32_t nin = step.nsrc + step.ntake, n = nin + step.nbuf + step.nout + step.ngive;
	const uint32_t lent = work.flags & TP_WORK_LENT ? n - step.ngive - step.nlend : n;
	bool any = false;
	for (uint32_t i = (uint32_t)tp_warp_thread(); i < n; i += TP_WARP) {
		const tp_dev_operand o = run.operands[step.first + i];
		if (o.where != TP_STEPS_LINK) continue;
		any = true;
		if (i < nin) continue;
		uint32_t *header = (uint32_t *)(at[i] - 16), *flag = tp_link_flag(*tp_steps_link(run, o.block), value[i] - 1);
		tp_store_relaxed(header + 1, work.chunk_bytes);
		if (flag != header) tp_lend_flag(flag, work.chunk_bytes, run.call->tag, i >= lent && i < n - step.ngive ? at[work.value] : 0);
		tp_store_relaxed(header + 2, run.call->tag);
		tp_store_relaxed(header + 3, 0);                                /* TP_SLOT_INLINE */
	}
	if (any) tp_fence();
	for (uint32_t i = (uint32_t)tp_warp_thread(); i < n; i += TP_WARP) {
		const tp_dev_operand o = run.operands[step.first + i];
		if (o.where != TP_STEPS_LINK) continue;
		/* Release, by the fence: pairs with tp_steps_claim at the other end, or with the proxy. */
		const tp_dev_link *l = tp_steps_link(run, o.block);
		tp_store_relaxed(i < nin ? (uint32_t *)l->head : tp_link_flag(*l, value[i] - 1), value[i]);
	}
	tp_warp_sync();
}

/* How groups get their work from a program. */
struct tp_steps_feed {
	typedef tp_steps_shared shared;

	TP_METHOD void begin(const shared &sh, const tp_group &g, tp_control *c)
	{
		const uint32_t nlanes = sh.run.program->nlanes;
		c->lane = (uint32_t)g.number;
		c->left = nlanes > c->lane ? (nlanes - c->lane + sh.all.ngroups - 1) / sh.all.ngroups : 0;
	}

	TP_METHOD bool look(shared &sh, const tp_group &g, tp_control *c, int which)
	{
		const tp_steps_run &run = sh.run;
		tp_lane_state *state = &sh.lanes[c->lane];
		const tp_dev_lane lane = run.lanes[c->lane];
		const uint32_t at = state->at, round = state->round, number = lane.first_step + at;
		bool taken = false;
		if (round < run.part->nrounds && tp_steps_ready(run, run.steps[number])) {
			const uint32_t base = tp_group_base(sh.all, g.number, which);
			taken = tp_steps_take(sh, run.steps[number], number, round, &sh.all.groups[g.number].work[which], sh.all.at + base, sh.value + base);
			if (!taken) tp_block_set(&sh.all.stopped, 1);
			if (run.lends) tp_steps_lend(sh, &sh.all.groups[g.number].work[which]);
			const bool over = at + 1 == lane.nsteps;
			if (over && round + 1 == run.part->nrounds) c->left--;
			if (tp_warp_thread() == 0) {
				state->at = over ? 0 : at + 1;
				state->round = round + over;
			}
			tp_warp_sync();
		}
		c->lane += sh.all.ngroups;
		if (c->lane >= run.program->nlanes) c->lane = (uint32_t)g.number;
		return taken;
	}

	TP_METHOD void publish(shared &sh, const tp_group &g, int which)
	{
		const uint32_t base = tp_group_base(sh.all, g.number, which);
		tp_steps_publish(sh.run, sh.all.groups[g.number].work[which], sh.all.at + base, sh.value + base);
	}
};

/* What the call may lend; one thread. Buffers as a whole: the entry may have gone since the launch, and be another one's by now. */
TP_FAR void tp_steps_find_loans(tp_steps_shared &sh)
{
	tp_steps_run &run = sh.run;
	const tp_dev_call &call = *run.call;
	if (!sh.looked) tp_lend_begin(sh.all.comm);
	sh.looked = 1;
	if (tp_lend_stands(sh.all.comm, call.lend_input, call.input, call.block_bytes * run.program->input_blocks)) run.lends |= 1u << TP_STEPS_INPUT;
	if (tp_lend_stands(sh.all.comm, call.lend_output, call.output, call.block_bytes * run.program->output_blocks)) run.lends |= 1u << TP_STEPS_OUTPUT;
}

/* The program, and what else of the call all threads see, into shared memory. */
TP_FAR void tp_steps_begin(tp_steps_shared &sh, const tp_dev_call *call)
{
	const uint64_t from = call->programs + (uint64_t)tp_block() * call->program_stride;
	const bool fits = call->program_stride <= TP_STEPS_PROGRAM;
	for (uint32_t i = 16u * (uint32_t)tp_thread(); fits && i < call->program_stride; i += 16u * (uint32_t)tp_threads())
		*(tp_four *)(sh.program + i) = *(const tp_four *)(from + i);
	for (int i = tp_thread(); i < TP_DEV_LANES; i += tp_threads()) sh.lanes[i] = tp_lane_state{ 0, 0 };
	tp_block_sync();
	const tp_dev_program *program = fits ? (const tp_dev_program *)sh.program : (const tp_dev_program *)from;
	const uint64_t *addresses = (const uint64_t *)((const unsigned char *)program + program->links_at);
	const bool keeps = program->nlinks <= TP_STEPS_LINKS;
	for (uint32_t i = (uint32_t)tp_thread(); keeps && i < program->nlinks; i += (uint32_t)tp_threads())
		sh.links[i] = *(const tp_dev_link *)addresses[i];
	if (tp_thread() == 0) {
		tp_steps_run &run = sh.run;
		const unsigned char *base = (const unsigned char *)program;
		const uint32_t channel = (uint32_t)tp_block();
		const uint64_t line = call->line_bytes, more = channel < call->part_more;
		const uint64_t first = call->part_lines * channel + (more ? channel : call->part_more);
		const uint64_t begin = first * line, end = (first + call->part_lines + more) * line;
		run.call = call;
		run.program = program;
		run.lanes = (const tp_dev_lane *)(base + program->lanes_at);
		run.steps = (const tp_dev_step *)(base + program->steps_at);
		run.operands = (const tp_dev_operand *)(base + program->operands_at);
		run.link_addresses = addresses;
		run.links = keeps ? sh.links : nullptr;
		run.part = &call->parts[more ? 0 : 1];
		run.part_offset = begin < call->block_bytes ? begin : call->block_bytes;
		run.part_bytes = (end < call->block_bytes ? end : call->block_bytes) - run.part_offset;
		run.lent = run.lends = 0;
		if (call->lend_input | call->lend_output) tp_steps_find_loans(sh);
		sh.all.ngroups = program->ngroups;
		sh.all.room = TP_DEV_ROOM / program->ngroups;
	}
	tp_block_sync();
}

/* What was lent must be through before the call ends, and the ends of links go back to where the next call finds them. All threads. */
TP_FAR void tp_steps_end(tp_steps_shared &sh)
{
	for (uint32_t i = (uint32_t)tp_thread(); i < sh.run.program->nlinks; i += (uint32_t)tp_threads()) {
		tp_dev_link *l = tp_steps_link(sh.run, i);
		if (sh.run.lent && l->lends) tp_lend_await(sh.all, l);
		if (!sh.run.links) continue;
		tp_dev_link *home = (tp_dev_link *)sh.run.link_addresses[i];
		home->next = l->next;
		home->head_seen = l->head_seen;
	}
}

template <class M> TP_DEVICE void tp_steps_call(tp_steps_shared &sh, const tp_dev_call *call)
{
	tp_steps_begin(sh, call);
	tp_groups_run<tp_steps_feed, M>(sh, &call->reduce);
	tp_block_sync();
	tp_steps_end(sh);
}

template <class M> TP_DEVICE void tp_steps_kernel(tp_steps_shared &sh, const tp_dev_steps &args)
{
	tp_dev_comm *comm = (tp_dev_comm *)args.comm;
	tp_groups_begin(sh.all, comm);
	if (tp_thread() == 0) sh.looked = 0;
	for (uint32_t i = 0; i < args.ncalls; i++) {
		const tp_dev_call *call = &args.calls[i];
		tp_block_sync();
		if (sh.all.stopped) break;
		if ((uint32_t)tp_block() < call->nchannels) tp_steps_call<M>(sh, call);
	}
	if (sh.looked) tp_lend_end(comm);
	tp_kernel_end(comm);
}

#define TP_STEPS_KERNEL(type, op) TP_KERNEL_BLOCKS(tp_steps_##type##_##op, tp_dev_steps, 2) \
{ \
	TP_SHARED(tp_steps_shared, shared); \
	tp_steps_kernel<tp_mover<tp_type_##type, tp_op_##op>>(shared, args); \
}

#endif
