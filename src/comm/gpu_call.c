/* A call of GPU ranks, from its checks to the launch.
 *
 * Budget of a call that was made before (tp_gpu_call_again) besides CUDA's launch and the record of an event behind it: 0.3 to 0.6 us, three calls of the driver
 * that do no more than read (the current context, the stream's number, whether it is captured) among them. That leaves room for the launch lock, a look in a small
 * table, which keeps the kernel and all its arguments but the addresses, one line for the call board and one for the flight recorder; not for an allocation, a
 * second lock, a word that other ranks write, a log line, or finding out again what kernel it is. So a call in a row on one stream is five calls of the
 * driver (tests/cuda/test_calls.c), in a group too. None can be left out: a program may change its context, may begin a capture, and may destroy a stream and get
 * another of the same handle, at any time, and behind a stream that was destroyed no event could be recorded later. */
#include <stdlib.h>
#include <string.h>

#include "comm/gpu.h"
#include "comm/ways.h"

#define FEW 16                  /* operations of a group that are launched at once */
#define FEW_STREAMS 32
#define SMALLEST_CHUNK ((size_t)8 << 10)
#define LARGEST_CHUNK ((size_t)1 << 20)
#define FAR_CHUNK ((size_t)64 << 10)

/* ---- the launch: launch lock held ---- */

static void announce(struct ncclComm *comm, struct tp_exec_call *call, struct tp_call *record)
{
	uint64_t seq = tp_comm_seq(comm);
	if (record->func != TP_SEND_RECV) {
		record->seq = ++seq;
		tp_comm_set_seq(comm, seq);
		/* Without the number, since a graph replays the same kernel again and again. */
		call->tag = record->hash;
		tp_boot_post_call(comm->boot, record);
	}
	tp_flight_begin(comm->flight, TP_MAX(seq, 1), record->func, record->count, record->type, record->op, record->root);
}

/* What is launched together, in this order. */
struct work {
	struct tp_exec_call *calls;         /* [ncalls]; what has nothing to do is taken out on the way */
	struct tp_call *records;            /* [ncalls] */
	int ncalls;
	struct tp_cuda_ready *ready;        /* of the one call; NULL: launches are yet to be made */
};

static ncclResult_t launch_entered(struct ncclComm *comm, struct tp_gpu_place *place, const struct work *work)
{
	struct tp_gpu_rank *rank = comm->gpu;
	struct tp_cuda_exec *exec = atomic_load_explicit(&rank->exec, memory_order_relaxed);
	struct tp_cuda_status before, after;
	if (tp_unlikely(rank->counts)) tp_cuda_exec_status(exec, &before);
	bool timed = tp_unlikely(rank->paced) && work->ncalls == 1 && !place->capture && tp_gpu_pace_begin(comm, place->stream, &work->calls[0]);
	TP_TRY(work->ready ? tp_cuda_exec_launch_ready(exec, place->stream, work->ready, &work->calls[0])
		: tp_cuda_exec_launch(exec, place->stream, work->calls, work->ncalls));
	if (tp_unlikely(timed)) tp_gpu_pace_end(comm, place->stream);
	uint64_t kernels = 0;
	if (tp_unlikely(rank->counts)) {
		tp_cuda_exec_status(exec, &after);
		kernels = after.launched - before.launched;
		if (!place->capture) atomic_fetch_add_explicit(&rank->expected, kernels, memory_order_seq_cst);
	}
	TP_TRY(tp_gpu_order_after(comm, place, kernels));
	if (tp_unlikely(rank->counts) && !place->capture) tp_gpu_watch_wake(rank);
	return ncclSuccess;
}

static void announce_all(struct ncclComm *comm, struct work *work)
{
	int nmoving = 0;
	for (int i = 0; i < work->ncalls; i++) {
		announce(comm, &work->calls[i], &work->records[i]);
		if (!work->records[i].count && !work->calls[i].ntransfers) continue;
		if (tp_unlikely(nmoving != i)) work->calls[nmoving] = work->calls[i];
		nmoving++;
	}
	work->ncalls = nmoving;
}

/* Where these streams are fit. */
static ncclResult_t launch_there(struct ncclComm *comm, struct tp_gpu_place *place, struct work *work)
{
	struct tp_gpu_rank *rank = comm->gpu;
	bool pushed;
	TP_TRY(tp_gpu_enter(rank->gpu, &pushed));
	tp_gpu_launch_begin(rank);
	tp_gpu_rank_now = comm->rank;
	ncclResult_t result = tp_gpu_order_before(comm, place);
	if (tp_unlikely(atomic_load_explicit(&rank->spent, memory_order_relaxed) != NULL) && !tp_gpu_rank_is_busy(comm)) tp_gpu_register_drop_spent(rank, true);
	bool announced = result == ncclSuccess;
	if (tp_likely(announced)) {
		if (tp_unlikely(place->capture != NULL)) tp_gpu_register_captured(comm, place->capture->held, work->calls, work->ncalls);
		announce_all(comm, work);
		if (work->ncalls) result = launch_entered(comm, place, work);
	}
	tp_gpu_rank_now = -1;
	tp_gpu_launch_end(rank);
	tp_gpu_leave(pushed);
	/* The others count on what was announced. */
	if (tp_unlikely(result != ncclSuccess && announced)) return tp_comm_explain(comm, result, tp_comm_seq(comm), 0);
	atomic_fetch_add_explicit(&rank->launches, 1, memory_order_seq_cst);    /* pairs with the watcher's look before it dozes */
	tp_gpu_watch_launched();
	return result;
}

static ncclResult_t launch(struct ncclComm *comm, const cudaStream_t *streams, int nstreams, struct work *work)
{
	struct tp_gpu_place place = { .streams = streams, .count = nstreams };
	ncclResult_t result = tp_gpu_order_check(comm, &place);
	if (tp_likely(result == ncclSuccess)) result = launch_there(comm, &place, work);
	tp_gpu_used_end(comm->gpu);
	return result;
}

/* ---- calls made before ---- */

static struct tp_gpu_call *place_of(struct tp_gpu_rank *rank, int coll, size_t count, int type, int op, int root)
{
	uint64_t h = (count ^ (uint64_t)coll << 56 ^ (uint64_t)type << 48 ^ (uint64_t)op << 40 ^ (uint64_t)(uint32_t)root << 20) * 0x9e3779b97f4a7c15u;
	return &rank->calls[h >> 58 & (TP_GPU_CALLS - 1)];
}

/* The same call but for its buffers, if it was made before; NULL: it wasn't, or has another plan by now. */
static struct tp_gpu_call *find_remembered(struct tp_gpu_rank *rank, const struct tp_op *op)
{
	const struct tp_call *r = &op->record;
	struct tp_gpu_call *last = place_of(rank, r->func, r->count, r->type, r->op, r->root);
	bool same = last->used && last->coll == r->func && last->count == r->count && last->type == r->type && last->op == r->op && last->root == r->root;
	return same && last->call.plan == op->call.plan && last->record.windows == r->windows &&
		last->windows == ((op->call.in_window | op->call.out_window) != 0) ? last : NULL;
}

static inline bool buffers_fit(const struct tp_gpu_call *last, const void *send_, void *recv_)
{
	uintptr_t send = (uintptr_t)send_, recv = (uintptr_t)recv_;
	if ((!send && last->send_bytes) || (!recv && last->recv_bytes)) return false;
	return (ptrdiff_t)(send - recv) == last->in_place || send + last->send_bytes <= recv || recv + last->recv_bytes <= send;
}

static bool gate_is_open(const struct ncclComm *comm)
{
	return (atomic_load_explicit(&comm->gate, memory_order_acquire) & ~(uint32_t)TP_GATE_NONBLOCKING) == TP_GATE_GPU;
}

/* With the launch lock. false: nothing was done. */
static bool launch_again(const struct tp_comm_call *call, struct tp_gpu_call *last, ncclResult_t *result)
{
	struct ncclComm *comm = call->comm;
	struct tp_exec_call *exec = &last->call;
	exec->input = call->send ? call->send : call->recv;
	exec->output = call->recv ? call->recv : (void *)(uintptr_t)call->send;
	/* Other buffers of the same size may have another plan. */
	const bool used_windows = last->record.windows;
	last->used = tp_gpu_find_windows(call, exec) == last->windows && (tp_likely(!last->windows) || tp_gpu_note_windows(comm, exec, &last->record) == used_windows);
	if (tp_unlikely(!last->used)) return false;
	struct work work = { exec, &last->record, 1, last->ready };
	*result = launch(comm, &call->stream, 1, &work);
	return true;
}

bool tp_gpu_call_again(const struct tp_comm_call *call, ncclResult_t *result)
{
	struct ncclComm *comm = call->comm;
	if (tp_unlikely(tp_group_depth || !comm || call->coll >= TP_SEND_RECV)) return false;
	if (tp_unlikely(atomic_load_explicit(&comm->magic, memory_order_relaxed) != TP_COMM_MAGIC || !gate_is_open(comm))) return false;
	pthread_mutex_lock(&comm->launch_lock);
	bool handled = false;
	/* Again, under the lock: abort and destroy raise the gate, then take the lock, before they free anything. */
	if (tp_likely(gate_is_open(comm))) {
		struct tp_gpu_rank *rank = comm->gpu;
		struct tp_gpu_call *last = place_of(rank, call->coll, call->count, (int)call->type, (int)call->op, call->root);
		if (last->used && last->coll == call->coll && last->count == call->count && last->type == (int)call->type && last->op == (int)call->op
			&& last->root == call->root && !rank->check_pointers && buffers_fit(last, call->send, call->recv))
			handled = launch_again(call, last, result);
	}
	pthread_mutex_unlock(&comm->launch_lock);
	return handled;
}

static void remember(struct ncclComm *comm, const struct tp_op *op)
{
	struct tp_comm_call call = { .coll = op->record.func, .count = op->record.count, .type = (ncclDataType_t)op->record.type,
		.root = op->record.root, .comm = comm };
	if (find_remembered(comm->gpu, op)) return;
	struct tp_gpu_call *last = place_of(comm->gpu, call.coll, call.count, op->record.type, op->record.op, call.root);
	free(last->ready);
	*last = (struct tp_gpu_call){ .used = true, .coll = call.coll, .type = op->record.type, .op = op->record.op, .root = call.root,
		.count = call.count, .windows = (op->call.in_window | op->call.out_window) != 0, .call = op->call, .record = op->record };
	last->call.tag = op->record.hash;
	tp_call_spans(&call, &last->send_bytes, &last->recv_bytes, &last->in_place);
	/* Without the memory for it calls are made anew each time. Where windows are used, launches differ with the place in them. */
	if (call.count && !op->record.windows)
		tp_cuda_exec_make_ready(atomic_load_explicit(&comm->gpu->exec, memory_order_relaxed), &last->call, &last->ready);
}

/* ---- operations ---- */

static ncclResult_t check_pointer(const struct tp_comm_call *call, const void *pointer, const char *which)
{
	const struct tp_gpu *gpu = call->comm->gpu->gpu;
	struct tp_gpu_pointer found;
	if (!pointer) return ncclSuccess;
	TP_TRY(tp_gpu_pointer(pointer, &found));
	if (!found.device && !found.managed && !found.pinned)
		return TP_FAIL(ncclInvalidArgument, "%s: %s %p is memory of the host that no GPU sees", call->name, which, pointer);
	if (found.device && !found.managed && found.ordinal != gpu->ordinal)
		return TP_FAIL(ncclInvalidArgument, "%s: %s %p is memory of device %d, and rank %d is on device %d", call->name, which, pointer, found.ordinal,
			call->comm->rank, gpu->ordinal);
	return ncclSuccess;
}

ncclResult_t tp_gpu_validate_call(const struct tp_comm_call *call)
{
	if (!call->comm->gpu->check_pointers || !call->count) return ncclSuccess;
	TP_TRY(check_pointer(call, call->send, "sendbuff"));
	return check_pointer(call, call->recv, "recvbuff");
}

static void add_stream(cudaStream_t *streams, int *count, cudaStream_t stream)
{
	for (int i = 0; i < *count; i++)
		if (streams[i] == stream) return;
	streams[(*count)++] = stream;
}

/* A call that is made again goes the short way, so this is said once for each. */
static void explain(const struct ncclComm *comm, struct tp_cuda_exec *exec, const struct tp_op *op)
{
	int blocks;
	if (tp_likely(!tp_log_wants(TP_LOG_INFO, TP_TUNING)) || (!op->record.count && !op->call.ntransfers)) return;
	const char *how = tp_cuda_exec_explain(exec, &op->call, &blocks);
	TP_INFO(TP_TUNING, "comm %p rank %d: %s of %zu bytes a block as %s, %d thread blocks", (const void *)comm, comm->rank,
		tp_coll_name((enum tp_coll)op->record.func), op->call.block_bytes, how, blocks);
}

/* In a group alone, as it was outside. */
static bool launch_remembered(struct ncclComm *comm, struct tp_op *op, ncclResult_t *result)
{
	struct tp_gpu_call *last = op->remember ? find_remembered(comm->gpu, op) : NULL;
	struct work work = { &op->call, &op->record, 1, last ? last->ready : NULL };
	if (!work.ready) return false;
	*result = launch(comm, &op->stream, 1, &work);
	return true;
}

/* Some operations of one communicator, as one launch. */
static ncclResult_t launch_ops(struct ncclComm *comm, struct tp_op *first, int nops)
{
	struct tp_exec_call calls[FEW];
	struct tp_call records[FEW];
	cudaStream_t few[FEW_STREAMS] = { 0 }, *streams = few;
	int room = 0, nstreams = 0, n = 0;
	struct tp_cuda_exec *exec = atomic_load_explicit(&comm->gpu->exec, memory_order_relaxed);
	ncclResult_t result = ncclSuccess;
	struct tp_op *op = first;
	if (nops == 1 && launch_remembered(comm, op, &result)) return result;
	for (int i = 0; i < nops; i++, op = op->next) room += op->nstreams;
	if (room > FEW_STREAMS && !(streams = tp_alloc((size_t)room, sizeof(*streams), "a group's streams"))) return ncclSystemError;
	for (op = first; n < nops && result == ncclSuccess; n++, op = op->next) {
		if (op->call.plan) result = tp_cuda_exec_prepare(exec, op->call.plan);
		if (result == ncclSuccess) explain(comm, exec, op);
		calls[n] = op->call;
		records[n] = op->record;
		for (int s = 0; s < op->nstreams; s++) add_stream(streams, &nstreams, op->nstreams > 1 ? op->streams[s] : op->stream);
	}
	struct work work = { calls, records, nops, NULL };
	if (result == ncclSuccess) result = launch(comm, streams, nstreams, &work);
	for (n = 0, op = first; n < nops && result == ncclSuccess; n++, op = op->next)
		if (op->remember) remember(comm, op);
	if (streams != few) free(streams);
	return result;
}

static ncclResult_t issue_ops(struct ncclComm *comm, struct tp_op *first)
{
	while (first) {
		struct tp_op *next = first;
		int nops = 0;
		while (next && nops < FEW) {
			next = next->next;
			nops++;
		}
		TP_TRY(launch_ops(comm, first, nops));
		first = next;
	}
	return ncclSuccess;
}

/* A communicator that fails doesn't keep the others from what their peers wait for. */
ncclResult_t tp_gpu_issue_all(struct tp_issue *issues)
{
	ncclResult_t result = ncclSuccess;
	for (struct tp_issue *i = issues; i; i = i->next) {
		struct ncclComm *comm = i->comm;
		pthread_mutex_lock(&comm->launch_lock);
		ncclResult_t issued = tp_comm_may_call(comm, "ncclGroupEnd");
		if (issued == ncclSuccess) issued = issue_ops(comm, i->first);
		pthread_mutex_unlock(&comm->launch_lock);
		if (result == ncclSuccess) result = issued;
		for (struct tp_op *op = i->first, *next; op; op = next) {
			next = op->next;
			tp_op_free(op);
		}
		i->first = i->last = NULL;
	}
	return result;
}

/* ---- choice ---- */

/* Chunks: an eighth of what a block has to move, so that receiving, reducing and sending overlap, between hosts large ones; links that hold less cut them
 * smaller (the executor sees to that, the same on all ranks). staged: its buffers lie in windows. */
void tp_gpu_fit_choice(const struct ncclComm *comm, const struct tp_ways_call *call, struct tp_choice *choice)
{
	enum tp_algo wanted = TP_ALGO_RING;
	bool wants = tp_cuda_exec_suggest(atomic_load_explicit(&comm->gpu->exec, memory_order_relaxed), call->coll, call->block_bytes, call->staged, &wanted);
	tp_ways_fit(call, wants, wanted, choice);
	size_t part = call->block_bytes / (size_t)choice->nchannels;
	choice->chunk_bytes = TP_MIN(TP_MAX(tp_align_up(part / 8, 512), comm->boot->nhosts > 1 ? FAR_CHUNK : SMALLEST_CHUNK), LARGEST_CHUNK);
	choice->ref_bytes = SIZE_MAX;
}
