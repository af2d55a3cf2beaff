/* Jobs: what waits for other ranks before a communicator can go on. Alone and blocking, the caller runs it; in a group all
 * of them run at once, a thread each, since ranks of one thread wait for each other; non-blocking, in the background. But those in which the ranks
 * of one communicator meet run one after the other, in the group's order, which is the same on all of them. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "comm/internal.h"

#define STACK_BYTES (1u << 20)

/* What follows another job goes from the list to that one's `then`. */
static void chain(struct tp_job *jobs)
{
	for (struct tp_job *job = jobs; job; job = job->next) {
		struct tp_job *last = job;
		last->then = NULL;
		for (struct tp_job **at = &job->next; *at && job->meets;) {
			struct tp_job *later = *at;
			if (later->meets != job->meets) {
				at = &later->next;
				continue;
			}
			*at = later->next;
			later->then = NULL;
			last = last->then = later;
		}
	}
}

static void *run_in_group(void *arg)
{
	for (struct tp_job *job = arg; job; job = job->then) job->result = job->run(job);
	return NULL;
}

/* Once state says that it is over, the communicator may be freed as soon as this thread is joined. */
static void *run_in_background(void *arg)
{
	for (struct tp_job *job = arg, *then; job; job = then) {
		struct ncclComm *comm = job->comm;
		then = job->then;
		ncclResult_t result = job->result = job->run(job);
		job->discard(job);
		/* Of a communicator that has another one to come, it isn't over. */
		if (then && then->comm == comm && result == ncclSuccess) continue;
		atomic_store_explicit(&comm->state, result, memory_order_release);      /* pairs with ncclCommGetAsyncError */
	}
	return NULL;
}

static ncclResult_t start(struct tp_job *job, void *(*run)(void *), pthread_t *thread)
{
	pthread_attr_t attributes;
	sigset_t every, before;
	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, STACK_BYTES);
	sigfillset(&every);
	pthread_sigmask(SIG_SETMASK, &every, &before);
	int error = pthread_create(thread, &attributes, run, job);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_attr_destroy(&attributes);
	if (error) return TP_FAIL(ncclSystemError, "a thread can't be started: %s", strerror(error));
	return ncclSuccess;
}

static ncclResult_t start_in_background(struct tp_job *job)
{
	struct ncclComm *comm = job->comm;
	if (atomic_load_explicit(&comm->state, memory_order_acquire) == ncclInProgress && comm->has_thread)
		return TP_FAIL(ncclInvalidUsage, "communicator %p is still busy with its last non-blocking call", (void *)comm);
	if (comm->has_thread) pthread_join(comm->thread, NULL);
	comm->has_thread = false;
	for (struct tp_job *each = job; each; each = each->then) atomic_store_explicit(&each->comm->state, ncclInProgress, memory_order_release);
	ncclResult_t result = start(job, run_in_background, &comm->thread);
	if (result == ncclSuccess) comm->has_thread = true;
	else for (struct tp_job *each = job; each; each = each->then) atomic_store_explicit(&each->comm->state, result, memory_order_release);
	return result;
}

static void discard_all(struct tp_job *job)
{
	for (struct tp_job *then; job; job = then) {
		then = job->then;
		job->discard(job);
	}
}

ncclResult_t tp_jobs_run(struct tp_job *jobs, bool blocking)
{
	ncclResult_t result = ncclSuccess;
	chain(jobs);
	if (!blocking) {
		result = ncclInProgress;
		for (struct tp_job *job = jobs, *next; job; job = next) {
			next = job->next;
			ncclResult_t started = start_in_background(job);
			if (started == ncclSuccess) continue;
			for (struct tp_job *each = job; each; each = each->then) each->result = started;
			result = started;
			discard_all(job);
		}
		return result;
	}
	for (struct tp_job *job = jobs; job; job = job->next) {
		/* Once it is started the result is the thread's to write. */
		ncclResult_t started = start(job, run_in_group, &job->thread);
		job->started = started == ncclSuccess;
		for (struct tp_job *each = job; each && !job->started; each = each->then) each->result = started;
	}
	for (struct tp_job *job = jobs, *next; job; job = next) {
		next = job->next;
		if (job->started) pthread_join(job->thread, NULL);
		for (const struct tp_job *each = job; each; each = each->then)
			if (result == ncclSuccess) result = each->result;
		discard_all(job);
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
		result = job->run(job);
	}
	job->result = result;
	job->discard(job);
	return result;
}
