/* The control segment of a host: made by the process of the host's lowest rank, mapped by all others. Places are offsets from
 * its beginning. Nobody holds a lock in it: a process may be killed between any two stores, and the others must go on. */
#ifndef TP_BOOT_SEGMENT_H
#define TP_BOOT_SEGMENT_H

#include "boot/boot.h"

#define TP_SEGMENT_EVENTS 16
#define TP_CALLS_KEPT 8
#define TP_CALL_WORDS 6
_Static_assert(sizeof(struct tp_call) == TP_CALL_WORDS * 8, "a call is six words");

/* LEFT: all its ranks closed in good order. */
enum tp_proc_state { TP_PROC_LIVES, TP_PROC_LEFT, TP_PROC_DEAD };
struct tp_segment_proc {
	_Atomic uint32_t state;         /* enum tp_proc_state */
	_Atomic uint32_t left;          /* of its ranks */
	int32_t pid, nranks, first_rank;
	_Atomic uint32_t locked;        /* it holds its byte of the segment's file (see watch.c) */
	uint64_t process_hash;
	char pad[TP_CACHE_LINE - 32];
} __attribute__((aligned(TP_CACHE_LINE)));

/* Written by one rank, read by any: odd while it is written. */
struct tp_segment_call {
	_Atomic uint64_t version;
	_Atomic uint64_t words[TP_CALL_WORDS];
	char pad[TP_CACHE_LINE - 8 - TP_CALL_WORDS * 8];
} __attribute__((aligned(TP_CACHE_LINE)));

struct tp_segment_rank {
	struct tp_segment_call calls[TP_CALLS_KEPT];
	_Atomic uint32_t left, newest;
	_Atomic uint32_t gather_bytes[2];   /* of the turns under way: all must agree */
	int32_t proc;
	char pad[TP_CACHE_LINE - 20];
} __attribute__((aligned(TP_CACHE_LINE)));

struct tp_segment {
	uint64_t bytes;
	int32_t nranks, nlocal, nhosts, host, nprocs;
	uint64_t peers, local_ranks, host_first, host_ranks, procs, ranks, bells, remote_calls, gather, gather_bytes;
	_Atomic uint32_t alarm __attribute__((aligned(TP_CACHE_LINE)));
	/* The first event is slot event_first - 1: a writer fills a slot of its own and then tries to make it the first, so one
	 * that dies half-way stops nobody. */
	_Atomic uint32_t event_first, event_next;
	_Atomic uint32_t arrived __attribute__((aligned(TP_CACHE_LINE)));
	_Atomic uint32_t full, full_sleepers;           /* all have arrived: the leader goes on */
	_Atomic uint32_t generation __attribute__((aligned(TP_CACHE_LINE)));    /* moves when all may go on */
	_Atomic uint32_t sleepers;
	struct tp_event events[TP_SEGMENT_EVENTS];
};

static inline void *tp_segment_at(struct tp_segment *seg, uint64_t offset) { return (char *)seg + offset; }
static inline struct tp_boot_peer *tp_segment_peers(struct tp_segment *seg) { return tp_segment_at(seg, seg->peers); }
static inline int *tp_segment_local_ranks(struct tp_segment *seg) { return tp_segment_at(seg, seg->local_ranks); }
/* Ranks of host h: host_ranks[host_first[h]] up to host_first[h + 1]. */
static inline int *tp_segment_host_first(struct tp_segment *seg) { return tp_segment_at(seg, seg->host_first); }
static inline int *tp_segment_host_ranks(struct tp_segment *seg) { return tp_segment_at(seg, seg->host_ranks); }
static inline struct tp_segment_proc *tp_segment_procs(struct tp_segment *seg) { return tp_segment_at(seg, seg->procs); }
static inline struct tp_segment_rank *tp_segment_ranks(struct tp_segment *seg) { return tp_segment_at(seg, seg->ranks); }
static inline struct tp_bell *tp_segment_bells(struct tp_segment *seg) { return tp_segment_at(seg, seg->bells); }
static inline struct tp_segment_call *tp_segment_remote_calls(struct tp_segment *seg) { return tp_segment_at(seg, seg->remote_calls); }
static inline char *tp_segment_gather(struct tp_segment *seg, uint32_t turn)
{
	return (char *)seg + seg->gather + (turn & 1) * seg->gather_bytes;
}

/* From a checked table. nlocal, bytes needed: layout only; then fill writes it all. */
size_t tp_segment_plan(const void *table, int host, struct tp_segment *out);
void tp_segment_fill(struct tp_segment *seg, const struct tp_segment *plan, const void *table);

#endif
