/* Who looks after kernels that spin: nobody waits for them on the host, so nobody would notice that a peer has died.
 *
 * One thread a process sleeps on the bells of all GPU ranks (an event rings them) and, while calls have been made lately, looks
 * every 250 ms for what rings no bell: mismatched calls and what kernels complain about. It can't know when the last kernel is done without a
 * cost to every kernel, so it looks less often the longer nothing was called, and in the end sleeps until the next call. It never
 * calls CUDA: a call of CUDA's may wait for the very kernel that must be told to end.
 *
 * Where a communicator has network links, the engine runs it besides while kernels are outstanding. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/gpu.h"

#define OF_RUNNABLE(r) ((struct ncclComm *)((char *)(r) - offsetof(struct ncclComm, runnable)))
#define PERIOD_MS 250u
#define BUSY_MS 10000u          /* since the last call: looks every PERIOD_MS … */
#define SLOW_MS 2000u           /* … then every SLOW_MS … */
#define QUIET_MS 600000u        /* … then never, until a bell rings or a call is made */
#define STALL_MS 200u
#define MISMATCH_MS 1500u
enum { MAX_WORDS = 128 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t looked = PTHREAD_COND_INITIALIZER;
static struct tp_gpu_rank *watched;
static uint64_t looks;          /* how often the watcher has begun anew, with bells that exist */
static bool started;
static pid_t started_by;        /* a child of a fork has no watcher */
static _Atomic uint32_t kicks;
_Atomic bool tp_gpu_watch_dozes;

void tp_gpu_watch_kick(void)
{
	atomic_fetch_add_explicit(&kicks, 1, memory_order_seq_cst);
	tp_futex_wake(&kicks, 1);
}

static ncclResult_t as_error(struct ncclComm *comm, const struct tp_cuda_status *status)
{
	if (status->fault == TP_CUDA_PLACE)
		return TP_FAIL(ncclInvalidUsage, "comm %p rank %d: " TP_CUDA_PLACE_TEXT, (void *)comm, comm->rank, status->peer);
	if (status->fault == TP_CUDA_TAG)
		return TP_FAIL(ncclInvalidUsage, "comm %p rank %d: what rank %d sent on channel %d belongs to another call (0x%x, not 0x%x): the ranks don't make "
			"the same calls in the same order", (void *)comm, comm->rank, status->peer, status->channel, status->found, status->expected);
	if (status->fault == TP_CUDA_BUFFER)
		return TP_FAIL(ncclInvalidUsage, "comm %p rank %d: rank %d receives into its registered buffer %u, which isn't mapped here any more: a buffer was "
			"deregistered while it was in use", (void *)comm, comm->rank, status->peer, status->found);
	return TP_FAIL(ncclInvalidUsage, "comm %p rank %d: rank %d sent %u bytes on channel %d where %u were expected: a send and its receive must be of the same "
		"size, and a collective of the same count on all ranks", (void *)comm, comm->rank, status->peer, status->found, status->channel,
		status->expected);
}

void tp_gpu_watch_faults(struct ncclComm *comm)
{
	struct tp_cuda_status status;
	struct tp_cuda_exec *exec = atomic_load_explicit(&comm->gpu->exec, memory_order_acquire);
	if (!exec || atomic_load_explicit(&comm->error, memory_order_relaxed) != ncclSuccess) return;
	tp_cuda_exec_status(exec, &status);
	if (tp_likely(status.fault == TP_CUDA_FINE || status.fault == TP_CUDA_ABORTED)) return;
	tp_log_set_device(comm->device);
	/* Both calls by name, if the call boards still have them. */
	if (tp_comm_seek_mismatch(comm, MISMATCH_MS)) return;
	tp_comm_explain(comm, as_error(comm, &status), tp_comm_seq(comm), 0);
}

/* How long until the next look, in ms; 0: none is needed. Run lock held. */
static uint64_t look(struct tp_gpu_rank *rank, uint64_t now_ms)
{
	struct ncclComm *comm = rank->comm;
	tp_comm_look_for_events(comm);
	tp_gpu_watch_faults(comm);
	uint64_t launches = atomic_load_explicit(&rank->launches, memory_order_seq_cst);
	if (launches != rank->seen_launches) {
		rank->seen_launches = launches;
		rank->quiet_since_ms = now_ms;
	}
	uint64_t quiet = now_ms - rank->quiet_since_ms;
	if (!launches || quiet > QUIET_MS || atomic_load_explicit(&comm->error, memory_order_relaxed) != ncclSuccess) return 0;
	if (quiet >= STALL_MS) tp_comm_seek_stall(comm, quiet);
	return quiet > BUSY_MS ? SLOW_MS : PERIOD_MS;
}

static uint64_t look_at_all(_Atomic uint32_t **words, uint32_t *seen, int *nwords)
{
	uint64_t now_ms = tp_clock_ms(), next = 0;
	pthread_mutex_lock(&lock);
	looks++;
	pthread_cond_broadcast(&looked);
	for (struct tp_gpu_rank *r = watched; r; r = r->next_watched) {
		struct ncclComm *comm = r->comm;
		struct tp_bell *bell = &comm->boot->bells[comm->boot->local];
		uint64_t wanted = PERIOD_MS;
		if (*nwords < MAX_WORDS) {
			words[*nwords] = &bell->word;
			seen[(*nwords)++] = atomic_load_explicit(&bell->word, memory_order_acquire);   /* before the look */
		} else {
			next = PERIOD_MS;
		}
		if (tp_engine_try_lock(&comm->runnable)) {
			wanted = look(r, now_ms);
			tp_engine_unlock(&comm->runnable);
		}
		if (wanted && (!next || wanted < next)) next = wanted;
	}
	pthread_mutex_unlock(&lock);
	return next;
}

/* Nothing was launched since the last look (which the launcher, for its part, sees dozing and kicks). */
static bool is_quiet(void)
{
	bool quiet = true;
	pthread_mutex_lock(&lock);
	for (struct tp_gpu_rank *r = watched; r && quiet; r = r->next_watched)
		quiet = atomic_load_explicit(&r->launches, memory_order_seq_cst) == r->seen_launches;
	pthread_mutex_unlock(&lock);
	return quiet;
}

static void *run_watcher(void *arg)
{
	_Atomic uint32_t *words[MAX_WORDS];
	uint32_t seen[MAX_WORDS];
	(void)arg;
	for (;;) {
		int nwords = 1;
		words[0] = &kicks;
		seen[0] = atomic_load_explicit(&kicks, memory_order_seq_cst);
		uint64_t next_ms = look_at_all(words, seen, &nwords);
		if (next_ms != PERIOD_MS) {
			atomic_store_explicit(&tp_gpu_watch_dozes, true, memory_order_seq_cst);
			if (!is_quiet()) next_ms = PERIOD_MS;
		}
		if (nwords == 1) tp_futex_wait(words[0], seen[0], next_ms * 1000);
		else tp_futex_wait_any(words, seen, nwords, next_ms * 1000);
		atomic_store_explicit(&tp_gpu_watch_dozes, false, memory_order_relaxed);
	}
	return NULL;
}

/* A child of a fork has no watcher, and no use of CUDA either. */
static ncclResult_t start_locked(void)
{
	if (started) return ncclSuccess;
	pthread_t thread;
	sigset_t every, before;
	sigfillset(&every);
	pthread_sigmask(SIG_SETMASK, &every, &before);
	int error = pthread_create(&thread, NULL, run_watcher, NULL);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (error) return TP_FAIL(ncclSystemError, "the thread that looks after GPU ranks can't be started: %s", strerror(error));
	pthread_setname_np(thread, "telpher-watch");
	pthread_detach(thread);
	started = true;
	started_by = getpid();
	return ncclSuccess;
}

ncclResult_t tp_gpu_watch_add(struct ncclComm *comm)
{
	struct tp_gpu_rank *rank = comm->gpu;
	rank->comm = comm;
	pthread_mutex_lock(&lock);
	ncclResult_t result = start_locked();
	if (result == ncclSuccess) {
		rank->next_watched = watched;
		watched = rank;
	}
	pthread_mutex_unlock(&lock);
	if (result == ncclSuccess) tp_gpu_watch_kick();
	return result;
}

void tp_gpu_watch_remove(struct ncclComm *comm)
{
	pthread_mutex_lock(&lock);
	struct tp_gpu_rank **at = &watched;
	while (*at && *at != comm->gpu) at = &(*at)->next_watched;
	bool was_watched = *at != NULL && started_by == getpid();
	if (*at) *at = comm->gpu->next_watched;
	tp_gpu_watch_kick();
	/* Its bell goes with the host's segment: not while somebody sleeps on it. */
	for (uint64_t before = looks; was_watched && looks == before;) pthread_cond_wait(&looked, &lock);
	pthread_mutex_unlock(&lock);
}

bool tp_gpu_watch_has(uint64_t comm_hash)
{
	pthread_mutex_lock(&lock);
	struct tp_gpu_rank *r = watched;
	while (r && r->comm_hash != comm_hash) r = r->next_watched;
	pthread_mutex_unlock(&lock);
	return r != NULL;
}

/* ---- the engine's part ---- */

static bool is_outstanding(const struct ncclComm *comm)
{
	struct tp_cuda_status status;
	tp_cuda_exec_status(atomic_load_explicit(&comm->gpu->exec, memory_order_acquire), &status);
	return status.completed < atomic_load_explicit(&comm->gpu->expected, memory_order_seq_cst);
}

static enum tp_run run_gpu(struct tp_runnable *runnable)
{
	struct ncclComm *comm = OF_RUNNABLE(runnable);
	if (!comm->gpu || !comm->links || !tp_links_have_net(comm->links)) return TP_RUN_IDLE;
	tp_comm_look_for_events(comm);
	tp_gpu_watch_faults(comm);
	if (atomic_load_explicit(&comm->gate, memory_order_acquire) & (TP_GATE_ERROR | TP_GATE_ABORTED | TP_GATE_REVOKED)) {
		/* Kernels end without waiting for what they have lent. */
		tp_links_recall(comm->links);
		return TP_RUN_IDLE;
	}
	bool outstanding = is_outstanding(comm), moved = false;
	ncclResult_t result = tp_links_progress(comm->links, &moved);
	if (result != ncclSuccess) {
		tp_comm_explain(comm, result, tp_comm_seq(comm), MISMATCH_MS);
		return TP_RUN_IDLE;
	}
	tp_gpu_watch_settle(comm);
	if (moved) return TP_RUN_MOVED;
	return outstanding || tp_links_need_progress(comm->links) ? TP_RUN_WAITING : TP_RUN_IDLE;
}

/* Not by what is outstanding: a communicator may always have something, and a kernel may have looked before it counts, for those of graphs are counted by a host node
 * beside them. Whoever keeps it here has the engine run again. */
static bool lends(void *arg)
{
	struct ncclComm *comm = arg;
	struct tp_cuda_exec *exec = atomic_load_explicit(&comm->gpu->exec, memory_order_acquire);
	return exec && tp_cuda_exec_lends(exec);
}

void tp_gpu_watch_settle(struct ncclComm *comm) { tp_links_settle(comm->links, lends, comm); }

static int poll_fds(struct tp_runnable *runnable, int *fds, uint32_t *events, int max)
{
	return tp_links_poll_fds(OF_RUNNABLE(runnable)->links, fds, events, max);
}

void tp_gpu_watch_init_runnable(struct ncclComm *comm)
{
	comm->runnable = (struct tp_runnable){ .run = run_gpu, .bell = &comm->boot->bells[comm->boot->local],
		.poll_fds = tp_links_have_net(comm->links) ? poll_fds : NULL, .crowded = true };
}

void tp_gpu_watch_wake(struct tp_gpu_rank *rank)
{
	struct ncclComm *comm = rank->comm;
	if (!comm) return;
	/* `expected` was raised before (seq_cst): an engine that drops the runnable now looks at it once more. */
	if (!atomic_load_explicit(&comm->runnable.queued, memory_order_seq_cst)) tp_engine_submit(&comm->runnable);
	else tp_bell_ring(comm->runnable.bell);
}
