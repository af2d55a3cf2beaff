/* bench/gpu: collectives on GPUs, ours beside the original, in one run.
 *
 * Each library has a group of ranks of its own (processes, or threads of one process), which lives through the whole run. The parent
 * gives the groups one measurement after the other, so that both see the same machine; the group that isn't measured sleeps.
 *   main.c    options, groups, tables, JSON
 *   tune.c    --tune: each kind of kernel alone, and the table of crossovers
 *   rank.c    a rank: its communicator, its buffers, measurements
 *   calls.c   the collectives: how they are called, what goes in, what should come out
 *   cuda.c    the driver, opened at run time */
#ifndef TP_BENCH_GPU_H
#define TP_BENCH_GPU_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gpu/driver.h"
#include "nccl.h"

enum { MOST_RANKS = 64, MOST_REPEATS = 64 };

/* ---- cuda.c ---- */
extern struct tp_cuda cuda;
extern CUresult (*cuda_kernel_node)(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *out);    /* cuGraphKernelNodeGetParams; NULL: not there */
bool cuda_open(void);
#define CUDA(call) cuda_check(cuda.call, #call, __FILE__, __LINE__)
void cuda_check(CUresult result, const char *call, const char *file, int line);     /* ends the process where it failed */

/* ---- the library under test ---- */
struct library {
	const char *name, *path;
#define MEMBERS(X) X(ncclGetVersion) X(ncclGetUniqueId) X(ncclCommInitRank) X(ncclCommDestroy) X(ncclGetErrorString) X(ncclAllReduce) \
	X(ncclAllGather) X(ncclReduceScatter) X(ncclBroadcast) X(ncclReduce) X(ncclSend) X(ncclRecv) X(ncclGroupStart) X(ncclGroupEnd)
#define OPTIONAL_MEMBERS(X) X(ncclAlltoAll) X(ncclGather) X(ncclScatter) X(ncclMemAlloc) X(ncclMemFree) X(ncclCommRegister) X(ncclCommDeregister) \
	X(ncclCommWindowRegister) X(ncclCommWindowDeregister)
#define MEMBER(function) __typeof__(&function) function;
	MEMBERS(MEMBER)
	OPTIONAL_MEMBERS(MEMBER)
#undef MEMBER
};
bool library_open(struct library *library);

/* ---- calls.c ---- */
enum coll { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, ALL_TO_ALL, GATHER, SCATTER, SEND_RECV, NCOLLS };
extern const char *const coll_names[NCOLLS];
struct buffers { CUdeviceptr in, out; };
/* bytes: as nccl-tests counts, the larger of the two buffers. */
size_t coll_count(enum coll coll, size_t bytes, int nranks, size_t element);        /* elements of a block */
size_t coll_in_bytes(enum coll coll, size_t block, int nranks);
size_t coll_out_bytes(enum coll coll, size_t block, int nranks);
double coll_bus_factor(enum coll coll, int nranks);                                 /* busbw = bytes / time * factor */
bool coll_exists(const struct library *library, enum coll coll);
ncclResult_t coll_call(const struct library *library, enum coll coll, const struct buffers *b, size_t count, ncclDataType_t type,
	int nranks, int rank, ncclComm_t comm, CUstream stream);
void coll_fill(enum coll coll, const struct buffers *b, size_t count, ncclDataType_t type, int nranks, int rank);
/* false: the first wrong element is said on stderr. */
bool coll_check(enum coll coll, const struct buffers *b, size_t count, ncclDataType_t type, int nranks, int rank);

/* ---- a group ---- */
enum mode { EAGER, GRAPH, NMODES };
struct cell { enum coll coll; size_t bytes; enum mode mode; bool registered, cold; int calls, repeats; };
struct answer {
	bool done, wrong;
	double device_us;                   /* a call, median over repeats of the slowest rank */
	double host_us;                     /* a call in the caller's thread, likewise */
	int blocks;                         /* of the kernels of a call, where a graph shows them */
	int kernels;
	unsigned shared;                    /* bytes that a launch gives to a block: pipes alone take any */
};
struct rank_times { double device_us[MOST_REPEATS], host_us[MOST_REPEATS]; int blocks, kernels; unsigned shared; bool wrong; };
/* Seen by the parent and all ranks of a group. */
struct group {
	struct library library;
	int nranks, ndevices;
	bool threads, registers, buffers;               /* buffers: registered memory is no window */
	_Atomic bool unregistered;                      /* some rank has no registered memory */
	size_t most_bytes;
	ncclDataType_t type;
	pthread_barrier_t barrier;          /* ranks */
	_Atomic uint32_t order, ended;      /* futexes: cells given, ranks that have ended the last one */
	bool quit;
	struct cell cell;
	ncclUniqueId id;
	ncclResult_t failed;
	double init_ms[MOST_RANKS], cuda_ms[MOST_RANKS], destroy_ms[MOST_RANKS];
	int64_t memory_bytes;               /* of a device, all ranks' communicators on it */
	int version, sms;
	char device_name[64];
	struct rank_times times[MOST_RANKS];
};
/* ---- main.c ---- */
struct group *open_group(const char *name, const char *path, int nranks, int ndevices, bool registers);
struct answer measure_cell(int group, const struct cell *cell);
int calls_for(size_t bytes);
/* ---- tune.c ---- */
void tune_open(const char *path, int nranks, int ndevices, size_t min_bytes, size_t max_bytes, size_t factor);     /* groups, in place of all others */
bool tune(const struct group *any, int repeats);

void rank_run(struct group *group, int rank);
double now_us(void);
void word_wait(_Atomic uint32_t *word, uint32_t while_it_is);
void word_raise(_Atomic uint32_t *word);

#endif
