/* How many blocks a communicator's kernels may have.
 *
 * Kernels of co-operating ranks wait for each other, so all blocks of all of them must be on the device at once; a block more would
 * wait for a place that nobody gives up. The device holds so many (tp_cuda_kernels_resident); ranks that run on it at the
 * same time share them: those of this process, and under MPS those of the communicator's other processes too, each
 * with what it has promised before (what processes outside the communicator have, nobody here knows). Processes without MPS take turns and each
 * has the whole device in its turn.
 *
 * Communicators of one process may run at the same time too. Each takes at most half of what the earlier ones have left (the first on a
 * device so small that half is less than 32: up to 32, but for an eighth, or the next one's kernels would have no place beside its own), so that
 * a few get all that is of use (32, or 64 while there is room), and later ones less, but never none: a program with dozens of communicators
 * doesn't use them all at once. A least number that is asked for is
 * given at the others' expense, as far as the device holds it. All ranks must have the same number of channels, so the least of all counts. */
#include <stdlib.h>
#include <string.h>

#include "comm/gpu.h"

enum { PARAM_MIN, PARAM_MAX, PARAM_MIN_CHANNELS, PARAM_MAX_CHANNELS };
static struct tp_param params[] = {
	[PARAM_MIN] = { .name = "NCCL_MIN_CTAS", .kind = TP_PARAM_INT, .fallback = "0", .min = 0, .max = 64,
		.doc = "GPU ranks: a communicator's kernels have at least so many thread blocks, if the GPU can hold them; 0: no wish" },
	[PARAM_MAX] = { .name = "NCCL_MAX_CTAS", .kind = TP_PARAM_INT, .fallback = "0", .min = 0, .max = 64,
		.doc = "GPU ranks: a communicator's kernels have at most so many thread blocks; 0: as many as are of use" },
	[PARAM_MIN_CHANNELS] = { .name = "NCCL_MIN_NCHANNELS", .kind = TP_PARAM_INT, .fallback = "0", .min = 0, .max = 64,
		.doc = "the older name of NCCL_MIN_CTAS" },
	[PARAM_MAX_CHANNELS] = { .name = "NCCL_MAX_NCHANNELS", .kind = TP_PARAM_INT, .fallback = "0", .min = 0, .max = 64,
		.doc = "the older name of NCCL_MAX_CTAS" },
};
TP_PARAM_TABLE("comm", params)

#define MOST 64
#define USUAL 32
#define ACROSS_HOSTS 16
#define KEPT 8                  /* one of so many blocks */

struct promise { struct promise *next; const struct tp_gpu *gpu; int blocks; };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct promise *promises;

void tp_gpu_budget_take(const struct tp_gpu *gpu, int blocks)
{
	pthread_mutex_lock(&lock);
	struct promise *p = promises;
	while (p && p->gpu != gpu) p = p->next;
	if (!p && (p = tp_alloc(1, sizeof(*p), "a GPU's budget"))) {
		*p = (struct promise){ promises, gpu, 0 };
		promises = p;
	}
	if (p) p->blocks += blocks;
	pthread_mutex_unlock(&lock);
}

void tp_gpu_budget_give_back(const struct tp_gpu *gpu, int blocks) { tp_gpu_budget_take(gpu, -blocks); }

static int promised(const struct tp_gpu *gpu)
{
	int blocks = 0;
	pthread_mutex_lock(&lock);
	for (const struct promise *p = promises; p; p = p->next)
		if (!memcmp(p->gpu->uuid, gpu->uuid, sizeof(gpu->uuid))) blocks += p->blocks;
	pthread_mutex_unlock(&lock);
	return blocks;
}

/* The environment wins over the configuration, as in NCCL. */
static int configured(int name, int older_name, int of_config)
{
	int64_t value = tp_param_int(&params[name]);
	if (!value) value = tp_param_int(&params[older_name]);
	return value ? (int)value : of_config;
}

void tp_gpu_budget_fill(const struct ncclComm *comm, struct tp_gpu_budget *out)
{
	const struct tp_gpu *gpu = comm->gpu->gpu;
	const char *blocking = getenv("CUDA_LAUNCH_BLOCKING");
	*out = (struct tp_gpu_budget){ .process = comm->boot->peers[comm->rank].process_hash,
		.resident = tp_cuda_kernels_resident(comm->gpu->kernels, comm->nranks), .mps = gpu->mps, .launch_blocking = blocking && atoi(blocking) != 0 };
	memcpy(out->uuid, gpu->uuid, sizeof(out->uuid));
	memcpy(out->bus_id, gpu->bus_id, TP_MIN(sizeof(out->bus_id), sizeof(gpu->bus_id)));
	out->available = out->resident - promised(gpu);
	out->least = TP_MIN(configured(PARAM_MIN, PARAM_MIN_CHANNELS, comm->config.min_ctas), MOST);
	out->most = TP_MIN(configured(PARAM_MAX, PARAM_MAX_CHANNELS, comm->config.max_ctas), MOST);
	out->most = TP_MAX(out->most, out->least);
	for (int shared = 0; shared < 2; shared++) out->pipes[shared] = (uint8_t)tp_cuda_pipes_wanted(comm->gpu->kernels, comm->nranks, shared);
}

static bool same_device(const struct tp_gpu_budget *a, const struct tp_gpu_budget *b) { return !memcmp(a->uuid, b->uuid, sizeof(a->uuid)); }

enum tp_cuda_pipes tp_gpu_budget_pipes(const struct ncclComm *comm, const struct tp_gpu_budget *all)
{
	bool shared = false;
	uint8_t least = TP_CUDA_PIPES_ALL;
	if (comm->boot->nhosts > 1) return TP_CUDA_PIPES_NONE;
	for (int r = 1; r < comm->nranks; r++) shared |= same_device(&all[r], &all[0]);
	for (int r = 0; r < comm->nranks; r++) least = TP_MIN(least, all[r].pipes[shared]);
	return (enum tp_cuda_pipes)least;
}

/* Do kernels of both run at the same time on one device? */
static bool run_together(const struct tp_gpu_budget *a, const struct tp_gpu_budget *b)
{
	return same_device(a, b) && (a->process == b->process || (a->mps && b->mps));
}

/* What is left of a rank's device: each process knows what it has promised itself, and no process what the others have. */
static int available_of(const struct tp_gpu_budget *all, int nranks, int rank, int *sharers)
{
	int resident = all[rank].resident, promised = 0;
	*sharers = 0;
	for (int r = 0; r < nranks; r++) {
		int same = 0;
		if (!run_together(&all[r], &all[rank])) continue;
		++*sharers;
		resident = TP_MIN(resident, all[r].resident);
		while (!same_device(&all[same], &all[r]) || all[same].process != all[r].process) same++;
		if (same == r) promised += all[r].resident - all[r].available;
	}
	return resident - promised;
}

/* What a rank can have, from its device's point of view. */
static int share_of(const struct tp_gpu_budget *all, int nranks, int rank)
{
	const struct tp_gpu_budget *own = &all[rank];
	int sharers, available = available_of(all, nranks, rank, &sharers);
	int fair = TP_MAX(available, 0) / 2 / sharers;
	int cap = fair >= MOST ? MOST : USUAL;
	/* A small device that nobody else uses yet. */
	if (fair < cap && sharers == 1 && available == own->resident) fair = own->resident - (own->resident + KEPT - 1) / KEPT;
	fair = TP_MAX(TP_MIN(fair, cap), 1);
	fair = TP_MIN(TP_MAX(fair, own->least), own->most);
	/* What was wished for beyond the others' share, but never more than can be there at all. */
	return TP_MAX(TP_MIN(fair, own->resident / sharers), 1);
}

/* Launches that wait until the kernel is done never start the kernels that it waits for. */
static ncclResult_t check_blocking(const struct ncclComm *comm, const struct tp_gpu_budget *all)
{
	for (int a = 0; a < comm->nranks; a++)
		for (int b = a + 1; b < comm->nranks; b++)
			if (all[a].process == all[b].process && (all[a].launch_blocking || all[b].launch_blocking))
				return TP_FAIL(ncclInvalidUsage, "CUDA_LAUNCH_BLOCKING is set and ranks %d and %d are of one process (host %s, pid %d): each launch would "
					"wait for its kernel, which waits for the other rank's. Unset it, or give each rank a process", a, b,
					comm->boot->peers[a].host_name, (int)comm->boot->peers[a].pid);
	return ncclSuccess;
}

ncclResult_t tp_gpu_budget_judge(const struct ncclComm *comm, const struct tp_gpu_budget *all, int *nchannels, int *sharers,
	int *in_process)
{
	int least = MOST, across = ACROSS_HOSTS;
	const struct tp_gpu_budget *own = &all[comm->rank];
	*sharers = *in_process = 0;
	TP_TRY(check_blocking(comm, all));
	for (int r = 0; r < comm->nranks; r++) {
		if (all[r].resident < 1)
			return TP_FAIL(ncclInternalError, "rank %d's GPU (%.16s) holds no block of our kernels", r, all[r].bus_id);
		least = TP_MIN(least, share_of(all, comm->nranks, r));
		across = TP_MAX(across, all[r].least);
		if (!same_device(&all[r], own)) continue;
		++*sharers;
		*in_process += all[r].process == own->process;
	}
	/* Slots share a fixed memory, so fewer channels have larger chunks; between hosts what a chunk costs whatever its size counts most. */
	*nchannels = comm->boot->nhosts > 1 ? TP_MIN(least, across) : least;
	return ncclSuccess;
}
