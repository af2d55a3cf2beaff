/* Jobs: what waits for other ranks before a communicator can go on. Alone and blocking, the caller runs it; in a group all
 * of them run at once, a thread each, since ranks of one thread wait for each other; non-blocking, in the background.
 * Those in which the ranks of one communicator meet take turns, in the order of the calls, which is the same on all ranks: each waits until the one
 * before is over. */
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "base/shm.h"
#include "comm/internal.h"

#define STACK_BYTES (1u << 20)

/* Held by its job until that is over, by the communicator as its last one, and by the job that comes next. */
struct tp_turn { _Atomic uint32_t refs, over; };
#define LOOK_US 20000                   /* for an abort, while a job waits for its turn */

static void drop(struct tp_turn *turn)
{
	if (turn && atomic_fetch_sub_explicit(&turn->refs, 1, memory_order_acq_rel) == 1) free(turn);
}

void tp_jobs_forget(struct ncclComm *comm) { drop(atomic_exchange_explicit(&comm->last_turn, NULL, memory_order_acq_rel)); }

/* In the order of the calls. */
static ncclResult_t take_turn(struct tp_job *job)
{
	if (!job->meets) return ncclSuccess;
	struct tp_turn *turn = tp_alloc(1, sizeof(*turn), "a job's turn");
	if (!turn) return ncclSystemError;
	atomic_store_explicit(&turn->refs, 2, memory_order_relaxed);
	job->turn = turn;
	job->before = atomic_exchange_explicit(&job->meets->last_turn, turn, memory_order_acq_rel);
	return ncclSuccess;
}

void tp_job_end_turn(struct tp_job *job)
{
	drop(job->before);
	job->before = NULL;
	if (!job->turn) return;
	atomic_store_explicit(&job->turn->over, 1, memory_order_release);       /* pairs with run_in_turn */
	tp_futex_wake(&job->turn->over, INT_MAX);
	drop(job->turn);
	job->turn = NULL;
}

static ncclResult_t run_in_turn(struct tp_job *job)
{
	while (job->before && !atomic_load_explicit(&job->before->over, memory_order_acquire)
		&& !atomic_load_explicit(&job->meets->abort_flag, memory_order_relaxed)) tp_futex_wait(&job->before->over, 0, LOOK_US);
	ncclResult_t result = job->run(job);
	tp_job_end_turn(job);
	return result;
}

static void *run_in_group(void *arg)
{
	struct tp_job *job = arg;
	job->result = run_in_turn(job);
	return NULL;
}

/* Once state says that it is over, the communicator may be freed as soon as this thread is joined. */
static void *run_in_background(void *arg)
{
	struct tp_job *job = arg;
	struct ncclComm *comm = job->comm;
	ncclResult_t result = run_in_turn(job);
	job->result = result;
	job->discard(job);
	atomic_store_explicit(&comm->state, result, memory_order_release);  /* pairs with ncclCommGetAsyncError */
	return NULL;
}

static ncclResult_t start(struct tp_job *job, void *(*run)(void *), pthread_t *thread)
{
	pthread_attr_t attributes;
	sigset_t every, before;
	TP_TRY(take_turn(job));
	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, STACK_BYTES);
	sigfillset(&every);
	pthread_sigmask(SIG_SETMASK, &every, &before);
	int error = pthread_create(thread, &attributes, run, job);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_attr_destroy(&attributes);
	if (!error) return ncclSuccess;
	tp_job_end_turn(job);
	return TP_FAIL(ncclSystemError, "a thread can't be started: %s", strerror(error));
}

static ncclResult_t start_in_background(struct tp_job *job)
{
	struct ncclComm *comm = job->comm;
	if (atomic_load_explicit(&comm->state, memory_order_acquire) == ncclInProgress && comm->has_thread)
		return TP_FAIL(ncclInvalidUsage, "communicator %p is still busy with its last non-blocking call", (void *)comm);
	if (comm->has_thread) pthread_join(comm->thread, NULL);
	comm->has_thread = false;
	atomic_store_explicit(&comm->state, ncclInProgress, memory_order_release);
	ncclResult_t result = start(job, run_in_background, &comm->thread);
	if (result == ncclSuccess) comm->has_thread = true;
	else atomic_store_explicit(&comm->state, result, memory_order_release);
	return result;
}

ncclResult_t tp_jobs_run(struct tp_job *jobs, bool blocking)
{
	ncclResult_t result = ncclSuccess;
	if (!blocking) {
		result = ncclInProgress;
		for (struct tp_job *job = jobs, *next; job; job = next) {
			next = job->next;
			ncclResult_t started = start_in_background(job);
			if (started == ncclSuccess) continue;
			job->result = result = started;
			job->discard(job);
		}
		return result;
	}
	for (struct tp_job *job = jobs; job; job = job->next) {
		/* Once it is started the result is the thread's to write. */
		ncclResult_t started = start(job, run_in_group, &job->thread);
		job->started = started == ncclSuccess;
		if (!job->started) job->result = started;
	}
	for (struct tp_job *job = jobs, *next; job; job = next) {
		next = job->next;
		if (job->started) pthread_join(job->thread, NULL);
		if (result == ncclSuccess) result = job->result;
		job->discard(job);
	}
	return result;
}

ncclResult_t tp_job_submit(struct tp_job *job)
{
	ncclResult_t result;
	if (tp_group_depth) {
		result = tp_group_add_job(job);
		if (result == ncclSuccess) return job->blocking ? ncclSuccess : ncclInProgress;
	} else if (!job->blocking) {
		result = start_in_background(job);
		if (result == ncclSuccess) return ncclInProgress;
	} else {
		result = take_turn(job);
		if (result == ncclSuccess) result = run_in_turn(job);
	}
	job->result = result;
	job->discard(job);
	return result;
}
