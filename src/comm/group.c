/* Groups: what a thread's calls between ncclGroupStart and ncclGroupEnd collect. Per communicator: its collectives, in
 * order, then one operation of all its sends and receives. Whatever blocks (init, split, …) is a job; jobs run first. */
#include <stdlib.h>
#include <string.h>

#include "comm/gpu.h"

struct group_comm {
	struct group_comm *next;
	struct tp_issue issue;
	struct tp_exec_transfer *transfers;
	int ntransfers, room;
	void **streams;                     /* of the transfers, each once: struct tp_stream, or CUDA's handles */
	int nstreams, stream_room;
	bool waits;                         /* a transfer had no stream */
};
/* A communicator keeps one for its next group, with the room that there is in it. */
static struct group_comm *take_spare(struct ncclComm *comm)
{
	struct group_comm *g = atomic_exchange_explicit(&comm->spare_group, NULL, memory_order_acquire);        /* pairs with give_back */
	return g ? g : tp_alloc(1, sizeof(*g), "a group");
}

static void free_group_comm(struct group_comm *g)
{
	free(g->transfers);
	free(g->streams);
	free(g);
}

static void give_back(struct group_comm *g)
{
	struct group_comm *none = NULL;
	struct ncclComm *comm = g->issue.comm;
	*g = (struct group_comm){ .transfers = g->transfers, .room = g->transfers ? g->room : 0, .streams = g->streams,
		.stream_room = g->streams ? g->stream_room : 0 };
	if (!atomic_compare_exchange_strong_explicit(&comm->spare_group, &none, g, memory_order_release, memory_order_relaxed)) free_group_comm(g);
}

void tp_group_free_spare(struct ncclComm *comm)
{
	struct group_comm *g = atomic_exchange_explicit(&comm->spare_group, NULL, memory_order_acquire);
	if (g) free_group_comm(g);
}

struct group {
	ncclResult_t error;
	struct group_comm *comms, *last;
	struct tp_job *jobs, **jobs_end;
	bool has_blocking, has_nonblocking;
};

_Thread_local int tp_group_depth __attribute__((tls_model("initial-exec")));
static _Thread_local struct group group __attribute__((tls_model("initial-exec")));

ncclResult_t tp_group_note(ncclResult_t result)
{
	if (tp_group_depth && result != ncclSuccess && result != ncclInProgress && group.error == ncclSuccess) group.error = result;
	return result;
}

ncclResult_t tp_group_start(void)
{
	if (tp_group_depth++ == 0) {
		memset(&group, 0, sizeof(group));
		group.jobs_end = &group.jobs;
	}
	return ncclSuccess;
}

static ncclResult_t note_blocking(bool blocking)
{
	if (blocking) group.has_blocking = true;
	else group.has_nonblocking = true;
	if (group.has_blocking && group.has_nonblocking)
		return TP_FAIL(ncclInvalidArgument, "blocking and non-blocking communicators don't go together in one group");
	return ncclSuccess;
}

static ncclResult_t find_comm(struct ncclComm *comm, struct group_comm **out)
{
	for (struct group_comm *g = group.comms; g; g = g->next) {
		if (g->issue.comm != comm) continue;
		*out = g;
		return ncclSuccess;
	}
	TP_TRY(note_blocking(comm->config.blocking));
	struct group_comm *g = take_spare(comm);
	if (!g) return ncclSystemError;
	g->issue.comm = comm;
	if (group.last) group.last->next = g;
	else group.comms = g;
	group.last = g;
	*out = g;
	return ncclSuccess;
}

static void append_op(struct group_comm *g, struct tp_op *op)
{
	if (g->issue.last) g->issue.last->next = op;
	else g->issue.first = op;
	g->issue.last = op;
}

ncclResult_t tp_group_add_op(struct ncclComm *comm, struct tp_op *op)
{
	struct group_comm *g;
	ncclResult_t result = find_comm(comm, &g);
	if (result == ncclSuccess) append_op(g, op);
	else tp_op_free(op);
	return result;
}

static ncclResult_t add_stream(struct group_comm *g, void *stream)
{
	if (!stream && !g->issue.comm->gpu) {
		g->waits = true;
		return ncclSuccess;
	}
	for (int i = 0; i < g->nstreams; i++)
		if (g->streams[i] == stream) return ncclSuccess;
	if (g->nstreams == g->stream_room) {
		int room = g->stream_room ? 2 * g->stream_room : 4;
		void **more = realloc(g->streams, (size_t)room * sizeof(*more));
		if (!more) return TP_FAIL(ncclSystemError, "no memory for a group's streams");
		g->streams = more;
		g->stream_room = room;
	}
	g->streams[g->nstreams++] = stream;
	return ncclSuccess;
}

ncclResult_t tp_group_add_transfer(struct ncclComm *comm, const struct tp_exec_transfer *transfer, void *stream)
{
	struct group_comm *g;
	TP_TRY(find_comm(comm, &g));
	if (g->ntransfers == g->room) {
		int room = g->room ? 2 * g->room : 8;
		struct tp_exec_transfer *more = realloc(g->transfers, (size_t)room * sizeof(*more));
		if (!more) return TP_FAIL(ncclSystemError, "no memory for %d sends and receives", room);
		g->transfers = more;
		g->room = room;
	}
	TP_TRY(add_stream(g, stream));
	g->transfers[g->ntransfers++] = *transfer;
	return ncclSuccess;
}

ncclResult_t tp_group_add_job(struct tp_job *job)
{
	TP_TRY(note_blocking(job->blocking));
	job->next = NULL;
	*group.jobs_end = job;
	group.jobs_end = &job->next;
	return ncclSuccess;
}

/* GPU ranks: no plan; the executor's kernel for sends and receives takes them as they are. They and their streams stay the group's, which outlives the
 * launch. */
static ncclResult_t fuse_gpu_transfers(struct group_comm *g)
{
	struct ncclComm *comm = g->issue.comm;
	struct tp_op *op = tp_op_new(comm);
	if (!op) return ncclSystemError;
	size_t largest = 0;
	for (int i = 0; i < g->ntransfers; i++) largest = TP_MAX(largest, g->transfers[i].bytes);
	op->record = (struct tp_call){ .func = TP_SEND_RECV, .type = ncclUint8, .root = -1 };
	op->call = (struct tp_exec_call){ .line_bytes = TP_GPU_LINE_BYTES, .block_bytes = largest, .chunk_bytes = comm->p2p_chunk_bytes,
		.tag = TP_P2P_TAG, .transfers = g->transfers, .ntransfers = g->ntransfers, .reduce = { .type = ncclUint8 } };
	op->stream = (cudaStream_t)g->streams[0];
	op->streams = (cudaStream_t *)g->streams;
	op->nstreams = g->nstreams;
	append_op(g, op);
	return ncclSuccess;
}

/* The one operation of all sends and receives of a communicator. */
static ncclResult_t fuse_transfers(struct group_comm *g)
{
	if (!g->ntransfers) return ncclSuccess;
	struct ncclComm *comm = g->issue.comm;
	if (comm->gpu) return fuse_gpu_transfers(g);
	struct tp_transfer *shape = tp_alloc((size_t)g->ntransfers, sizeof(*shape), "a group's sends and receives");
	struct tp_op *op = shape ? tp_op_new(comm) : NULL;
	if (!op) {
		free(shape);
		return ncclSystemError;
	}
	size_t largest = 0;
	for (int i = 0; i < g->ntransfers; i++) {
		shape[i] = (struct tp_transfer){ g->transfers[i].peer, g->transfers[i].is_send };
		largest = TP_MAX(largest, g->transfers[i].bytes);
	}
	ncclResult_t result = tp_plan_p2p(comm->rank, comm->nranks, shape, g->ntransfers, &op->own_plan);
	free(shape);
	if (g->nstreams > 1) {
		op->more_places = tp_alloc((size_t)g->nstreams - 1, sizeof(*op->more_places), "a group's streams");
		if (!op->more_places && result == ncclSuccess) result = ncclSystemError;
	}
	if (result != ncclSuccess) {
		tp_op_free(op);
		return result;
	}
	op->nplaces = g->nstreams;
	for (int i = 0; i < g->nstreams; i++)
		*(i ? &op->more_places[i - 1] : &op->place) = (struct tp_stream_place){ .stream = g->streams[i], .op = op };
	op->waits = g->waits;
	op->record = (struct tp_call){ .func = TP_SEND_RECV, .type = ncclUint8, .root = -1 };
	op->call = (struct tp_exec_call){ .plan = op->own_plan, .line_bytes = TP_LINE_BYTES, .block_bytes = largest,
		.chunk_bytes = comm->p2p_chunk_bytes, .tag = TP_P2P_TAG, .transfers = g->transfers, .ntransfers = g->ntransfers,
		.reduce = { .type = ncclUint8 } };
	op->transfers = g->transfers;
	g->transfers = NULL;
	append_op(g, op);
	return ncclSuccess;
}

static void discard_comms(struct group_comm *comms)
{
	while (comms) {
		struct group_comm *g = comms;
		comms = g->next;
		for (struct tp_op *op = g->issue.first, *next; op; op = next) {
			next = op->next;
			tp_op_free(op);
		}
		give_back(g);
	}
}

static void discard_jobs(struct tp_job *jobs)
{
	while (jobs) {
		struct tp_job *job = jobs;
		jobs = job->next;
		job->result = ncclInvalidUsage;
		job->discard(job);
	}
}

/* Every stream must still be there, since a group may have outlived it. */
static ncclResult_t check_streams(const struct group_comm *comms)
{
	ncclResult_t result = ncclSuccess;
	pthread_mutex_lock(&tp_order_lock);
	for (const struct group_comm *g = comms; g && result == ncclSuccess; g = g->next) {
		for (const struct tp_op *op = g->issue.first; op && result == ncclSuccess; op = op->next) {
			for (int i = 0; i < op->nplaces && result == ncclSuccess; i++) {
				struct tp_stream *found;
				result = tp_stream_find((cudaStream_t)(i ? op->more_places[i - 1] : op->place).stream, "ncclGroupEnd", &found);
			}
		}
	}
	pthread_mutex_unlock(&tp_order_lock);
	return result;
}

static ncclResult_t run_comms(struct group_comm *comms)
{
	ncclResult_t result = ncclSuccess;
	struct group_comm *entered = comms;
	for (; entered && result == ncclSuccess; entered = entered->next) {
		result = tp_comm_enter(entered->issue.comm, "ncclGroupEnd");
		if (result != ncclSuccess) break;
		result = tp_comm_may_call(entered->issue.comm, "ncclGroupEnd");
		if (result == ncclSuccess) result = fuse_transfers(entered);
		entered->issue.next = entered->next ? &entered->next->issue : NULL;
	}
	if (result == ncclSuccess) result = check_streams(comms);
	if (result == ncclSuccess && comms) {
		result = comms->issue.comm->gpu ? tp_gpu_issue_all(&comms->issue) : tp_issue_all(&comms->issue);
		for (struct group_comm *g = comms; g; g = g->next) g->issue.first = NULL;
	}
	for (struct group_comm *g = comms; g != entered; g = g->next) tp_comm_leave(g->issue.comm);
	return result;
}

/* The group's own, taken off the thread: what runs now may start groups itself. */
static ncclResult_t close_group(struct group *taken, const char *name)
{
	if (tp_group_depth == 0) return TP_FAIL(ncclInvalidUsage, "%s without ncclGroupStart", name);
	*taken = (struct group){ 0 };
	if (--tp_group_depth) return ncclInProgress;
	*taken = group;
	memset(&group, 0, sizeof(group));
	return ncclSuccess;
}

ncclResult_t tp_group_end(void)
{
	struct group taken = { 0 };
	ncclResult_t result = close_group(&taken, "ncclGroupEnd");
	if (result != ncclSuccess) return result == ncclInProgress ? ncclSuccess : result;
	result = taken.error;
	if (result != ncclSuccess) {
		discard_jobs(taken.jobs);
		discard_comms(taken.comms);
		return result;
	}
	if (taken.jobs) result = tp_jobs_run(taken.jobs, !taken.has_nonblocking);
	if (result == ncclSuccess || result == ncclInProgress) {
		ncclResult_t ran = run_comms(taken.comms);
		if (ran != ncclSuccess) result = ran;
	}
	discard_comms(taken.comms);
	return result;
}

/* Transfers are taken as one operation per communicator, limited by the largest sum to or from one peer. */
static double predict_transfers(const struct group_comm *g)
{
	const struct tp_cost_model *model = &g->issue.comm->model;
	double us = 0;
	for (int i = 0; i < g->ntransfers; i++) {
		bool across = g->issue.comm->boot->peers[g->transfers[i].peer].host != g->issue.comm->boot->host;
		const struct tp_cost_link *link = across ? &model->across : &model->inside;
		us = TP_MAX(us, link->latency_us) + (double)g->transfers[i].bytes * link->us_per_byte;
	}
	return us;
}

ncclResult_t tp_group_simulate_end(ncclSimInfo_t *info)
{
	if (!info) return TP_FAIL(ncclInvalidArgument, "ncclGroupSimulateEnd: simInfo is NULL");
	if (info->magic != 0x74685283u)
		return TP_FAIL(ncclInvalidArgument, "ncclGroupSimulateEnd: simInfo's magic is 0x%x; was it set by NCCL_SIM_INFO_INITIALIZER?", info->magic);
	struct group taken = { 0 };
	ncclResult_t result = close_group(&taken, "ncclGroupSimulateEnd");
	if (result != ncclSuccess) return result == ncclInProgress ? ncclSuccess : result;
	result = taken.error;
	double longest = 0;
	for (const struct group_comm *g = taken.comms; g && result == ncclSuccess; g = g->next) {
		double us = predict_transfers(g);
		for (const struct tp_op *op = g->issue.first; op; op = op->next) us += op->predicted_us;
		longest = TP_MAX(longest, us);
	}
	if (result == ncclSuccess && info->size >= offsetof(ncclSimInfo_t, estimatedTime) + sizeof(float)) info->estimatedTime = (float)longest;
	discard_jobs(taken.jobs);
	discard_comms(taken.comms);
	return result;
}
