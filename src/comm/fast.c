/* A call of the data path, from the entry point to its queue, and the short way around the queue.
 *
 * The short way is for the same call again: a small message, one step for everybody, no group, no stream. Budget between
 * the entry point and tp_exec_one_shot: 30 ns. That leaves room for one uncontended atomic exchange (the run lock), one
 * cache line of our own written for the call board, and some twenty loads and compares. Not for an allocation, a second
 * lock, a division, a system call, or a log line, not even one that isn't written: whatever needs more sets a bit in
 * comm->gate, and one test sees them all. */
#include <stdlib.h>
#include <string.h>

#include "comm/gpu.h"

static inline bool buffers_fit(const struct tp_last_call *last, const void *send_, void *recv_)
{
	uintptr_t send = (uintptr_t)send_, recv = (uintptr_t)recv_;
	if ((!send && last->send_bytes) || (!recv && last->recv_bytes)) return false;
	return (ptrdiff_t)(send - recv) == last->in_place || send + last->send_bytes <= recv || recv + last->recv_bytes <= send;
}

/* With the run lock. *handled = false: nothing was done. */
static ncclResult_t run_again(struct ncclComm *comm, struct tp_last_call *last, const struct tp_comm_call *call, bool *handled)
{
	last->call.input = call->send ? call->send : call->recv;
	last->call.output = call->recv ? call->recv : (void *)(uintptr_t)call->send;
	uint64_t seq = tp_comm_seq(comm) + 1;
	last->record.seq = seq;
	last->call.tag = last->hash + (uint32_t)seq * 0x9e3779b1u;
	tp_boot_post_call(comm->boot, &last->record);
	struct tp_flight_record *flight = tp_flight_begin(comm->flight, seq, last->record.func, last->count, last->type, last->op, last->root);
	comm->stalled_since_ns = 0;
	tp_comm_set_seq(comm, seq);
	ncclResult_t result = tp_exec_one_shot(comm->exec, &last->call, comm->runnable.crowded, tp_comm_poll_wait, comm, handled);
	tp_flight_end(flight, seq, result);
	if (tp_unlikely(result != ncclSuccess)) {
		*handled = true;
		return tp_comm_explain(comm, result, seq, 1500);
	}
	if (!*handled) tp_comm_set_seq(comm, seq - 1);
	return ncclSuccess;
}

/* true: done, with *result. */
static inline bool call_again(const struct tp_comm_call *call, ncclResult_t *result)
{
	struct ncclComm *comm = call->comm;
	if (tp_unlikely(tp_group_depth || !comm || !tp_stream_is_sync(call->stream) || call->coll >= TP_SEND_RECV)) return false;
	if (tp_unlikely(atomic_load_explicit(&comm->magic, memory_order_relaxed) != TP_COMM_MAGIC)) return false;
	if (tp_unlikely(atomic_load_explicit(&comm->gate, memory_order_acquire))) return false;
	if (tp_unlikely(!tp_engine_try_lock(&comm->runnable))) return false;
	/* Under the lock: abort and destroy raise the gate, then take the lock, before they free anything. */
	struct tp_last_call *last = &comm->last[call->coll];
	bool handled = false;
	if (tp_likely(last->usable && last->count == call->count && last->type == (int)call->type && last->op == (int)call->op
		&& last->root == call->root && buffers_fit(last, call->send, call->recv)
		&& !atomic_load_explicit(&comm->gate, memory_order_acquire)
		&& !atomic_load_explicit(&comm->queued, memory_order_acquire)       /* pairs with end_op */
		&& atomic_load_explicit(comm->alarm, memory_order_relaxed) == comm->alarm_seen))
		*result = run_again(comm, last, call, &handled);
	tp_engine_unlock(&comm->runnable);
	return handled;
}

static void trace(const struct tp_comm_call *call)
{
	const struct ncclComm *comm = call->comm;
	tp_log_set_device(comm->device);
	TP_INFO(TP_COLL, "%s: opCount %lx sendbuff %p recvbuff %p count %zu datatype %d op %d root %d comm %p [nranks=%d] stream %p", call->name,
		(unsigned long)tp_comm_seq(comm), call->send, call->recv, call->count, (int)call->type, (int)call->op, call->root, (const void *)comm,
		comm->nranks, (void *)call->stream);
}

/* The operation for a collective, ready for the queue. */
static ncclResult_t make_op(const struct tp_comm_call *call, struct tp_op **out)
{
	struct ncclComm *comm = call->comm;
	struct tp_op *op = tp_op_new(comm);
	if (!op) return ncclSystemError;
	op->record = (struct tp_call){ .count = call->count, .func = call->coll, .type = (uint8_t)call->type,
		.op = (uint8_t)TP_MIN((int)call->op, ncclNumOps), .root = call->root };
	op->record.hash = tp_call_hash(call->coll, call->count, op->record.type, op->record.op, call->root);
	struct tp_exec_call *exec = &op->call;
	ncclResult_t result = tp_redop_fill(comm, call->op, call->type, &exec->reduce, &op->device_scalar);
	/* A rank that doesn't use one of the buffers need not give it. */
	exec->input = call->send ? call->send : call->recv;
	exec->output = call->recv ? call->recv : (void *)(uintptr_t)call->send;
	exec->line_bytes = comm->gpu ? TP_GPU_LINE_BYTES : TP_LINE_BYTES;
	if (comm->gpu) {                    /* read by the kernel */
		exec->device_scalar = op->device_scalar;
		op->device_scalar = NULL;
	}
	exec->block_bytes = tp_call_block_bytes(call);
	bool staged = comm->gpu ? tp_gpu_find_windows(call, exec) : exec->reduce.pre;
	struct tp_choice_entry choice;
	if (result == ncclSuccess && call->count)
		result = tp_choice_find(comm, call->coll, call->root, exec->block_bytes, staged, &choice);
	if (result != ncclSuccess) {
		tp_op_free(op);
		return result;
	}
	if (call->count) {
		exec->plan = choice.plan;
		exec->chunk_bytes = choice.chunk_bytes;
		exec->ref_bytes = choice.ref_bytes;
		if (tp_unlikely(staged && comm->gpu))
			tp_gpu_note_windows(comm, exec, &op->record);
		op->predicted_us = choice.us;
		op->remember = comm->gpu ? (int)call->op < ncclNumOps : (choice.plan->shape == TP_SHAPE_ONE_SHOT || choice.plan->shape == TP_SHAPE_DIRECT)
			&& exec->block_bytes <= TP_MIN(TP_EXEC_FUSED_BYTES, exec->ref_bytes) && (int)call->op < ncclNumOps && comm->nranks > 1
			&& comm->boot->nhosts == 1;
	}
	*out = op;
	return ncclSuccess;
}

/* The stream's place in the operation; a stream that isn't one is an error. */
static ncclResult_t place_on_stream(const struct tp_comm_call *call, struct tp_op *op)
{
	if (call->comm->gpu) {
		op->stream = call->stream;
		op->nstreams = 1;
		return ncclSuccess;
	}
	op->waits = tp_stream_is_sync(call->stream);
	if (op->waits) return ncclSuccess;
	pthread_mutex_lock(&tp_order_lock);
	struct tp_stream *stream = NULL;
	ncclResult_t result = tp_stream_find(call->stream, call->name, &stream);
	pthread_mutex_unlock(&tp_order_lock);
	TP_TRY(result);
	op->place = (struct tp_stream_place){ .stream = stream, .op = op };
	op->nplaces = 1;
	return ncclSuccess;
}

static ncclResult_t call_collective(const struct tp_comm_call *call)
{
	struct tp_op *op;
	TP_TRY(make_op(call, &op));
	ncclResult_t result = place_on_stream(call, op);
	if (result != ncclSuccess) {
		tp_op_free(op);
		return result;
	}
	if (tp_group_depth) return tp_group_add_op(call->comm, op);
	struct tp_issue issue = { .comm = call->comm, .first = op, .last = op };
	return call->comm->gpu ? tp_gpu_issue_all(&issue) : tp_issue_all(&issue);
}

static ncclResult_t call_transfer(const struct tp_comm_call *call)
{
	struct tp_stream *stream = NULL;
	if (call->comm->gpu) {
		stream = (struct tp_stream *)call->stream;
	} else if (!tp_stream_is_sync(call->stream)) {
		pthread_mutex_lock(&tp_order_lock);
		ncclResult_t result = tp_stream_find(call->stream, call->name, &stream);
		pthread_mutex_unlock(&tp_order_lock);
		TP_TRY(result);
	}
	struct tp_exec_transfer transfer = { call->root, call->is_send,
		call->is_send ? (void *)(uintptr_t)call->send : call->recv, tp_call_block_bytes(call) };
	return tp_group_add_transfer(call->comm, &transfer, stream);
}

static ncclResult_t call_checked(const struct tp_comm_call *call)
{
	TP_TRY(tp_comm_may_call(call->comm, call->name));
	TP_TRY(tp_validate_call(call));
	if (call->comm->gpu) TP_TRY(tp_gpu_validate_call(call));
	if (atomic_load_explicit(&call->comm->gate, memory_order_relaxed) & TP_GATE_TRACING) trace(call);
	return call->coll == TP_SEND_RECV ? call_transfer(call) : call_collective(call);
}

ncclResult_t tp_comm_call(const struct tp_comm_call *call)
{
	ncclResult_t result = ncclSuccess;
	if (tp_likely(call_again(call, &result))) return result;
	if (tp_gpu_call_again(call, &result)) return result;
	result = tp_comm_enter(call->comm, call->name);
	if (result == ncclSuccess) {
		/* A send or receive of its own is a group of one. */
		bool alone = call->coll == TP_SEND_RECV && !tp_group_depth;
		if (alone) tp_group_start();
		result = call_checked(call);
		if (alone) {
			tp_group_note(result);
			result = tp_group_end();
		}
		tp_comm_leave(call->comm);
	}
	return tp_group_note(result);
}
