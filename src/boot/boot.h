/* Rendezvous: who is where, all-gather, barrier, life signs, and the memory that the ranks of one host share.
 *
 * One service thread a process has one TCP listener. It plays the root for unique ids made here (and for ids derived from
 * a parent communicator: split, shrink), links the first process of each host ("leader") to the others, watches for
 * deaths and spreads events. Ranks of a host meet in one shared segment, whose descriptor the leader passes over an
 * abstract Unix socket; all-gathers go through it, and between leaders over TCP in log(hosts) steps.
 * Nothing that arrives is believed: every connection proves the id's secret (keyed hash over a fresh challenge), a
 * stranger is dropped, logged once in plain words, and delays nobody. */
#ifndef TP_BOOT_BOOT_H
#define TP_BOOT_BOOT_H

#include <sys/types.h>
#include "base/base.h"

struct tp_boot_peer {
	int rank;
	int host;                   /* index, in order of the lowest rank */
	int local;                  /* place among the ranks of its host, in order of rank */
	pid_t pid;                  /* as its own host sees it */
	uint64_t host_hash, process_hash;
	char host_name[64];
	union tp_addr service;      /* its process's listener */
	int32_t device;             /* what the rank said; host ranks: its number in the process */
};

/* A rank's doorbell, in the host's shared segment. Whoever makes something possible for a rank that sleeps rings it. */
struct tp_bell {
	_Atomic uint32_t word;      /* futex */
	_Atomic uint32_t sleeping;
	char pad[TP_CACHE_LINE - 8];
};
/* After a store that the owner of the bell may be waiting for. One load where nobody sleeps. */
static inline void tp_bell_ring(struct tp_bell *bell)
{
	/* The sleeper sets the flag, issues a process-wide barrier (membarrier) and looks again before it sleeps: so no
	 * fence is needed here. Where membarrier is missing sleeps are short. */
	if (atomic_load_explicit(&bell->sleeping, memory_order_relaxed)) {
		atomic_fetch_add_explicit(&bell->word, 1, memory_order_release);
		tp_futex_wake(&bell->word, INT_MAX);
	}
}

enum tp_event_kind { TP_EVENT_NONE, TP_EVENT_DEAD, TP_EVENT_ABORTED, TP_EVENT_FAILED, TP_EVENT_REVOKED, TP_EVENT_MISMATCH };
struct tp_event { enum tp_event_kind kind; int rank; ncclResult_t result; char text[240]; };

/* What a rank called, to find mismatched calls. Posted at each enqueue: one cache line, no system call. */
struct tp_call {
	uint64_t seq;               /* 1, 2, … within the communicator */
	uint64_t count;
	uint32_t hash;              /* of (func, count, type, op, root): equal on all ranks */
	uint8_t func, type, op;     /* enum tp_coll, ncclDataType_t, ncclRedOp_t (ncclNumOps: PreMulSum) */
	uint8_t windows;            /* 1: by kernels that reach all ranks' windows; equal on all ranks, as they have promised */
	int32_t root;
	/* Of a call in windows: which (their number and one; 0: none is used), and where its buffers lie in them. As promised, equal on all ranks. */
	uint16_t in_window, out_window;
	uint64_t in_offset, out_offset;
};

struct tp_boot {
	int rank, nranks;
	int host, nhosts;
	int local, nlocal;
	const int *local_ranks;             /* [nlocal] */
	const struct tp_boot_peer *peers;   /* [nranks] */
	uint64_t comm_hash;                 /* the id in logs */
	uint8_t secret[TP_SECRET_BYTES];    /* of this communicator: net connections prove it too */
	struct tp_bell *bells;              /* [nlocal] in the segment */
	/* Changes when an event concerns this communicator on this host; polled by every wait. */
	_Atomic uint32_t *alarm;
	_Atomic uint32_t *abort;            /* this rank's own abort flag (ncclCommAbort): every wait in boot polls it */
};

struct tp_boot_args {
	int rank, nranks;
	int nids;
	const ncclUniqueId *ids;
	int32_t device;
	int timeout_ms;                     /* TELPHER_INIT_TIMEOUT, 0: parameter's default */
	_Atomic uint32_t *abort;
	const char *name;                   /* for logs */
};

ncclResult_t tp_boot_unique_id(ncclUniqueId *out);
/* Blocks until all ranks are there; a rank that never comes is named in the error, a peer of another version too. */
ncclResult_t tp_boot_open(const struct tp_boot_args *args, struct tp_boot **out);
/* An id that all members of a new communicator compute alike, without talking: root is the process of parent rank
 * `root_rank`, salt tells apart (kind, counter, colour, exclusions). Works with dead non-members in the parent. */
ncclResult_t tp_boot_derive_id(const struct tp_boot *parent, int root_rank, const void *salt, size_t salt_bytes, ncclUniqueId *out);
/* all: nranks * bytes_each, own part filled in. bytes_each <= TP_BOOT_GATHER_MAX. */
#define TP_BOOT_GATHER_MAX 4096
ncclResult_t tp_boot_all_gather(struct tp_boot *boot, void *all, size_t bytes_each);
ncclResult_t tp_boot_barrier(struct tp_boot *boot);
/* Collective over the ranks of a host: a new segment of zeros, mapped by all of them. The mapping lives until close. */
ncclResult_t tp_boot_share(struct tp_boot *boot, size_t bytes, const char *what, void **base);

/* Tells every rank; returns at once. The first event of a communicator is the one that waiters report. */
void tp_boot_post_event(struct tp_boot *boot, const struct tp_event *event);
bool tp_boot_first_event(struct tp_boot *boot, struct tp_event *out);
void tp_boot_post_call(struct tp_boot *boot, const struct tp_call *call);
/* A wait has lasted: compare the calls of all ranks (those of other hosts are asked for, so look again a little later).
 * true: out names two ranks whose calls of one seq differ. */
bool tp_boot_find_mismatch(struct tp_boot *boot, uint64_t seq, struct tp_event *out);
/* Has this rank closed its communicator in good order? Known of ranks of this host. */
bool tp_boot_has_left(const struct tp_boot *boot, int rank);
/* What a rank last called, where known: for messages about stalls. false: unknown. */
bool tp_boot_last_call(struct tp_boot *boot, int rank, struct tp_call *out);
/* Leaves without waiting. Peers learn that this rank is gone in good order (no DEAD event). */
void tp_boot_close(struct tp_boot *boot);

/* The service thread's fds and timers, for other folders (net, watch). Callbacks run on the service thread. */
struct tp_service_watch;
ncclResult_t tp_service_watch_fd(int fd, uint32_t epoll_events, void (*call)(void *arg, uint32_t events), void *arg,
	struct tp_service_watch **out);
void tp_service_unwatch(struct tp_service_watch *watch);

#endif
