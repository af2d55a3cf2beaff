/* A world of ranks on this machine without a rendezvous: threads or forked processes that meet in memory made before. Its
 * own tp_boot_all_gather and tp_boot_share stand in for boot's, so that tests here need nothing of it. */
#ifndef TP_TESTS_EXEC_HELPER_WORLD_H
#define TP_TESTS_EXEC_HELPER_WORLD_H

#include "exec/exec.h"
#include "sanitizers.h"

enum world_kind { WORLD_THREADS, WORLD_PROCESSES };
/* The thread sanitizer is ten times as slow, and between processes it sees nothing: there, worlds of threads do. */
#define WORLD_KINDS (SANITIZED_THREAD ? 1 : 2)

struct world_options {
	enum world_kind kind;
	int nranks, nchannels;
	bool by_ref;
	size_t shared_bytes;        /* memory that all ranks see, zeroed: results to compare */
};
struct world {
	struct tp_boot *boot;
	struct tp_links *links;
	struct tp_exec *exec;
	int rank, nranks;
	bool crowded;               /* more ranks than cores */
	unsigned char *shared;
	const void *arg;
};
/* Runs body on every rank; its result: 0, or the line that failed. The first failure of any rank is returned. */
int world_run(const struct world_options *options, int (*body)(struct world *world), const void *arg);
void world_barrier(struct world *world);
/* One operation from start to end, with the engine's kind of waiting. */
ncclResult_t world_run_call(struct world *world, const struct tp_exec_call *call);

#define WORLD_CHECK(condition) do { \
	if (!(condition)) { \
		fprintf(stderr, "%s:%d: rank %d: %s\n", __FILE__, __LINE__, world->rank, #condition); \
		return __LINE__; \
	} \
} while (0)

#endif
