/* How a communicator's end on a GPU ends.
 *
 * Kernels of other ranks may still read and write memory of ours (the last chunks of the last operation), and ours may still wait
 * in a stream behind somebody's long work, and graphs may be launched again. So executor, links and boot of a communicator go to a graveyard, and
 * are freed as soon as its own operations are done, no rank of this process is left in it, and no graph holds it. (Ranks of other processes have
 * mappings of their own, which keep the memory.)
 *
 * CUDA gives memory back only when all kernels of the context are done, and a kernel of another communicator may wait for what this very thread
 * does next. So nothing is freed while any rank of the process, on whatever GPU, of a living communicator or an ended one, has operations
 * outstanding, nor while graphs hold living ranks (unless there is only one); the next communicator that begins or ends tries again. No rank of
 * ours launches meanwhile (tp_gpu_quiet). A communicator that never came to launch anything is freed at once. */
#include <stdlib.h>

#include "comm/gpu.h"

#define WAIT_MS 2000u           /* for kernels that were told to end */

struct grave {
	struct grave *next;
	struct tp_gpu_rank *rank;
	struct tp_links *links;
	struct tp_boot *boot;
};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct grave *graves;
static pthread_mutex_t open_lock = PTHREAD_MUTEX_INITIALIZER;     /* the ranks that can launch; unlike the watcher's list, CUDA is called with it */
static struct tp_gpu_rank *open_ranks;
static pthread_mutex_t quiet_lock = PTHREAD_MUTEX_INITIALIZER;    /* as long as it is quiet */
_Atomic bool tp_gpu_quiet;

static void nap(uint64_t waited_ms)
{
	struct timespec length = { 0, waited_ms < 2 ? 20000 : waited_ms < 100 ? 200000 : 2000000 };
	nanosleep(&length, NULL);
}

void tp_gpu_rank_abort(struct tp_gpu_rank *rank)
{
	struct tp_cuda_exec *exec = atomic_load_explicit(&rank->exec, memory_order_acquire);
	if (exec) tp_cuda_exec_abort(exec);
}

/* CUDA_SUCCESS: everything is done. The context is entered here; a capture of this thread doesn't mind. */
static CUresult query(struct tp_gpu_rank *rank)
{
	bool pushed;
	int mode;
	if (!rank->done || tp_gpu_enter(rank->gpu, &pushed) != ncclSuccess) return CUDA_SUCCESS;
	tp_gpu_relax(&mode);
	CUresult result = tp_cuda->EventQuery(rank->done);
	tp_gpu_unrelax(mode);
	tp_gpu_leave(pushed);
	return result;
}

bool tp_gpu_rank_is_busy(struct ncclComm *comm)
{
	return query(comm->gpu) == CUDA_ERROR_NOT_READY;
}

/* All flights have landed. */
static void end_flights(struct ncclComm *comm, ncclResult_t result)
{
	for (uint64_t i = 0; i <= comm->flight->mask; i++) {
		struct tp_flight_record *r = &comm->flight->records[i];
		if (atomic_load_explicit(&r->state, memory_order_relaxed) == TP_FLIGHT_RUNNING)
			tp_flight_end(r, atomic_load_explicit(&r->seq, memory_order_relaxed), result);
	}
}

ncclResult_t tp_gpu_rank_drain(struct ncclComm *comm)
{
	uint64_t start = tp_clock_ms();
	for (;;) {
		CUresult found = query(comm->gpu);
		if (found == CUDA_SUCCESS) break;
		if (found != CUDA_ERROR_NOT_READY) return tp_comm_explain(comm, TP_GPU_FAIL(comm, "EventQuery", found), tp_comm_seq(comm), 0);
		/* The watcher sees events and ends the kernels; then there is nothing to wait for here. */
		if (atomic_load_explicit(&comm->gate, memory_order_acquire) & (TP_GATE_ERROR | TP_GATE_ABORTED | TP_GATE_REVOKED)) break;
		nap(tp_clock_ms() - start);
	}
	if (tp_links_have_net(comm->links)) return tp_comm_drain(comm);
	int error = atomic_load_explicit(&comm->error, memory_order_acquire);
	if (error == ncclSuccess) end_flights(comm, ncclSuccess);
	return error;
}

void tp_gpu_rank_register(struct tp_gpu_rank *rank)
{
	pthread_mutex_lock(&open_lock);
	rank->next_open = open_ranks;
	open_ranks = rank;
	pthread_mutex_unlock(&open_lock);
}

static void unregister(const struct tp_gpu_rank *rank)
{
	pthread_mutex_lock(&open_lock);
	struct tp_gpu_rank **at = &open_ranks;
	while (*at && *at != rank) at = &(*at)->next_open;
	if (*at) *at = rank->next_open;
	pthread_mutex_unlock(&open_lock);
}

/* No kernel of the rank waits for a peer, nor will one before we look again: graphs are launched without a call to us. */
static bool is_idle(struct tp_gpu_rank *rank)
{
	return atomic_load_explicit(&rank->graphs, memory_order_acquire) == 0 /* pairs with let_go */ && query(rank) != CUDA_ERROR_NOT_READY;
}

/* With the lock. On all GPUs of the process: memory that ranks showed each other is freed by the last of them, on its owner's GPU. A
 * rank alone in its process waits for nobody here. */
static bool all_are_idle(void)
{
	pthread_mutex_lock(&open_lock);
	bool idle = true, alone = !open_ranks || !open_ranks->next_open;
	for (struct tp_gpu_rank *r = open_ranks; r && idle; r = r->next_open) idle = alone ? query(r) != CUDA_ERROR_NOT_READY : is_idle(r);
	pthread_mutex_unlock(&open_lock);
	for (struct grave *g = graves; g && idle; g = g->next) idle = query(g->rank) != CUDA_ERROR_NOT_READY;
	return idle;
}

static bool may_be_freed(struct grave *g)
{
	return !tp_gpu_watch_has(g->rank->comm_hash) && is_idle(g->rank) && all_are_idle();
}

static void bury(struct grave *g)
{
	bool pushed;
	if (tp_gpu_enter(g->rank->gpu, &pushed) == ncclSuccess) {
		int mode;
		tp_gpu_relax(&mode);
		struct tp_cuda_exec *exec = atomic_load_explicit(&g->rank->exec, memory_order_relaxed);
		if (exec) tp_cuda_exec_destroy(exec);
		tp_gpu_memory_close(g->rank);
		if (g->links) tp_links_destroy(g->links);
		tp_gpu_unrelax(mode);
		tp_gpu_leave(pushed);
	}
	if (g->boot) tp_boot_close(g->boot);
	tp_gpu_rank_free(g->rank);
	free(g);
}

void tp_gpu_launch_wait(struct tp_gpu_rank *rank)
{
	do {
		atomic_store_explicit(&rank->launching, false, memory_order_release);
		pthread_mutex_lock(&quiet_lock);
		pthread_mutex_unlock(&quiet_lock);
		atomic_store_explicit(&rank->launching, true, memory_order_seq_cst);
	} while (atomic_load_explicit(&tp_gpu_quiet, memory_order_seq_cst));
}

static void end_quiet(void)
{
	atomic_store_explicit(&tp_gpu_quiet, false, memory_order_release);      /* pairs with tp_gpu_launch_begin */
	pthread_mutex_unlock(&quiet_lock);
}

/* false: somebody launches, or frees. */
static bool begin_quiet(void)
{
	bool launching = false;
	if (pthread_mutex_trylock(&quiet_lock)) return false;
	atomic_store_explicit(&tp_gpu_quiet, true, memory_order_seq_cst);
	pthread_mutex_lock(&open_lock);
	for (struct tp_gpu_rank *r = open_ranks; r && !launching; r = r->next_open)
		launching = atomic_load_explicit(&r->launching, memory_order_seq_cst);
	pthread_mutex_unlock(&open_lock);
	if (launching) end_quiet();
	return !launching;
}

/* Frees what can be freed by now. */
void tp_gpu_rank_bury(void)
{
	struct grave *ready = NULL;
	if (!begin_quiet()) return;         /* another time */
	pthread_mutex_lock(&lock);
	for (struct grave **at = &graves; *at;) {
		struct grave *g = *at;
		if (!may_be_freed(g)) {
			at = &g->next;
			continue;
		}
		*at = g->next;
		g->next = ready;
		ready = g;
	}
	pthread_mutex_unlock(&lock);
	while (ready) {
		struct grave *g = ready;
		ready = g->next;
		bury(g);
	}
	end_quiet();
}

/* Nobody launches any more once the launch lock was held, so the event stands behind the last kernel. */
static struct grave *dig(struct ncclComm *comm)
{
	struct tp_gpu_rank *rank = comm->gpu;
	struct grave *g = tp_alloc(1, sizeof(*g), "a communicator's remains");
	tp_gpu_watch_remove(comm);
	pthread_mutex_lock(&comm->launch_lock);
	comm->gpu = NULL;
	rank->comm = NULL;
	pthread_mutex_unlock(&comm->launch_lock);
	tp_gpu_used_close(rank);
	if (g) *g = (struct grave){ NULL, rank, comm->links, comm->boot };
	comm->links = NULL;
	comm->boot = NULL;
	return g;
}

void tp_gpu_rank_close(struct ncclComm *comm)
{
	bool used = comm->gpu->done != NULL;
	uint64_t start = tp_clock_ms();
	struct grave *g = dig(comm);
	if (!g) return;             /* no memory for a record: what there is stays */
	if (!used) {
		unregister(g->rank);
		bury(g);
		return;
	}
	/* Only for kernels, which end at once: for other ranks and graphs nobody waits. */
	while (query(g->rank) == CUDA_ERROR_NOT_READY && tp_clock_ms() - start < WAIT_MS) nap(tp_clock_ms() - start);
	if (query(g->rank) == CUDA_ERROR_NOT_READY)
		TP_INFO(TP_INIT, "device %d: operations of an ended communicator still wait in a stream; its memory is freed when they are gone", comm->device);
	/* Of an operation that ended early something may be on loan, and the program has its memory back. */
	if (g->links) tp_links_retire(g->links);
	tp_gpu_memory_tell(g->rank, g->links, g->boot->rank);
	/* Always in one of the lists: while its kernels wait, nothing may be freed. */
	pthread_mutex_lock(&lock);
	g->next = graves;
	graves = g;
	unregister(g->rank);
	pthread_mutex_unlock(&lock);
	tp_gpu_rank_bury();
}
