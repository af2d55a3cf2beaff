/* A communicator's end on a GPU, from the device of the calling thread to an executor that can launch. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/gpu.h"

enum { PARAM_CHECK_POINTERS, PARAM_MIXING };
static struct tp_param params[] = {
	[PARAM_CHECK_POINTERS] = { .name = "NCCL_CHECK_POINTERS", .kind = TP_PARAM_BOOL, .fallback = "0", .max = 1,
		.doc = "GPU ranks: 1: each call checks that its buffers are memory of the rank's GPU" },
	[PARAM_MIXING] = { .name = "NCCL_GRAPH_MIXING_SUPPORT", .kind = TP_PARAM_BOOL, .fallback = "1", .max = 1,
		.doc = "GPU ranks: 0: CUDA graphs aren't ordered against each other and other calls of their communicator: the program does that" },
};
TP_PARAM_TABLE("comm", params)

ncclResult_t tp_gpu_rank_fail(const char *file, int line, const char *function, const struct ncclComm *comm, const char *what, CUresult error)
{
	int before = tp_gpu_rank_now;
	tp_gpu_rank_now = comm->rank;
	ncclResult_t result = tp_gpu_fail(file, line, function, comm->gpu->gpu, what, error);
	tp_gpu_rank_now = before;
	return result;
}

static ncclResult_t make(struct tp_gpu *gpu, struct tp_gpu_rank **out)
{
	struct tp_gpu_rank *rank = tp_alloc(1, sizeof(*rank), "a GPU's rank");
	if (!rank) return ncclSystemError;
	rank->gpu = gpu;
	rank->mixing = tp_param_int(&params[PARAM_MIXING]) != 0;
	rank->check_pointers = tp_param_int(&params[PARAM_CHECK_POINTERS]) != 0;
	*out = rank;
	return ncclSuccess;
}

ncclResult_t tp_gpu_rank_new(int ordinal, struct tp_gpu_rank **out)
{
	struct tp_gpu *gpu;
	if (ordinal >= 0) TP_TRY(tp_gpu_of_ordinal(ordinal, &gpu));
	else TP_TRY(tp_gpu_current(&gpu));
	return make(gpu, out);
}

ncclResult_t tp_gpu_rank_like(const struct tp_gpu_rank *parent, struct tp_gpu_rank **out)
{
	return make((struct tp_gpu *)(uintptr_t)parent->gpu, out);
}

static void *load_kernels(void *arg)
{
	struct tp_gpu_rank *rank = arg;
	rank->load_result = tp_cuda_kernels_load(rank->gpu, &rank->kernels);
	return NULL;
}

static void *ask_nvml(void *arg)
{
	tp_gpu_ask_nvml(((struct tp_gpu_rank *)arg)->gpu);
	return NULL;
}

/* Kernels are loaded, and NVML asked, once a process: later communicators find them there, or wait for who fetches them. */
static bool is_first(const struct tp_gpu *gpu)
{
	static _Atomic(const struct tp_gpu *) begun[64];
	for (size_t i = 0; i < TP_ARRAY_LEN(begun); i++) {
		const struct tp_gpu *there = NULL;
		if (atomic_compare_exchange_strong_explicit(&begun[i], &there, gpu, memory_order_relaxed, memory_order_relaxed)) return true;
		if (there == gpu) return false;
	}
	return true;
}

/* Where there is no thread to be had, await_kernels loads, and the topology asks. */
void tp_gpu_rank_begin(struct tp_gpu_rank *rank)
{
	sigset_t every, before;
	if (!is_first(rank->gpu)) return;
	sigfillset(&every);
	pthread_sigmask(SIG_SETMASK, &every, &before);
	rank->loads = pthread_create(&rank->loader, NULL, load_kernels, rank) == 0;
	rank->asks = pthread_create(&rank->asker, NULL, ask_nvml, rank) == 0;
	pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void await_nvml(struct tp_gpu_rank *rank)
{
	if (rank->asks) pthread_join(rank->asker, NULL);
	rank->asks = false;
}

static ncclResult_t await_kernels(struct tp_gpu_rank *rank)
{
	if (!rank->loads) return rank->kernels ? ncclSuccess : tp_cuda_kernels_load(rank->gpu, &rank->kernels);
	pthread_join(rank->loader, NULL);
	rank->loads = false;
	return rank->load_result;
}

void tp_gpu_rank_free(struct tp_gpu_rank *rank)
{
	if (!rank) return;
	bool pushed;
	if (rank->loads) pthread_join(rank->loader, NULL);
	await_nvml(rank);
	if ((rank->done || rank->join) && tp_gpu_enter(rank->gpu, &pushed) == ncclSuccess) {
		if (rank->done) tp_cuda->EventDestroy(rank->done);
		if (rank->join) tp_cuda->EventDestroy(rank->join);
		tp_gpu_pace_free(rank);
		tp_gpu_used_free(rank);
		tp_gpu_leave(pushed);
	}
	if (rank->blocks) tp_gpu_budget_give_back(rank->gpu, rank->blocks);
	for (int i = 0; i < TP_GPU_CALLS; i++) free(rank->calls[i].ready);
	free(rank);
}

/* What several ranks on one GPU mean, once a communicator. */
static void tell_sharing(const struct ncclComm *comm, const struct tp_gpu_budget *all, int sharers, int in_process)
{
	if (sharers < 2) return;
	const struct tp_gpu *gpu = comm->gpu->gpu;
	int first = 0, queues = getenv("CUDA_DEVICE_MAX_CONNECTIONS") ? atoi(getenv("CUDA_DEVICE_MAX_CONNECTIONS")) : 8;
	while (memcmp(all[first].uuid, gpu->uuid, sizeof(gpu->uuid))) first++;
	if (first != comm->rank) return;
	const char *how = in_process == sharers ? "in one process: each needs a non-blocking stream of its own"
		: gpu->mps ? "in several processes, under MPS: their kernels run side by side"
		: "in several processes, which take turns on it: milliseconds a call; MPS (nvidia-cuda-mps-control -d) makes that microseconds";
	TP_INFO(TP_INIT, "%d ranks share GPU %d (%s), %s; it works, and is slower than a GPU for each", sharers, gpu->ordinal, gpu->bus_id, how);
	/* A stream for each rank, and ours for uploads, which a kernel of another rank may wait for. */
	const int streams = in_process + 1;
	if (in_process > 1 && streams > queues)
		TP_WARN("comm %p rank %d: %d ranks of this process share GPU %d and have %d streams there at least, and it has %d queues (CUDA_DEVICE_MAX_CONNECTIONS): "
			"streams that share a queue wait for each other, perhaps for ever. Set CUDA_DEVICE_MAX_CONNECTIONS=32", (const void *)comm, comm->rank, in_process,
			gpu->ordinal, streams, queues);
}

ncclResult_t tp_gpu_rank_agree(struct ncclComm *comm)
{
	struct tp_gpu_rank *rank = comm->gpu;
	tp_gpu_rank_bury();
	TP_TRY(await_kernels(rank));
	struct tp_gpu_budget *all = tp_alloc((size_t)comm->nranks, sizeof(*all), "the GPUs' budgets");
	if (!all) return ncclSystemError;
	tp_gpu_budget_fill(comm, &all[comm->rank]);
	int nchannels, sharers, in_process;
	ncclResult_t result = tp_boot_all_gather(comm->boot, all, sizeof(*all));
	if (result == ncclSuccess) result = tp_gpu_budget_judge(comm, all, &nchannels, &sharers, &in_process);
	if (result == ncclSuccess) {
		comm->nchannels = nchannels;
		rank->strict = in_process > 1;
		rank->shared = sharers > 1;
		rank->comm_hash = comm->boot->comm_hash;
		rank->blocks = nchannels;
		rank->pipes = tp_gpu_budget_pipes(comm, all);
		tp_gpu_budget_take(rank->gpu, nchannels);
		tell_sharing(comm, all, sharers, in_process);
		TP_INFO(TP_INIT, "%d channels of a thread block each (device %d holds %d blocks, %d of them free)", nchannels, rank->gpu->ordinal,
			(int)all[comm->rank].resident, (int)all[comm->rank].available);
	}
	free(all);
	return result;
}

size_t tp_gpu_rank_region_bytes(const struct ncclComm *comm)
{
	int largest = 1;
	for (int r = 0; r < comm->nranks; r++) largest = TP_MAX(largest, comm->boot->peers[r].local + 1);
	return tp_cuda_region_bytes(largest, comm->nchannels, comm->gpu->pipes);
}

static ncclResult_t open_memory(struct ncclComm *comm)
{
	const struct tp_boot *boot = comm->boot;
	bool *reaches = tp_alloc((size_t)boot->nlocal, sizeof(*reaches), "which GPUs reach each other");
	if (!reaches) return ncclSystemError;
	for (int i = 0; i < boot->nlocal; i++) reaches[i] = tp_links_reaches(comm->links, comm->rank, boot->local_ranks[i]);
	struct tp_mem_options options = { .gpu = comm->gpu->gpu, .reaches = reaches };
	ncclResult_t result = tp_mem_create(comm->boot, &options, &comm->gpu->mem);
	free(reaches);
	return result;
}

static ncclResult_t open_entered(struct ncclComm *comm)
{
	struct tp_gpu_rank *rank = comm->gpu;
	rank->counts = tp_links_have_net(comm->links);
	struct tp_cuda_options options = { .gpu = rank->gpu, .nchannels = comm->nchannels, .shared_gpu = rank->shared, .counts = rank->counts,
		.pipes = rank->pipes, .no_ctas = comm->config.cta_policy & NCCL_CTA_POLICY_ZERO };
	struct tp_cuda_exec *exec;
	TP_TRY(tp_cuda_exec_create(comm->boot, comm->links, &options, &exec));
	atomic_store_explicit(&rank->exec, exec, memory_order_release);
	TP_TRY(open_memory(comm));
	tp_gpu_memory_offer(rank, exec);
	TP_GPU_TRY(comm, EventCreate(&rank->done, CU_EVENT_DISABLE_TIMING));
	TP_GPU_TRY(comm, EventCreate(&rank->join, CU_EVENT_DISABLE_TIMING));
	tp_gpu_rank_register(rank);
	return ncclSuccess;
}

ncclResult_t tp_gpu_rank_open(struct ncclComm *comm)
{
	bool pushed;
	TP_TRY(tp_gpu_enter(comm->gpu->gpu, &pushed));
	tp_gpu_rank_now = comm->rank;
	ncclResult_t result = open_entered(comm);
	tp_gpu_rank_now = -1;
	tp_gpu_leave(pushed);
	await_nvml(comm->gpu);
	return result;
}
