/* Joining: from an id to a communicator that works.
 *
 * boot -> settings -> links -> executor -> topology -> model: each step needs that all ranks did the one before, and the exchanges in
 * them are what makes sure of it. A rank that fails on the way tells the others, so that nobody waits for it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/gpu.h"
#include "topo/topo.h"

struct init_job {
	struct tp_job job;
	struct tp_init_args args;
	ncclUniqueId id;                    /* args.ids of one */
};

static double seconds(uint64_t from_ns, uint64_t to_ns) { return (double)(to_ns - from_ns) / 1e9; }

static void log_once(void)
{
	TP_INFO(TP_INIT, "NCCL version 2.28.9+telpher0.1.0");
	if (!tp_log_wants(TP_LOG_INFO, TP_INIT))
		tp_log_write(TP_LOG_VERSION, ~0u, __FILE__, __LINE__, __func__, "NCCL version 2.28.9+telpher0.1.0");
	tp_param_report_environment();
}

static const char *coll_name(int func) { return tp_coll_name((enum tp_coll)func); }

static ncclResult_t make_layout(struct ncclComm *comm)
{
	int *domains = tp_alloc((size_t)comm->nranks, sizeof(*domains), "the layout");
	if (!domains) return ncclSystemError;
	for (int r = 0; r < comm->nranks; r++) domains[r] = comm->boot->peers[r].host;
	ncclResult_t result = tp_layout_create(comm->nranks, domains, &comm->layout);
	free(domains);
	return result;
}

/* times: after boot, exchange of settings, links, topology, the rest. */
static ncclResult_t join(struct ncclComm *comm, const struct tp_init_args *args, uint64_t times[5])
{
	struct tp_boot_args boot = { .rank = args->rank, .nranks = args->nranks, .nids = args->nids, .ids = args->ids,
		.device = comm->device, .abort = &comm->abort_flag, .name = args->name };
	if (comm->gpu) tp_gpu_rank_begin(comm->gpu);
	TP_TRY(tp_boot_open(&boot, &comm->boot));
	comm->alarm = comm->boot->alarm;
	comm->alarm_seen = 0;
	times[0] = tp_clock_ns();
	TP_TRY(tp_agree_settings(comm, args->kind));
	TP_TRY(make_layout(comm));
	if (comm->gpu) TP_TRY(tp_gpu_rank_agree(comm));
	TP_INFO(TP_INIT, "comm %p rank %d nRanks %d nNodes %d localRanks %d localRank %d MNNVL 0", (void *)comm, comm->rank, comm->nranks,
		comm->boot->nhosts, comm->boot->nlocal, comm->boot->local);
	times[1] = tp_clock_ns();
	struct tp_links_options links = { .nchannels = comm->nchannels, .allow_by_ref = !comm->gpu,
		.net_name = comm->config.net_name[0] ? comm->config.net_name : NULL, .cross_nic = tp_topo_cross_nic() };
	if (comm->gpu) {
		links.gpu = comm->gpu->gpu;
		links.region_bytes = tp_gpu_rank_region_bytes(comm);
		links.carries_large = comm->gpu->pipes >= TP_CUDA_PIPES_MOVE;
	}
	TP_TRY(tp_links_create(comm->boot, &links, &comm->links));
	if (comm->gpu) TP_TRY(tp_gpu_rank_open(comm));
	else TP_TRY(tp_exec_create(comm->boot, comm->links, &comm->exec));
	TP_TRY(tp_flight_create(comm->rank, comm->nranks, comm->boot->comm_hash, coll_name, &comm->flight));
	times[2] = tp_clock_ns();
	TP_TRY(tp_comm_topo_open(comm));
	TP_TRY(tp_comm_order_rings(comm));
	TP_TRY(tp_comm_open_ways(comm));
	times[3] = tp_clock_ns();
	TP_TRY(tp_report_check(comm));
	if (comm->gpu) TP_TRY(tp_gpu_pace_open(comm));
	TP_TRY(tp_agree_model(comm));
	if (comm->gpu) {
		tp_gpu_watch_init_runnable(comm);
		TP_TRY(tp_gpu_watch_add(comm));
	} else {
		tp_comm_init_runnable(comm);
	}
	times[4] = tp_clock_ns();
	return ncclSuccess;
}

/* The others wait for us at the next exchange: they must not. */
static void tell_failure(struct ncclComm *comm, ncclResult_t result)
{
	if (!comm->boot) return;
	struct tp_event event = { .kind = TP_EVENT_FAILED, .rank = comm->rank, .result = result };
	const char *text = tp_log_last_error();
	size_t n = strnlen(text, sizeof(event.text) - 1);
	memcpy(event.text, text, n);
	tp_boot_post_event(comm->boot, &event);
}

/* NCCL's line, which tools read. */
static void log_init(const struct ncclComm *comm, const struct tp_init_args *args, const char *what)
{
	const struct tp_gpu *gpu = comm->gpu ? comm->gpu->gpu : NULL;
	TP_INFO(TP_INIT, "%s comm %p rank %d nranks %d cudaDev %d nvmlDev %d busId %llx commId 0x%llx - Init %s", args->name, (const void *)comm,
		args->rank, args->nranks, comm->device, gpu ? gpu->nvml : comm->device, gpu ? (unsigned long long)gpu->bus : 0ull,
		(unsigned long long)tp_hash64(args->ids, sizeof(*args->ids), 0), what);
}

ncclResult_t tp_init_join(struct ncclComm *comm, const struct tp_init_args *args)
{
	uint64_t times[5] = { 0 }, start = tp_clock_ns();
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	pthread_once(&once, log_once);
	comm->rank = args->rank;
	comm->nranks = args->nranks;
	comm->nchannels = 1;            /* GPU ranks agree on more */
	comm->p2p_chunk_bytes = 1u << 20;
	tp_log_set_device(comm->device);
	log_init(comm, args, "START");
	ncclResult_t result = join(comm, args, times);
	if (result != ncclSuccess) {
		tell_failure(comm, result);
		tp_comm_tear_down(comm);
		return result;
	}
	log_init(comm, args, "COMPLETE");
	TP_INFO(TP_INIT, "Init timings - %s: rank %d nranks %d total %.2f (kernels 0.00, alloc 0.00, bootstrap %.2f, allgathers %.2f, topo %.2f, "
		"graphs 0.00, connections %.2f, rest %.2f)", args->name, args->rank, args->nranks, seconds(start, times[4]), seconds(start, times[0]),
		seconds(times[0], times[1]), seconds(times[2], times[3]), seconds(times[1], times[2]), seconds(times[3], times[4]));
	/* Pairs with the acquire in tp_comm_may_call and in fast.c: what join wrote is seen by whoever finds the gate open. */
	atomic_fetch_and_explicit(&comm->gate, ~(uint32_t)TP_GATE_INIT, memory_order_release);
	return ncclSuccess;
}

/* A handle with its configuration, before anybody is met. */
ncclResult_t tp_init_handle(const struct tp_config *config, int device, struct tp_gpu_rank *gpu, struct ncclComm **out)
{
	struct ncclComm *comm = tp_comm_new();
	if (!comm) {
		tp_gpu_rank_free(gpu);
		return ncclSystemError;
	}
	comm->config = *config;
	comm->device = gpu ? gpu->gpu->ordinal : device;
	comm->gpu = gpu;
	if (gpu) atomic_fetch_or_explicit(&comm->gate, TP_GATE_GPU, memory_order_relaxed);
	if (!config->blocking) atomic_fetch_or_explicit(&comm->gate, TP_GATE_NONBLOCKING, memory_order_relaxed);
	*out = comm;
	return ncclSuccess;
}

/* The handle of a join that failed: a blocking caller never sees it; a non-blocking one has it and must abort it. */
void tp_init_failed(struct ncclComm *comm, ncclResult_t result)
{
	if (comm->config.blocking) tp_comm_free(comm);
	else tp_comm_set_error(comm, result);
}

static ncclResult_t run_init(struct tp_job *job)
{
	struct init_job *init = (struct init_job *)job;
	struct ncclComm *comm = job->comm;
	ncclResult_t result = tp_init_join(comm, &init->args);
	if (result != ncclSuccess) tp_init_failed(comm, result);
	else if (job->blocking) *init->args.out = comm;
	init->args.joined = true;
	return result;
}

static void discard_init(struct tp_job *job)
{
	struct init_job *init = (struct init_job *)job;
	/* Never run: the handle is nobody's. */
	if (!init->args.joined) {
		if (!job->blocking) *init->args.out = NULL;
		tp_comm_free(job->comm);
	}
	if (init->args.ids != &init->id) free((void *)(uintptr_t)init->args.ids);
	free(init);
}

static int device_of_process(void)
{
	static _Atomic int cached = -1;
	int device = atomic_load_explicit(&cached, memory_order_relaxed);
	if (device >= 0) return device;
	static const char *const names[] = { "TELPHER_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "LOCAL_RANK", "SLURM_LOCALID" };
	device = 0;
	for (size_t i = 0; i < TP_ARRAY_LEN(names); i++) {
		const char *text = getenv(names[i]);
		if (!text || !*text) continue;
		device = TP_MAX(0, atoi(text));
		break;
	}
	atomic_store_explicit(&cached, device, memory_order_relaxed);
	return device;
}

/* device: a host rank's number; ordinal: a GPU rank's device, -1: the calling thread's. */
static ncclResult_t init_rank(const char *name, ncclComm_t *out, int nranks, int rank, int nids, const ncclUniqueId *ids,
	const ncclConfig_t *user_config, int device, int ordinal)
{
	if (!out || !ids) return TP_FAIL(ncclInvalidArgument, "%s: %s is NULL", name, out ? "the unique id" : "comm");
	if (nranks < 1) return TP_FAIL(ncclInvalidArgument, "%s: nranks is %d; it must be at least 1", name, nranks);
	if (rank < 0 || rank >= nranks) return TP_FAIL(ncclInvalidArgument, "%s: rank is %d; it must be in [0, %d)", name, rank, nranks);
	if (nids < 1 || nids > nranks) return TP_FAIL(ncclInvalidArgument, "%s: nId is %d; it must be in [1, %d]", name, nids, nranks);
	struct tp_config config;
	TP_TRY(tp_config_read(user_config, NULL, &config));
	enum tp_device_kind kind;
	TP_TRY(tp_device_kind(&kind));
	/* Here, since a group's joins are made by other threads. */
	struct tp_gpu_rank *gpu = NULL;
	if (kind == TP_DEVICE_CUDA) TP_TRY(tp_gpu_rank_new(ordinal, &gpu));
	struct init_job *init = tp_alloc(1, sizeof(*init), "a new communicator");
	ncclUniqueId *copy = NULL;
	if (init) copy = nids == 1 ? &init->id : tp_alloc((size_t)nids, sizeof(*copy), "unique ids");
	if (!copy) {
		tp_gpu_rank_free(gpu);
		free(init);
		return ncclSystemError;
	}
	ncclResult_t result = tp_init_handle(&config, device, gpu, &init->job.comm);
	if (result != ncclSuccess) {
		if (copy != &init->id) free(copy);
		free(init);
		return result;
	}
	memcpy(copy, ids, (size_t)nids * sizeof(*ids));
	init->args = (struct tp_init_args){ .name = name, .nranks = nranks, .rank = rank, .nids = nids, .ids = copy, .kind = kind, .out = out };
	init->job.run = run_init;
	init->job.discard = discard_init;
	init->job.blocking = config.blocking;
	if (!config.blocking) {
		atomic_store_explicit(&init->job.comm->state, ncclInProgress, memory_order_relaxed);
		*out = init->job.comm;
	}
	return tp_job_submit(&init->job);
}

ncclResult_t tp_comm_init_rank(const char *name, ncclComm_t *out, int nranks, int rank, int nids, const ncclUniqueId *ids,
	const ncclConfig_t *config)
{
	return tp_group_note(init_rank(name, out, nranks, rank, nids, ids, config, device_of_process(), -1));
}

ncclResult_t tp_comm_init_all(ncclComm_t *comms, int ndev, const int *devlist)
{
	static const char name[] = "ncclCommInitAll";
	if (!comms) return tp_group_note(TP_FAIL(ncclInvalidArgument, "%s: comms is NULL", name));
	if (ndev < 1) return tp_group_note(TP_FAIL(ncclInvalidArgument, "%s: ndev is %d; it must be at least 1", name, ndev));
	enum tp_device_kind kind;
	ncclResult_t result = tp_device_kind(&kind);
	if (result != ncclSuccess) return tp_group_note(result);
	for (int i = 0; devlist && i < ndev; i++) {
		if (devlist[i] < 0) return tp_group_note(TP_FAIL(ncclInvalidArgument, "%s: devlist[%d] is %d", name, i, devlist[i]));
		for (int k = 0; k < i; k++)
			if (devlist[k] == devlist[i] && kind == TP_DEVICE_HOST)
				return tp_group_note(TP_FAIL(ncclInvalidUsage, "%s: device %d is in devlist twice", name, devlist[i]));
	}
	ncclUniqueId id;
	result = tp_boot_unique_id(&id);
	if (result != ncclSuccess) return tp_group_note(result);
	ncclComm_t *made = tp_alloc((size_t)ndev, sizeof(*made), "communicators");
	if (!made) return tp_group_note(ncclSystemError);
	bool nested = tp_group_depth > 0;
	tp_group_start();
	for (int i = 0; i < ndev; i++)
		tp_group_note(init_rank(name, nested ? &comms[i] : &made[i], ndev, i, 1, &id, NULL, devlist ? devlist[i] : i,
			devlist ? devlist[i] : i));
	result = tp_group_end();
	if (!nested && (result == ncclSuccess || result == ncclInProgress)) memcpy(comms, made, (size_t)ndev * sizeof(*made));
	/* Some ranks may have come through where others failed. */
	for (int i = 0; i < ndev && !nested && result != ncclSuccess && result != ncclInProgress; i++)
		if (made[i]) tp_comm_abort(made[i]);
	free(made);
	return result;
}
