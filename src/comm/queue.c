/* The queue of a communicator and what runs it.
 *
 * run_comm is the runnable's `run`: it starts the first operation once it is first on its streams too, advances it, ends
 * it, goes on. An operation ends exactly once, by end_op; after that nobody touches its batch. */
#include <stdlib.h>
#include <string.h>

#include "comm/internal.h"

#define OF_RUNNABLE(r) ((struct ncclComm *)((char *)(r) - offsetof(struct ncclComm, runnable)))
#define LOOK_BACK 4
#define ASK_MS 250
#define EXPLAIN_MS 1500             /* how long a tag that doesn't match waits for the other side's record */
#define DEATH_MS 600                /* how long a connection that broke waits for the news that its peer has died */

struct tp_op *tp_op_new(struct ncclComm *comm)
{
	pthread_mutex_lock(&comm->queue_lock);
	struct tp_op *op = comm->spare;
	if (op) comm->spare = op->next;
	pthread_mutex_unlock(&comm->queue_lock);
	if (op) memset(op, 0, sizeof(*op));
	else op = tp_alloc(1, sizeof(*op), "an operation");
	if (op) op->comm = comm;
	return op;
}

void tp_op_free(struct tp_op *op)
{
	struct ncclComm *comm = op->comm;
	free(op->transfers);
	free(op->more_places);
	tp_plan_free(op->own_plan);
	pthread_mutex_lock(&comm->queue_lock);
	op->next = comm->spare;
	comm->spare = op;
	pthread_mutex_unlock(&comm->queue_lock);
}

static void end_op(struct tp_op *op, ncclResult_t result)
{
	struct ncclComm *comm = op->comm;
	struct tp_batch *batch = op->batch;
	if (op->running) tp_exec_cancel(comm->exec, op->running);
	if (op->flight) tp_flight_end(op->flight, op->flight_seq, result);
	if (op->nplaces) {
		pthread_mutex_lock(&tp_order_lock);
		tp_stream_op_done(op, result);
		pthread_mutex_unlock(&tp_order_lock);
	}
	if (op->counted) atomic_fetch_sub_explicit(&comm->unfinished, 1, memory_order_release);
	comm->current = NULL;
	tp_op_free(op);
	atomic_fetch_sub_explicit(&comm->queued, 1, memory_order_release);  /* pairs with the look in fast.c */
	if (batch) {
		int none = ncclSuccess;
		if (result != ncclSuccess) atomic_compare_exchange_strong_explicit(&batch->error, &none, result, memory_order_relaxed, memory_order_relaxed);
		atomic_fetch_sub_explicit(&batch->pending, 1, memory_order_release);    /* pairs with batch_done */
	}
}

static struct tp_op *take_first(struct ncclComm *comm)
{
	pthread_mutex_lock(&comm->queue_lock);
	struct tp_op *op = comm->head;
	if (op) {
		comm->head = op->next;
		if (!comm->head) comm->tail = NULL;
	}
	pthread_mutex_unlock(&comm->queue_lock);
	return op;
}

/* Why nothing can run here any more; ncclSuccess: it can. */
static ncclResult_t verdict(struct ncclComm *comm)
{
	uint32_t gate = atomic_load_explicit(&comm->gate, memory_order_acquire);
	if (tp_likely(!(gate & (TP_GATE_ERROR | TP_GATE_ABORTED | TP_GATE_REVOKED)))) return ncclSuccess;
	int error = atomic_load_explicit(&comm->error, memory_order_acquire);
	if (error != ncclSuccess) return error;
	return gate & TP_GATE_REVOKED ? ncclInvalidUsage : ncclInternalError;
}

/* The operation found something wrong: for good, and the other ranks hear of it. */
static void fail(struct ncclComm *comm, ncclResult_t result)
{
	if (atomic_load_explicit(&comm->error, memory_order_relaxed) != ncclSuccess) return;
	struct tp_event event = { .kind = TP_EVENT_FAILED, .rank = comm->rank, .result = result };
	const char *text = tp_log_last_error();
	size_t n = strnlen(text, sizeof(event.text) - 1);
	memcpy(event.text, text, n);
	tp_comm_set_error(comm, result);
	tp_boot_post_event(comm->boot, &event);
	tp_flight_dump_on_error(comm->flight, text);
}

/* Two ranks made different calls: their names and calls, to everybody. What doesn't fit may be a chunk of an earlier call
 * that this rank was through with, so the last few are compared; boot asks other hosts of one at a time, the first here. */
static bool find_mismatch(struct ncclComm *comm, uint64_t seq, uint64_t turn)
{
	struct tp_event event;
	bool found = false;
	for (uint64_t i = 0; i < LOOK_BACK && !found; i++) {
		uint64_t back = (turn + i) % LOOK_BACK;
		found = back < seq && tp_boot_find_mismatch(comm->boot, seq - back, &event);
	}
	if (!found) return false;
	event.kind = TP_EVENT_MISMATCH;
	event.result = ncclInvalidUsage;
	tp_log_set_device(comm->device);
	tp_comm_set_error(comm, TP_FAIL(ncclInvalidUsage, "comm %p rank %d: %s", (void *)comm, comm->rank,
		event.text));
	tp_boot_post_event(comm->boot, &event);
	return true;
}

/* A rank of this host that left the communicator before it made this call never will. */
static void find_departed(struct ncclComm *comm, uint64_t seq)
{
	for (int i = 0; i < comm->boot->nlocal; i++) {
		int rank = comm->boot->local_ranks[i];
		struct tp_call last = { 0 };
		if (!tp_boot_has_left(comm->boot, rank)) continue;
		if (tp_boot_last_call(comm->boot, rank, &last) && last.seq >= seq) continue;
		tp_log_set_device(comm->device);
		fail(comm, TP_FAIL(ncclRemoteError, "comm %p rank %d: rank %d (host %s, pid %d) has left the communicator after %llu calls, but "
			"rank %d waits for it in call %llu", (void *)comm, comm->rank, rank, comm->boot->peers[rank].host_name,
			(int)comm->boot->peers[rank].pid, (unsigned long long)last.seq, comm->rank, (unsigned long long)seq));
		return;
	}
}

/* What to make of an operation's error: a tag that doesn't match means that somebody called something else, and a
 * connection that broke that somebody is dying; both are known better in a moment. Run lock held. */
ncclResult_t tp_comm_explain(struct ncclComm *comm, ncclResult_t found, uint64_t seq, uint64_t budget_ms)
{
	if (verdict(comm) != ncclSuccess) return verdict(comm);
	uint64_t start = tp_clock_ms();
	if (found == ncclRemoteError) budget_ms = TP_MIN(budget_ms, (uint64_t)DEATH_MS);
	while (found == ncclInvalidUsage || found == ncclRemoteError) {
		tp_comm_look_for_events(comm);
		if (verdict(comm) != ncclSuccess) return verdict(comm);
		if (found == ncclInvalidUsage && find_mismatch(comm, seq, (tp_clock_ms() - start) / ASK_MS)) return ncclInvalidUsage;
		if (tp_clock_ms() - start >= budget_ms) break;
		struct timespec nap = { 0, 2000000 };
		nanosleep(&nap, NULL);
	}
	fail(comm, found);
	return verdict(comm);
}

bool tp_comm_seek_mismatch(struct ncclComm *comm, uint64_t budget_ms)
{
	uint64_t start = tp_clock_ms(), waited = 0;
	do {
		tp_comm_look_for_events(comm);
		if (verdict(comm) != ncclSuccess) return true;
		if (find_mismatch(comm, tp_comm_seq(comm), waited / ASK_MS)) return true;
		struct timespec nap = { 0, 2000000 };
		nanosleep(&nap, NULL);
		waited = tp_clock_ms() - start;
	} while (waited < budget_ms);
	return false;
}

void tp_comm_seek_stall(struct ncclComm *comm, uint64_t waited_ms)
{
	uint64_t seq = tp_comm_seq(comm);
	if (!seq || verdict(comm) != ncclSuccess) return;
	if (!find_mismatch(comm, seq, waited_ms / ASK_MS)) find_departed(comm, seq);
}

static void remember(struct ncclComm *comm, const struct tp_op *op, struct tp_last_call *last)
{
	struct tp_comm_call call = { .coll = op->record.func, .count = op->record.count, .type = (ncclDataType_t)op->record.type,
		.root = op->record.root, .comm = comm };
	last->count = call.count;
	last->type = call.type;
	last->op = op->record.op;
	last->root = call.root;
	tp_call_spans(&call, &last->send_bytes, &last->recv_bytes, &last->in_place);
	last->hash = op->record.hash;
	last->call = op->call;
	last->record = op->record;
	last->usable = true;
}

/* Returns with op->started, or an error. *done: there was nothing to do. */
static ncclResult_t start_op(struct ncclComm *comm, struct tp_op *op, bool *done)
{
	*done = false;
	if (op->record.func != TP_SEND_RECV) {
		op->record.seq = tp_comm_seq(comm) + 1;
		tp_comm_set_seq(comm, op->record.seq);
		op->call.tag = op->record.hash + (uint32_t)op->record.seq * 0x9e3779b1u;
		tp_boot_post_call(comm->boot, &op->record);
		if (!op->record.count) {
			*done = true;
			return ncclSuccess;
		}
	}
	if (op->device_scalar) tp_redop_read_scalar(op->device_scalar, &op->call.reduce);
	op->flight_seq = TP_MAX(tp_comm_seq(comm), 1);
	op->flight = tp_flight_begin(comm->flight, op->flight_seq, op->record.func, op->record.count, op->record.type, op->record.op,
		op->record.root);
	if (op->remember) remember(comm, op, &comm->last[op->record.func]);
	if (comm->pace) tp_comm_pace_begin(comm, op);
	TP_TRY(tp_exec_start(comm->exec, &op->call, &op->running));
	op->started = true;
	return ncclSuccess;
}

/* *waits: it is not its turn on a stream, or nothing could be moved. */
static void advance(struct ncclComm *comm, struct tp_op *op, bool *moved, bool *waits)
{
	ncclResult_t result = verdict(comm);
	bool done = result != ncclSuccess, stepped = false;
	*waits = false;
	if (!done && !op->started) {
		if (op->nplaces) {
			pthread_mutex_lock(&tp_order_lock);
			*waits = !tp_stream_op_is_first(op);
			pthread_mutex_unlock(&tp_order_lock);
			if (*waits) return;
		}
		result = start_op(comm, op, &done);
		stepped = true;
	}
	if (result == ncclSuccess && !done) {
		bool moved_now = false;
		result = tp_exec_run(comm->exec, op->running, &moved_now, &done);
		stepped |= moved_now;
		if (op->begun_ns && !moved_now && !done) tp_comm_pace_waits(comm);
		if (result == ncclSuccess && done) {
			op->running = NULL;
			if (op->begun_ns) result = tp_comm_pace_go_on(comm, op, &done);
		}
	}
	if (result != ncclSuccess && verdict(comm) == ncclSuccess) {
		tp_log_set_device(comm->device);
		/* Sends and receives have no records to compare: what was found is all there is to know. */
		bool known = result == ncclInvalidUsage && op->record.func == TP_SEND_RECV;
		result = tp_comm_explain(comm, result, tp_comm_seq(comm), known ? 0 : EXPLAIN_MS);
	}
	if (result != ncclSuccess || done) {
		end_op(op, result);
		*moved = true;
		return;
	}
	*moved |= stepped;
	*waits = true;
}

static enum tp_run run_comm(struct tp_runnable *runnable)
{
	struct ncclComm *comm = OF_RUNNABLE(runnable);
	bool moved = false, waits = false;
	tp_comm_look_for_events(comm);
	while (!waits && (comm->current || (comm->current = take_first(comm))))
		advance(comm, comm->current, &moved, &waits);
	if (waits) return moved ? TP_RUN_MOVED : TP_RUN_WAITING;
	/* Nothing outstanding; but what was sent may still have to leave. */
	if (tp_links_need_progress(comm->links) && verdict(comm) == ncclSuccess) {
		bool pushed = false;
		ncclResult_t result = tp_links_progress(comm->links, &pushed);
		if (result != ncclSuccess) tp_comm_explain(comm, result, tp_comm_seq(comm), EXPLAIN_MS);
		else if (tp_links_need_progress(comm->links)) return moved || pushed ? TP_RUN_MOVED : TP_RUN_WAITING;
	}
	return moved ? TP_RUN_MOVED : TP_RUN_IDLE;
}

static int poll_fds(struct tp_runnable *runnable, int *fds, uint32_t *events, int max)
{
	struct ncclComm *comm = OF_RUNNABLE(runnable);
	return tp_links_poll_fds(comm->links, fds, events, max);
}

static void stalled(struct tp_runnable *runnable, uint64_t waited_ms)
{
	struct ncclComm *comm = OF_RUNNABLE(runnable);
	tp_comm_look_for_events(comm);
	if (verdict(comm) != ncclSuccess || !comm->current || !comm->current->started || comm->current->record.func == TP_SEND_RECV) return;
	if (!find_mismatch(comm, tp_comm_seq(comm), waited_ms / ASK_MS)) find_departed(comm, tp_comm_seq(comm));
}

/* As `stalled`, for a wait that isn't the engine's. */
ncclResult_t tp_comm_poll_wait(void *arg, uint64_t waited_ns)
{
	struct ncclComm *comm = arg;
	tp_comm_look_for_events(comm);
	ncclResult_t result = verdict(comm);
	if (result != ncclSuccess || waited_ns - comm->stalled_since_ns < TP_STALL_NS) return result;
	comm->stalled_since_ns = waited_ns;
	if (!find_mismatch(comm, tp_comm_seq(comm), waited_ns / (ASK_MS * 1000000u))) find_departed(comm, tp_comm_seq(comm));
	return verdict(comm);
}

void tp_comm_init_runnable(struct ncclComm *comm)
{
	comm->runnable = (struct tp_runnable){ .run = run_comm, .stalled = stalled, .bell = &comm->boot->bells[comm->boot->local],
		.poll_fds = tp_links_have_net(comm->links) ? poll_fds : NULL, .crowded = comm->crowded };
}

void tp_comm_lock_run(struct ncclComm *comm)
{
	while (!tp_engine_try_lock(&comm->runnable)) {
		struct timespec nap = { 0, 20000 };
		nanosleep(&nap, NULL);
	}
}

void tp_comm_drop_all(struct ncclComm *comm)
{
	tp_comm_lock_run(comm);
	comm->runnable.run(&comm->runnable);
	tp_engine_unlock(&comm->runnable);
}

static bool batch_done(void *arg)
{
	struct tp_batch *batch = arg;
	return atomic_load_explicit(&batch->pending, memory_order_acquire) == 0;
}

/* Nothing outstanding, nothing to move, or no hope of it. */
static bool is_drained(void *arg)
{
	struct ncclComm *comm = arg;
	if (verdict(comm) != ncclSuccess) return atomic_load_explicit(&comm->queued, memory_order_acquire) == 0;
	if (atomic_load_explicit(&comm->queued, memory_order_acquire)) return false;
	if (!tp_engine_try_lock(&comm->runnable)) return false;
	bool drained = !tp_links_need_progress(comm->links);
	tp_engine_unlock(&comm->runnable);
	return drained;
}

ncclResult_t tp_comm_drain(struct ncclComm *comm)
{
	struct tp_runnable *set[1] = { &comm->runnable };
	tp_engine_wait(set, 1, is_drained, comm);
	return verdict(comm);
}

static void append(struct tp_issue *issue)
{
	struct ncclComm *comm = issue->comm;
	uint32_t count = 0;
	for (struct tp_op *op = issue->first; op; op = op->next) {
		count++;
		for (int i = 0; i < op->nplaces; i++) tp_stream_append(i ? &op->more_places[i - 1] : &op->place);
	}
	pthread_mutex_lock(&comm->queue_lock);
	if (comm->tail) comm->tail->next = issue->first;
	else comm->head = issue->first;
	comm->tail = issue->last;
	atomic_fetch_add_explicit(&comm->queued, count, memory_order_relaxed);
	pthread_mutex_unlock(&comm->queue_lock);
}

static bool on_streams(const struct tp_issue *issues)
{
	for (; issues; issues = issues->next)
		for (const struct tp_op *op = issues->first; op; op = op->next)
			if (op->nplaces) return true;
	return false;
}

/* Blocking operations without a stream: the caller waits, and runs them. */
static int count_waits(struct tp_issue *issues, struct tp_batch *batch, bool *in_progress)
{
	int waits = 0;
	for (struct tp_issue *i = issues; i; i = i->next) {
		i->sync = false;
		for (struct tp_op *op = i->first; op; op = op->next) {
			if (!op->waits) continue;
			if (i->comm->config.blocking) {
				op->batch = batch;
				i->sync = true;
				waits++;
			} else {
				op->counted = true;
				*in_progress = true;
				atomic_fetch_add_explicit(&i->comm->unfinished, 1, memory_order_relaxed);
			}
		}
	}
	atomic_store_explicit(&batch->pending, waits, memory_order_relaxed);
	return waits;
}

static ncclResult_t wait_for(struct tp_issue *issues, struct tp_batch *batch)
{
	struct tp_runnable *few[16], **set = few;
	int count = 0;
	for (struct tp_issue *i = issues; i; i = i->next) count += i->sync;
	if (count > (int)TP_ARRAY_LEN(few) && !(set = tp_alloc((size_t)count, sizeof(*set), "a group"))) {
		/* They are in their queues already: one after the other would stand still, so the engine thread runs them. */
		for (struct tp_issue *i = issues; i; i = i->next) TP_TRY(tp_engine_submit(&i->comm->runnable));
		set = few;
		count = 1;
	}
	int n = 0;
	for (struct tp_issue *i = issues; i && n < count; i = i->next)
		if (i->sync) set[n++] = &i->comm->runnable;
	tp_engine_wait(set, count, batch_done, batch);
	if (set != few) free(set);
	return atomic_load_explicit(&batch->error, memory_order_relaxed);
}

ncclResult_t tp_issue_all(struct tp_issue *issues)
{
	struct tp_batch batch = { .error = ncclSuccess };
	bool in_progress = false;
	bool ordered = on_streams(issues);
	int waits = count_waits(issues, &batch, &in_progress);
	if (ordered) pthread_mutex_lock(&tp_order_lock);
	for (struct tp_issue *i = issues; i; i = i->next) append(i);
	if (ordered) pthread_mutex_unlock(&tp_order_lock);
	ncclResult_t result = ncclSuccess;
	for (struct tp_issue *i = issues; i; i = i->next) {
		if (i->sync && !ordered) continue;
		ncclResult_t submitted = tp_engine_submit(&i->comm->runnable);
		if (submitted != ncclSuccess) {
			tp_comm_set_error(i->comm, submitted);
			tp_comm_drop_all(i->comm);
			result = submitted;
		}
	}
	if (waits) {
		ncclResult_t waited = wait_for(issues, &batch);
		if (waited != ncclSuccess) result = waited;
	}
	/* What was sent last may not have left: somebody has to push it on. */
	for (struct tp_issue *i = issues; i && waits; i = i->next) {
		if (!i->comm->runnable.poll_fds || !tp_engine_try_lock(&i->comm->runnable)) continue;
		bool left = tp_links_need_progress(i->comm->links);
		tp_engine_unlock(&i->comm->runnable);
		if (left) tp_engine_submit(&i->comm->runnable);
	}
	return result == ncclSuccess && in_progress ? ncclInProgress : result;
}
