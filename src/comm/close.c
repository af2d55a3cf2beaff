/* The ways a communicator ends. Destroy drains and leaves; abort makes everybody inside leave first; revoke ends what is
 * outstanding and keeps the handle. None of them waits for other ranks to do the same. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "comm/gpu.h"

void tp_comm_tear_down(struct ncclComm *comm)
{
	if (comm->runnable.run) tp_engine_forget(&comm->runnable);
	tp_comm_pace_close(comm);
	tp_exec_destroy(comm->exec);
	if (comm->gpu) tp_gpu_rank_close(comm);
	tp_comm_topo_close(comm);
	if (comm->links) tp_links_destroy(comm->links);
	if (comm->boot) tp_boot_close(comm->boot);
	tp_flight_destroy(comm->flight);
	tp_choice_free_all(comm);
	tp_layout_free(comm->layout);
	free(comm->ways);
	tp_memory_forget_comm(comm);
	while (comm->spare) {
		struct tp_op *op = comm->spare;
		comm->spare = op->next;
		free(op);
	}
	tp_group_free_spare(comm);
	comm->exec = NULL;
	comm->links = NULL;
	comm->boot = NULL;
	comm->flight = NULL;
	comm->layout = NULL;
	comm->ways = NULL;
	comm->alarm = NULL;
}

static void nap_us(long us)
{
	struct timespec length = { 0, us * 1000 };
	nanosleep(&length, NULL);
}

/* Ends everything outstanding and waits until nobody but the caller (counted in) is inside. The gate says why. */
static void empty(struct ncclComm *comm)
{
	int inside = atomic_load_explicit(&comm->inside, memory_order_seq_cst);
	if (comm->gpu) tp_gpu_rank_abort(comm->gpu);        /* before the run lock: who has it may wait for a kernel */
	if (inside > 1 || atomic_load_explicit(&comm->queued, memory_order_acquire))
		TP_WARN("comm %p rank %d: ended while operations are outstanding: they fail", (void *)comm, comm->rank);
	do {
		if (comm->boot) {
			tp_comm_drop_all(comm);
			tp_bell_ring(comm->runnable.bell);
		}
		inside = atomic_load_explicit(&comm->inside, memory_order_seq_cst);     /* pairs with tp_comm_enter and _leave */
		if (inside > 1) nap_us(50);
	} while (inside > 1);
}

static void join_thread(struct ncclComm *comm)
{
	if (!comm->has_thread) return;
	pthread_join(comm->thread, NULL);
	comm->has_thread = false;
}

static void post(struct ncclComm *comm, enum tp_event_kind kind, const char *text)
{
	struct tp_event event = { .kind = kind, .rank = comm->rank, .result = ncclRemoteError };
	size_t n = strnlen(text, sizeof(event.text) - 1);
	memcpy(event.text, text, n);
	tp_boot_post_event(comm->boot, &event);
}

/* Everything that init made, and the handle; entered by the caller. */
static void end(struct ncclComm *comm, const char *what)
{
	int rank = comm->rank, nranks = comm->nranks, device = comm->device;
	unsigned long long bus = comm->gpu ? (unsigned long long)comm->gpu->gpu->bus : 0;
	tp_log_set_device(device);
	if (comm->links) tp_report_paths(comm);
	tp_comm_tear_down(comm);
	tp_comm_leave(comm);
	tp_comm_free(comm);
	TP_INFO(TP_INIT, "comm %p rank %d nranks %d cudaDev %d busId %llx - %s COMPLETE", (void *)comm, rank, nranks, device, bus, what);
}

/* Only one caller may end a communicator. */
static ncclResult_t claim(struct ncclComm *comm, const char *name)
{
	TP_TRY(tp_comm_enter(comm, name));
	if (!(atomic_fetch_or_explicit(&comm->gate, TP_GATE_ABORTED, memory_order_seq_cst) & TP_GATE_ABORTED)) return ncclSuccess;
	tp_comm_leave(comm);
	return TP_FAIL(ncclInvalidUsage, "%s: communicator %p is being destroyed or aborted by another call", name, (void *)comm);
}

ncclResult_t tp_comm_abort(ncclComm_t comm)
{
	if (!comm) return ncclSuccess;
	TP_TRY(tp_comm_check(comm, "ncclCommAbort"));
	if (tp_comm_forget_forked(comm)) return ncclSuccess;
	TP_TRY(claim(comm, "ncclCommAbort"));
	tp_log_set_device(comm->device);
	atomic_store_explicit(&comm->abort_flag, 1, memory_order_seq_cst);      /* every wait in boot looks at it */
	/* A join under way makes and unmakes what we would touch: let it end first. */
	if (atomic_load_explicit(&comm->gate, memory_order_acquire) & TP_GATE_INIT) join_thread(comm);
	if (comm->boot) {
		post(comm, TP_EVENT_ABORTED, "ncclCommAbort");
		atomic_store_explicit(comm->boot->abort, 1, memory_order_seq_cst);
		empty(comm);
	}
	join_thread(comm);
	end(comm, "Abort");
	return ncclSuccess;
}

struct close_job { struct tp_job job; bool destroy, ran; };

static ncclResult_t run_close(struct tp_job *base)
{
	struct close_job *job = (struct close_job *)base;
	struct ncclComm *comm = base->comm;
	job->ran = true;
	tp_log_set_device(comm->device);
	ncclResult_t result = ncclSuccess;
	if (comm->boot && !(atomic_load_explicit(&comm->gate, memory_order_acquire) & TP_GATE_ERROR))
		result = comm->gpu ? tp_gpu_rank_drain(comm) : tp_comm_drain(comm);
	if (!job->destroy) {
		if (result == ncclSuccess) TP_INFO(TP_INIT, "comm %p rank %d nranks %d - Finalize COMPLETE", (void *)comm, comm->rank, comm->nranks);
		tp_comm_leave(comm);
		return result;
	}
	atomic_fetch_or_explicit(&comm->gate, TP_GATE_ABORTED, memory_order_seq_cst);
	if (comm->boot) empty(comm);
	end(comm, "Destroy");
	return ncclSuccess;
}

static void discard_close(struct tp_job *base)
{
	struct close_job *job = (struct close_job *)base;
	if (!job->ran) tp_comm_leave(base->comm);
	free(job);
}

static ncclResult_t submit(struct ncclComm *comm, bool destroy)
{
	struct close_job *job = tp_alloc(1, sizeof(*job), "a communicator's end");
	if (!job) {
		tp_comm_leave(comm);
		return ncclSystemError;
	}
	*job = (struct close_job){ .job = { .run = run_close, .discard = discard_close, .comm = comm,
		.blocking = destroy || comm->config.blocking }, .destroy = destroy };
	return tp_job_submit(&job->job);
}

static ncclResult_t finalize(ncclComm_t comm)
{
	TP_TRY(tp_comm_enter(comm, "ncclCommFinalize"));
	ncclResult_t result = tp_comm_may_call(comm, "ncclCommFinalize");
	if (result == ncclSuccess && (atomic_fetch_or_explicit(&comm->gate, TP_GATE_FINALIZED, memory_order_acq_rel) & TP_GATE_FINALIZED))
		result = TP_FAIL(ncclInvalidUsage, "ncclCommFinalize: communicator %p was finalized before", (void *)comm);
	if (result != ncclSuccess) {
		tp_comm_leave(comm);
		return result;
	}
	return submit(comm, false);
}

ncclResult_t tp_comm_finalize(ncclComm_t comm) { return tp_group_note(finalize(comm)); }

static ncclResult_t destroy(ncclComm_t comm)
{
	if (!comm) return ncclSuccess;
	TP_TRY(tp_comm_check(comm, "ncclCommDestroy"));
	if (tp_comm_forget_forked(comm)) return ncclSuccess;
	TP_TRY(tp_comm_enter(comm, "ncclCommDestroy"));
	/* What runs in the background is waited for. */
	join_thread(comm);
	atomic_fetch_or_explicit(&comm->gate, TP_GATE_FINALIZED, memory_order_acq_rel);
	return submit(comm, true);
}

ncclResult_t tp_comm_destroy(ncclComm_t comm) { return tp_group_note(destroy(comm)); }

/* Ends what is outstanding, here and elsewhere, and refuses more. The caller is counted in. */
ncclResult_t tp_comm_stop(struct ncclComm *comm, const char *why)
{
	uint32_t before = atomic_fetch_or_explicit(&comm->gate, TP_GATE_REVOKED, memory_order_seq_cst);
	if (before & TP_GATE_REVOKED) return ncclSuccess;
	if (!(before & TP_GATE_ERROR)) post(comm, TP_EVENT_REVOKED, why);
	if (comm->gpu) tp_gpu_rank_abort(comm->gpu);
	tp_comm_drop_all(comm);
	tp_bell_ring(comm->runnable.bell);
	return ncclSuccess;
}

static ncclResult_t revoke(ncclComm_t comm, int flags)
{
	if (flags != NCCL_REVOKE_DEFAULT) return TP_FAIL(ncclInvalidArgument, "ncclCommRevoke: there are no flags 0x%x", (unsigned)flags);
	TP_TRY(tp_comm_enter(comm, "ncclCommRevoke"));
	ncclResult_t result = ncclSuccess;
	if (atomic_load_explicit(&comm->gate, memory_order_acquire) & (TP_GATE_INIT | TP_GATE_FINALIZED))
		result = tp_comm_may_call(comm, "ncclCommRevoke");
	if (result == ncclSuccess) result = tp_comm_stop(comm, "ncclCommRevoke");
	tp_comm_leave(comm);
	return result;
}

ncclResult_t tp_comm_revoke(ncclComm_t comm, int flags) { return tp_group_note(revoke(comm, flags)); }
