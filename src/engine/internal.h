/* What wait.c and engine.c share. */
#ifndef TP_ENGINE_INTERNAL_H
#define TP_ENGINE_INTERNAL_H

#include <pthread.h>
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

/* place.c; all with the engine's mutex held. */
bool tp_place_add(const char *device, const uint64_t near[TP_CPU_WORDS]);   /* true: the thread, where there is one, is to be placed anew */
void tp_place_thread(pthread_t thread);
const char *tp_place_words(char *text, size_t bytes);

/* delay.c */
struct tp_delay_window {
	uint64_t wall_ns, measured_ns, lost_ns;     /* of the stretches that were measured: how long they took, and without a processor */
	uint64_t queue_ns, idle_ns;                 /* the thread's wait for a processor; time that the machine's processors were idle */
	bool crowded;                               /* the machine has more ranks than processors */
};
enum tp_delay_verdict { TP_DELAY_NONE, TP_DELAY_FULL /* no processor was free */, TP_DELAY_MISPLACED };
enum tp_delay_verdict tp_delay_judge(const struct tp_delay_window *window);
/* Of one thread. */
struct tp_delay {
	const char *(*where)(char *text, size_t bytes);     /* says where the thread is */
	bool measuring, worked, readable, told, warned;
	uint32_t rounds;
	int bad, misplaced;                         /* windows in a row */
	uint64_t start_ns, start_cpu_ns, since_ns, queue_ns, idle_ns;
	struct tp_delay_window window;
};
/* Around each round that the thread runs. */
void tp_delay_before(struct tp_delay *delay);
void tp_delay_after(struct tp_delay *delay, bool moved, bool crowded);

#endif
