/* What is said of a communicator that is slow. A warning must be true, so it needs more than the cost model, whose figures are guesses mostly: a
 * pair that is far behind others like it, by much more than turns of such pairs differ; or figures that somebody measured here. And it needs
 * two looks that find the same, and none between them that finds something else or nothing; one that couldn't tell may lie there. Otherwise it is an
 * INFO line, once, and the watch goes on. All ranks judge alike; rank 0 speaks. */
#include <stdio.h>
#include <string.h>

#include "comm/pace.h"

#define FAR_BEHIND 4.0f                 /* pairs that are alike differ by less */
#define FIGURES_US 100.0f               /* what a thread that slept may be late by, against figures of threads that didn't */
#define LIKE_US 20.0f                   /* of times below it, what they say of a link is less than what they say of how a message is taken */
#define SPREADS 4                       /* what surroundings do to a time */
#define RESTLESS 3.0f                   /* where a message's time may be processors' for so much of it, that all are slow says nothing; nor … */
#define BUSY 0.05f                      /* … where ranks wait for a processor, or the machine for its host, for so much of the time */
#define UNKNOWN 100.0f                  /* (more than all the time) */

/* Within a host the model's figures are of data in caches. */
float tp_pace_expected_us(const struct ncclComm *comm, enum tp_pace_class kind, size_t bytes)
{
	if ((kind != TP_PACE_MACHINE && kind != TP_PACE_REMOTE) || !comm->pace->across) return 0;
	return (float)(comm->model.across.latency_us + (double)bytes * comm->model.across.us_per_byte);
}

static double gbps(const struct tp_comm_pace *pace, float us) { return us > 0 ? (double)pace->bytes / (double)us / 1e3 : 0; }

bool tp_pace_is_far_behind(float took_us, float like_us) { return like_us > 0 && took_us >= FAR_BEHIND * TP_MAX(like_us, LIKE_US); }

static enum tp_pace_verdict judge(const struct tp_pace_found *f, bool measured)
{
	/* What others' times vary by is chance; of one that has no like, or isn't far behind, what its own do. */
	float noise_us = SPREADS * f->spread_us, near_us = SPREADS * TP_MAX(f->spread_us, f->own_spread_us);
	if (f->from < 0 || f->to < 0) return TP_PACE_NOTHING;
	if (tp_pace_is_far_behind(f->took_us, f->like_us) && f->took_us - f->like_us > noise_us) return TP_PACE_BEHIND_LIKE;
	if (f->expected_us > 0 && f->took_us > TP_PACE_SLOW_RATIO * f->expected_us && f->took_us - f->expected_us > TP_MAX(near_us, FIGURES_US)) return TP_PACE_BEHIND_FIGURES;
	return measured && f->unrest < RESTLESS ? TP_PACE_ALL_SLOW : TP_PACE_NOTHING;
}

/* Far behind, and not by enough for what turns differ among themselves; or nothing was to be seen for what threads waited for processors (where nobody
 * counts that, all of a time may be such waits, however long the message is). */
static bool is_hidden(const struct tp_comm_pace *pace)
{
	const struct tp_pace_found *f = &pace->found;
	return f->from >= 0 && f->to >= 0 && (tp_pace_is_far_behind(f->took_us, f->like_us) || (f->unrest >= RESTLESS && pace->busy <= UNKNOWN));
}

/* One host or rank that is slow makes several pairs slow, of which now one and now another is the slowest. */
static bool is_same(const struct tp_comm_pace *pace, enum tp_pace_verdict verdict)
{
	const struct tp_pace_found *f = &pace->found, *was = &pace->was;
	if (verdict != pace->was_verdict) return false;
	if (verdict == TP_PACE_ALL_SLOW) return true;
	if (f->kind != was->kind) return false;
	if (f->from == was->from || f->to == was->to || f->from == was->to || f->to == was->from) return true;
	/* A host's ranks leave and enter it by the same wires. */
	return (f->kind == TP_PACE_MACHINE || f->kind == TP_PACE_REMOTE) && (f->from_host == was->from_host || f->to_host == was->to_host);
}

enum tp_pace_end tp_pace_weigh(struct tp_comm_pace *pace, bool measured, enum tp_pace_verdict *verdict)
{
	bool first = pace->was_verdict == TP_PACE_NOTHING;
	*verdict = pace->taken > BUSY ? TP_PACE_NOTHING : judge(&pace->found, measured && pace->busy <= BUSY);
	if (*verdict != TP_PACE_NOTHING && is_same(pace, *verdict)) return TP_PACE_WARNED;
	if (*verdict == TP_PACE_NOTHING && pace->taken <= BUSY && tp_pace_may_grow(pace) && is_hidden(pace)) {
		/* What an earlier look found still stands. */
		pace->grown++;
		return TP_PACE_LARGER;
	}
	/* Each time something else is no slow pair: the watch begins again, later. */
	pace->was_verdict = first ? *verdict : TP_PACE_NOTHING;
	pace->was = pace->found;
	if (pace->was_verdict != TP_PACE_NOTHING) return TP_PACE_ONCE_MORE;
	pace->grown = 0;
	return TP_PACE_CALM;
}

static void describe_op(const struct ncclComm *comm, const struct tp_op *op, char *text, size_t bytes)
{
	snprintf(text, bytes, "large collectives take %.3g times as long as predicted (the median of the last ones; waiting for ranks that come late is left out; "
		"the prediction is %.3g ms for %s of %zu bytes a block by %s)", (double)comm->pace->median, op->predicted_us / 1e3, tp_coll_name((enum tp_coll)op->record.func),
		op->call.block_bytes, tp_algo_name(op->call.plan->spec.algo));
}

/* What it took at least may be nothing, where all of it may be waits for processors. */
static bool is_rate_sure(const struct tp_pace_found *f) { return f->took_us >= 1; }

static void describe_rate(const struct tp_comm_pace *pace, char *text, size_t bytes)
{
	if (is_rate_sure(&pace->found)) snprintf(text, bytes, "%.3g GB/s", gbps(pace, pace->found.took_us));
	else snprintf(text, bytes, "no rate that is sure");
}

/* What it is held against. */
static void describe_others(const struct tp_comm_pace *pace, enum tp_pace_verdict verdict, char *text, size_t bytes)
{
	const struct tp_pace_found *f = &pace->found;
	if (verdict == TP_PACE_BEHIND_FIGURES) snprintf(text, bytes, "while by the measured figures (TELPHER_TUNE_FILE) it makes %.3g GB/s", gbps(pace, f->expected_us));
	else if (f->like_us <= 0) snprintf(text, bytes, "and it has no like");
	else if (f->took_us > f->like_us || !is_rate_sure(f)) snprintf(text, bytes, "while others like it make %.3g GB/s", gbps(pace, f->like_us));
	else snprintf(text, bytes, "and the others are like it");
}

void tp_pace_describe_look(const struct tp_comm_pace *pace, enum tp_pace_verdict verdict, enum tp_pace_end end, char *text, size_t bytes)
{
	char rate[40], others[160];
	describe_rate(pace, rate, sizeof(rate));
	describe_others(pace, verdict, others, sizeof(others));
	snprintf(text, bytes, "rank %d -> rank %d: %s, %s. The watch over the pace looks once more%s", pace->found.from, pace->found.to, rate, others,
		end == TP_PACE_LARGER ? ", with longer messages, which threads' waits for processors hide less" : "");
}

static void describe_pair(struct ncclComm *comm, char *text, size_t bytes)
{
	const struct tp_comm_pace *pace = comm->pace;
	const struct tp_pace_found *f = &pace->found;
	const struct tp_boot_peer *from = &comm->boot->peers[f->from], *to = &comm->boot->peers[f->to];
	struct tp_watch_path path;
	char rate[40];
	describe_rate(pace, rate, sizeof(rate));
	if (tp_report_path(comm, f->from, f->to, &path) != ncclSuccess) memset(&path, 0, sizeof(path));
	snprintf(text, bytes, "rank %d (host %.63s, pid %d) -> rank %d (host %.63s, pid %d) by %s%s%s: %s", f->from, from->host_name, (int)from->pid, f->to,
		to->host_name, (int)to->pid, path.via, path.device[0] ? " on " : "", path.device, rate);
}

static const char *where_to_look(const struct tp_pace_found *f, enum tp_pace_verdict verdict)
{
	if (verdict == TP_PACE_ALL_SLOW) return "Look at what all pairs share: load, clocks and power of the processors, the network as a whole";
	if (f->kind == TP_PACE_MACHINE || f->kind == TP_PACE_REMOTE)
		return "Look at its ports, cable and switch, at limits and queues on the way (ethtool -S, tc -s qdisc), and at who else uses it (telpher probe)";
	return "Look at what else runs on these two ranks' processors and memory, and where they are bound (telpher topo show)";
}

/* Why it is no warning: what is known of that. */
static void describe_doubt(const struct tp_comm_pace *pace, char *text, size_t bytes)
{
	const struct tp_pace_found *f = &pace->found;
	if (pace->taken > BUSY)
		snprintf(text, bytes, "The host of this virtual machine took %.0f%% of the processors' time meanwhile", 100 * (double)pace->taken);
	else if (pace->busy > UNKNOWN)
		snprintf(text, bytes, "For how long ranks waited for processors isn't known (the system doesn't count it, or several threads run a rank by turns), so that no pair can be "
			"held to be slow");
	else if (f->unrest >= RESTLESS)
		snprintf(text, bytes, "Up to %.0f%% of what messages took may be waits for processors, which more ranks or other programs have", 100 * (1 - 1 / (double)f->unrest));
	else if (pace->busy > BUSY)
		snprintf(text, bytes, "Ranks' threads were ready without a processor for up to %.0f%% of the time (they yield it while they wait for data, too)", 100 * (double)pace->busy);
	else
		snprintf(text, bytes, "The prediction may be wrong here: a table of measured figures (TELPHER_TUNE_FILE) would tell");
}

static void say(struct ncclComm *comm, const struct tp_op *op, enum tp_pace_verdict verdict, bool sure)
{
	const struct tp_comm_pace *pace = comm->pace;
	char what[320], pair[320], others[160], doubt[240];
	int percent = (int)(100 / TP_MAX(pace->median, 1) + 0.5f);
	describe_op(comm, op, what, sizeof(what));
	describe_pair(comm, pair, sizeof(pair));
	describe_others(pace, verdict, others, sizeof(others));
	describe_doubt(pace, doubt, sizeof(doubt));
	tp_log_set_device(comm->device);
	if (sure)
		TP_WARN("comm %p rank 0: this communicator of %d ranks keeps running at %d%% of its predicted speed: %s. The slowest pair is %s, %s. %s", (void *)comm,
			comm->nranks, percent, what, pair, others, where_to_look(&pace->found, verdict));
	else
		TP_INFO(TP_INIT | TP_TUNING, "comm %p rank 0: this communicator of %d ranks runs at %d%% of its predicted speed: %s. No pair keeps standing out: the slowest is "
			"%s, %s. %s", (void *)comm, comm->nranks, percent, what, pair, others, doubt);
}

enum tp_pace_end tp_pace_tell(struct ncclComm *comm, const struct tp_op *op)
{
	struct tp_comm_pace *pace = comm->pace;
	enum tp_pace_verdict verdict;
	/* Across hosts and within them, whichever of both are there. */
	bool measured = comm->boot->nhosts > 1 ? pace->across : pace->inside;
	enum tp_pace_end end = tp_pace_weigh(pace, measured, &verdict);
	bool sure = end == TP_PACE_WARNED, speaks = sure || (end == TP_PACE_CALM && !pace->told);
	if (comm->rank == 0 && speaks && pace->found.from >= 0) say(comm, op, verdict, sure);
	if (comm->rank == 0 && (end == TP_PACE_ONCE_MORE || end == TP_PACE_LARGER)) {
		char look[360];
		tp_pace_describe_look(pace, verdict, end, look, sizeof(look));
		TP_INFO(TP_TUNING, "comm %p rank 0: %s", (void *)comm, look);
	}
	pace->told |= end == TP_PACE_CALM && pace->found.from >= 0;
	return end;
}
