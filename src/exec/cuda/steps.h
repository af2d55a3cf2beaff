/* The steps kernel: runs a rank's programs, a block a channel.
 *
 * A program's lanes are spread over groups of warps. A group takes the next step of any of its lanes whose links are all
 * ready, in turn, so that no lane waits for another; the steps it has taken it moves in that order. Each group has a control
 * warp, which looks at links, turns a step's operands into addresses (struct tp_work), and publishes what was moved: it
 * finds the next step while the others still move this one, and its fence waits for stores while they already go on. Groups of few
 * warps have none: there the first warp does both.
 *
 * What is written here and read by other groups goes through local links like everything else, so groups never
 * meet but at the beginning and the end of a call. */
#ifndef TP_EXEC_CUDA_STEPS_H
#define TP_EXEC_CUDA_STEPS_H

#include "exec/cuda/block.h"
#include "exec/cuda/move.h"

enum {
	TP_STEPS_GROUPS = 16,           /* of a block, at most */
	TP_STEPS_CONTROL_WARPS = 4,     /* a group of so many has a control warp of its own */
	TP_STEPS_ROOM = 512,            /* operands of the steps at hand, of all groups: each has its share, twice */
	TP_STEPS_LINKS = 136,           /* ends that are kept in shared memory while the kernel runs */
	TP_STEPS_LANES = 256,
	TP_STEPS_PROGRAM = 16 << 10     /* bytes of a program that is read into shared memory */
};
/* As plan/plan.h's. */
enum { TP_STEPS_LINK, TP_STEPS_INPUT, TP_STEPS_OUTPUT, TP_STEPS_SCRATCH };
enum { TP_STEPS_FLAG_REDUCE = 1, TP_STEPS_FLAG_FINAL = 2 };

struct tp_lane_state { uint32_t at, round; };
struct tp_group_shared { tp_work work[2]; uint32_t moved, pad; };

/* One call on one channel. In shared memory, for all threads see the same, and registers are for data. */
struct tp_steps_run {
	tp_dev_comm *comm;
	const tp_dev_call *call;
	const tp_dev_program *program;
	const tp_dev_lane *lanes;
	const tp_dev_step *steps;
	const tp_dev_operand *operands;
	const uint64_t *link_addresses;
	tp_dev_link *links;                         /* in shared memory; NULL: there are too many, link_addresses has them */
	const tp_dev_part *part;
	uint64_t part_offset, part_bytes;
	uint32_t ngroups, room;                     /* room: operands of a group, for one work */
	uint32_t stopped;
};
struct alignas(16) tp_steps_shared {
	unsigned char program[TP_STEPS_PROGRAM];
	uint64_t at[2 * TP_STEPS_ROOM];             /* addresses: [group][which work][operand] */
	uint32_t value[2 * TP_STEPS_ROOM];          /* links: the chunk's number plus one */
	tp_dev_link links[TP_STEPS_LINKS];
	tp_lane_state lanes[TP_STEPS_LANES];
	tp_group_shared groups[TP_STEPS_GROUPS];
	tp_steps_run run;
};

/* The group that a thread is in. */
struct tp_steps_group {
	int number, warps;
	int thread;                                 /* in the group */
	bool apart;                                 /* its first warp controls and doesn't move */
};
TP_DEVICE int tp_steps_warp_thread() { return tp_thread() % TP_WARP; }
TP_DEVICE uint32_t tp_steps_base(const tp_steps_run &run, int group, int which) { return (2u * (uint32_t)group + (uint32_t)which) * run.room; }
TP_DEVICE void tp_steps_sync(const tp_steps_group &g)
{
	if (g.warps == 1) tp_warp_sync();
	else tp_group_sync(1 + g.number, g.warps * TP_WARP);
}

TP_DEVICE tp_dev_link *tp_steps_link(const tp_steps_run &run, uint32_t number)
{ return run.links ? run.links + number : (tp_dev_link *)run.link_addresses[number]; }
TP_DEVICE uint64_t tp_steps_slot(const tp_dev_link *l) { return l->slots + (uint64_t)(l->next & l->mask) * l->stride; }
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
	for (uint32_t i = (uint32_t)tp_steps_warp_thread(); i < n; i += TP_WARP) {
		const tp_dev_operand o = run.operands[step.first + i];
		if (o.where != TP_STEPS_LINK) continue;
		const tp_dev_link *l = tp_steps_link(run, o.block);
		if (i < nin) ready &= tp_load_relaxed((const uint32_t *)tp_steps_slot(l)) == l->next + 1;
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
		const uint32_t *header = (const uint32_t *)tp_steps_slot(tp_steps_link(run, o.block));
		tp_load_acquire(header);
		bytes = tp_load_relaxed(header + 1);
		if (bytes > run.part->chunk_bytes) bytes = (uint32_t)run.part->chunk_bytes;     /* and the check below says so */
	}
	return bytes;
}

/* Claims a link's next chunk (or slot): *at is its data. False: what is there belongs to another call. */
TP_DEVICE bool tp_steps_claim(const tp_steps_run &run, tp_dev_link *l, bool source, bool token, uint32_t bytes, uint64_t *at, uint32_t *value)
{
	const uint64_t slot = tp_steps_slot(l);
	bool fine = true;
	if (source) {
		const uint32_t *header = (const uint32_t *)slot;
		tp_load_acquire(header);                                        /* pairs with tp_steps_publish, or with the proxy */
		const uint32_t found = tp_load_relaxed(header + 1), tag = tp_load_relaxed(header + 2);
		if (!token && tag != run.call->tag) {
			tp_block_fault(run.comm, TP_BLOCK_TAG, l->peer, tp_block(), tag, run.call->tag);
			fine = false;
		} else if (!token && found != bytes) {
			tp_block_fault(run.comm, TP_BLOCK_SIZE, l->peer, tp_block(), found, bytes);
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
TP_DEVICE bool tp_steps_take(const tp_steps_run &run, const tp_dev_step &step, uint32_t number, uint32_t round, tp_work *work,
	uint64_t *at, uint32_t *value)
{
	const uint32_t nin = step.nsrc + step.ntake, n = nin + step.nbuf + step.nout + step.ngive;
	const uint32_t bytes = tp_steps_size(run, step, round);
	tp_warp_sync();                             /* the size's own link is claimed below */
	const bool pre = run.call->reduce.pre && run.program->flags & TP_DEV_PROGRAM_REDUCES;
	bool fine = true, aligned = true, raw = false;
	for (uint32_t i = (uint32_t)tp_steps_warp_thread(); i < n; i += TP_WARP) {
		const tp_dev_operand o = run.operands[step.first + i];
		if (o.where == TP_STEPS_LINK) {
			const bool token = (i >= step.nsrc && i < nin) || i >= n - step.ngive;
			fine &= tp_steps_claim(run, tp_steps_link(run, o.block), i < nin, token, bytes, &at[i], &value[i]);
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
	if (tp_steps_warp_thread() == 0) {
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

/* The work was moved: its slots are given to peers and back to them; all threads of a warp, which have seen the end of the move. */
TP_FAR void tp_steps_publish(const tp_steps_run &run, const tp_work &work, const uint64_t *at, const uint32_t *value)
{
	const tp_dev_step &step = run.steps[work.step];
	const uint32_t nin = step.nsrc + step.ntake, n = nin + step.nbuf + step.nout + step.ngive;
	bool any = false;
	for (uint32_t i = (uint32_t)tp_steps_warp_thread(); i < n; i += TP_WARP) {
		if (run.operands[step.first + i].where != TP_STEPS_LINK) continue;
		any = true;
		if (i < nin) continue;
		uint32_t *header = (uint32_t *)(at[i] - 16);
		tp_store_relaxed(header + 1, work.chunk_bytes);
		tp_store_relaxed(header + 2, run.call->tag);
		tp_store_relaxed(header + 3, 0);                                /* TP_SLOT_INLINE */
	}
	if (any) tp_fence();
	for (uint32_t i = (uint32_t)tp_steps_warp_thread(); i < n; i += TP_WARP) {
		const tp_dev_operand o = run.operands[step.first + i];
		if (o.where != TP_STEPS_LINK) continue;
		/* Release, by the fence: pairs with tp_steps_claim at the other end, or with the proxy. */
		uint32_t *flag = i < nin ? (uint32_t *)tp_steps_link(run, o.block)->head : (uint32_t *)(at[i] - 16);
		tp_store_relaxed(flag, value[i]);
	}
	tp_warp_sync();
}

/* What a controlling warp knows. */
struct tp_steps_control { uint32_t left, lane; unsigned turn; };

TP_DEVICE void tp_steps_control_begin(const tp_steps_run &run, const tp_steps_group &g, tp_steps_control *c)
{
	const uint32_t nlanes = run.program->nlanes;
	c->lane = (uint32_t)g.number;
	c->left = nlanes > c->lane ? (nlanes - c->lane + run.ngroups - 1) / run.ngroups : 0;
	c->turn = 0;
}

/* Looks at one of the group's lanes: takes its next step where that is ready. */
TP_DEVICE bool tp_steps_look(tp_steps_shared &sh, const tp_steps_group &g, tp_steps_control *c, int which)
{
	const tp_steps_run &run = sh.run;
	tp_lane_state *state = &sh.lanes[c->lane];
	const tp_dev_lane lane = run.lanes[c->lane];
	const uint32_t at = state->at, round = state->round;
	bool taken = false;
	if (round < run.part->nrounds && tp_steps_ready(run, run.steps[lane.first_step + at])) {
		const uint32_t base = tp_steps_base(run, g.number, which), number = lane.first_step + at;
		taken = tp_steps_take(run, run.steps[number], number, round, &sh.groups[g.number].work[which], sh.at + base, sh.value + base);
		if (!taken) sh.run.stopped = 1;
		const bool over = at + 1 == lane.nsteps;
		if (over && round + 1 == run.part->nrounds) c->left--;
		if (tp_steps_warp_thread() == 0) {
			state->at = over ? 0 : at + 1;
			state->round = round + over;
		}
		tp_warp_sync();
	}
	if (c->left) {
		c->lane += run.ngroups;
		if (c->lane >= run.program->nlanes) c->lane = (uint32_t)g.number;
	}
	return taken;
}

TP_DEVICE void tp_steps_end_work(tp_steps_shared &sh, const tp_steps_group &g, int which)
{
	if (tp_steps_warp_thread() == 0) sh.groups[g.number].work[which].flags = TP_WORK_END;
	tp_warp_sync();
}

/* Waits for the next step of any of the group's lanes, where the warp that waits also moves. */
TP_FAR void tp_steps_wait(tp_steps_shared &sh, const tp_steps_group &g, tp_steps_control *c)
{
	for (c->turn = 0; c->left; c->turn++) {
		if (tp_steps_look(sh, g, c, 0)) return;
		if (tp_warp_any(tp_block_load(&sh.run.stopped) || tp_block_stopped(sh.run.comm, c->turn))) {
			sh.run.stopped = 1;
			break;
		}
		tp_nap(c->turn / (c->left + 1), sh.run.comm->shared_gpu);
	}
	tp_steps_end_work(sh, g, 0);
}

/* A control warp's whole call: one step is moved by the others while the next one is looked for. */
TP_FAR void tp_steps_control_run(tp_steps_shared &sh, const tp_steps_group &g, tp_steps_control *c)
{
	const tp_steps_run &run = sh.run;
	tp_group_shared &shared = sh.groups[g.number];
	const uint32_t movers = (uint32_t)g.warps - 1;
	int next = 0;                       /* which work is (to be) taken; the other one is moved */
	bool have = false, busy = false;
	uint32_t moved = 0;
	for (c->turn = 0;; c->turn++) {
		if (!have && c->left) have = tp_steps_look(sh, g, c, next);
		if (busy && tp_warp_all(tp_block_load(&shared.moved) == moved)) {
			const uint32_t base = tp_steps_base(run, g.number, next ^ 1);
			tp_steps_publish(run, shared.work[next ^ 1], sh.at + base, sh.value + base);
			busy = false;
			c->turn = 0;
		}
		if (!busy && have) {
			tp_steps_sync(g);
			next ^= 1;
			moved += movers;
			busy = true;
			have = false;
			continue;
		}
		if (!busy && !c->left) break;
		if (tp_warp_any(tp_block_load(&sh.run.stopped) || tp_block_stopped(run.comm, c->turn))) {
			sh.run.stopped = 1;
			while (busy && !tp_warp_all(tp_block_load(&shared.moved) == moved)) tp_nap(0, false);
			break;
		}
		tp_nap(c->turn / (c->left + 1), run.comm->shared_gpu);
	}
	tp_steps_end_work(sh, g, next);
	tp_steps_sync(g);
}

template <class M> TP_DEVICE void tp_steps_group_run(tp_steps_shared &sh, const tp_steps_group &g)
{
	const bool controls = g.thread < TP_WARP;
	tp_steps_control control;
	if (controls) tp_steps_control_begin(sh.run, g, &control);
	if (controls && g.apart) {
		tp_steps_control_run(sh, g, &control);
		return;
	}
	const int skipped = g.apart ? TP_WARP : 0, thread = g.thread - skipped, threads = g.warps * TP_WARP - skipped;
	for (int which = 0;; which ^= g.apart) {
		if (controls) tp_steps_wait(sh, g, &control);
		tp_steps_sync(g);
		const tp_work &work = sh.groups[g.number].work[which];
		if (work.flags & TP_WORK_END) return;
		const uint32_t base = tp_steps_base(sh.run, g.number, which);
		M::move(work, sh.at + base, thread, threads, sh.run.call->reduce);
		if (g.apart) {
			tp_warp_sync();
			if (tp_steps_warp_thread() == 0) tp_block_add(&sh.groups[g.number].moved, 1);
		} else {
			tp_steps_sync(g);
			if (controls) tp_steps_publish(sh.run, work, sh.at + base, sh.value + base);
		}
	}
}

/* The program, and what else of the call all threads see, into shared memory. */
TP_FAR void tp_steps_begin(tp_steps_shared &sh, tp_dev_comm *comm, const tp_dev_call *call)
{
	const uint64_t from = call->programs + (uint64_t)tp_block() * call->program_stride;
	const bool fits = call->program_stride <= TP_STEPS_PROGRAM;
	for (uint32_t i = 16u * (uint32_t)tp_thread(); fits && i < call->program_stride; i += 16u * (uint32_t)tp_threads())
		*(tp_four *)(sh.program + i) = *(const tp_four *)(from + i);
	for (int i = tp_thread(); i < TP_STEPS_LANES; i += tp_threads()) sh.lanes[i] = tp_lane_state{ 0, 0 };
	for (int i = tp_thread(); i < TP_STEPS_GROUPS; i += tp_threads()) sh.groups[i].moved = 0;
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
		run.comm = comm;
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
		run.ngroups = program->ngroups;
		run.room = TP_STEPS_ROOM / program->ngroups;
	}
	tp_block_sync();
}

template <class M> TP_DEVICE void tp_steps_call(tp_steps_shared &sh, tp_dev_comm *comm, const tp_dev_call *call)
{
	tp_steps_begin(sh, comm, call);
	const int warps = tp_threads() / TP_WARP, ngroups = (int)sh.run.ngroups, warp = tp_thread() / TP_WARP;
	tp_steps_group g;
	g.warps = warps / ngroups;
	g.number = warp / g.warps;
	g.thread = tp_thread() - g.number * g.warps * TP_WARP;
	g.apart = g.warps >= TP_STEPS_CONTROL_WARPS;
	if (g.number < ngroups) tp_steps_group_run<M>(sh, g);
	tp_block_sync();
	for (uint32_t i = (uint32_t)tp_thread(); sh.run.links && i < sh.run.program->nlinks; i += (uint32_t)tp_threads()) {
		tp_dev_link *l = (tp_dev_link *)sh.run.link_addresses[i];
		l->next = sh.links[i].next;
		l->head_seen = sh.links[i].head_seen;
	}
	tp_block_sync();
}

template <class M> TP_DEVICE void tp_steps_kernel(tp_steps_shared &sh, const tp_dev_steps &args)
{
	tp_dev_comm *comm = (tp_dev_comm *)args.comm;
	if (tp_thread() == 0) sh.run.stopped = tp_load_relaxed(&comm->stop);
	for (uint32_t i = 0; i < args.ncalls; i++) {
		const tp_dev_call *call = &args.calls[i];
		tp_block_sync();
		if (sh.run.stopped) break;
		if ((uint32_t)tp_block() < call->nchannels) tp_steps_call<M>(sh, comm, call);
	}
	tp_kernel_end(comm);
}

#define TP_STEPS_KERNEL(type, op) TP_KERNEL_BLOCKS(tp_steps_##type##_##op, tp_dev_steps, 2) \
{ \
	TP_SHARED(tp_steps_shared, shared); \
	tp_steps_kernel<tp_mover<tp_type_##type, tp_op_##op>>(shared, args); \
}

#endif
