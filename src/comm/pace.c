/* Watching a communicator's pace: collectives of host ranks against the cost model's times.
 *
 * What is watched costs two looks at the clock an operation, and only operations that move much are: small ones take a shorter way and never
 * come here. When it is time to compare (watch/pace.c), the ranks do so behind the operation that they have just done, with the same plan on the
 * same links: everybody is there, nothing is connected, and nobody waits for anything but what he waited for anyway (measuring pairs, later,
 * connects neighbours that may not have been). So only collectives in
 * which each rank needs something of every other are watched: any of them can carry the least of all ranks' values.
 *
 * A rank's time holds its wait for ranks that came late; the least of all ranks' times doesn't, since whoever came last waited for nobody.
 *
 * Every step is taken by all ranks or by none: what decides is counts of operations, which are equal, and answers, which are equal too. */
#include <stdlib.h>
#include <string.h>

#include "comm/pace.h"

#define LEAST_BYTES ((size_t)256 << 10)         /* below it waiting for a turn is most of the time, of which the model knows little */

static struct tp_param params[] = {
	{ .name = "TELPHER_WATCH", .kind = TP_PARAM_BOOL, .fallback = "0", .max = 1,
		.doc = "1: ranks look whether large collectives keep taking more than twice as long as predicted, and measure why (one call waits for that)" },
};
TP_PARAM_TABLE("watch", params)

int tp_comm_pace_wanted(void)
{
	struct tp_param *table = tp_param_find("TELPHER_TUNE_FILE");
	if (!tp_param_int(&params[0])) return 0;
	return table && tp_param_is_set(table) ? 2 : 1;
}

ncclResult_t tp_comm_pace_open(struct ncclComm *comm, int wanted)
{
	struct tp_comm_pace *pace = tp_alloc(1, sizeof(*pace), "the watch over the pace");
	if (!pace) return ncclSystemError;
	comm->pace = pace;
	pace->measured = wanted == 2;
	tp_pace_begin(&pace->pace);
	return ncclSuccess;
}

void tp_comm_pace_close(struct ncclComm *comm)
{
	struct tp_comm_pace *pace = comm->pace;
	if (!pace) return;
	tp_pace_release(pace);
	tp_plan_free(pace->plan);
	free(pace->in);
	free(pace->out);
	free(pace);
	comm->pace = NULL;
}

static bool gathers(int coll) { return coll == TP_ALL_GATHER || coll == TP_ALL_TO_ALL; }
static bool takes_all(int coll) { return coll == TP_REDUCE_SCATTER || coll == TP_ALL_TO_ALL; }

static size_t total_bytes(const struct ncclComm *comm, const struct tp_op *op)
{
	return op->call.block_bytes * (op->record.func == TP_ALL_REDUCE ? 1 : (size_t)comm->nranks);
}

void tp_comm_pace_begin(const struct ncclComm *comm, struct tp_op *op)
{
	int coll = op->record.func;
	bool known = coll == TP_ALL_REDUCE || coll == TP_REDUCE_SCATTER || gathers(coll);
	/* Smaller blocks may take the short way on some ranks, which isn't seen here: all ranks must count the same calls. */
	if (known && op->call.block_bytes > TP_EXEC_FUSED_BYTES && total_bytes(comm, op) >= LEAST_BYTES) op->begun_ns = tp_clock_ns();
}

ncclResult_t tp_pace_ask(struct ncclComm *comm, struct tp_op *op, enum tp_pace_stage stage)
{
	struct tp_comm_pace *pace = comm->pace;
	int coll = op->record.func, blocks = takes_all(coll) ? comm->nranks : 1;
	struct tp_exec_call call = op->call;
	for (int b = 1; b < blocks; b++) memcpy(pace->in + b * TP_PACE_VALUES, pace->in, TP_PACE_VALUES * sizeof(*pace->in));
	call.input = pace->in;
	call.output = pace->out;
	call.block_bytes = TP_PACE_VALUES * sizeof(*pace->in);
	call.reduce = (struct tp_reduce){ .type = ncclFloat32, .op = ncclMin };
	call.tag = op->call.tag ^ (0x9ace0000u + ++pace->turn % 0x10000u);
	pace->stage = stage;
	return tp_exec_start(comm->exec, &call, &op->running);
}

/* What was asked last. */
static const float *answer_of(const struct ncclComm *comm, const struct tp_op *op)
{
	struct tp_comm_pace *pace = comm->pace;
	for (int r = 1; r < comm->nranks && gathers(op->record.func); r++)
		for (int v = 0; v < TP_PACE_VALUES; v++) pace->out[v] = TP_MIN(pace->out[v], pace->out[r * TP_PACE_VALUES + v]);
	return pace->out;
}

static ncclResult_t compare(struct ncclComm *comm, struct tp_op *op)
{
	struct tp_comm_pace *pace = comm->pace;
	size_t values = (size_t)comm->nranks * TP_PACE_VALUES;
	if (!pace->in) pace->in = tp_alloc(values, sizeof(*pace->in), "comparing the ranks' times");
	if (!pace->out) pace->out = tp_alloc(values, sizeof(*pace->out), "comparing the ranks' times");
	if (!pace->in || !pace->out) return ncclSystemError;
	tp_pace_window(&pace->pace, pace->in);
	/* Whoever has no memory to measure with keeps the others from it. */
	pace->in[TP_PACE_SAMPLES] = tp_pace_may_suspect(&pace->pace) && tp_pace_prepare(pace);
	return tp_pace_ask(comm, op, TP_PACE_COMPARE);
}

/* Measured, and found. */
static void end_watch(struct ncclComm *comm, const struct tp_op *op)
{
	struct tp_comm_pace *pace = comm->pace;
	pace->stage = TP_PACE_IDLE;
	tp_pace_release(pace);
	switch (tp_pace_tell(comm, op)) {
	case TP_PACE_WARNED: tp_comm_pace_close(comm); break;       /* once is enough */
	case TP_PACE_ONCE_MORE: tp_pace_begin_anew(&pace->pace); break;
	case TP_PACE_CALM: tp_pace_put_off(&pace->pace); break;
	}
}

ncclResult_t tp_comm_pace_go_on(struct ncclComm *comm, struct tp_op *op, bool *done)
{
	struct tp_comm_pace *pace = comm->pace;
	bool over = false;
	*done = true;
	if (!pace) return ncclSuccess;
	if (pace->stage == TP_PACE_IDLE) {
		if (!tp_pace_add(&pace->pace, (double)(tp_clock_ns() - op->begun_ns) / 1e3, op->predicted_us)) return ncclSuccess;
		*done = false;
		return compare(comm, op);
	}
	const float *answer = answer_of(comm, op);
	if (pace->stage == TP_PACE_COMPARE) {
		bool suspect = tp_pace_judge(&pace->pace, answer, &pace->median);
		if (!suspect || answer[TP_PACE_SAMPLES] < 1) {
			pace->stage = TP_PACE_IDLE;
			tp_pace_release(pace);
			return ncclSuccess;
		}
	}
	TP_TRY(tp_pace_measure(comm, op, answer, &over));
	if (over) end_watch(comm, op);
	*done = over;
	return ncclSuccess;
}
