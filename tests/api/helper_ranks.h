/* Ranks as processes (or as threads of one process), for tests: each runs a body with a communicator already made. The
 * test's own process never uses the library, so any number of such jobs can follow each other. */
#ifndef TESTS_API_HELPER_RANKS_H
#define TESTS_API_HELPER_RANKS_H

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>
#include <cmocka.h>
#include "nccl.h"
#include "telpher.h"
#include "sanitizers.h"

#define RANKS_MAX 64

struct ranks_shared {
	_Atomic int id_ready, arrived, left;
	_Atomic int barrier[64];        /* ranks_barrier's counters */
	_Atomic int word[16];           /* for the test's own use */
	ncclUniqueId id;
	pid_t pids[RANKS_MAX];
	char bytes[512];                /* for the test's own use */
};

struct ranks {
	int rank, nranks;
	ncclComm_t comm;                /* NULL where options say so */
	ncclUniqueId id;
	struct ranks_shared *shared;
	void *arg;
	int barriers;
};

struct ranks_options {
	int nranks;
	int nhosts;                     /* virtual hosts; 0 or 1: one */
	bool threads;                   /* ranks are threads of one process */
	bool no_comm;                   /* the body makes its communicator itself */
	uint64_t may_die;               /* bit r: rank r needn't end well */
	int timeout_s;                  /* 0: 150 */
	const char *env[8];             /* NAME=value, set in every rank */
};

typedef void (*ranks_body)(struct ranks *r);
/* true: all ranks ended well. Communicators the helper made are destroyed after the body. */
bool ranks_run(const struct ranks_options *options, ranks_body body, void *arg);
/* n processes on one host. */
bool ranks_run_n(int nranks, ranks_body body, void *arg);
/* Among the ranks of a job, not through the library. */
void ranks_barrier(struct ranks *r);
uint64_t ranks_now_ms(void);
/* A required time with what the surroundings cost: twice under a sanitizer, more where the machine has other work. */
int ranks_patience_ms(int ms);

#define REQUIRE(condition) do { \
	if (!(condition)) { \
		fprintf(stderr, "%s:%d: rank %d of %d (pid %d): %s is false; last error: %s\n", __FILE__, __LINE__, r->rank, r->nranks, \
			(int)getpid(), #condition, ncclGetLastError(NULL)); \
		_exit(9); \
	} \
} while (0)
#define REQUIRE_IS(call, wanted) do { \
	ncclResult_t got_ = (call); \
	if (got_ != (wanted)) { \
		fprintf(stderr, "%s:%d: rank %d of %d (pid %d): %s gives %d, not %d; last error: %s\n", __FILE__, __LINE__, r->rank, r->nranks, \
			(int)getpid(), #call, (int)got_, (int)(wanted), ncclGetLastError(NULL)); \
		_exit(9); \
	} \
} while (0)
#define REQUIRE_OK(call) REQUIRE_IS(call, ncclSuccess)
#define REQUIRE_ERROR_HAS(text) do { \
	if (!strstr(ncclGetLastError(NULL), (text))) { \
		fprintf(stderr, "%s:%d: rank %d of %d: the last error doesn't say \"%s\": %s\n", __FILE__, __LINE__, r->rank, r->nranks, \
			(text), ncclGetLastError(NULL)); \
		_exit(9); \
	} \
} while (0)

/* Numbers: element i of a buffer of `type` as a double and back (exact values only). */
size_t ranks_type_bytes(ncclDataType_t type);
double ranks_get(const void *buffer, size_t i, ncclDataType_t type);
void ranks_put(void *buffer, size_t i, ncclDataType_t type, double value);
/* A small whole number for (seed, rank, i): sums and products of eight of them are exact in every type. */
double ranks_value(uint64_t seed, int rank, size_t i, ncclRedOp_t op);
/* What op over n such values gives at i; *tolerance: relative, 0 where it is exact. */
double ranks_reduced(uint64_t seed, int n, size_t i, ncclDataType_t type, ncclRedOp_t op, double *tolerance);
bool ranks_equal(double got, double wanted, double tolerance);

#endif
