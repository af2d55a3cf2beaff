/* Who runs a runnable: the caller that waits for it, or the process's one engine thread.
 *
 * The thread keeps a list of its own; others add to it through `incoming`, under a mutex that is held for a few
 * instructions only. A runnable that has nothing left is dropped from the list in two steps (flag down, one more look), so
 * that a submit in between is never lost. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "engine/internal.h"

struct engine {
	pthread_mutex_t mutex;
	pthread_cond_t let_go;
	bool started;
	struct tp_runnable *incoming;
	struct tp_runnable *forget;         /* what a caller wants out of the list */
	_Atomic uint32_t kick;              /* changes when the thread should look */
	uint32_t seen;                      /* the thread's own: kick as of its last look */
	struct tp_runnable **list;          /* the thread's own from here */
	bool *idle;
	int count, room;
};
static struct engine engine = { .mutex = PTHREAD_MUTEX_INITIALIZER, .let_go = PTHREAD_COND_INITIALIZER };

static void kick(void)
{
	atomic_fetch_add_explicit(&engine.kick, 1, memory_order_seq_cst);   /* pairs with the load in kicked */
	tp_futex_wake(&engine.kick, 1);
}

static bool kicked(void *arg)
{
	(void)arg;
	return atomic_load_explicit(&engine.kick, memory_order_seq_cst) != engine.seen;
}

/* false: the list can't grow, so the rest stays in `incoming`, to be tried again. */
static bool take_incoming(void)
{
	bool all = true;
	engine.seen = atomic_load_explicit(&engine.kick, memory_order_seq_cst);
	pthread_mutex_lock(&engine.mutex);
	while (engine.incoming) {
		if (engine.count == engine.room) {
			int room = engine.room ? 2 * engine.room : 16;
			struct tp_runnable **list = realloc(engine.list, (size_t)room * sizeof(*list));
			if (list) engine.list = list;
			bool *idle = realloc(engine.idle, (size_t)room * sizeof(*idle));
			if (idle) engine.idle = idle;
			all = list && idle;
			if (!all) break;
			engine.room = room;
		}
		engine.list[engine.count++] = engine.incoming;
		engine.incoming = engine.incoming->next_queued;
	}
	if (engine.forget) {
		for (struct tp_runnable **at = &engine.incoming; *at;)
			if (*at == engine.forget) *at = (*at)->next_queued;
			else at = &(*at)->next_queued;
		for (int i = 0; i < engine.count; i++)
			if (engine.list[i] == engine.forget) engine.list[i--] = engine.list[--engine.count];
		engine.forget = NULL;
		pthread_cond_broadcast(&engine.let_go);
	}
	pthread_mutex_unlock(&engine.mutex);
	return all;
}

/* Drops what has nothing left. Its flag goes down first: a submit from now on queues it anew; one from before is seen by
 * the look that follows. */
static bool drop_idle(void)
{
	bool moved = false;
	for (int i = 0; i < engine.count; i++) {
		struct tp_runnable *r = engine.list[i];
		if (!engine.idle[i]) continue;
		atomic_store_explicit(&r->queued, 0, memory_order_seq_cst);
		bool idle;
		struct tp_round once = { .set = &r, .count = 1 };
		moved |= tp_round_run(&once, &idle);
		uint32_t down = 0;
		if (!idle && atomic_compare_exchange_strong_explicit(&r->queued, &down, 1, memory_order_seq_cst, memory_order_seq_cst))
			continue;
		engine.list[i] = engine.list[--engine.count];
		engine.idle[i] = engine.idle[engine.count];
		i--;
	}
	return moved;
}

static void *run_engine(void *arg)
{
	(void)arg;
	struct tp_round round = { 0 };
	for (;;) {
		bool all = take_incoming();
		if (!engine.count) {
			if (!kicked(NULL)) tp_futex_wait(&engine.kick, engine.seen, all ? 0 : SLEEP_US);
			round = (struct tp_round){ 0 };
			continue;
		}
		round.set = engine.list;
		round.count = engine.count;
		bool moved = tp_round_run(&round, engine.idle);
		moved |= drop_idle();
		round.set = engine.list;
		round.count = engine.count;
		if (!moved && round.count) tp_round_pause(&round, &engine.kick, kicked, NULL);
	}
	return NULL;
}

/* A child starts anew: what the parent's thread runs is the parent's. Its list, which may be growing just now, is kept reachable, never used. */
static void before_fork(void) { pthread_mutex_lock(&engine.mutex); }
static void in_parent(void) { pthread_mutex_unlock(&engine.mutex); }
static void in_child(void)
{
	static struct tp_runnable **abandoned_list;
	static bool *abandoned_idle;
	if (engine.started) {
		abandoned_list = engine.list;
		abandoned_idle = engine.idle;
		engine.list = NULL;
		engine.idle = NULL;
		engine.count = engine.room = 0;
		engine.incoming = engine.forget = NULL;
		engine.started = false;
		pthread_cond_init(&engine.let_go, NULL);
	}
	(void)abandoned_list;
	(void)abandoned_idle;
	pthread_mutex_unlock(&engine.mutex);
}
TP_FORK_HOOK(TP_FORK_ENGINE, before_fork, in_parent, in_child)

static ncclResult_t start_locked(void)
{
	if (engine.started) return ncclSuccess;
	tp_engine_prepare();
	pthread_t thread;
	sigset_t all, before;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	int error = pthread_create(&thread, NULL, run_engine, NULL);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (error) return TP_FAIL(ncclSystemError, "the engine thread can't be started: %s", strerror(error));
	pthread_setname_np(thread, "telpher-engine");
	pthread_detach(thread);
	engine.started = true;
	return ncclSuccess;
}

ncclResult_t tp_engine_submit(struct tp_runnable *runnable)
{
	/* Queued already: it is enough that the thread looks again. */
	if (atomic_exchange_explicit(&runnable->queued, 1, memory_order_seq_cst)) {
		kick();
		return ncclSuccess;
	}
	pthread_mutex_lock(&engine.mutex);
	ncclResult_t result = start_locked();
	if (result == ncclSuccess) {
		runnable->next_queued = engine.incoming;
		engine.incoming = runnable;
	} else {
		atomic_store_explicit(&runnable->queued, 0, memory_order_seq_cst);
	}
	pthread_mutex_unlock(&engine.mutex);
	if (result == ncclSuccess) kick();
	return result;
}

void tp_engine_forget(struct tp_runnable *runnable)
{
	pthread_mutex_lock(&engine.mutex);
	if (engine.started) {
		while (engine.forget) pthread_cond_wait(&engine.let_go, &engine.mutex);
		engine.forget = runnable;
		kick();
		while (engine.forget == runnable) pthread_cond_wait(&engine.let_go, &engine.mutex);
	}
	pthread_mutex_unlock(&engine.mutex);
}

struct until { bool (*done)(void *arg); void *arg; };

static bool is_over(void *arg)
{
	struct until *until = arg;
	return until->done(until->arg);
}

void tp_engine_wait(struct tp_runnable *const *set, int count, bool (*done)(void *arg), void *arg)
{
	struct tp_round round = { .set = (struct tp_runnable **)(uintptr_t)set, .count = count };
	struct until until = { done, arg };
	while (!done(arg))
		if (!tp_round_run(&round, NULL) && !done(arg)) tp_round_pause(&round, NULL, is_over, &until);
}
