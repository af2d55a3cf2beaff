/* `telpher perf`: what its parts share. perf.c parses and steers, perf_data.c makes and checks data, perf_run.c runs ranks,
 * perf_output.c prints the table and the JSON, perf_vary.c repeats it all for each value of a variable. */
#ifndef TELPHER_PERF_H
#define TELPHER_PERF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include "nccl.h"

enum perf_coll {
	PERF_ALL_REDUCE, PERF_ALL_GATHER, PERF_REDUCE_SCATTER, PERF_BROADCAST, PERF_REDUCE, PERF_ALL_TO_ALL, PERF_GATHER,
	PERF_SCATTER, PERF_SEND_RECV, PERF_NCOLLS
};

#define PERF_MUL_SUM ncclNumOps         /* our number for "mulsum", made by ncclRedOpCreatePreMulSum */
#define PERF_NOPS 6
#define PERF_MOST_RANKS 1024            /* of a thread */

struct perf_coll_info {
	const char *name;                   /* "all_reduce" */
	bool reduces, rooted;
	bool block_per_rank;                /* the size is that of nranks blocks of count elements */
	bool send_is_large, recv_is_large;  /* which of the buffers hold nranks blocks */
	const char *factor;                 /* busbw / algbw, for people */
};
extern const struct perf_coll_info perf_colls[PERF_NCOLLS];
double perf_bus_factor(enum perf_coll coll, int nranks);

struct perf_options {
	enum perf_coll coll;
	size_t min_bytes, max_bytes, step_bytes;
	double step_factor;                 /* > 1: used instead of step_bytes */
	int iters, warmup, aggregate;       /* iters 0: by size */
	int registers;                      /* buffers are registered with ncclCommRegister */
	int check;                          /* checked repetitions of each line; 0: none */
	int root;                           /* -1: every rank in turn */
	int types[ncclNumTypes], ntypes;
	int ops[PERF_NOPS], nops;
	int nthreads, ngpus;                /* threads a process, ranks a thread */
	int average;                        /* 0: rank 0's time, 1: mean, 2: least, 3: greatest */
	FILE *json;                         /* NULL: none */
	/* this process among others */
	int nprocs, proc;
	ncclUniqueId id;
};

struct perf_sample {
	double us, algbw, busbw;            /* 0: not measured */
	int64_t wrong;                      /* -1: not checked */
};
struct perf_line {
	size_t bytes, count;
	ncclDataType_t type;
	int op, root;                       /* -1: none */
	struct perf_sample out_of_place, in_place;
};

/* Data. Values are small, so that sums are exact in every type and any order. */
size_t perf_type_bytes(int type);
const char *perf_type_name(int type);
const char *perf_op_name(int op);
double perf_scalar(int rank);           /* mulsum's factor of a rank */
void perf_encode_scalar(int type, int rank, void *out);
/* Fills rank's send buffer: nblocks blocks of count elements. */
void perf_fill(const struct perf_options *o, int type, int op, int rank, int nranks, void *buf, size_t nblocks, size_t count, uint64_t seed);
/* Counts the elements of what rank received that aren't what they must be. */
int64_t perf_wrong(const struct perf_options *o, int type, int op, int root, int rank, int nranks, const void *buf, size_t count, uint64_t seed);
/* False where the collective leaves this rank's receive buffer alone. */
bool perf_receives(enum perf_coll coll, int root, int rank);

/* Runs everything; lines are handed to perf_output by the process that has rank 0. Returns the exit status. */
int perf_run(const struct perf_options *o);

void perf_print_head(const struct perf_options *o, int nranks);
void perf_print_device(int rank, int pid, const char *host, int device);
void perf_print_columns(void);
void perf_add_line(const struct perf_line *line);
/* Prints the foot, writes the JSON; returns the exit status: not 0 where an element was wrong. */
int perf_finish(const struct perf_options *o, int nranks);
/* Writes json and closes out; frees json. False with a message where it could not be written. */
struct cJSON;
bool perf_write_json(struct cJSON *json, FILE *out);

/* --vary: runs this program once for each value, one table; all runs' JSON goes to json where that isn't NULL. */
int perf_vary(const char *assignment, int argc, char **argv, int nprocs, int nhosts, FILE *json);
/* --np: runs this program as a job of processes. */
int perf_spawn(int argc, char **argv, int nprocs, int nhosts);

#endif
