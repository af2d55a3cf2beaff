/* Ranks for the tests: forked processes (each with a host of its own where asked) and threads. */
#ifndef HELPER_BOOT_H
#define HELPER_BOOT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "boot/boot.h"

/* In a child: a check that fails ends it with 1. */
#define must(condition) do { \
	if (!(condition)) { \
		fprintf(stderr, "%s:%d: %s is false; last error: %s\n", __FILE__, __LINE__, #condition, tp_log_last_error()); \
		_exit(1); \
	} \
} while (0)

/* One child of helper_run. */
struct helper_job {
	int nranks, nhosts;             /* ranks are dealt to hosts in blocks */
	int rank;
	ncclUniqueId *id;               /* shared by all; made by rank 0 at its first helper_open, or by the test */
};
/* Forks nranks children and runs body in each; returns the number of children that did not exit with `expected` (a status as
 * waitpid gives it, -1: not looked at). expected may be NULL: all 0. */
int helper_run(int nranks, int nhosts, void (*body)(struct helper_job *job), const int *expected);
void helper_open(struct helper_job *job, struct tp_boot **boot);
ncclResult_t helper_try_open(struct helper_job *job, int rank, int nranks, int timeout_ms, struct tp_boot **boot);
/* 64 words of shared memory for the test's own use; all are 0 at first. */
void helper_put(struct helper_job *job, int word, int value);
int helper_get(struct helper_job *job, int word);
void helper_await(struct helper_job *job, int word, int at_least);
void helper_add(struct helper_job *job, int word);
/* Waits for the first event, ms at most. */
bool helper_event(struct tp_boot *boot, int ms, struct tp_event *out);
/* Every rank gathers and checks (rank * 1000 + round) in blocks of bytes_each. */
void helper_check_gather(struct tp_boot *boot, int rounds, size_t bytes_each);
int helper_count_fds(void);
int helper_count_threads(void);
/* No more than these are left, at once or soon: a connection lingers for a while, and a joined thread is listed for a moment longer. */
bool helper_settle(int fds, int threads);
/* nranks threads of this process; body gets its open boot. */
void helper_threads(int nranks, void (*body)(struct tp_boot *boot, void *arg), void *arg);

#endif
