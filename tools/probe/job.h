/* Data over a link: one block or a stream of messages, out, in, or both at once, by one loop that posts, polls and looks at the peer. */
#ifndef TELPHER_PROBE_JOB_H
#define TELPHER_PROBE_JOB_H

#include "probe/link.h"
#include "probe/memory.h"
#include "probe/shape.h"

struct probe_job {
	struct probe_link *link;
	struct probe_peer *peer;                /* NULL: both ends are here, nobody can go away */
	enum probe_op op;
	struct probe_shape shape;
	const struct probe_memory *memory;      /* the half that goes out (or is read into), then the half that comes in */
	uint64_t out_at, in_at;                 /* offsets of these in memory */
	uint64_t remote_addr;                   /* of the other side's `in` half */
	uint32_t remote_rkey;
	bool out, in;                           /* what this side does: requests; being written or sent to with notice */
	bool notice;                            /* the last piece of each share carries immediate data */
	double *us;                             /* a stream: each message waits for the one before, and this is what each took; NULL: as many at once as go */
	/* afterwards */
	uint64_t ns;                            /* from the first post to the last completion of what goes out */
	uint64_t imm;                           /* sum of what came in as immediate data */
	/* its own */
	struct probe_way { uint64_t next, freed, posted_in, in; } ways[PROBE_MAX_QPS];
	uint64_t left_out, left_in, looked;
	uint32_t allowed, idle;                 /* messages that may be under way; polls that found nothing */
};

/* Posts the receives that the other side's requests will need; before that side is told to begin. */
int probe_job_prepare(struct probe_job *job);
int probe_job_run(struct probe_job *job);
#endif
