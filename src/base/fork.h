/* Locks and forks. A child has one thread: a lock that another one held when it was forked would stay held in it for ever. So whoever has a lock of
 * the process's (not of an object's) says what becomes of it:
 *
 *   TP_FORK_HOLD(level, mutex)     fork() takes it, so that what it guards is whole in the child
 *   TP_FORK_RENEW(mutex)           the child finds it free. For locks under which foreign code runs, which may be long, or fork by itself (a driver
 *                                  that starts a helper); what they guard must be of use at any moment, or of none to a child (a started CUDA)
 *
 * Locks are taken from the highest level to the lowest: a thread that holds one may take those of lower levels. Those of threads that only some
 * processes have (boot's, the IB transport's) are hooked later, so they are taken first. One a file. */
#ifndef TP_BASE_FORK_H
#define TP_BASE_FORK_H

#include <pthread.h>

#define TP_FORK_LOG 201         /* and parameters: any lock may be held where a line is written */
#define TP_FORK_BASE 202
#define TP_FORK_MEM 203
#define TP_FORK_ENGINE 204
#define TP_FORK_COMM 205
#define TP_FORK_ORDER 206

#define TP_FORK_HOOK(level, before, in_parent, in_child) \
	__attribute__((constructor(level))) static void tp_fork_hook(void) { pthread_atfork(before, in_parent, in_child); }

#define TP_FORK_HOLD(level, mutex) \
	static void tp_fork_take(void) { pthread_mutex_lock(&(mutex)); } \
	static void tp_fork_give(void) { pthread_mutex_unlock(&(mutex)); } \
	TP_FORK_HOOK(level, tp_fork_take, tp_fork_give, tp_fork_give)

#define TP_FORK_RENEW(mutex) \
	static void tp_fork_renew(void) { pthread_mutex_init(&(mutex), NULL); } \
	TP_FORK_HOOK(TP_FORK_BASE, NULL, NULL, tp_fork_renew)

#endif
