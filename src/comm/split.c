/* New communicators from an old one. Their id is computed alike by all members, from the parent's secret and from what
 * tells this child from others, so only a split's colours and keys have to be exchanged. */
#include <stdlib.h>
#include <string.h>

#include "comm/gpu.h"

struct derive_job {
	struct tp_job job;
	struct ncclComm *parent, *child;    /* child NULL: no colour */
	ncclComm_t *out;
	bool shrink, ran;
	uint32_t count;                     /* which derived communicator of the parent */
	int color, key;
	int *members, nmembers;             /* ranks of the parent, in the child's order */
};

struct salt { uint32_t shrink, count; int32_t color; uint32_t members; };

struct choice { int32_t color, key; };
struct candidate { int32_t key, rank; };

static int by_key(const void *a_, const void *b_)
{
	const struct candidate *a = a_, *b = b_;
	if (a->key != b->key) return a->key < b->key ? -1 : 1;
	return a->rank < b->rank ? -1 : 1;
}

/* Who has our colour, in the order of key and rank. */
static ncclResult_t gather_colors(struct derive_job *job)
{
	struct ncclComm *parent = job->parent;
	struct choice *all = tp_alloc((size_t)parent->nranks, sizeof(*all), "colours");
	struct candidate *same = tp_alloc((size_t)parent->nranks, sizeof(*same), "colours");
	job->members = tp_alloc((size_t)parent->nranks, sizeof(*job->members), "colours");
	ncclResult_t result = all && same && job->members ? ncclSuccess : ncclSystemError;
	if (all) all[parent->rank] = (struct choice){ job->color, job->key };
	if (result == ncclSuccess) result = tp_boot_all_gather(parent->boot, all, sizeof(*all));
	if (result == ncclSuccess) {
		for (int r = 0; r < parent->nranks; r++)
			if (all[r].color == job->color) same[job->nmembers++] = (struct candidate){ all[r].key, r };
		qsort(same, (size_t)job->nmembers, sizeof(*same), by_key);
		for (int i = 0; i < job->nmembers; i++) job->members[i] = same[i].rank;
	}
	free(all);
	free(same);
	return result;
}

static ncclResult_t join_child(struct derive_job *job)
{
	struct ncclComm *parent = job->parent;
	int rank = 0;
	while (job->members[rank] != parent->rank) rank++;
	struct salt salt = { job->shrink, job->count, job->shrink ? 0 : job->color,
		(uint32_t)tp_hash64(job->members, (size_t)job->nmembers * sizeof(int), 1) };
	ncclUniqueId id;
	TP_TRY(tp_boot_derive_id(parent->boot, job->members[0], &salt, sizeof(salt), &id));
	TP_INFO(TP_INIT, "%s comm %p rank %d nranks %d parent %p splitCount %u color %d key %d", job->shrink ? "ncclCommShrink" : "ncclCommSplit",
		(void *)job->child, rank, job->nmembers, (void *)parent, job->count, job->color, job->key);
	struct tp_init_args args = { .name = job->shrink ? "ncclCommShrink" : "ncclCommSplit", .nranks = job->nmembers, .rank = rank,
		.nids = 1, .ids = &id, .kind = parent->gpu ? TP_DEVICE_CUDA : TP_DEVICE_HOST };
	return tp_init_join(job->child, &args);
}

static ncclResult_t run_derive(struct tp_job *base)
{
	struct derive_job *job = (struct derive_job *)base;
	job->ran = true;
	tp_log_set_device(job->parent->device);
	ncclResult_t result = job->shrink ? ncclSuccess : gather_colors(job);
	/* The new ranks meet among themselves: whoever comes next on the parent needn't wait for that. */
	tp_job_end_turn(base);
	if (result == ncclSuccess && job->child) result = join_child(job);
	if (job->child && result != ncclSuccess) tp_init_failed(job->child, result);
	if (base->blocking && result == ncclSuccess) *job->out = job->child;
	return result;
}

static void discard_derive(struct tp_job *base)
{
	struct derive_job *job = (struct derive_job *)base;
	if (!job->ran && job->child) {
		if (!base->blocking) *job->out = NULL;
		tp_comm_free(job->child);
	}
	tp_comm_leave(job->parent);
	free(job->members);
	free(job);
}

/* parent is entered; the job leaves it. */
static ncclResult_t submit(struct derive_job *job, const ncclConfig_t *user_config, bool has_child)
{
	struct ncclComm *parent = job->parent;
	struct tp_config config;
	ncclResult_t result = tp_config_read(user_config, user_config ? NULL : &parent->config, &config);
	struct tp_gpu_rank *gpu = NULL;
	if (result == ncclSuccess && has_child && parent->gpu) result = tp_gpu_rank_like(parent->gpu, &gpu);
	if (result == ncclSuccess && has_child) result = tp_init_handle(&config, parent->device, gpu, &job->child);
	job->job.run = run_derive;
	job->job.discard = discard_derive;
	job->job.comm = job->child ? job->child : parent;
	job->job.meets = parent;
	job->job.blocking = result == ncclSuccess ? (job->child ? config.blocking : parent->config.blocking) : true;
	if (result != ncclSuccess) {
		job->job.discard(&job->job);
		return result;
	}
	job->count = parent->splits++;
	if (!job->job.blocking) {
		if (job->child) atomic_store_explicit(&job->child->state, ncclInProgress, memory_order_relaxed);
		*job->out = job->child;
	}
	return tp_job_submit(&job->job);
}

static ncclResult_t split(ncclComm_t parent, int color, int key, ncclComm_t *out, const ncclConfig_t *config)
{
	ncclResult_t result = tp_comm_may_call(parent, "ncclCommSplit");
	if (result == ncclSuccess && color < 0 && color != NCCL_SPLIT_NOCOLOR)
		result = TP_FAIL(ncclInvalidArgument, "ncclCommSplit: color is %d; it must be at least 0, or NCCL_SPLIT_NOCOLOR (%d)", color,
			NCCL_SPLIT_NOCOLOR);
	struct derive_job *job = result == ncclSuccess ? tp_alloc(1, sizeof(*job), "a split") : NULL;
	if (!job) {
		tp_comm_leave(parent);
		return result == ncclSuccess ? ncclSystemError : result;
	}
	*job = (struct derive_job){ .parent = parent, .out = out, .color = color, .key = key };
	return submit(job, config, color >= 0);
}

ncclResult_t tp_comm_split(ncclComm_t parent, int color, int key, ncclComm_t *out, const ncclConfig_t *config)
{
	if (!out) return tp_group_note(TP_FAIL(ncclInvalidArgument, "ncclCommSplit: newcomm is NULL"));
	ncclResult_t result = tp_comm_enter(parent, "ncclCommSplit");
	return tp_group_note(result == ncclSuccess ? split(parent, color, key, out, config) : result);
}

/* The ranks that stay, in order. */
static ncclResult_t find_members(struct derive_job *job, const int *exclude, int nexclude)
{
	struct ncclComm *parent = job->parent;
	job->members = tp_alloc((size_t)parent->nranks, sizeof(*job->members), "the ranks that stay");
	bool *gone = tp_alloc((size_t)parent->nranks, sizeof(*gone), "the ranks that go");
	ncclResult_t result = job->members && gone ? ncclSuccess : ncclSystemError;
	for (int i = 0; i < nexclude && result == ncclSuccess; i++) {
		if (exclude[i] < 0 || exclude[i] >= parent->nranks)
			result = TP_FAIL(ncclInvalidArgument, "ncclCommShrink: excludeRanksList[%d] is %d; it must be in [0, %d)", i, exclude[i],
				parent->nranks);
		else if (gone[exclude[i]])
			result = TP_FAIL(ncclInvalidArgument, "ncclCommShrink: rank %d is in excludeRanksList twice", exclude[i]);
		else if (exclude[i] == parent->rank)
			result = TP_FAIL(ncclInvalidArgument, "ncclCommShrink: rank %d excludes itself; only the ranks that stay make this call",
				parent->rank);
		else
			gone[exclude[i]] = true;
	}
	for (int r = 0; r < parent->nranks && result == ncclSuccess; r++)
		if (!gone[r]) job->members[job->nmembers++] = r;
	free(gone);
	return result;
}

static ncclResult_t check_state(struct ncclComm *parent, int flags)
{
	uint32_t gate = atomic_load_explicit(&parent->gate, memory_order_acquire);
	if (gate & (TP_GATE_INIT | TP_GATE_FINALIZED)) return tp_comm_may_call(parent, "ncclCommShrink");
	if (flags == NCCL_SHRINK_ABORT) return tp_comm_stop(parent, "shrinks the communicator");
	bool busy = parent->gpu ? tp_gpu_rank_is_busy(parent) : atomic_load_explicit(&parent->queued, memory_order_acquire) != 0;
	if (busy && !(gate & TP_GATE_ERROR))
		return TP_FAIL(ncclInvalidUsage, "ncclCommShrink: operations are outstanding on communicator %p; wait for them, or use "
			"NCCL_SHRINK_ABORT", (void *)parent);
	return ncclSuccess;
}

static ncclResult_t shrink(ncclComm_t parent, const int *exclude, int nexclude, ncclComm_t *out, const ncclConfig_t *config, int flags)
{
	struct derive_job *job = tp_alloc(1, sizeof(*job), "a shrink");
	if (!job) {
		tp_comm_leave(parent);
		return ncclSystemError;
	}
	*job = (struct derive_job){ .parent = parent, .out = out, .shrink = true };
	ncclResult_t result = find_members(job, exclude, nexclude);
	if (result == ncclSuccess) result = check_state(parent, flags);
	if (result != ncclSuccess) {
		discard_derive(&job->job);
		return result;
	}
	return submit(job, config, true);
}

ncclResult_t tp_comm_shrink(ncclComm_t parent, const int *exclude, int nexclude, ncclComm_t *out, const ncclConfig_t *config, int flags)
{
	if (!out || (nexclude > 0 && !exclude))
		return tp_group_note(TP_FAIL(ncclInvalidArgument, "ncclCommShrink: %s is NULL", out ? "excludeRanksList" : "newcomm"));
	if (nexclude < 0) return tp_group_note(TP_FAIL(ncclInvalidArgument, "ncclCommShrink: excludeRanksCount is %d", nexclude));
	if (flags != NCCL_SHRINK_DEFAULT && flags != NCCL_SHRINK_ABORT)
		return tp_group_note(TP_FAIL(ncclInvalidArgument, "ncclCommShrink: there are no flags 0x%x", (unsigned)flags));
	ncclResult_t result = tp_comm_enter(parent, "ncclCommShrink");
	return tp_group_note(result == ncclSuccess ? shrink(parent, exclude, nexclude, out, config, flags) : result);
}
