/* What peers' words make a process do: map memory, let it go, write a table. All of that calls CUDA, and CUDA may wait for kernels that run: for one
 * that waits for a peer, perhaps, which has died. Deaths are heard on the service thread, so this is done on a thread of its own, one a
 * process, which is started with the first communicator that needs it, and sleeps while there is nothing to do. */
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "base/fork.h"
#include "mem/internal.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t added = PTHREAD_COND_INITIALIZER, ended = PTHREAD_COND_INITIALIZER;
static struct tp_mem_task *first, **last = &first;
static const struct tp_mem *running;    /* whose task it is at */
static pid_t started_by;                /* a child of a fork has no thread */
TP_FORK_HOLD(TP_FORK_MEM, lock)

static struct tp_mem_task *take_locked(void)
{
	struct tp_mem_task *task = first;
	first = task->next;
	if (!first) last = &first;
	return task;
}

static void *run_tasks(void *unused)
{
	(void)unused;
	pthread_mutex_lock(&lock);
	for (;;) {
		while (!first) pthread_cond_wait(&added, &lock);
		struct tp_mem_task *task = take_locked();
		running = task->mem;
		pthread_mutex_unlock(&lock);
		task->run(task);
		pthread_mutex_lock(&lock);
		running = NULL;
		pthread_cond_broadcast(&ended);
	}
	return NULL;
}

static ncclResult_t start_locked(void)
{
	if (started_by == getpid()) return ncclSuccess;
	pthread_t thread;
	sigset_t every, before;
	/* What a parent left is the parent's, and so is who waits there. */
	pthread_cond_init(&added, NULL);
	pthread_cond_init(&ended, NULL);
	running = NULL;
	first = NULL;
	last = &first;
	sigfillset(&every);
	pthread_sigmask(SIG_SETMASK, &every, &before);
	int error = pthread_create(&thread, NULL, run_tasks, NULL);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (error) return TP_FAIL(ncclSystemError, "the thread that maps peers' registered memory can't be started: %s", strerror(error));
	pthread_setname_np(thread, "telpher-memory");
	pthread_detach(thread);
	started_by = getpid();
	return ncclSuccess;
}

ncclResult_t tp_mem_thread_start(void)
{
	pthread_mutex_lock(&lock);
	ncclResult_t result = start_locked();
	pthread_mutex_unlock(&lock);
	return result;
}

void tp_mem_thread_add(struct tp_mem_task *task)
{
	task->next = NULL;
	pthread_mutex_lock(&lock);
	*last = task;
	last = &task->next;
	pthread_cond_signal(&added);
	pthread_mutex_unlock(&lock);
}

void tp_mem_thread_forget(const struct tp_mem *mem)
{
	struct tp_mem_task *gone = NULL;
	pthread_mutex_lock(&lock);
	bool is_here = started_by == getpid();
	for (struct tp_mem_task **at = &first; is_here && *at;) {
		struct tp_mem_task *task = *at;
		if (task->mem != mem) {
			at = &task->next;
			continue;
		}
		*at = task->next;
		if (last == &task->next) last = at;
		task->next = gone;
		gone = task;
	}
	while (is_here && running == mem) pthread_cond_wait(&ended, &lock);
	pthread_mutex_unlock(&lock);
	while (gone) {
		struct tp_mem_task *task = gone;
		gone = task->next;
		task->discard(task);
	}
}
