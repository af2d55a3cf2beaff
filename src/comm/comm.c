/* The handle: where it comes from, what makes it valid, and the queries.
 *
 * Handles are never given back to the allocator: a freed one waits, closed, among RESERVE others before it is used again.
 * So a use after destroy reads a handle that says so, instead of somebody else's memory. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/gpu.h"

#define RESERVE 16

static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static struct ncclComm *all, *free_first, *free_last;
static int free_count;

/* What a child of a fork has of a communicator is the handle: memory that ranks share, connections and threads are the parent's, and a call would
 * take part in its place. */
static void before_fork(void) { pthread_mutex_lock(&pool_lock); }
static void in_parent(void) { pthread_mutex_unlock(&pool_lock); }
static void in_child(void)
{
	for (struct ncclComm *comm = all; comm; comm = comm->next_all)
		if (!(atomic_load_explicit(&comm->gate, memory_order_relaxed) & TP_GATE_CLOSED))
			atomic_fetch_or_explicit(&comm->gate, TP_GATE_FORKED, memory_order_relaxed);
	pthread_mutex_unlock(&pool_lock);
}
TP_FORK_HOOK(TP_FORK_COMM, before_fork, in_parent, in_child)

static uint32_t wanted_tracing(void) { return tp_log_wants(TP_LOG_INFO, TP_COLL) ? TP_GATE_TRACING : 0; }

struct ncclComm *tp_comm_new(void)
{
	pthread_mutex_lock(&pool_lock);
	struct ncclComm *comm = NULL;
	if (free_count > RESERVE) {
		comm = free_first;
		free_first = comm->next_free;
		free_count--;
	} else {
		comm = tp_alloc(1, sizeof(*comm), "a communicator");
		if (comm) {
			comm->next_all = all;
			all = comm;
			pthread_mutex_init(&comm->queue_lock, NULL);
			pthread_mutex_init(&comm->launch_lock, NULL);
			pthread_mutex_init(&comm->choice_lock, NULL);
		}
	}
	if (comm) {
		atomic_store_explicit(&comm->gate, TP_GATE_INIT | wanted_tracing(), memory_order_relaxed);
		atomic_store_explicit(&comm->magic, TP_COMM_MAGIC, memory_order_relaxed);
		atomic_store_explicit(&comm->magic_end, TP_COMM_MAGIC, memory_order_relaxed);
	}
	pthread_mutex_unlock(&pool_lock);
	return comm;
}

/* Everything of a life that is over, but not what makes the handle one. */
static void wipe(struct ncclComm *comm)
{
	tp_jobs_forget(comm);
	comm->rank = comm->nranks = comm->device = 0;
	atomic_store_explicit(&comm->queued, 0, memory_order_relaxed);
	comm->alarm_seen = 0;
	comm->alarm = NULL;
	comm->exec = NULL;
	tp_gpu_rank_free(comm->gpu);        /* that never met anybody */
	comm->gpu = NULL;
	comm->boot = NULL;
	tp_comm_set_seq(comm, 0);
	memset(&comm->runnable, 0, sizeof(comm->runnable));
	memset(comm->last, 0, sizeof(comm->last));
	comm->flight = NULL;
	comm->links = NULL;
	comm->topo = NULL;
	comm->pace = NULL;
	comm->layout = NULL;
	comm->ways = NULL;
	memset(&comm->config, 0, sizeof(comm->config));
	memset(comm->choices, 0, sizeof(comm->choices));
	memset(comm->redops, 0, sizeof(comm->redops));
	comm->splits = 0;
	comm->has_thread = false;
	comm->error_text[0] = '\0';
	atomic_store_explicit(&comm->unfinished, 0, memory_order_relaxed);
	atomic_store_explicit(&comm->error, ncclSuccess, memory_order_relaxed);
	atomic_store_explicit(&comm->state, ncclSuccess, memory_order_relaxed);
	atomic_store_explicit(&comm->abort_flag, 0, memory_order_relaxed);
}

void tp_comm_free(struct ncclComm *comm)
{
	atomic_store_explicit(&comm->gate, TP_GATE_CLOSED, memory_order_release);
	atomic_store_explicit(&comm->magic, 0, memory_order_relaxed);
	atomic_store_explicit(&comm->magic_end, 0, memory_order_relaxed);
	wipe(comm);
	pthread_mutex_lock(&pool_lock);
	comm->next_free = NULL;
	if (free_count++) free_last->next_free = comm;
	else free_first = comm;
	free_last = comm;
	pthread_mutex_unlock(&pool_lock);
}

void tp_comm_reset_tracing(void)
{
	uint32_t tracing = wanted_tracing();
	pthread_mutex_lock(&pool_lock);
	for (struct ncclComm *comm = all; comm; comm = comm->next_all) {
		if (tracing) atomic_fetch_or_explicit(&comm->gate, tracing, memory_order_relaxed);
		else atomic_fetch_and_explicit(&comm->gate, ~(uint32_t)TP_GATE_TRACING, memory_order_relaxed);
	}
	pthread_mutex_unlock(&pool_lock);
}

ncclResult_t tp_comm_check(ncclComm_t comm, const char *name)
{
	if (!comm) return TP_FAIL(ncclInvalidArgument, "%s: the communicator is NULL", name);
	if (atomic_load_explicit(&comm->magic, memory_order_relaxed) != TP_COMM_MAGIC
		|| atomic_load_explicit(&comm->magic_end, memory_order_relaxed) != TP_COMM_MAGIC)
		return TP_FAIL(ncclInvalidArgument, "%s: %p is not a communicator, or was destroyed or aborted", name, (void *)comm);
	return ncclSuccess;
}

bool tp_comm_forget_forked(struct ncclComm *comm)
{
	if (!(atomic_load_explicit(&comm->gate, memory_order_relaxed) & TP_GATE_FORKED)) return false;
	atomic_store_explicit(&comm->magic, 0, memory_order_relaxed);
	atomic_store_explicit(&comm->magic_end, 0, memory_order_relaxed);
	return true;
}

static ncclResult_t refuse_forked(const struct ncclComm *comm, const char *name)
{
	return TP_FAIL(ncclInvalidUsage, "%s: communicator %p belongs to the parent of this process (pid %d), which was forked from it: make another here, or use "
		"it in the parent only", name, (const void *)comm, (int)getpid());
}

ncclResult_t tp_comm_enter(struct ncclComm *comm, const char *name)
{
	TP_TRY(tp_comm_check(comm, name));
	if (atomic_load_explicit(&comm->gate, memory_order_relaxed) & TP_GATE_FORKED) return refuse_forked(comm, name);
	/* Pairs with the wait for 0 in close.c: either it sees us, or we see its gate. */
	atomic_fetch_add_explicit(&comm->inside, 1, memory_order_seq_cst);
	if (atomic_load_explicit(&comm->gate, memory_order_seq_cst) & (TP_GATE_ABORTED | TP_GATE_CLOSED)) {
		tp_comm_leave(comm);
		return TP_FAIL(ncclInvalidArgument, "%s: %p was destroyed or aborted", name, (void *)comm);
	}
	return ncclSuccess;
}

void tp_comm_leave(struct ncclComm *comm)
{
	atomic_fetch_sub_explicit(&comm->inside, 1, memory_order_release);  /* pairs with the wait in close.c */
}

ncclResult_t tp_comm_may_call(struct ncclComm *comm, const char *name)
{
	uint32_t gate = atomic_load_explicit(&comm->gate, memory_order_acquire);
	if (tp_likely(!(gate & TP_GATE_REFUSES))) return ncclSuccess;
	if (gate & TP_GATE_FORKED) return refuse_forked(comm, name);
	int error = atomic_load_explicit(&comm->error, memory_order_acquire);
	if (gate & TP_GATE_ERROR) return error;      /* logged when it was found */
	if (gate & TP_GATE_INIT) {
		int state = atomic_load_explicit(&comm->state, memory_order_acquire);
		if (state == ncclInProgress || state == ncclSuccess)
			return TP_FAIL(ncclInvalidArgument, "%s: communicator %p is still being made; wait until ncclCommGetAsyncError no longer "
				"gives ncclInProgress", name, (void *)comm);
		return state;
	}
	if (gate & TP_GATE_REVOKED)
		return TP_FAIL(ncclInvalidUsage, "%s: communicator %p was revoked; shrink or destroy it", name, (void *)comm);
	if (gate & TP_GATE_FINALIZED)
		return TP_FAIL(ncclInvalidUsage, "%s: communicator %p was finalized; it can only be destroyed", name, (void *)comm);
	return TP_FAIL(ncclInvalidArgument, "%s: communicator %p was aborted", name, (void *)comm);
}

void tp_comm_set_error(struct ncclComm *comm, ncclResult_t result)
{
	int none = ncclSuccess;
	if (!atomic_compare_exchange_strong_explicit(&comm->error, &none, result, memory_order_acq_rel, memory_order_relaxed)) return;
	atomic_fetch_or_explicit(&comm->gate, TP_GATE_ERROR, memory_order_release);        /* pairs with tp_comm_may_call */
	if (comm->gpu) tp_gpu_rank_abort(comm->gpu);
}

void tp_comm_look_for_events(struct ncclComm *comm)
{
	uint32_t alarm = atomic_load_explicit(comm->alarm, memory_order_acquire);
	if (tp_likely(alarm == comm->alarm_seen)) return;
	comm->alarm_seen = alarm;
	struct tp_event event;
	if (!tp_boot_first_event(comm->boot, &event)) return;
	if (atomic_load_explicit(&comm->error, memory_order_relaxed) != ncclSuccess) return;
	tp_log_set_device(comm->device);
	if (event.kind == TP_EVENT_MISMATCH) {
		tp_comm_set_error(comm, TP_FAIL(ncclInvalidUsage, "comm %p rank %d: %s", (void *)comm, comm->rank,
			event.text));
		return;
	}
	if (event.rank == comm->rank) return;       /* our own word to the others */
	static const char *const what[] = { [TP_EVENT_DEAD] = "died", [TP_EVENT_ABORTED] = "aborted the communicator",
		[TP_EVENT_FAILED] = "failed", [TP_EVENT_REVOKED] = "revoked the communicator" };
	const struct tp_boot_peer *peer = event.rank >= 0 && event.rank < comm->nranks ? &comm->boot->peers[event.rank] : NULL;
	tp_comm_set_error(comm, TP_FAIL(ncclRemoteError, "comm %p rank %d: rank %d (host %s, pid %d) %s%s%s", (void *)comm, comm->rank,
		event.rank, peer ? peer->host_name : "?", peer ? (int)peer->pid : 0, what[event.kind], event.text[0] ? ": " : "", event.text));
}

ncclResult_t tp_comm_async_error(ncclComm_t comm, ncclResult_t *out)
{
	if (!out) return TP_FAIL(ncclInvalidArgument, "ncclCommGetAsyncError: asyncError is NULL");
	TP_TRY(tp_comm_enter(comm, "ncclCommGetAsyncError"));
	uint32_t gate = atomic_load_explicit(&comm->gate, memory_order_acquire);
	/* Where another thread runs the rank, that one looks. */
	if (!(gate & (TP_GATE_INIT | TP_GATE_ERROR)) && tp_engine_try_lock(&comm->runnable)) {
		tp_comm_look_for_events(comm);
		if (comm->gpu) tp_gpu_watch_faults(comm);
		tp_engine_unlock(&comm->runnable);
	}
	ncclResult_t result = atomic_load_explicit(&comm->error, memory_order_acquire);
	if (result == ncclSuccess) result = atomic_load_explicit(&comm->state, memory_order_acquire);
	if (result == ncclSuccess && atomic_load_explicit(&comm->unfinished, memory_order_acquire) > 0) result = ncclInProgress;
	*out = result;
	tp_comm_leave(comm);
	return ncclSuccess;
}

static ncclResult_t query(ncclComm_t comm, const char *name, size_t offset, int *out)
{
	if (!out) return TP_FAIL(ncclInvalidArgument, "%s: the output is NULL", name);
	TP_TRY(tp_comm_check(comm, name));
	if (atomic_load_explicit(&comm->gate, memory_order_acquire) & TP_GATE_INIT) TP_TRY(tp_comm_may_call(comm, name));
	memcpy(out, (const char *)comm + offset, sizeof(*out));
	return ncclSuccess;
}

ncclResult_t tp_comm_count(ncclComm_t comm, int *out) { return query(comm, "ncclCommCount", offsetof(struct ncclComm, nranks), out); }
ncclResult_t tp_comm_device(ncclComm_t comm, int *out) { return query(comm, "ncclCommCuDevice", offsetof(struct ncclComm, device), out); }
ncclResult_t tp_comm_rank(ncclComm_t comm, int *out) { return query(comm, "ncclCommUserRank", offsetof(struct ncclComm, rank), out); }
