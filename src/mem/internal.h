/* What the parts of mem share:
 *   alloc.c     ncclMemAlloc
 *   pass.c      descriptors between the ranks of a host
 *   exchange.c  each rank shows a piece of its own memory to the ranks of its host
 *   record.c    what somebody's allocation is, as others need to know it
 *   import.c    what was mapped of other processes and ranks, once a process
 *   registry.c  a communicator's registrations and the tables that kernels read
 *   announce.c  tells peers of them in the background
 *   thread.c    does what peers tell
 *   window.c    registrations that all ranks make together */
#ifndef TP_MEM_INTERNAL_H
#define TP_MEM_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include "mem/mem.h"

#define TP_MEM_LOCAL_MAX 64
#define TP_MEM_WINDOWS 256              /* of a communicator at a time */

/* ---- pass.c ---- */
/* Proves the communicator's secret for one purpose. */
void tp_mem_sign(const struct tp_boot *boot, const char *what, int from, int to, uint64_t nonce, uint8_t mac[TP_SECRET_BYTES]);
/* A socket that the ranks of the host can reach by its number, which is random and never 0. */
ncclResult_t tp_mem_listen(const struct tp_boot *boot, int *listener, uint64_t *name);
void tp_mem_socket_name(const struct tp_boot *boot, int rank, uint64_t name, char text[80]);
static inline bool tp_mem_same_process(const struct tp_boot *boot, int rank)
{
	return boot->peers[rank].process_hash == boot->peers[boot->rank].process_hash;
}
/* One side of a passing, as each rank tells it to all. */
struct tp_mem_hand { uint64_t name; uint32_t has_fd, pad; };
/* Passes own_fd to the ranks of other processes of this host that want it, and takes theirs. hands: [nlocal], of all; wanted: [nlocal], symmetric.
 * fds: [nlocal], -1 where none came. */
ncclResult_t tp_mem_pass(struct tp_boot *boot, int listener, const struct tp_mem_hand *hands, const bool *wanted, int own_fd, int *fds);

/* ---- record.c ---- */
/* A range of somebody's memory. Travels as bytes. */
struct tp_mem_record {
	struct tp_gpu_export export;        /* of the allocation */
	uint64_t process, buffer_id;        /* which allocation: buffer ids are unique in a process */
	uint64_t base, gpu;                 /* address and struct tp_gpu, for ranks of its process */
	uint64_t offset, bytes;             /* of the range */
};
/* *fd: to be closed by the caller, -1 where none is needed. false: it can't be shared, why says why not. */
bool tp_mem_describe(const struct tp_gpu *gpu, uint64_t process, const void *ptr, size_t bytes, struct tp_mem_record *out, int *fd, char *why,
	size_t why_bytes);

/* ---- import.c ---- */
struct tp_mem_import;
/* Where kernels of gpu see the record's range; counted. own_process: tp_boot_peer.process_hash of this one. */
ncclResult_t tp_mem_import_take(const struct tp_gpu *gpu, uint64_t own_process, const struct tp_mem_record *record, int fd, uint64_t *address,
	struct tp_mem_import **out);
void tp_mem_import_drop(struct tp_mem_import *import);
int tp_mem_imports(void);               /* how many are kept (tests) */

/* ---- registry.c ---- */
struct tp_mem_range {
	struct tp_mem_range *next;          /* all of a communicator */
	uintptr_t begin, end, highest;      /* highest: the largest end of this and all ranges before it, in order */
	uint64_t buffer_id;
	uint32_t index;                     /* TP_MEM_BUFFERS: peers can't have it */
	uint64_t acks;                      /* bit l: local rank l has answered */
	bool retiring;                      /* no longer registered; the index is free once all have answered */
	uint32_t generation;                /* of the index: answers to an earlier user of it count for nothing */
	bool plain;                         /* by IPC: the owner may free it only when all have closed it */
	struct tp_mem_record record;
};
/* What a peer has told of its buffer `index`. */
struct tp_mem_remote { struct tp_mem_import *import; uint32_t generation; };

struct tp_mem {
	struct tp_boot *boot;
	const struct tp_gpu *gpu;
	uint64_t process;
	bool useful;                        /* there are others on the host, and all reach all */
	uint64_t everybody;                 /* bits of the other local ranks */
	struct tp_gpu_memory memory;        /* the table, then the windows' */
	uint64_t *table;                    /* the host's copy; words are read and written whole */
	pthread_mutex_t lock;
	pthread_cond_t answered;
	_Atomic int nranges;                /* that are registered and can be found */
	struct tp_mem_range *ranges;
	struct tp_mem_range **sorted;       /* those, by begin */
	struct tp_mem_range *by_index[TP_MEM_BUFFERS];
	uint32_t generations[TP_MEM_BUFFERS];
	uint32_t next_index;
	struct tp_mem_remote (*remotes)[TP_MEM_BUFFERS];    /* [nlocal] */
	/* announce.c */
	int listener;
	int timer;
	struct tp_service_watch *watch, *timer_watch;
	pthread_mutex_t say_lock;           /* what is said, and in which order */
	struct tp_mem_pending *pending;
	struct tp_mem_guest *guests;        /* the service thread's */
	uint64_t names[TP_MEM_LOCAL_MAX];   /* of the sockets of the local ranks; but for the own one with say_lock */
	/* window.c */
	_Atomic(struct tp_mem_view *) windows;  /* changes with the lock */
	uint64_t windows_used[TP_MEM_WINDOWS / 64];
	uint32_t next_window;
};
/* The device's copy of table or windows' words follows the host's. */
ncclResult_t tp_mem_write_words(struct tp_mem *mem, size_t first, const uint64_t *words, size_t count);

/* ---- announce.c ---- */
enum tp_mem_word { TP_MEM_ANNOUNCE = 1, TP_MEM_RETIRE, TP_MEM_ANSWER };
ncclResult_t tp_mem_announce_open(struct tp_mem *mem);
void tp_mem_announce_close(struct tp_mem *mem);
/* To all other ranks of the host; without the lock. fd: of the range's record, or -1. */
void tp_mem_announce(struct tp_mem *mem, enum tp_mem_word word, const struct tp_mem_range *range, int fd);
/* On the memory thread, what came: record and fd (may be taken) of local rank `from`. */
void tp_mem_peer_announced(struct tp_mem *mem, int from, uint32_t index, uint32_t generation, const struct tp_mem_record *record, int fd);
void tp_mem_peer_retired(struct tp_mem *mem, int from, uint32_t index, uint32_t generation);
void tp_mem_peer_answered(struct tp_mem *mem, int from, uint32_t index, uint32_t generation, bool retired, bool mapped);
void tp_mem_answer(struct tp_mem *mem, int to, uint32_t index, uint32_t generation, bool retired, bool mapped);

/* ---- thread.c ---- */
struct tp_mem_task {
	struct tp_mem_task *next;
	struct tp_mem *mem;
	void (*run)(struct tp_mem_task *task);          /* and frees it */
	void (*discard)(struct tp_mem_task *task);      /* the same, without doing it */
};
ncclResult_t tp_mem_thread_start(void);
/* One after the other, in this order. */
void tp_mem_thread_add(struct tp_mem_task *task);
/* Nothing is done for mem any more once this returns: no one may add to it. */
void tp_mem_thread_forget(const struct tp_mem *mem);

/* ---- window.c ---- */
void tp_mem_windows_close(struct tp_mem *mem);

#endif
