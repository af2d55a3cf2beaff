/* bench/gpu: collectives on GPUs, ours beside the original, in one run.
 *
 * Each library has a group of ranks of its own (processes, or threads of one process), which lives through the whole run. The parent
 * gives the groups one measurement after the other, so that both see the same machine; the group that isn't measured sleeps.
 *   main.c    options, and what is run
 *   group.c   groups of ranks, and one measurement by one of them
 *   report.c  tables, JSON
 *   tune.c    --tune: each kind of kernel alone, and the table of crossovers
 *   rank.c    a rank: its communicators, its buffers
 *   measure.c a rank's measurements: eager, by its own graph, by one graph of all ranks
 *   look.c    what ran: kernels, blocks, multiprocessors, and what the library calls it
 *   calls.c   the collectives: how they are called, what goes in, what should come out
 *   cuda.c    the driver, opened at run time */
#ifndef TP_BENCH_GPU_H
#define TP_BENCH_GPU_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "gpu/driver.h"
#include "nccl.h"
#include "telpher.h"

enum { MOST_RANKS = 64, MOST_REPEATS = 64, MOST_INITS = 16, MOST_GROUPS = 16, KERNEL_NAME = 96, HOW_NAME = 40 };

/* ---- cuda.c ---- */
extern struct tp_cuda cuda;
extern CUresult (*cuda_kernel_node)(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *out);    /* cuGraphKernelNodeGetParams; NULL: not there */
extern CUresult (*cuda_kernel_name)(const char **out, CUkernel kernel);
bool cuda_open(void);
#define CUDA(call) cuda_check(cuda.call, #call, __FILE__, __LINE__)
void cuda_check(CUresult result, const char *call, const char *file, int line);     /* ends the process where it failed */

/* ---- the library under test ---- */
struct library {
	const char *name, *path;
#define MEMBERS(X) X(ncclGetVersion) X(ncclGetUniqueId) X(ncclCommInitRank) X(ncclCommDestroy) X(ncclGetErrorString) X(ncclAllReduce) \
	X(ncclAllGather) X(ncclReduceScatter) X(ncclBroadcast) X(ncclReduce) X(ncclSend) X(ncclRecv) X(ncclGroupStart) X(ncclGroupEnd)
#define OPTIONAL_MEMBERS(X) X(ncclAlltoAll) X(ncclGather) X(ncclScatter) X(ncclMemAlloc) X(ncclMemFree) X(ncclCommRegister) X(ncclCommDeregister) \
	X(ncclCommWindowRegister) X(ncclCommWindowDeregister) X(ncclGetLastError) X(ncclResetDebugInit) X(telpher_version) X(telpher_comm_paths)
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
enum mode { EAGER, GRAPH, JOINT /* one graph of all ranks */, NMODES };
struct cell { enum coll coll; size_t bytes; enum mode mode; bool registered, cold; int calls, repeats; };
/* What a call ran as. */
struct ran {
	int kernels, copies;                /* kernels, and copies by copy engines, of a call */
	int blocks, threads;                /* of its largest kernel, and of a block */
	int sms;                            /* multiprocessors that so many blocks fill, as many on each as fit */
	unsigned shared;                    /* bytes that a launch gives to a block: pipes alone take any */
	char kernel[KERNEL_NAME];           /* the largest one's name; empty: the driver doesn't tell */
	char how[HOW_NAME];                 /* what the library says: "TWO_SHOT/LL128"; empty: it doesn't */
};
struct answer {
	bool done, wrong;
	double device_us;                   /* a call, median over repeats of the slowest rank */
	double host_us;                     /* a call in the caller's thread, likewise */
	double launch_us, event_us;         /* of an eager call's kernel: its launch alone, and with the record of an event behind it; 0: not to be had */
	struct ran ran;                     /* of the rank with the most blocks */
};
struct rank_times { double device_us[MOST_REPEATS], host_us[MOST_REPEATS], launch_us[MOST_REPEATS], event_us[MOST_REPEATS]; struct ran ran; bool absent, wrong, launches; };
/* Of the communicators that a rank made and destroyed before the one that it keeps; the first one has kernels to load. */
struct rank_lives { double cuda_ms, init_ms[MOST_INITS], destroy_ms[MOST_INITS]; int64_t first_bytes, bytes; };
/* Seen by the parent and all ranks of a group. */
struct group {
	struct library library;
	int nranks, ndevices, inits;
	bool threads, registers, buffers;   /* buffers: registered memory is no window */
	_Atomic bool unregistered;          /* some rank has no registered memory */
	bool net;                           /* some ranks talk over a network */
	size_t most_bytes;
	ncclDataType_t type;
	pthread_barrier_t barrier;          /* ranks */
	_Atomic uint32_t order, ended;      /* futexes: cells given, ranks that have ended the last one */
	bool quit;
	struct cell cell;
	ncclUniqueId id;
	int version, sms, spoiled;          /* spoiled: the rank whose results are made wrong, for tests; -1: none */
	char device_name[64], join[8];      /* how the ranks' GPUs are joined: shared (they share one), nvlink, pcie */
	struct rank_times times[MOST_RANKS];
	struct rank_lives lives[MOST_RANKS];
};

/* ---- group.c ---- */
struct group_options { const char *name, *path; int nranks, ndevices, inits; bool threads, registers, buffers; size_t most_bytes; ncclDataType_t type; };
/* The group's number. A rank that dies ends the run. */
int open_group(const struct group_options *options);
struct group *group_of(int number);
struct answer measure_cell(int number, const struct cell *cell);
void close_group(int number);           /* its ranks end */
double median(double *values, int n);   /* sorts them */

/* ---- report.c ---- */
bool report_open(const char *json);     /* NULL: no JSON. false: it can't be written, said on stderr */
void report_close(void);
void report_cell(const struct group *g, const struct cell *cell, const struct answer *a);       /* a line of JSON */
void report_lives(const struct group *g);
void print_head(enum coll coll, int nranks, const char *ours, const char *theirs);
/* A row; theirs: NULL where it stands alone. false: a result was wrong. */
bool print_row(size_t bytes, const char *kind, const struct answer *ours, const struct answer *theirs);

/* ---- tune.c ---- */
struct tune_options { struct group_options group; size_t min_bytes, max_bytes, factor; int repeats, calls; const char *table; /* NULL: none */ };
bool tune_open(const struct tune_options *options);     /* groups, in place of all others; false: the table can't be written */
bool tune(const struct tune_options *options);          /* false: a result was wrong, or the table couldn't be written */
int calls_for(size_t bytes, int asked);                 /* main.c; asked: 0: by size */

/* ---- rank.c ---- */
struct rank {
	struct group *g;
	const struct library *l;
	int rank;
	CUcontext context;
	CUstream stream;
	CUevent begin, end, fork;               /* fork: within a capture */
	ncclComm_t comm;
	size_t room;                            /* bytes of each buffer */
	struct buffers plain, registered;       /* registered.in == 0: this library or memory can't */
	void *handles[2];
	ncclWindow_t windows[2];
	char how[NCOLLS][HOW_NAME];             /* what the library said last: where it says nothing, the call is as the last one that it spoke of */
};
extern struct rank *here[MOST_RANKS];       /* of this process */
void rank_run(struct group *group, int rank);
void meet(struct rank *k);
void must(const struct rank *k, ncclResult_t result, const char *what);
#define MUST(call) must(k, call, #call)
double now_us(void);
void word_wait(_Atomic uint32_t *word, uint32_t while_it_is);
void word_raise(_Atomic uint32_t *word);

/* ---- measure.c ---- */
enum { COLD_BYTES = 256 << 20 };            /* more than any level-2 cache: buffers so far apart are cold again */
void measure(struct rank *k);

/* ---- look.c ---- */
void look_open(void);                       /* before the library is opened */
void look_close(void);                      /* what the library warned of, to stderr */
/* Between these the library says what calls run as; all ranks, nothing under way. */
void look_begin(struct rank *k);
void look_end(struct rank *k, const struct cell *c);
void look_at_graph(struct rank *k, CUgraph graph, int calls, struct ran *out);
bool look_at_launch(CUgraph graph, CUDA_KERNEL_NODE_PARAMS *out);       /* the only kernel, which is all that moves data; the graph's; false: it isn't */

#endif
