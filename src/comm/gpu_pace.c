/* Watching the pace of GPU ranks, where all of them are on one host and it is asked for (TELPHER_WATCH=2).
 *
 * Of some large collectives, the same on all ranks (which, their numbers say), each rank records an event before its kernel and one behind it, and
 * later, at another such call, when both have passed, writes down in memory that the host's ranks share how many times as long as predicted the GPU
 * took. The first rank of the host takes of each collective the least: who came last waited for nobody (pace.c). So nobody waits for anybody, and a call
 * that isn't one of these costs a comparison. What a graph replays isn't seen.
 *
 * Who is slow can't be measured beside the program's kernels: the topology's slowest pair is named. And what is predicted is a guess unless
 * somebody measured (TELPHER_TUNE_FILE), so only then it is a warning. */
#include <stdlib.h>
#include <string.h>

#include "comm/gpu.h"

#define LEAST_BYTES ((size_t)1 << 20)
#define ROWS 32                         /* of each rank's times: in the place that the call's number hashes to */
#define FIRST 16                        /* of these, until they are judged */
#define ONE_IN 16                       /* of the large collectives: a power of two */

/* seq: of the call, stored last; 0 while the row changes. */
struct row { _Atomic uint64_t seq; _Atomic float ratio; };

struct sample { uint64_t seq; double predicted_us; enum tp_coll coll; enum tp_algo algo; size_t block_bytes; };

struct tp_gpu_pace {
	CUevent begin, end;                 /* of the sample at hand; NULL: none was taken yet */
	bool off;                           /* not wanted, said, or CUDA won't */
	bool outstanding;
	bool measured;                      /* the model's figures were */
	struct sample now;
	struct row *rows;                   /* [nlocal][ROWS]; one more, whose seq says that it is over */
	/* The first rank's. */
	struct tp_pace pace;
	struct sample pending[ROWS];        /* that others may not have written yet */
};

int tp_gpu_pace_wanted(const struct ncclComm *comm)
{
	/* Ranks that share a GPU take turns, or its parts. */
	struct tp_gpu_pace *pace = comm->gpu->pace;
	struct tp_cost_model guess;
	if (!pace || comm->gpu->shared || comm->gpu->strict) return 0;
	tp_cost_gpu_defaults(&guess);
	pace->measured = tp_cost_is_measured(&comm->model, &guess, false);
	/* Events are commands on the user's stream: only where that is asked for. */
	return tp_comm_watch_level() > 1;
}

void tp_gpu_pace_agree(struct ncclComm *comm, int wanted)
{
	if (!comm->gpu->pace) return;
	comm->gpu->pace->off = wanted == 0;
	comm->gpu->paced = wanted != 0;
}

ncclResult_t tp_gpu_pace_open(struct ncclComm *comm)
{
	if (comm->nranks < 2 || comm->boot->nhosts > 1) return ncclSuccess;
	struct tp_gpu_pace *pace = tp_alloc(1, sizeof(*pace), "the watch over the pace");
	if (!pace) return ncclSystemError;
	comm->gpu->pace = pace;
	pace->off = true;
	tp_pace_begin(&pace->pace, FIRST, 0);
	return tp_boot_share(comm->boot, ((size_t)comm->boot->nlocal * ROWS + 1) * sizeof(*pace->rows), "times of GPU ranks", (void **)&pace->rows);
}

void tp_gpu_pace_free(struct tp_gpu_rank *rank)
{
	if (!rank->pace) return;
	if (rank->pace->begin) tp_cuda->EventDestroy(rank->pace->begin);
	if (rank->pace->end) tp_cuda->EventDestroy(rank->pace->end);
	free(rank->pace);
	rank->pace = NULL;
}

static _Atomic uint64_t *over_of(const struct ncclComm *comm) { return &comm->gpu->pace->rows[(size_t)comm->boot->nlocal * ROWS].seq; }

static uint64_t hash_of(uint64_t seq) { return seq * 0x9e3779b97f4a7c15u; }
static size_t place_of(uint64_t seq) { return hash_of(seq) >> 32 & (ROWS - 1); }

static void publish(const struct ncclComm *comm, uint64_t seq, float ratio)
{
	struct row *row = &comm->gpu->pace->rows[(size_t)comm->boot->local * ROWS + place_of(seq)];
	atomic_store_explicit(&row->seq, 0, memory_order_relaxed);
	atomic_store_explicit(&row->ratio, ratio, memory_order_release);        /* whoever sees it sees seq 0, or a later one */
	atomic_store_explicit(&row->seq, seq, memory_order_release);            /* pairs with least_of */
}

/* false: some rank has not written it (or something else since). */
static bool least_of(const struct ncclComm *comm, uint64_t seq, float *least)
{
	*least = 1e6f;
	for (int l = 0; l < comm->boot->nlocal; l++) {
		struct row *row = &comm->gpu->pace->rows[(size_t)l * ROWS + place_of(seq)];
		if (atomic_load_explicit(&row->seq, memory_order_acquire) != seq) return false;
		float ratio = atomic_load_explicit(&row->ratio, memory_order_acquire);
		if (atomic_load_explicit(&row->seq, memory_order_relaxed) != seq) return false;
		*least = TP_MIN(*least, ratio);
	}
	return true;
}

/* ---- The first rank's */

/* Of two paths, which is worse? Through the host's memory is worse than whatever is direct. */
static bool is_worse(const struct tp_watch_path *a, const struct tp_watch_path *b)
{
	bool direct = strncmp(a->via, "P2P", 3) == 0, other = strncmp(b->via, "P2P", 3) == 0;
	return direct != other ? !direct : a->gbps < b->gbps;
}

static void name_pair(struct ncclComm *comm, char *text, size_t bytes)
{
	struct tp_watch_path worst = { .from = -1 }, best = { .from = -1 }, path;
	for (int a = 0; a < comm->nranks; a++) {
		for (int b = 0; b < comm->nranks; b++) {
			if (a == b || tp_report_path(comm, a, b, &path) != ncclSuccess) continue;
			if (worst.from < 0 || is_worse(&path, &worst)) worst = path;
			if (best.from < 0 || is_worse(&best, &path)) best = path;
		}
	}
	*text = 0;
	if (worst.from < 0) return;
	const char *alike = is_worse(&worst, &best) ? "" : ", and all others are like it";
	snprintf(text, bytes, "By the topology the slowest pair is rank %d -> rank %d by %s%s%s, %.4g GB/s%s", worst.from, worst.to, worst.via,
		worst.type[0] ? " over " : "", worst.type, (double)worst.gbps, alike);
}

static void tell(struct ncclComm *comm, const struct sample *sample, float median)
{
	char what[256], pair[160];
	double took = sample->predicted_us * (double)median;
	int percent = (int)(100 / TP_MAX(median, 1) + 0.5f);
	snprintf(what, sizeof(what), "%s of %zu bytes a block by %s takes %.4g us on the GPUs where %.4g us are predicted (median of the last operations; waiting for "
		"ranks that come late is left out)", tp_coll_name(sample->coll), sample->block_bytes, tp_algo_name(sample->algo), took, sample->predicted_us);
	name_pair(comm, pair, sizeof(pair));
	tp_log_set_device(comm->device);
	if (comm->gpu->pace->measured)
		TP_WARN("comm %p rank %d: this communicator of %d GPUs keeps running at %d%% of its predicted speed: %s. %s. Look at clocks and power (nvidia-smi -q -d "
			"PERFORMANCE), at errors of links (nvidia-smi nvlink -e) and at what else runs on these GPUs", (void *)comm, comm->rank, comm->nranks, percent, what, pair);
	else
		TP_INFO(TP_INIT | TP_TUNING, "comm %p rank %d: this communicator of %d GPUs runs at %d%% of its predicted speed: %s. %s. The prediction may be wrong here: "
			"a table of measured figures (TELPHER_TUNE_FILE) would tell", (void *)comm, comm->rank, comm->nranks, percent, what, pair);
}

static void judge(struct ncclComm *comm)
{
	struct tp_gpu_pace *pace = comm->gpu->pace;
	float window[TP_PACE_SAMPLES], least, median;
	for (int i = 0; i < ROWS && !pace->off; i++) {
		struct sample *sample = &pace->pending[i];
		if (!sample->seq || !least_of(comm, sample->seq, &least)) continue;
		bool due = tp_pace_add(&pace->pace, (double)least, 1);
		if (due) {
			tp_pace_window(&pace->pace, window);
			pace->off = tp_pace_judge(&pace->pace, window, 0, &median);
			if (pace->off) tell(comm, sample, median);
			if (pace->off) atomic_store_explicit(over_of(comm), 1, memory_order_relaxed);
		}
		sample->seq = 0;
	}
}

/* ---- Launch lock held, the GPU's context current */

/* What was recorded last has passed? */
static void look(struct ncclComm *comm)
{
	struct tp_gpu_pace *pace = comm->gpu->pace;
	const struct sample *now = &pace->now;
	float ms = 0;
	int mode;
	if (!pace->outstanding) return;
	tp_gpu_relax(&mode);
	CUresult result = tp_cuda->EventQuery(pace->end);
	if (result == CUDA_SUCCESS) result = tp_cuda->EventElapsedTime(&ms, pace->begin, pace->end);
	tp_gpu_unrelax(mode);
	if (result == CUDA_ERROR_NOT_READY) return;
	pace->outstanding = false;
	/* Whatever is wrong, the next launch meets it too. */
	pace->off = result != CUDA_SUCCESS;
	if (pace->off) return;
	publish(comm, now->seq, (float)TP_MIN((double)ms * 1e3 / TP_MAX(now->predicted_us, 1e-3), 1e6));
	if (comm->boot->local == 0) pace->pending[place_of(now->seq)] = *now;
}

static bool is_watched(const struct ncclComm *comm, const struct tp_exec_call *call, uint64_t seq)
{
	if (!call->plan || hash_of(seq) >> 60 >= 16 / ONE_IN) return false;
	enum tp_coll coll = call->plan->spec.coll;
	if (coll == TP_ALL_REDUCE) return call->block_bytes >= LEAST_BYTES;
	return (coll == TP_ALL_GATHER || coll == TP_REDUCE_SCATTER || coll == TP_ALL_TO_ALL) && call->block_bytes * (size_t)comm->nranks >= LEAST_BYTES;
}

bool tp_gpu_pace_begin(struct ncclComm *comm, CUstream stream, const struct tp_exec_call *call)
{
	struct tp_gpu_pace *pace = comm->gpu->pace;
	uint64_t seq = tp_comm_seq(comm);
	struct tp_choice_entry choice;
	if (pace->off || !is_watched(comm, call, seq)) return false;
	pace->off = atomic_load_explicit(over_of(comm), memory_order_relaxed) != 0;
	if (pace->off) return false;
	look(comm);
	if (comm->boot->local == 0) judge(comm);
	if (pace->off || pace->outstanding) return false;
	if (tp_choice_find(comm, call->plan->spec.coll, call->plan->spec.root, call->block_bytes, (call->in_window | call->out_window) != 0, &choice) != ncclSuccess) return false;
	pace->off = (!pace->begin && tp_cuda->EventCreate(&pace->begin, CU_EVENT_DEFAULT) != CUDA_SUCCESS) ||
		(!pace->end && tp_cuda->EventCreate(&pace->end, CU_EVENT_DEFAULT) != CUDA_SUCCESS) || tp_cuda->EventRecord(pace->begin, stream) != CUDA_SUCCESS;
	if (pace->off) return false;
	pace->now = (struct sample){ .seq = seq, .predicted_us = choice.us, .coll = call->plan->spec.coll, .algo = call->plan->spec.algo,
		.block_bytes = call->block_bytes };
	return true;
}

void tp_gpu_pace_end(struct ncclComm *comm, CUstream stream)
{
	struct tp_gpu_pace *pace = comm->gpu->pace;
	pace->outstanding = tp_cuda->EventRecord(pace->end, stream) == CUDA_SUCCESS;
	pace->off = !pace->outstanding;
}
