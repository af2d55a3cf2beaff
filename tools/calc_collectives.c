/* `telpher calc`, collectives: what bus bandwidth is, what a rank sends, where latency stops to rule, what overlap hides. */
#include "calc.h"

#include <math.h>
#include <stdio.h>

#include "tools.h"

/* What a rank's link carries for one byte of algorithm bandwidth, n ranks: twice, times (n - 1) / n, or 1. */
static const struct coll { const char *name; int times; bool shared; const char *formula, *steps; } colls[] = {
	{ "all_reduce", 2, true, "2 (n - 1) / n", "2 (n - 1)" }, { "all_gather", 1, true, "(n - 1) / n", "n - 1" },
	{ "reduce_scatter", 1, true, "(n - 1) / n", "n - 1" }, { "alltoall", 1, true, "(n - 1) / n", "n - 1" },
	{ "broadcast", 1, false, "1", "n - 1" }, { "reduce", 1, false, "1", "n - 1" }, { "sendrecv", 1, false, "1", "1" },
	{ "gather", 1, true, "(n - 1) / n", "1" }, { "scatter", 1, true, "(n - 1) / n", "1" },
};
enum { COLLS = sizeof(colls) / sizeof(colls[0]) };

static double factor_of(const struct coll *coll, int n) { return coll->times * (coll->shared ? (double)(n - 1) / n : 1); }

static void busbw_table(struct calc *c)
{
	cJSON *table = calc_table(c, "busbw = algbw x factor", CALC_TESTS, "collective|factor|2 ranks|4|8|16|64|1024");
	for (size_t i = 0; i < COLLS; i++)
		calc_row(c, table, "%s|%s|%.4g|%.4g|%.4g|%.4g|%.4g|%.4g", colls[i].name, colls[i].formula, factor_of(&colls[i], 2),
			factor_of(&colls[i], 4), factor_of(&colls[i], 8), factor_of(&colls[i], 16), factor_of(&colls[i], 64), factor_of(&colls[i], 1024));
	calc_note(c, "\"Twice the algorithm bandwidth\" holds for all_reduce of many ranks only.");
}

static int bandwidth(struct calc *c, const struct coll *coll, int n)
{
	const struct calc_options *o = c->options;
	double algbw = 0, time_us = 0, factor = factor_of(coll, n);
	size_t bytes = 0;
	if (o->bytes && (!tool_parse_size(o->bytes, &bytes) || !bytes)) return calc_refuse(c, "--bytes %s: no size; say 4096, 64K, 4M or 1G", o->bytes);
	if (o->time_us && !calc_number(o->time_us, 1e-6, 1e15, &time_us)) return calc_refuse(c, "--time %s: no number of microseconds", o->time_us);
	if (o->algbw_gbs && !calc_number(o->algbw_gbs, 1e-9, 1e9, &algbw)) return calc_refuse(c, "--algbw %s: no number of GB/s", o->algbw_gbs);
	if (o->algbw_gbs && o->time_us) return calc_refuse(c, "--algbw or --time, not both");
	if (o->time_us && !o->bytes) return calc_refuse(c, "--time needs --bytes");
	if (o->time_us) {
		algbw = (double)bytes / time_us / 1000;
		calc_value(c, "algbw", algbw, "GB/s", CALC_TESTS, "%zu bytes / %g us", bytes, time_us);
	}
	if (algbw > 0) calc_value(c, "busbw", algbw * factor, "GB/s", CALC_TESTS, "algbw %.4g x %.4g", algbw, factor);
	if (bytes && o->algbw_gbs) calc_value(c, "time", (double)bytes / algbw / 1000, "us", CALC_TESTS, "%zu bytes / %.4g GB/s", bytes, algbw);
	if (bytes) calc_value(c, "a rank of a ring sends", (double)bytes * factor, "bytes", CALC_OVERVIEW, "%zu x %.4g", bytes, factor);
	return 0;
}

static int busbw(struct calc *c)
{
	int n;
	if (!c->nwords) return busbw_table(c), 0;
	if (c->nwords < 2) return calc_refuse(c, "%s of how many ranks? say busbw %s 8", c->words[0], c->words[0]);
	const struct coll *coll = NULL;
	for (size_t i = 0; i < COLLS; i++)
		if (calc_same(colls[i].name, c->words[0])) coll = &colls[i];
	if (calc_same("allreduce", c->words[0])) coll = &colls[0];
	if (calc_same("allgather", c->words[0])) coll = &colls[1];
	if (calc_same("reducescatter", c->words[0])) coll = &colls[2];
	if (calc_same("all_to_all", c->words[0])) coll = &colls[3];
	if (!coll)
		return calc_refuse(c, "there is no collective \"%s\"; there are all_reduce, all_gather, reduce_scatter, alltoall, broadcast, reduce, "
			"sendrecv, gather, scatter", c->words[0]);
	if (!calc_integer(c->words[1], 1, 100000000, &n)) return calc_refuse(c, "\"%s\" is no number of ranks; from 1 on", c->words[1]);
	calc_value(c, "factor", factor_of(coll, n), "", CALC_TESTS, "%s, n = %d", coll->formula, n);
	if (coll->shared || coll->times == 2) calc_text(c, "steps of a ring", coll->steps, CALC_OVERVIEW);
	return bandwidth(c, coll, n);
}

static int s_star(struct calc *c)
{
	double alpha, beta;
	size_t bytes = 0;
	if (!calc_number(c->words[0], 1e-6, 1e9, &alpha)) return calc_refuse(c, "\"%s\" is no latency in us", c->words[0]);
	if (!calc_number(c->words[1], 1e-6, 1e9, &beta)) return calc_refuse(c, "\"%s\" is no bandwidth in GB/s", c->words[1]);
	if (c->options->bytes && !tool_parse_size(c->options->bytes, &bytes))
		return calc_refuse(c, "--bytes %s: no size; say 4096, 64K, 4M or 1G", c->options->bytes);
	calc_value(c, "S*", alpha * beta, "KB", CALC_PATHS, "alpha x beta = %g us x %g GB/s (1 KB = 1000 bytes)", alpha, beta);
	if (c->options->bytes) {
		double time = alpha + (double)bytes / beta / 1000;
		calc_value(c, "time of a message", time, "us", CALC_PATHS, "alpha + bytes / beta = %g + %.4g", alpha, (double)bytes / beta / 1000);
		calc_value(c, "share of the latency", 100 * alpha / time, "%", NULL, "%g / %.4g", alpha, time);
		calc_value(c, "bandwidth it sees", (double)bytes / time / 1000, "GB/s", NULL, "%zu bytes / %.4g us", bytes, time);
	}
	calc_note(c, "Below S* latency rules, above it bandwidth; at S* each takes half of the time.");
	return 0;
}

static int step(struct calc *c)
{
	double compute, communicate;
	if (!calc_number(c->words[0], 0, 1e12, &compute)) return calc_refuse(c, "\"%s\" is no time of computing", c->words[0]);
	if (!calc_number(c->words[1], 0, 1e12, &communicate)) return calc_refuse(c, "\"%s\" is no time of communicating", c->words[1]);
	calc_value(c, "a step, all overlapped", fmax(compute, communicate), "ms", CALC_OVERVIEW, "max(%g, %g)", compute, communicate);
	calc_value(c, "a step, nothing overlapped", compute + communicate, "ms", NULL, "%g + %g", compute, communicate);
	return 0;
}

const struct calc_command calc_collectives[] = {
	{ "busbw", "[COLLECTIVE RANKS]", "bus bandwidth's factor (--algbw, or --bytes and --time)", 0, 2, busbw },
	{ "s-star", "ALPHA_US BETA_GB/S", "the size at which bandwidth takes over from latency (--bytes)", 2, 2, s_star },
	{ "step", "COMPUTE_MS COMMUNICATE_MS", "a training step with and without overlap", 2, 2, step },
};
const size_t calc_collectives_count = sizeof(calc_collectives) / sizeof(calc_collectives[0]);
