/* Which plan runs a call: the chooser's answer, remembered. It depends on (collective, root, bytes, staged) and on what
 * all ranks agreed at init, so all ranks find the same without talking. */
#include <stdlib.h>
#include <string.h>

#include "comm/gpu.h"
#include "comm/ways.h"

static ncclResult_t find_plan(struct ncclComm *comm, enum tp_coll coll, int root, const struct tp_choice *choice,
	const struct tp_plan **out)
{
	for (struct tp_plan_entry *e = comm->plans; e; e = e->next) {
		if (e->coll == coll && e->algo == choice->algo && e->root == root && e->nchannels == choice->nchannels) {
			*out = e->plan;
			return ncclSuccess;
		}
	}
	struct tp_plan_entry *e = tp_alloc(1, sizeof(*e), "a plan");
	if (!e) return ncclSystemError;
	*e = (struct tp_plan_entry){ comm->plans, coll, choice->algo, root, choice->nchannels, NULL };
	struct tp_plan_spec spec = { coll, choice->algo, root, choice->nchannels, comm->layout };
	ncclResult_t result = tp_plan_create(&spec, comm->rank, &e->plan);
	if (result != ncclSuccess) {
		free(e);
		return result;
	}
	comm->plans = e;
	*out = e->plan;
	return ncclSuccess;
}

static ncclResult_t choose(struct ncclComm *comm, enum tp_coll coll, int root, size_t block_bytes, bool staged,
	struct tp_choice_entry *out)
{
	struct tp_choice choice;
	struct tp_ways_call call = { .layout = comm->layout, .ways = comm->ways, .library = &comm->model, .coll = coll, .root = root, .nchannels = comm->nchannels,
		.block_bytes = block_bytes, .staged = staged, .filter = comm->algo_filter };
	TP_TRY(tp_ways_choose(&call, &choice));
	if (comm->gpu) tp_gpu_fit_choice(comm, &call, &choice);
	if (choice.nchannels > comm->nchannels) choice.nchannels = comm->nchannels;
	TP_TRY(tp_watch_expect("algo", tp_algo_name(choice.algo), tp_coll_name(coll), NULL));
	const struct tp_plan *plan;
	TP_TRY(find_plan(comm, coll, root, &choice, &plan));
	*out = (struct tp_choice_entry){ true, coll, staged, root, block_bytes, choice.chunk_bytes, choice.ref_bytes,
		choice.candidates[choice.algo].us, plan };
	TP_INFO(TP_TUNING, "%s: %zu bytes a block, root %d -> %s, %zu bytes a chunk, %d channels, predicted %.2f us", tp_coll_name(coll),
		block_bytes, root, tp_algo_name(choice.algo), choice.chunk_bytes, choice.nchannels, out->us);
	return ncclSuccess;
}

ncclResult_t tp_choice_find(struct ncclComm *comm, enum tp_coll coll, int root, size_t block_bytes, bool staged,
	struct tp_choice_entry *out)
{
	uint64_t h = (block_bytes * 0x9e3779b97f4a7c15u) ^ ((uint64_t)coll << 32) ^ ((uint64_t)(uint32_t)root << 36) ^ staged;
	h *= 0xbf58476d1ce4e5b9u;
	pthread_mutex_lock(&comm->choice_lock);
	struct tp_choice_entry *slot = &comm->choices[h >> 56 & (TP_CHOICES - 1)];
	ncclResult_t result = ncclSuccess;
	if (!slot->used || slot->coll != coll || slot->root != root || slot->block_bytes != block_bytes || slot->staged != staged) {
		struct tp_choice_entry made;
		result = choose(comm, coll, root, block_bytes, staged, &made);
		if (result == ncclSuccess) *slot = made;
	}
	if (result == ncclSuccess) *out = *slot;
	pthread_mutex_unlock(&comm->choice_lock);
	return result;
}

void tp_choice_free_all(struct ncclComm *comm)
{
	while (comm->plans) {
		struct tp_plan_entry *e = comm->plans;
		comm->plans = e->next;
		tp_plan_free(e->plan);
		free(e);
	}
}
