/* What wait.c and engine.c share. */
#ifndef TP_ENGINE_INTERNAL_H
#define TP_ENGINE_INTERNAL_H

#include "engine/engine.h"

#define SLEEP_US 50000u             /* the longest sleep: events are rung, this is the net below */
#define BLIND_SLEEP_US 1000u
#define STALL_MS 200u

/* Every store before it, on any processor, is seen by loads after it; false: only ours. */
bool tp_engine_barrier(void);
bool tp_engine_barrier_works(void);
void tp_engine_nap(uint32_t us);

/* A set of runnables that one thread runs and waits for. */
struct tp_round {
	struct tp_runnable **set;
	int count;
	struct tp_wait wait;
	uint64_t moved_ms;          /* when something last moved; 0: not looked at yet */
	uint64_t stalled_ms;        /* when `stalled` was last called */
};
/* Runs each once (those that nobody else holds). true: something moved. idle[i], where idle isn't NULL: i has nothing left. */
bool tp_round_run(struct tp_round *round, bool *idle);
/* Nothing moved: waits a little. Once the bells are armed `go_on` is asked whether there is reason not to sleep; extra is
 * one more word to watch, or NULL. */
void tp_round_pause(struct tp_round *round, _Atomic uint32_t *extra, bool (*go_on)(void *arg), void *arg);

#endif
