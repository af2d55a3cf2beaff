/* The CUDA executor's life, and what its kernels say. */
#include <stdatomic.h>
#include <stdlib.h>

#include "exec/cuda/internal.h"

/* A region: what fused kernels have (fused.h), then streams, lines of copies, pipes. */
size_t tp_cuda_copies_at(int nlocal, int nchannels)
{
	return tp_align_up(tp_align_up(tp_fused_region_bytes(nlocal, nchannels), 4096) + tp_cuda_streams_region_bytes(nlocal, nchannels), 4096);
}

static size_t pipes_at(int nlocal, int nchannels)
{
	return tp_align_up(tp_cuda_copies_at(nlocal, nchannels) + tp_cuda_copies_region_bytes(nlocal), 4096);
}

size_t tp_cuda_region_bytes(int nlocal_max, int nchannels, enum tp_cuda_pipes pipes)
{
	return pipes_at(nlocal_max, nchannels) + tp_pipes_region_bytes(pipes, nlocal_max, nchannels);
}

/* After the agreement on fused kernels. */
static ncclResult_t init_pipes(struct tp_cuda_exec *exec, enum tp_cuda_pipes level)
{
	struct tp_fused *f = &exec->fused;
	int n = exec->boot->nranks;
	uint64_t counters, rings[TP_PIPE_RANKS];
	if (!f->usable || !f->table.pipes || n > TP_PIPE_RANKS) return ncclSuccess;
	TP_TRY(tp_cuda_take_memory(exec, tp_pipes_counter_bytes(exec->nchannels), "counters of pipes", &counters));
	for (int r = 0; r < n; r++) rings[r] = f->region[r] + pipes_at(n, exec->nchannels);
	tp_pipes_init(level, n, exec->nchannels, exec->kernels->shared_most, counters, rings, &f->pipes);
	return ncclSuccess;
}

/* What the kernels know of the communicator; epochs and counters begin at zero. */
static ncclResult_t upload_comm(struct tp_cuda_exec *exec, const struct tp_cuda_options *options)
{
	const struct tp_boot *boot = exec->boot;
	struct tp_dev_comm comm = { .rank = boot->rank, .nranks = boot->nranks, .local = boot->local, .nlocal = boot->nlocal,
		.status = (uint64_t)(uintptr_t)exec->status_memory.ptr, .shared_gpu = options->shared_gpu, .counts = options->counts };
	for (int i = 0; i < boot->nlocal && i < TP_DEV_MAX_LOCAL; i++)
		comm.region[i] = (uint64_t)(uintptr_t)tp_links_region(exec->links, boot->local_ranks[i]);
	TP_TRY(tp_cuda_upload(exec, exec->comm, &comm, sizeof(comm)));
	return tp_cuda_upload_wait(exec);
}

static ncclResult_t take_all(struct tp_cuda_exec *exec)
{
	size_t nends = (size_t)exec->boot->nranks * 2 * TP_LINK_CLASSES * (size_t)exec->nchannels;
	exec->ends = tp_alloc(nends, sizeof(*exec->ends), "ends of links");
	exec->local_ends = tp_alloc((size_t)exec->nchannels * 2 * TP_CUDA_LOCAL_LINKS, sizeof(*exec->local_ends), "ends of links");
	exec->ends_lend = tp_alloc(nends, sizeof(*exec->ends_lend), "ends of links");
	if (!exec->ends || !exec->local_ends || !exec->ends_lend) return ncclSystemError;
	TP_TRY(tp_cuda_kernels_load(exec->gpu, &exec->kernels));
	TP_TRY(tp_gpu_alloc_host(exec->gpu, TP_CUDA_STAGING_BYTES, "uploads", &exec->staging_memory));
	TP_TRY(tp_gpu_alloc_host(exec->gpu, sizeof(struct tp_dev_status), "the kernels' status", &exec->status_memory));
	exec->status = exec->status_memory.host;
	return tp_cuda_take_memory(exec, sizeof(struct tp_dev_comm), "a communicator on the GPU", &exec->comm);
}

/* The largest chunk that every slot holds. Where each rank is alone on its host, slots inside hosts are of no account. */
static size_t limit_chunks(const struct tp_cuda_exec *exec)
{
	enum { MOST = 64 << 20 };       /* kernels count a chunk's bytes in 32 bits */
	size_t limit = exec->boot->nranks > 1 ? tp_links_inline_capacity(exec->links, false) : MOST;
	if (exec->boot->nranks == exec->boot->nhosts && exec->boot->nranks > 1) limit = tp_links_inline_capacity(exec->links, true);
	else if (tp_links_have_net(exec->links)) limit = TP_MIN(limit, tp_links_inline_capacity(exec->links, true));
	return TP_MIN(limit, (size_t)MOST);
}

ncclResult_t tp_cuda_exec_create(struct tp_boot *boot, struct tp_links *links, const struct tp_cuda_options *options, struct tp_cuda_exec **out)
{
	if (options->nchannels < 1 || options->nchannels > TP_DEV_MAX_CHANNELS)
		return TP_FAIL(ncclInternalError, "rank %d: %d channels for the GPU: 1 to %d are possible", boot->rank, options->nchannels, TP_DEV_MAX_CHANNELS);
	struct tp_cuda_exec *exec = tp_alloc(1, sizeof(*exec), "a CUDA executor");
	if (!exec) return ncclSystemError;
	exec->boot = boot;
	exec->links = links;
	exec->gpu = options->gpu;
	exec->nchannels = options->nchannels;
	exec->shared_gpu = options->shared_gpu;
	exec->chunk_limit = limit_chunks(exec);
	ncclResult_t result = take_all(exec);
	if (result == ncclSuccess) result = upload_comm(exec, options);
	struct tp_fused_options fused = { .gpu = options->gpu, .nchannels = options->nchannels, .shared_gpu = options->shared_gpu,
		.counts = options->counts, .pipes = options->pipes, .no_ctas = options->no_ctas, .comm = exec->comm };
	if (result == ncclSuccess) result = tp_fused_init(boot, links, &fused, &exec->fused);
	if (result == ncclSuccess) result = init_pipes(exec, options->pipes);
	if (result == ncclSuccess) result = tp_cuda_streams_init(exec);
	if (result == ncclSuccess) result = tp_cuda_copies_init(exec);
	if (result == ncclSuccess) *out = exec;
	else tp_cuda_exec_destroy(exec);
	return result;
}

void tp_cuda_exec_destroy(struct tp_cuda_exec *exec)
{
	if (!exec) return;
	tp_cuda_copies_close(exec);
	for (int b = 0; b < TP_CUDA_PLAN_BUCKETS; b++) {
		for (struct tp_cuda_plan *p = exec->plans[b], *next; p; p = next) {
			next = p->next;
			free(p);
		}
	}
	tp_cuda_free_memory(exec);
	if (exec->staging_memory.host) tp_gpu_free(&exec->staging_memory);
	if (exec->status_memory.host) tp_gpu_free(&exec->status_memory);
	free(exec->ends);
	free(exec->ends_lend);
	free(exec->local_ends);
	free(exec->transfer_ends);
	free(exec->transfer_last);
	free(exec->transfer_args);
	free(exec->transfer_order);
	free(exec);
}

/* ---- plans ---- */

static unsigned bucket_of(const struct tp_plan *plan)
{
	uintptr_t at = (uintptr_t)plan;
	return (unsigned)(at >> 5 ^ at >> 11) % TP_CUDA_PLAN_BUCKETS;
}

/* A plan that was freed and another made at its place with the same specification has the same programs: generators
 * depend on nothing else. */
static bool is_plan(const struct tp_cuda_plan *p, const struct tp_plan *plan)
{
	return p->plan == plan && p->source == plan->programs && p->spec.coll == plan->spec.coll && p->spec.algo == plan->spec.algo &&
		p->spec.root == plan->spec.root && p->spec.nchannels == plan->spec.nchannels;
}

struct tp_cuda_plan *tp_cuda_find_plan(struct tp_cuda_exec *exec, const struct tp_plan *plan)
{
	struct tp_cuda_plan *p = exec->last;
	if (p && is_plan(p, plan)) return p;
	for (p = exec->plans[bucket_of(plan)]; p && !is_plan(p, plan); p = p->next) { }
	if (p) exec->last = p;
	return p;
}

ncclResult_t tp_cuda_exec_prepare(struct tp_cuda_exec *exec, const struct tp_plan *plan)
{
	struct tp_cuda_plan *p;
	if (tp_cuda_find_plan(exec, plan)) return ncclSuccess;
	TP_TRY(tp_cuda_compile(exec, plan, &p));
	struct tp_cuda_plan **at = &exec->plans[bucket_of(plan)];
	p->next = *at;
	*at = exec->last = p;
	return ncclSuccess;
}

/* ---- status ---- */

void tp_cuda_exec_status(struct tp_cuda_exec *exec, struct tp_cuda_status *out)
{
	struct tp_dev_status *status = exec->status;
	*out = (struct tp_cuda_status){ .launched = atomic_load_explicit(&exec->launched, memory_order_relaxed),
		.straight = __atomic_load_n(&status->straight, __ATOMIC_RELAXED),
		/* Pairs with tp_kernel_end. */
		.completed = __atomic_load_n(&status->completed, __ATOMIC_ACQUIRE) };
	out->fault = (enum tp_cuda_fault)__atomic_load_n(&status->fault, __ATOMIC_ACQUIRE);     /* pairs with tp_block_fault */
	if (out->fault != TP_CUDA_FINE) {
		out->peer = status->peer;
		out->channel = status->channel;
		out->found = status->found;
		out->expected = status->expected;
	} else if (__atomic_load_n(&status->abort, __ATOMIC_RELAXED)) {
		out->fault = TP_CUDA_ABORTED;
	}
}

bool tp_cuda_exec_lends(struct tp_cuda_exec *exec)
{
	bool any = false;
	/* Pairs with tp_lend_begin: who has emptied an entry has called CUDA, and stored any_gone (seq_cst), before this. */
	for (int b = 0; b < exec->nchannels && !any; b++) any = __atomic_load_n(&exec->status->lends[b], __ATOMIC_SEQ_CST);
	return any;
}

void tp_cuda_exec_abort(struct tp_cuda_exec *exec)
{
	__atomic_store_n(&exec->status->abort, 1, __ATOMIC_RELEASE);        /* polled by tp_block_stopped */
}
