/* Memory of GPU ranks: ncclMemAlloc, registered buffers, windows. What registration is good for: mem/mem.h. */
#include <stdlib.h>

#include "comm/gpu.h"

struct tp_gpu_window { struct tp_gpu_window *next; struct tp_mem_window *window; };

struct window_job {
	struct tp_job job;
	void *buffer;
	size_t bytes;
	int flags;
	ncclWindow_t *out;
	bool ran;
};

ncclResult_t tp_gpu_memory_alloc(size_t bytes, void **out)
{
	struct tp_gpu *gpu;
	TP_TRY(tp_gpu_current(&gpu));
	return tp_mem_alloc(gpu, bytes, out);
}

ncclResult_t tp_gpu_memory_free(void *memory) { return tp_mem_free(memory); }

ncclResult_t tp_gpu_memory_register(struct ncclComm *comm, void *buffer, size_t bytes, void **handle)
{
	return tp_mem_register(comm->gpu->mem, buffer, bytes, handle);
}

ncclResult_t tp_gpu_memory_deregister(struct ncclComm *comm, void *handle)
{
	/* A communicator that never came to be has registered nothing. */
	if (!comm->gpu || !comm->gpu->mem)
		return TP_FAIL(ncclInvalidArgument, "ncclCommDeregister: %p is not a registration of communicator %p", handle, (void *)comm);
	return tp_mem_deregister(comm->gpu->mem, handle);
}

static ncclResult_t make_window(struct window_job *job)
{
	struct ncclComm *comm = job->job.comm;
	struct tp_gpu_window *w = tp_alloc(1, sizeof(*w), "a window");
	if (!w) return ncclSystemError;
	tp_log_set_device(comm->device);
	ncclResult_t result = tp_mem_window_create(comm->gpu->mem, job->buffer, job->bytes, job->flags, &w->window);
	if (result != ncclSuccess) {
		free(w);
		return result;
	}
	if (w->window->mapped && w->window->flags & NCCL_WIN_COLL_SYMMETRIC) {
		pthread_mutex_lock(&comm->launch_lock);
		tp_cuda_exec_expect_windows(atomic_load_explicit(&comm->gpu->exec, memory_order_relaxed));
		pthread_mutex_unlock(&comm->launch_lock);
	}
	pthread_mutex_lock(&comm->choice_lock);
	w->next = atomic_load_explicit(&comm->gpu->windows, memory_order_relaxed);
	atomic_store_explicit(&comm->gpu->windows, w, memory_order_relaxed);
	pthread_mutex_unlock(&comm->choice_lock);
	*job->out = (ncclWindow_t)w;
	return ncclSuccess;
}

static ncclResult_t run_window(struct tp_job *base)
{
	struct window_job *job = (struct window_job *)base;
	job->ran = true;
	ncclResult_t result = make_window(job);
	tp_comm_leave(base->comm);
	return result;
}

static void discard_window(struct tp_job *base)
{
	struct window_job *job = (struct window_job *)base;
	if (!job->ran) tp_comm_leave(base->comm);
	free(job);
}

/* comm is entered; the job leaves it. */
static ncclResult_t submit_window(struct ncclComm *comm, void *buffer, size_t bytes, ncclWindow_t *out, int flags)
{
	struct window_job *job = tp_alloc(1, sizeof(*job), "a window");
	if (!job) {
		tp_comm_leave(comm);
		return ncclSystemError;
	}
	*job = (struct window_job){ .job = { .run = run_window, .discard = discard_window, .comm = comm, .meets = comm, .blocking = comm->config.blocking },
		.buffer = buffer, .bytes = bytes, .flags = flags, .out = out };
	return tp_job_submit(&job->job);
}

static ncclResult_t register_window(ncclComm_t comm, void *buffer, size_t bytes, ncclWindow_t *out, int flags)
{
	static const char name[] = "ncclCommWindowRegister";
	TP_TRY(tp_comm_enter(comm, name));
	ncclResult_t result = tp_comm_may_call(comm, name);
	if (result == ncclSuccess && !comm->gpu)
		result = TP_FAIL(ncclInvalidUsage, "%s: host ranks have no GPU windows; use the collectives or send and receive", name);
	if (result == ncclSuccess && (!buffer || !out || !bytes))
		result = TP_FAIL(ncclInvalidArgument, "%s: %s", name, !buffer ? "buff is NULL" : !out ? "win is NULL" : "size is 0");
	if (result == ncclSuccess && (flags & ~NCCL_WIN_COLL_SYMMETRIC))
		result = TP_FAIL(ncclInvalidArgument, "%s: there are no flags 0x%x", name, (unsigned)flags);
	if (result == ncclSuccess) return submit_window(comm, buffer, bytes, out, flags);
	tp_comm_leave(comm);
	return result;
}

ncclResult_t tp_comm_window_register(ncclComm_t comm, void *buffer, size_t bytes, ncclWindow_t *out, int flags)
{
	return tp_group_note(register_window(comm, buffer, bytes, out, flags));
}

static ncclResult_t deregister_window(struct ncclComm *comm, ncclWindow_t window)
{
	struct tp_gpu_window *found = NULL;
	if (!window) return ncclSuccess;
	pthread_mutex_lock(&comm->choice_lock);
	struct tp_gpu_window *before = NULL;
	found = comm->gpu ? atomic_load_explicit(&comm->gpu->windows, memory_order_relaxed) : NULL;
	while (found && found != (struct tp_gpu_window *)window) {
		before = found;
		found = found->next;
	}
	if (found && before) before->next = found->next;
	else if (found) atomic_store_explicit(&comm->gpu->windows, found->next, memory_order_relaxed);
	pthread_mutex_unlock(&comm->choice_lock);
	if (!found) return TP_FAIL(ncclInvalidArgument, "ncclCommWindowDeregister: %p is not a window of communicator %p", (void *)window, (void *)comm);
	ncclResult_t result = tp_mem_window_destroy(comm->gpu->mem, found->window);
	free(found);
	return result;
}

ncclResult_t tp_comm_window_deregister(ncclComm_t comm, ncclWindow_t window)
{
	TP_TRY(tp_comm_enter(comm, "ncclCommWindowDeregister"));
	ncclResult_t result = deregister_window(comm, window);
	tp_comm_leave(comm);
	return result;
}

static const struct tp_mem_window *find_promised(struct tp_gpu_rank *rank, const void *ptr, size_t bytes, uint64_t *offset)
{
	const struct tp_mem_window *window = tp_mem_window_find(rank->mem, ptr, bytes, offset);
	return window && window->flags & NCCL_WIN_COLL_SYMMETRIC ? window : NULL;
}

/* Copy engines push: the output is all they need. */
static bool find_for_copies(const struct tp_comm_call *call, struct tp_exec_call *exec)
{
	struct tp_gpu_rank *rank = call->comm->gpu;
	size_t bytes = exec->block_bytes;
	uint64_t offset;
	if (!tp_cuda_exec_copies(atomic_load_explicit(&rank->exec, memory_order_relaxed), (enum tp_coll)call->coll, bytes)) return false;
	const struct tp_mem_window *out = find_promised(rank, exec->output, call->coll == TP_BROADCAST ? bytes : bytes * (size_t)call->comm->nranks, &offset);
	if (!out) return false;
	exec->out_window = (uint64_t)(uintptr_t)out->device_peers;
	exec->out_offset = offset;
	exec->out_peers = out->peers;
	exec->out_window_id = out->id;
	return true;
}

bool tp_gpu_look_for_windows(const struct tp_comm_call *call, struct tp_exec_call *exec)
{
	struct tp_gpu_rank *rank = call->comm->gpu;
	bool reduces_all = call->coll == TP_ALL_REDUCE;
	if (!reduces_all && call->coll != TP_REDUCE_SCATTER) return find_for_copies(call, exec);
	size_t bytes = exec->block_bytes;
	const struct tp_mem_window *in = find_promised(rank, exec->input, reduces_all ? bytes : bytes * (size_t)call->comm->nranks, &exec->in_offset);
	if (!in) return false;
	if (reduces_all) {
		const struct tp_mem_window *out = find_promised(rank, exec->output, bytes, &exec->out_offset);
		if (!out) return false;
		exec->out_window = (uint64_t)(uintptr_t)out->device_peers;
		exec->out_window_id = out->id;
	}
	exec->in_window = (uint64_t)(uintptr_t)in->device_peers;
	exec->in_window_id = in->id;
	return true;
}

bool tp_gpu_note_windows(struct ncclComm *comm, const struct tp_exec_call *exec, struct tp_call *record)
{
	bool uses = tp_cuda_exec_uses_windows(atomic_load_explicit(&comm->gpu->exec, memory_order_relaxed), exec);
	record->windows = uses;
	record->in_window = uses && exec->in_window ? (uint16_t)(exec->in_window_id + 1) : 0;
	record->out_window = uses && (exec->out_window || exec->out_peers) ? (uint16_t)(exec->out_window_id + 1) : 0;
	record->in_offset = record->in_window ? exec->in_offset : 0;
	record->out_offset = record->out_window ? exec->out_offset : 0;
	return uses;
}

static bool find_place(void *mem, const void *ptr, size_t bytes, uint32_t *index, uint64_t *offset)
{
	struct tp_mem_place place;
	if (!tp_mem_find(mem, ptr, bytes, &place)) return false;
	*index = place.index;
	*offset = place.offset;
	return true;
}

void tp_gpu_memory_offer(struct tp_gpu_rank *rank, struct tp_cuda_exec *exec)
{
	struct tp_cuda_buffers buffers = { rank->mem, find_place, tp_mem_table(rank->mem), TP_MEM_BUFFERS };
	if (tp_mem_is_useful(rank->mem)) tp_cuda_exec_set_buffers(exec, &buffers);
}

void tp_gpu_memory_tell(struct tp_gpu_rank *rank, struct tp_links *links, int number)
{
	struct tp_links_loans loans = { 0 };
	if (links) tp_links_loans(links, &loans);
	if (loans.chunks | loans.copied)
		TP_INFO(TP_REG, "rank %d sent %llu chunks, %llu bytes, over the network from where they lay in its registered buffers, and copied %llu late", number,
			(unsigned long long)loans.chunks, (unsigned long long)loans.bytes, (unsigned long long)loans.copied);
	struct tp_cuda_exec *exec = atomic_load_explicit(&rank->exec, memory_order_relaxed);
	struct tp_cuda_status status;
	if (!exec) return;
	tp_cuda_exec_status(exec, &status);
	if (status.straight) TP_INFO(TP_REG, "rank %d received %u parts of messages straight into its registered buffers", number, status.straight);
}

/* What the program left registered ends with the communicator. */
void tp_gpu_memory_close(struct tp_gpu_rank *rank)
{
	for (struct tp_gpu_window *w = atomic_load_explicit(&rank->windows, memory_order_relaxed), *next; w; w = next) {
		next = w->next;
		tp_mem_window_destroy(rank->mem, w->window);
		free(w);
	}
	tp_gpu_register_drop_spent(rank, false);
	if (rank->mem) tp_mem_destroy(rank->mem);
	rank->mem = NULL;
}
