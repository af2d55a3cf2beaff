/* Graph registration: buffers that a captured call receives into are registered (mem/mem.h) as long as its graph lives, for a graph that is
 * captured once is replayed often, and its memory stays. The program need not ask for it. (Memory that CUDA IPC shares only where it is told to:
 * it must not be freed before all peers have let go of it, which a program that didn't ask doesn't know.)
 *
 * Like any registration it is this rank's own affair: peers map the buffer in the background, and kernels are told of it only when all have.
 * So a capture waits for them, but never long, and goes on without. A graph's end is heard on a thread of the driver's, where nothing
 * of CUDA's may be called: what it held is let go by a later call of the rank.
 *
 * Who looks for a registration finds these too, whoever made them: other graphs, which hold what they find, and calls that aren't captured. So what
 * no graph holds any more goes once nothing of this rank is outstanding. */
#include <stdlib.h>
#include <unistd.h>

#include "comm/gpu.h"

#define WAIT_MS 100u                            /* for peers, in all of a capture */

struct tp_gpu_kept { struct tp_gpu_kept *next; uintptr_t begin, end; void *handle; int graphs; };
struct tp_gpu_use { struct tp_gpu_use *next; struct tp_gpu_kept *kept; };

enum { PARAM_REGISTER, PARAM_LEGACY };
static struct tp_param params[] = {
	[PARAM_REGISTER] = { .name = "NCCL_GRAPH_REGISTER", .kind = TP_PARAM_BOOL, .fallback = "1", .max = 1,
		.doc = "GPU ranks: 1: large buffers that captured calls receive into are registered while their graph lives" },
	[PARAM_LEGACY] = { .name = "NCCL_LEGACY_CUDA_REGISTER", .kind = TP_PARAM_BOOL, .fallback = "0", .max = 1,
		.doc = "GPU ranks: 1: for captured calls (NCCL_GRAPH_REGISTER) memory of cudaMalloc is registered too, which CUDA IPC shows to peers: mapping it, and letting it "
			"go, may wait for their kernels; 0: that of ncclMemAlloc and its like alone" },
};
TP_PARAM_TABLE("comm", params)

static bool covers(const struct tp_gpu_kept *k, uintptr_t begin, uintptr_t end) { return begin >= k->begin && end <= k->end; }

static bool is_held(const struct tp_gpu_held *held, uintptr_t begin, uintptr_t end)
{
	const struct tp_gpu_use *use = held->uses;
	while (use && !covers(use->kept, begin, end)) use = use->next;
	return use != NULL;
}

static bool hold(struct tp_gpu_held *held, struct tp_gpu_kept *k)
{
	struct tp_gpu_use *use = tp_alloc(1, sizeof(*use), "a graph's registration");
	if (!use) return false;
	*use = (struct tp_gpu_use){ held->uses, k };
	held->uses = use;
	k->graphs++;
	return true;
}

/* The whole of its allocation, for other buffers of the graph lie there too. False: no peer will map it. */
static bool keep(struct tp_gpu_rank *rank, struct tp_gpu_held *held, const void *buffer, size_t bytes)
{
	struct tp_gpu_pointer p;
	if (tp_gpu_pointer(buffer, &p) != ncclSuccess || !p.device || p.managed) return false;
	uintptr_t begin = (uintptr_t)p.base, end = begin + p.bytes;
	if (!tp_param_int(&params[PARAM_LEGACY]) && !tp_mem_is_mapped(buffer)) return false;
	if ((uintptr_t)buffer < begin || (uintptr_t)buffer + bytes > end) return false;
	struct tp_gpu_kept *k = tp_alloc(1, sizeof(*k), "a graph's registration");
	if (!k) return false;
	*k = (struct tp_gpu_kept){ .next = rank->kept, .begin = begin, .end = end };
	if (tp_mem_register(rank->mem, p.base, p.bytes, &k->handle) != ncclSuccess) {
		free(k);
		return false;
	}
	if (!hold(held, k)) {
		tp_mem_deregister(rank->mem, k->handle);
		free(k);
		return false;
	}
	rank->kept = k;
	return tp_mem_has_effect(k->handle);
}

static void register_buffer(struct tp_gpu_rank *rank, struct tp_gpu_held *held, const void *buffer, size_t bytes)
{
	struct tp_mem_place place;
	uintptr_t begin = (uintptr_t)buffer;
	if (!buffer || is_held(held, begin, begin + bytes)) return;
	for (struct tp_gpu_kept *k = rank->kept; k; k = k->next)
		if (covers(k, begin, begin + bytes) && !hold(held, k)) return;
	if (tp_mem_find(rank->mem, buffer, bytes, &place) || !keep(rank, held, buffer, bytes)) return;
	uint64_t start = tp_clock_ms(), waited = 0;
	while (held->waited_ms + waited < WAIT_MS && !tp_mem_find(rank->mem, buffer, bytes, &place)) {
		usleep(100);
		waited = tp_clock_ms() - start;
	}
	held->waited_ms += (uint32_t)waited;
}

/* Only what kernels will offer. Ranks that aren't the root of a gather get nothing. */
static void register_call(struct tp_gpu_rank *rank, struct tp_gpu_held *held, const struct tp_exec_call *call, int own)
{
	uint64_t from = tp_cuda_exec_offers_from(atomic_load_explicit(&rank->exec, memory_order_relaxed), call);
	for (int t = 0; t < call->ntransfers; t++) {
		const struct tp_exec_transfer *transfer = &call->transfers[t];
		if (!transfer->is_send && transfer->peer != own && transfer->bytes >= from) register_buffer(rank, held, transfer->buf, transfer->bytes);
	}
	if (call->plan && call->block_bytes >= from && (call->plan->spec.coll != TP_GATHER || call->plan->spec.root == own))
		register_buffer(rank, held, call->output, call->block_bytes * call->plan->output_blocks);
}

void tp_gpu_register_captured(struct ncclComm *comm, struct tp_gpu_held *held, const struct tp_exec_call *calls, int ncalls)
{
	if (!tp_param_int(&params[PARAM_REGISTER])) return;
	for (int i = 0; i < ncalls; i++)
		if (!(calls[i].in_window | calls[i].out_window)) register_call(comm->gpu, held, &calls[i], comm->rank);
}

void tp_gpu_register_spend(struct tp_gpu_held *held)
{
	struct tp_gpu_use *last = held->uses, *before;
	if (!last) return;
	while (last->next) last = last->next;
	before = atomic_load_explicit(&held->rank->spent, memory_order_relaxed);
	do last->next = before;
	while (!atomic_compare_exchange_weak_explicit(&held->rank->spent, &before, held->uses, memory_order_release, memory_order_relaxed)); /* pairs with tp_gpu_register_drop_spent */
	held->uses = NULL;
}

static void drop(struct tp_gpu_rank *rank, struct tp_gpu_kept *k, bool deregisters)
{
	struct tp_gpu_kept **at = &rank->kept;
	while (*at != k) at = &(*at)->next;
	*at = k->next;
	if (deregisters) tp_mem_deregister(rank->mem, k->handle);
	free(k);
}

void tp_gpu_register_drop_spent(struct tp_gpu_rank *rank, bool deregisters)
{
	struct tp_gpu_use *use = atomic_exchange_explicit(&rank->spent, NULL, memory_order_acquire), *next;
	for (; use; use = next) {
		next = use->next;
		if (--use->kept->graphs == 0) drop(rank, use->kept, deregisters);
		free(use);
	}
}
