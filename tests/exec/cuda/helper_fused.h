/* Fused kernels, run by the emulator: ranks are threads, each with its own region, comm and epochs. Results are compared bit for
 * bit with the host executor's arithmetic, sources in rank order. */
#ifndef TP_TESTS_EXEC_CUDA_HELPER_FUSED_H
#define TP_TESTS_EXEC_CUDA_HELPER_FUSED_H

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "exec/cuda/fused.h"
#include "exec/cuda/internal.h"

enum { FUSED_MOST_RANKS = 16 };

struct fused_call {
	enum tp_coll coll;
	enum tp_algo algo;
	int root;
	ncclDataType_t type;
	ncclRedOp_t op;
	int scaling;                            /* 0: none, 1: average, 2: multiplied first, 3: the same by a scalar in device memory */
	size_t count, shift;                    /* shift: of the buffers, in elements */
	unsigned odd;                           /* not in place: ranks whose output lies an element further, as bits */
	bool in_place, lines128, windows;
	bool owners;                            /* broadcast and reduce of three ranks and more: in two steps */
	bool pipes;                             /* through pipes: lines128 */
	bool transfers;                         /* all-to-all: as sends and receives, the large ones through pipes */
	bool offers;                            /* what only moves: receivers offer their buffers */
	unsigned registered;                    /* whose buffers are registered, as bits */
	size_t cut;                             /* lines and windows: bytes of a launch, over all ranks; 0: all */
	uint32_t tag;
};

struct fused_rank {
	int rank;
	struct fused_world *world;
	struct tp_dev_comm comm;
	struct tp_dev_status status;
	struct tp_fused fused;
	void *region, *pipes, *counters;
	void *lines, *line_counters;            /* of sends and receives */
	uint64_t *table;                        /* registered buffers: [rank][TP_DEV_BUFFERS], an entry a call */
	uint32_t tag_differs;
	uint64_t in_bases[FUSED_MOST_RANKS], out_bases[FUSED_MOST_RANKS];   /* windows: of the call at hand */
	int failed;
	/* While held, it goes no further than where lateness shows; in rounds: not before all threads of the kernel have begun. */
	_Atomic bool held;
	bool held_in_rounds;
	_Atomic unsigned looks;
	unsigned held_from;
};

struct fused_world {
	int n, nchannels;
	size_t region_bytes;
	const struct fused_call *calls;
	int ncalls;
	struct tp_layout *layout;
	pthread_barrier_t barrier;
	struct fused_rank ranks[FUSED_MOST_RANKS];
};

/* What runs as fused kernels on lines. */
enum { FUSED_KINDS = 11 };
struct fused_kind { enum tp_coll coll; enum tp_algo algo; bool rooted, reduces, owners; };
extern const struct fused_kind fused_kinds[FUSED_KINDS];

extern int fused_lateness;              /* of 100 looks so many are late; no kernel runs when it is set */

/* A call of a kind, of float sums. */
struct fused_call fused_call_of(const struct fused_kind *kind, int root, size_t count, bool lines128, uint32_t tag);

/* The ranks' memory as it is at init, but for their blocks' epochs, which are their pipes' counters too. */
void fused_open(struct fused_world *w, int n, int nchannels, uint32_t epoch);
/* The same with one block and the smallest slots, for calls of several rounds; and how many floats of a slice a round moves. */
void fused_open_small(struct fused_world *w, int n, uint32_t epoch);
size_t fused_small_round(int n, bool lines128);
void fused_close(struct fused_world *w);
/* Pipes with smaller chunks from now on. */
void fused_set_chunk(struct fused_world *w, uint32_t bytes);
/* The first nranks ranks run the calls, in a row, and check all results at the end. */
void fused_begin(struct fused_world *w, int nranks, const struct fused_call *calls, int ncalls, pthread_t *threads);
/* Until they have ended: the line of the first failure, 0. */
int fused_end(struct fused_world *w, int nranks, const pthread_t *threads);
int fused_run(struct fused_world *w, const struct fused_call *calls, int ncalls);
void fused_abort(struct fused_world *w);
/* The calls in a world of their own. */
void fused_run_calls(int n, int nchannels, uint32_t epoch, const struct fused_call *calls, int ncalls);
void fused_run_small(int n, const struct fused_call *calls, int ncalls);
void fused_random_calls(int n, int nchannels, uint32_t epoch, uint64_t seed, int ncalls, size_t most_bytes);
/* Through pipes alone. */
void fused_random_pipes(int n, int nchannels, uint32_t epoch, uint32_t chunk, uint64_t seed, int ncalls, size_t most_bytes);

#endif
