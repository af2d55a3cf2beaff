/* The cost model: what a plan's round costs, from how often each kind of work is done in it (profile.c).
 *
 *   time = call + first round + other rounds (+ relays)
 *   other = the largest of: the busiest rank's work; all work of a domain over its cores; what crosses its border
 *   first = the work and the hops of a round, which nothing hides; where rounds go in lockstep, so are all
 *
 * Ranks beyond the cores wait for a turn at each hop. It is a model for choosing, not a clock: what matters is the order
 * in which it puts the candidates. A table corrects it by measurement. */
#include "plan/cost.h"

#define SLOTS 8
#define LARGEST_CHUNK (1u << 20)        /* by reference: two of them and a result stay in a second-level cache */
#define SMALLEST_SHARE (16u << 10)

/* Measured between two pinned processes on a virtual machine of two cores, the data in the other's second-level cache:
 * memcpy 20 GB/s, process_vm_readv 25 GB/s and 0.8 us, a pass of reduction from a slot 20 GB/s of its result; TCP over loopback
 * 3 GB/s, 17 us; sched_yield to the other rank 1.3 us. Out of that cache memcpy makes 10 GB/s (64 MB: 5), process_vm_readv,
 * which looks up each page, 6 (2 to 3): hence stream_bytes. */
void tp_cost_defaults(struct tp_cost_model *model)
{
	*model = (struct tp_cost_model){
		.inside = { .latency_us = 0.15, .us_per_byte = 0.4e-4, .step_us = 0.05 },
		.across = { .latency_us = 17, .us_per_byte = 3.3e-4, .step_us = 2.5 },
		.reduce_us_per_byte = 0.5e-4, .copy_us_per_byte = 0.5e-4, .call_us = 0.1,
		.cores_per_domain = tp_cpu_count(), .inline_bytes = 12287, .slot_bytes_inside = 262144,
		.slot_bytes_across = 131072, .by_ref_inside = true, .ref_us = 0.8, .switch_us = 1.3, .stream_bytes = 1 << 20,
	};
	/* Steps that wait for each other take a little longer than their parts; all pairs hardly do. */
	for (int a = 0; a < TP_NALGOS; a++)
		model->scale[a] = a == TP_ALGO_ONE_SHOT || a == TP_ALGO_TWO_SHOT || a == TP_ALGO_DIRECT ? 1 : 1.05;
	model->scale[TP_ALGO_RING] = 1.15;      /* what it passes on lies in the next rank's cache each time */
}

/* Measured on four H200 behind NVSwitch, in graphs (fp32): one-shot with flags in the data 3.3 us for 8 B, 5.4 for 64 KB, 8.9 for
 * 256 KB, 25 for 1 MB; two-shot 13.8 for 1 MB, 26.9 for 4 MB, 85 for 16 MB, 325 for 64 MB. A flag takes 1.3 us from one GPU to another; all
 * pairs at once move 350 GB/s. Lines that carry flags move twice the bytes, which is one-shot's scale. What has no fused kernel
 * pays for reading its steps, and chains of stages for each other's latency, which no other channel hides. */
void tp_cost_gpu_defaults(struct tp_cost_model *model)
{
	*model = (struct tp_cost_model){
		.inside = { .latency_us = 1.3, .us_per_byte = 2.9e-6, .step_us = 0.02 },
		.across = { .latency_us = 30, .us_per_byte = 3.3e-4, .step_us = 2.5 },
		.reduce_us_per_byte = 0.7e-6, .copy_us_per_byte = 2.9e-6, .call_us = 1.8,
		.cores_per_domain = 1 << 20, .inline_bytes = 1 << 20, .slot_bytes_inside = 8 << 20,
		.slot_bytes_across = 131072, .by_ref_inside = false, .ref_us = 0, .switch_us = 0, .stream_bytes = 1 << 20,
	};
	for (int a = 0; a < TP_NALGOS; a++) model->scale[a] = a == TP_ALGO_TWO_SHOT || a == TP_ALGO_DIRECT ? 1 : 1.5;
	model->scale[TP_ALGO_ONE_SHOT] = 1.2;
	model->scale[TP_ALGO_RING] = model->scale[TP_ALGO_HIERARCHICAL] = 1.1;
}

static int largest_domain(const struct tp_layout *layout)
{
	int largest = 1;
	for (int d = 0; d < layout->ndomains; d++) largest = TP_MAX(largest, layout->domain_size[d]);
	return largest;
}

static double work_us(const struct tp_cost_work *w, double chunk, bool by_ref, const struct tp_cost_model *m)
{
	double sends = w->refs + w->copies_out + w->results_out, takes = w->ref_stored + w->takes + w->reduce_takes;
	double near_refs = by_ref && sends > 0 ? w->refs * (1 - w->far_out / sends) : 0;
	double near_takes = by_ref && takes > 0 ? w->ref_takes * (1 - TP_MIN(w->far_in / takes, 1)) : 0;
	double stored = w->ref_takes > 0 ? w->ref_stored * (1 - near_takes / w->ref_takes) : 0;
	double copies = w->refs - near_refs + w->copies_out + w->takes + stored + w->moves;
	return m->inside.step_us * (w->steps + sends + takes)
		+ chunk * (m->copy_us_per_byte * copies + m->reduce_us_per_byte * w->reduces)
		+ near_takes * (m->ref_us + chunk * m->inside.us_per_byte)
		+ (w->far_out + w->far_in) * (m->across.step_us + chunk * m->across.us_per_byte / 2);
}

size_t tp_cost_chunk_limit(const struct tp_cost_profile *p, const struct tp_layout *layout, bool by_ref,
	const struct tp_cost_model *model)
{
	size_t limit = LARGEST_CHUNK;
	if (layout->nranks == 1) return limit;
	int ranks = largest_domain(layout);
	if (ranks > 1 && !(by_ref && p->refs_only)) {
		/* A rank's slots lie in memory that is really used: what all its links take is bounded, however many they are. */
		size_t share = TP_MAX(LARGEST_CHUNK / (unsigned)(ranks - 1) & ~(size_t)(TP_CACHE_LINE - 1), SMALLEST_SHARE);
		limit = TP_MIN(limit, TP_MIN(model->slot_bytes_inside, share));
	}
	if (layout->ndomains > 1) limit = TP_MIN(limit, model->slot_bytes_across);
	return limit;
}

double tp_cost_time(const struct tp_cost_profile *p, const struct tp_plan_spec *spec, size_t block_bytes, size_t chunk_bytes,
	bool by_ref, const struct tp_cost_model *m)
{
	double block = (double)block_bytes, room = p->pieces * (double)TP_MAX(chunk_bytes, 1);
	double rounds = block > room ? (double)(size_t)((block + room - 1) / room) : 1, chunk = block / (rounds * p->pieces);
	int ranks = largest_domain(spec->layout), cores = TP_MAX(TP_MIN(m->cores_per_domain, ranks), 1);
	bool refs = by_ref && ranks > 1 && chunk > (double)m->inline_bytes;
	double each = work_us(&p->each, chunk, refs, m), root = p->rooted ? work_us(&p->root, chunk, refs, m) : each;
	double shared = (root + (ranks - 1) * each) / cores;
	if (ranks > cores) shared += m->switch_us * ranks / cores / SLOTS;      /* full slots end a turn */
	double wire = p->crossing * chunk * m->across.us_per_byte;
	double work = TP_MAX(TP_MAX(each, root), shared), round = TP_MAX(work, wire), first = work;
	double turn = m->switch_us * ((ranks + cores - 1) / cores - 1);
	double chain = p->hops_inside * (m->inside.latency_us + turn)
		+ p->hops_across * (m->across.latency_us + turn + chunk * m->across.us_per_byte);
	double own_sends = p->each.refs + p->each.copies_out + p->each.results_out;
	double relay = p->relays * each / TP_MAX(own_sends, 1);
	if (refs) chain += m->inside.latency_us + turn;         /* back: that the references were read */
	first = TP_MAX(first + chain, round);
	return m->scale[spec->algo] * (m->call_us + first + (rounds - 1) * (p->lockstep ? first : round) + relay);
}

double tp_cost_predict(const struct tp_plan_spec *spec, size_t block_bytes, size_t chunk_bytes, const struct tp_cost_model *model)
{
	struct tp_cost_profile p;
	if (!tp_cost_profile_of(spec, &p)) return -1;
	return tp_cost_time(&p, spec, block_bytes, chunk_bytes, model->by_ref_inside, model);
}

/* Chunks that a rank copies in a round, none of them by reference. */
static double copies_of(const struct tp_cost_work *w) { return w->refs + w->copies_out + w->takes + w->ref_stored + w->moves; }

bool tp_cost_fit(const struct tp_plan_spec *spec, double inside_us_per_byte, double across_us_per_byte, struct tp_cost_model *model)
{
	struct tp_cost_profile p;
	if (!tp_cost_profile_of(spec, &p)) return false;
	double copies = TP_MAX(copies_of(&p.each), p.rooted ? copies_of(&p.root) : 0);
	if (inside_us_per_byte > 0 && copies > 0) model->copy_us_per_byte = inside_us_per_byte * p.pieces / copies;
	if (across_us_per_byte > 0 && p.crossing > 0) model->across.us_per_byte = across_us_per_byte * p.pieces / p.crossing;
	return true;
}
