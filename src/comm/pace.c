/* Watching a communicator's pace: collectives of host ranks against the cost model's times.
 *
 * What is watched costs two looks at the clock an operation, and only operations that move much are: small ones take a shorter way and never
 * come here. When it is time to compare (watch/pace.c), the ranks do so behind the operation that they have just done, with the same plan on the
 * same links: everybody is there, nothing is connected, and nobody waits for anything but what he waited for anyway. So only collectives in
 * which each rank needs something of every other are watched: any of them can carry the least of all ranks' values. Where windows are slow for
 * seconds, they measure pairs (pace_measure.c), by and by. A job that keeps up with the model never comes so far.
 *
 * A rank's time holds its wait for ranks that came late; the least of all ranks' times doesn't, since whoever came last waited for nobody.
 *
 * Every step is taken by all ranks or by none: what decides is counts of operations, which are equal, and answers, which are equal too. Nothing of it
 * fails where the operation itself would not have: memory is taken before ranks agree, and links are those in use. */
#include <stdlib.h>
#include <string.h>

#include "comm/pace.h"

#define LEAST_BYTES ((size_t)256 << 10)         /* below it waiting for a turn is most of the time, of which the model knows little */
#define FIRST 64                        /* calls until times are compared, where all isn't well: of what one costs, less than a hundredth */
#define FIRST_IN_A_HURRY 16
#define SECONDS 3                       /* that windows are slow until pairs are measured: twice, before anything is said */

static struct tp_param params[] = {
	{ .name = "TELPHER_WATCH", .kind = TP_PARAM_INT, .fallback = "1", .max = 2,
		.doc = "Ranks look whether large collectives keep taking more than twice as long as predicted, for seconds, and then measure why: 1: by and by (in a "
		"fiftieth of the time; a tenth, if they take ten times as long); 2: at every call, to know soon, and GPU ranks look too; 0: nobody looks" },
};
TP_PARAM_TABLE("watch", params)

int tp_comm_watch_level(void) { return (int)tp_param_int(&params[0]); }

int tp_comm_pace_open(struct ncclComm *comm)
{
	int level = tp_comm_watch_level();
	size_t values = (size_t)comm->nranks * TP_PACE_VALUES;
	struct tp_comm_pace *pace = level && comm->nranks > 1 ? calloc(1, sizeof(*pace)) : NULL;
	if (!pace) return 0;
	pace->in = calloc(values, sizeof(*pace->in));
	pace->out = calloc(values, sizeof(*pace->out));
	if (!pace->in || !pace->out) {
		free(pace->in);
		free(pace->out);
		free(pace);
		return 0;
	}
	comm->pace = pace;
	return level;
}

void tp_comm_pace_agree(struct ncclComm *comm, int level)
{
	struct tp_comm_pace *pace = comm->pace;
	struct tp_cost_model guess;
	if (!level) tp_comm_pace_close(comm);
	if (!level || !pace) return;
	tp_cost_defaults(&guess);
	pace->hurry = level > 1;
	tp_pace_begin(&pace->pace, pace->hurry ? FIRST_IN_A_HURRY : FIRST, pace->hurry ? 0 : SECONDS);
	pace->across = tp_cost_is_measured(&comm->model, &guess, true);
	pace->inside = tp_cost_is_measured(&comm->model, &guess, false);
}

void tp_comm_pace_close(struct ncclComm *comm)
{
	struct tp_comm_pace *pace = comm->pace;
	if (!pace) return;
	if (comm->rank == 0 && pace->watched)
		TP_INFO(TP_INIT | TP_TUNING, "comm %p rank 0: the watch over the pace saw %llu large collectives, compared the ranks' times of them %u times, and "
			"measured pairs %u times", (void *)comm, (unsigned long long)pace->watched, pace->compared, pace->looks);
	tp_pace_release(comm);
	free(pace->in);
	free(pace->out);
	free(pace);
	comm->pace = NULL;
}

void tp_pace_clear(struct tp_comm_pace *pace, float value)
{
	for (int v = 0; v < TP_PACE_VALUES; v++) pace->in[v] = value;
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

ncclResult_t tp_pace_ask(struct ncclComm *comm, struct tp_op *op, enum tp_pace_stage stage, ncclRedOp_t what)
{
	struct tp_comm_pace *pace = comm->pace;
	int coll = op->record.func, blocks = takes_all(coll) ? comm->nranks : 1;
	struct tp_exec_call call = op->call;
	for (int b = 1; b < blocks; b++) memcpy(pace->in + b * TP_PACE_VALUES, pace->in, TP_PACE_VALUES * sizeof(*pace->in));
	call.input = pace->in;
	call.output = pace->out;
	call.block_bytes = TP_PACE_VALUES * sizeof(*pace->in);
	call.reduce = (struct tp_reduce){ .type = ncclFloat32, .op = what };
	call.tag = op->call.tag ^ (0x9ace0000u + ++pace->turn % 0x10000u);
	pace->stage = stage;
	pace->asked = what;
	return tp_exec_start(comm->exec, &call, &op->running);
}

/* What was asked last. */
static const float *answer_of(const struct ncclComm *comm, const struct tp_op *op)
{
	struct tp_comm_pace *pace = comm->pace;
	for (int r = 1; r < comm->nranks && gathers(op->record.func); r++) {
		for (int v = 0; v < TP_PACE_VALUES; v++) {
			float other = pace->out[r * TP_PACE_VALUES + v];
			pace->out[v] = pace->asked == ncclSum ? pace->out[v] + other : TP_MIN(pace->out[v], other);
		}
	}
	return pace->out;
}

enum { PREPARED = TP_PACE_SAMPLES, ELAPSED, BUSY, STOLEN };     /* among the values that go with a window */
_Static_assert(STOLEN < TP_PACE_VALUES, "they fit");

static ncclResult_t compare(struct ncclComm *comm, struct tp_op *op)
{
	struct tp_comm_pace *pace = comm->pace;
	float elapsed_s = (float)((double)(tp_clock_ns() - pace->window_ns) / 1e9);
	bool suspects = tp_pace_may_suspect(&pace->pace, elapsed_s);
	tp_pace_clear(pace, 0);
	tp_pace_window(&pace->pace, pace->in);
	/* Whoever has no memory to measure with keeps the others from it. */
	pace->in[PREPARED] = suspects && tp_pace_prepare(comm, op->call.plan);
	pace->in[ELAPSED] = elapsed_s;
	pace->in[BUSY] = -tp_delay_us(&pace->delay) / TP_MAX(elapsed_s * 1e6f, 1);
	pace->in[STOLEN] = suspects ? -tp_stolen_share(&pace->stolen) : 0;      /* (since the last suspicion; it costs more to read than a call on a large machine) */
	pace->compared++;
	return tp_pace_ask(comm, op, TP_PACE_COMPARE, ncclMin);
}

/* Windows have been compared. */
static void judge(struct ncclComm *comm, const struct tp_op *op, const float *answer)
{
	struct tp_comm_pace *pace = comm->pace;
	bool suspect = tp_pace_judge(&pace->pace, answer, answer[ELAPSED], &pace->median);
	pace->busy = pace->pace.slow > 1 ? TP_MAX(pace->busy, -answer[BUSY]) : -answer[BUSY];
	pace->taken = -answer[STOLEN];
	pace->stage = TP_PACE_IDLE;
	if (suspect && answer[PREPARED] >= 1) {
		tp_pace_begin_look(pace, total_bytes(comm, op));
		return;
	}
	tp_pace_release(comm);
	if (suspect) tp_pace_put_off(&pace->pace);
}

static void end_look(struct ncclComm *comm, const struct tp_op *op)
{
	struct tp_comm_pace *pace = comm->pace;
	tp_pace_release(comm);
	switch (tp_pace_tell(comm, op)) {
	case TP_PACE_WARNED: tp_comm_pace_close(comm); break;       /* once is enough */
	case TP_PACE_LARGER:
	case TP_PACE_ONCE_MORE: tp_pace_begin_anew(&pace->pace); break;
	case TP_PACE_CALM: tp_pace_put_off(&pace->pace); break;
	}
}

/* A call of the job's is done. *done: it is all, for now. */
static ncclResult_t after_call(struct ncclComm *comm, struct tp_op *op, bool *done)
{
	struct tp_comm_pace *pace = comm->pace;
	pace->watched++;
	if (pace->looking) {
		*done = tp_pace_waits(pace, total_bytes(comm, op));
		if (!*done) return tp_pace_take_turn(comm, op);
		if (!pace->looking) end_look(comm, op);
		return ncclSuccess;
	}
	uint64_t now_ns = tp_clock_ns();
	if (pace->pace.count == 0 && !pace->pace.skipped) {
		pace->window_ns = now_ns;
		tp_delay_begin(&pace->delay);
	}
	*done = !tp_pace_add(&pace->pace, (double)(now_ns - op->begun_ns) / 1e3, op->predicted_us);
	return *done ? ncclSuccess : compare(comm, op);
}

void tp_comm_pace_waits(struct ncclComm *comm)
{
	if (comm->pace) comm->pace->waited = true;
}

ncclResult_t tp_comm_pace_go_on(struct ncclComm *comm, struct tp_op *op, bool *done)
{
	struct tp_comm_pace *pace = comm->pace;
	*done = true;
	if (!pace) return ncclSuccess;
	if (pace->stage == TP_PACE_IDLE) return after_call(comm, op, done);
	const float *answer = answer_of(comm, op);
	if (pace->stage == TP_PACE_COMPARE) {
		judge(comm, op, answer);
		return ncclSuccess;
	}
	TP_TRY(tp_pace_measure(comm, op, answer, done));
	if (*done && !pace->looking) end_look(comm, op);
	return ncclSuccess;
}
