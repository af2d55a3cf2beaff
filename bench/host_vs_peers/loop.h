/* What the measured loop asks of an implementation. Every file peer_*.c gives these for one of them; loop.c is the same for all. */
#ifndef TELPHER_BENCH_LOOP_H
#define TELPHER_BENCH_LOOP_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

enum peer_collective {
	PEER_ALL_REDUCE,        /* in and out: count floats */
	PEER_ALL_GATHER,        /* in: count, out: count a rank */
	PEER_REDUCE_SCATTER,    /* in: count a rank, out: count */
	PEER_BROADCAST,         /* from rank 0, in place: out only */
	PEER_ALL_TO_ALL,        /* in and out: count a rank */
	PEER_COLLECTIVES
};

/* Joins the others. dir: a folder all ranks share, where files may be left for each other. rank is -1 where the
 * implementation's own launcher started the process. 0, or -1 after a message on stderr; so for all that follow. */
int peer_start(const char *dir, int *rank, int *nranks);
int peer_barrier(void);
/* One call, done when it returns. out of PEER_BROADCAST holds the input on rank 0. */
int peer_call(enum peer_collective which, float *in, float *out, size_t count);
void peer_stop(void);

#ifdef __cplusplus
}
#endif
#endif
