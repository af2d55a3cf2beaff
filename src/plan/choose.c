/* The chooser: the cost model's time of every algorithm that can do the collective and that NCCL_ALGO allows, each at its
 * best chunk size; the least wins, the earlier in enum tp_algo where two are equal. A function of its arguments alone:
 * ranks that agree on these can't disagree on the choice. */
#include <stdio.h>
#include <string.h>

#include "plan/cost.h"
#include "plan/filter.h"

enum { PARAM_ALGO, PARAM_PROTO };
static struct tp_param params[] = {
	[PARAM_ALGO] = { .name = "NCCL_ALGO", .kind = TP_PARAM_STRING,
		.doc = "algorithms that are allowed: [collective:]name,name;… with ^ before names that aren't; telpher explain lists them" },
	[PARAM_PROTO] = { .name = "NCCL_PROTO", .kind = TP_PARAM_STRING,
		.doc = "checked, and without effect on host memory, where all links have one protocol" },
};
TP_PARAM_TABLE("plan", params)

const char *tp_choose_algo_text(void) { return tp_param_string(&params[PARAM_ALGO]); }
const char *tp_choose_proto_text(void) { return tp_param_string(&params[PARAM_PROTO]); }

ncclResult_t tp_choose_check_algo(const char *algo_filter)
{
	struct tp_filter filter;
	TP_TRY(tp_filter_parse_algo(algo_filter, &filter));
	for (int bit = 0; tp_filter_foreign_name(bit); bit++)
		if (filter.foreign >> bit & 1)
			TP_INFO(TP_TUNING | TP_ENV, "NCCL_ALGO names %s, which these ranks don't have: %s", tp_filter_foreign_name(bit),
				tp_filter_foreign_why(bit));
	return ncclSuccess;
}

ncclResult_t tp_choose_check_proto(const char *proto_filter)
{
	uint32_t named;
	TP_TRY(tp_filter_parse_proto(proto_filter, &named));
	if (proto_filter && *proto_filter)
		TP_INFO(TP_TUNING | TP_ENV, "NCCL_PROTO=%s has no effect: links between host ranks have one protocol, which is LL's "
			"for chunks of a cache line and Simple's for others", proto_filter);
	return ncclSuccess;
}

/* NCCL's AlltoAll, Gather and Scatter are sends and receives, which NCCL_ALGO doesn't concern: a list for all collectives
 * that holds none of their algorithms isn't meant for them. */
static uint32_t allowed_algos(const struct tp_filter *filter, const struct tp_plan_spec *spec)
{
	uint32_t allowed = filter->algos[spec->coll];
	if (filter->named[spec->coll] || !filter->restricted) return allowed;
	if (spec->coll != TP_ALL_TO_ALL && spec->coll != TP_GATHER && spec->coll != TP_SCATTER) return allowed;
	for (int a = 0; a < TP_NALGOS; a++) {
		struct tp_plan_spec one = *spec;
		one.algo = (enum tp_algo)a;
		if ((allowed >> a & 1) && !tp_plan_refuses(&one)) return allowed;
	}
	return (1u << TP_NALGOS) - 1;
}

/* What is reduced goes through slots: reading it from its owner's memory first is a pass more, and a system call (2 ranks,
 * 16 MB: 3.1 ms through slots, 3.5 to 4.9 read). So do long broadcasts where sender and receiver can copy at the same time
 * (2 ranks, 16 MB: 1.2 ms, 1.7 read), and all-gathers so long that looking up their pages costs more than a second copy
 * (2 ranks, blocks of 64 MB: 29 ms, 33 read; of 32 MB: no difference). */
static bool may_refer(const struct tp_plan_spec *spec, size_t block_bytes, const struct tp_cost_model *model)
{
	const struct tp_layout *l = spec->layout;
	if (spec->coll == TP_ALL_REDUCE || spec->coll == TP_REDUCE_SCATTER || spec->coll == TP_REDUCE) return false;
	size_t bound = spec->coll == TP_BROADCAST ? model->stream_bytes : spec->coll == TP_ALL_GATHER ? 64 * model->stream_bytes : SIZE_MAX;
	if (block_bytes < bound) return true;
	for (int d = 0; d < l->ndomains; d++)
		if (l->domain_size[d] > model->cores_per_domain) return true;
	return false;
}

/* The best of a few chunk sizes: the largest allowed, and parts of it, so that a message can pipeline. */
static void try_chunks(const struct tp_plan_spec *spec, size_t block_bytes, bool by_ref, const struct tp_cost_model *model, size_t widest,
	struct tp_candidate *c)
{
	int most = widest ? 12 : 9;
	struct tp_cost_profile profile;
	if (!tp_cost_profile_of(spec, &profile)) {
		c->why_not = "the cost model doesn't know it";
		return;
	}
	size_t limit = TP_MAX(tp_cost_chunk_limit(&profile, spec->layout, by_ref, model), widest);
	for (size_t chunk = limit, tries = 0; tries == 0 || (tries < (size_t)most && chunk >= 4096); chunk /= 2, tries++) {
		if (tries && by_ref && chunk <= model->inline_bytes) break;
		double us = tp_cost_time(&profile, spec, block_bytes, chunk, by_ref, model);
		if (c->us >= 0 && us >= c->us) continue;
		c->us = us;
		c->chunk_bytes = chunk;
		c->by_ref = by_ref;
	}
}

static ncclResult_t nothing_left(const struct tp_plan_spec *spec, const struct tp_filter *filter, const char *algo_filter,
	const struct tp_choice *choice)
{
	char reasons[640] = "", can[128] = "";
	for (int a = 0; a < TP_NALGOS; a++) {
		struct tp_plan_spec one = *spec;
		one.algo = (enum tp_algo)a;
		const char *why = tp_plan_refuses(&one);
		char *into = why ? reasons : can;
		size_t room = why ? sizeof(reasons) : sizeof(can), used = strlen(into);
		if (!why) snprintf(into + used, room - used, "%s%s", used ? ", " : "", tp_algo_name(one.algo));
		else if (choice->candidates[a].why_not == why)
			snprintf(into + used, room - used, "; %s: %s", tp_algo_name(one.algo), why);
	}
	return TP_FAIL(ncclInvalidUsage, "no algorithm/protocol available for function %s: NCCL_ALGO was set to \"%s\", and %s among %d "
		"ranks is done by %s%s%s", tp_coll_name(spec->coll), algo_filter ? algo_filter : "", tp_coll_name(spec->coll),
		spec->layout->nranks, *can ? can : "none", reasons,
		filter->named[spec->coll] ? "" : ". A list for one collective only begins with its name, as in \"AllGather:PAT\"");
}

ncclResult_t tp_choose(const struct tp_layout *layout, enum tp_coll coll, int root, size_t block_bytes, bool staged,
	const struct tp_cost_model *model, const char *algo_filter, struct tp_choice *out)
{
	struct tp_choose_models models = { .widest = { 0 } };
	for (int a = 0; a < TP_NALGOS; a++) models.of[a] = model;
	return tp_choose_by(layout, coll, root, block_bytes, staged, &models, algo_filter, out);
}

ncclResult_t tp_choose_by(const struct tp_layout *layout, enum tp_coll coll, int root, size_t block_bytes, bool staged,
	const struct tp_choose_models *models, const char *algo_filter, struct tp_choice *out)
{
	struct tp_choice choice = { .nchannels = 1 };
	struct tp_filter filter;
	struct tp_plan_spec spec = { .coll = coll, .root = root, .nchannels = 1, .layout = layout };
	int best = -1;
	if ((unsigned)coll >= TP_SEND_RECV) return TP_FAIL(ncclInvalidArgument, "There is no algorithm to choose for %s", tp_coll_name(coll));
	if (tp_coll_has_root(coll) && (root < 0 || root >= layout->nranks))
		return TP_FAIL(ncclInvalidArgument, "%s: root %d is not one of the ranks 0 to %d", tp_coll_name(coll), root,
			layout->nranks - 1);
	TP_TRY(tp_filter_parse_algo(algo_filter, &filter));
	uint32_t allowed = allowed_algos(&filter, &spec);
	for (int a = 0; a < TP_NALGOS; a++) {
		struct tp_candidate *c = &choice.candidates[a];
		spec.algo = (enum tp_algo)a;
		*c = (struct tp_candidate){ .algo = spec.algo, .us = -1, .why_not = tp_plan_refuses(&spec) };
		if (!(allowed >> a & 1)) c->why_not = "NCCL_ALGO leaves it out";
		if (c->why_not) continue;
		const struct tp_cost_model *model = models->of[a];
		try_chunks(&spec, block_bytes, false, model, models->widest[a], c);
		if (model->by_ref_inside && !staged && may_refer(&spec, block_bytes, model)) try_chunks(&spec, block_bytes, true, model, 0, c);
		if (c->us >= 0 && (best < 0 || c->us < choice.candidates[best].us)) best = a;
	}
	if (best < 0) return nothing_left(&spec, &filter, algo_filter, &choice);
	choice.algo = (enum tp_algo)best;
	choice.chunk_bytes = choice.candidates[best].chunk_bytes;
	choice.ref_bytes = choice.candidates[best].by_ref ? models->of[best]->inline_bytes + 1 : SIZE_MAX;
	*out = choice;
	return ncclSuccess;
}

int tp_choose_channels(enum tp_algo algo, enum tp_coll coll, int nranks, size_t block_bytes, int most)
{
	bool many = tp_coll_input_is_blocks(coll) || tp_coll_output_is_blocks(coll);
	size_t bytes = block_bytes * (many ? (size_t)nranks : 1), unit = algo == TP_ALGO_ONE_SHOT ? 4096 : 16384;
	int channels = 1;
	while (channels < most && (size_t)channels * unit < bytes) channels *= 2;
	return TP_MIN(channels, most);
}
