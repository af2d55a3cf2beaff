/* The table (nccl-tests' columns, so that its parsers work) and the JSON file. */
#include "perf.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static cJSON *results;
static double busbw_sum;
static int busbw_count;
static int64_t wrong_total;

void perf_print_head(const struct perf_options *o, int nranks)
{
	const struct perf_coll_info *info = &perf_colls[o->coll];
	char step[48];
	if (o->step_factor > 1) snprintf(step, sizeof(step), "%g(factor)", o->step_factor);
	else snprintf(step, sizeof(step), "%zu(bytes)", o->step_bytes);
	int version = 0;
	ncclGetVersion(&version);
	printf("# telpher perf nccl-headers=%d nccl-library=%d\n", NCCL_VERSION_CODE, version);
	printf("# Collective test starting: %s_perf\n", info->name);
	printf("# nThread %d nGpus %d minBytes %zu maxBytes %zu step: %s warmup iters: %d iters: ", o->nthreads, o->ngpus, o->min_bytes,
		o->max_bytes, step, o->warmup);
	if (o->iters) printf("%d", o->iters);
	else printf("by size");
	printf(" agg iters: %d validation: %d graph: 0 unalign: 0\n", o->aggregate, o->check);
	printf("# busbw = algbw x %s = algbw x %g for %d ranks\n#\n# Using devices\n", info->factor, perf_bus_factor(o->coll, nranks), nranks);
}

void perf_print_device(int rank, int pid, const char *host, int device)
{
	printf("#  Rank %2d Group  0 Pid %6d on %10s device %2d [host memory]\n", rank, pid, host, device);
}

void perf_print_columns(void)
{
	printf("#\n");
	printf("# %10s  %12s  %8s  %6s  %6s           out-of-place                       in-place          \n", "", "", "", "", "");
	printf("# %10s  %12s  %8s  %6s  %6s  %7s  %6s  %6s  %5s  %7s  %6s  %6s  %5s\n", "size", "count", "type", "redop", "root",
		"time", "algbw", "busbw", "#wrong", "time", "algbw", "busbw", "#wrong");
	printf("# %10s  %12s  %8s  %6s  %6s  %7s  %6s  %6s  %5s  %7s  %6s  %6s  %5s\n", "(B)", "(elements)", "", "", "",
		"(us)", "(GB/s)", "(GB/s)", "", "(us)", "(GB/s)", "(GB/s)", "");
}

static void print_sample(const struct perf_sample *s)
{
	char time[32], wrong[24];
	int digits = s->us < 1000 ? 2 : s->us < 100000 ? 1 : 0;
	snprintf(time, sizeof(time), "%.*f", digits, s->us);
	if (s->wrong < 0) snprintf(wrong, sizeof(wrong), "N/A");
	else snprintf(wrong, sizeof(wrong), "%lld", (long long)s->wrong);
	printf("  %7s  %6.2f  %6.2f  %5s", time, s->algbw, s->busbw, wrong);
}

static cJSON *sample_json(const struct perf_sample *s)
{
	if (s->us == 0) return cJSON_CreateNull();
	cJSON *json = cJSON_CreateObject();
	cJSON_AddNumberToObject(json, "time_us", s->us);
	cJSON_AddNumberToObject(json, "algbw_gbs", s->algbw);
	cJSON_AddNumberToObject(json, "busbw_gbs", s->busbw);
	if (s->wrong < 0) cJSON_AddNullToObject(json, "wrong");
	else cJSON_AddNumberToObject(json, "wrong", (double)s->wrong);
	return json;
}

void perf_add_line(const struct perf_line *l)
{
	printf("%12zu  %12zu  %8s  %6s  %6d", l->bytes, l->count, perf_type_name((int)l->type), l->op < 0 ? "none" : perf_op_name(l->op), l->root);
	print_sample(&l->out_of_place);
	print_sample(&l->in_place);
	printf("\n");
	fflush(stdout);
	const struct perf_sample *both[2] = { &l->out_of_place, &l->in_place };
	for (int i = 0; i < 2; i++) {
		if (both[i]->us == 0) continue;
		busbw_sum += both[i]->busbw;
		busbw_count++;
		if (both[i]->wrong > 0) wrong_total += both[i]->wrong;
	}
	if (!results) results = cJSON_CreateArray();
	cJSON *json = cJSON_CreateObject();
	cJSON_AddNumberToObject(json, "size", (double)l->bytes);
	cJSON_AddNumberToObject(json, "count", (double)l->count);
	cJSON_AddStringToObject(json, "type", perf_type_name((int)l->type));
	cJSON_AddStringToObject(json, "redop", l->op < 0 ? "none" : perf_op_name(l->op));
	cJSON_AddNumberToObject(json, "root", l->root);
	cJSON_AddItemToObject(json, "out_of_place", sample_json(&l->out_of_place));
	cJSON_AddItemToObject(json, "in_place", sample_json(&l->in_place));
	cJSON_AddItemToArray(results, json);
}

bool perf_write_json(cJSON *json, FILE *out)
{
	char *text = cJSON_Print(json);
	cJSON_Delete(json);
	bool failed = !text || fprintf(out, "%s\n", text) < 0;
	if (fclose(out)) failed = true;
	if (failed) fprintf(stderr, "telpher perf: the results could not be written to the file of -J\n");
	free(text);
	return !failed;
}

static bool write_results(const struct perf_options *o, int nranks, double average)
{
	cJSON *json = cJSON_CreateObject();
	cJSON_AddStringToObject(json, "collective", perf_colls[o->coll].name);
	cJSON_AddNumberToObject(json, "nranks", nranks);
	cJSON_AddNumberToObject(json, "nprocs", o->nprocs);
	cJSON_AddNumberToObject(json, "nthreads", o->nthreads);
	cJSON_AddNumberToObject(json, "ngpus", o->ngpus);
	cJSON_AddStringToObject(json, "busbw_factor", perf_colls[o->coll].factor);
	cJSON_AddItemToObject(json, "results", results ? results : cJSON_CreateArray());
	cJSON_AddNumberToObject(json, "out_of_bounds", (double)wrong_total);
	cJSON_AddNumberToObject(json, "average_busbw_gbs", average);
	results = NULL;
	return perf_write_json(json, o->json);
}

int perf_finish(const struct perf_options *o, int nranks)
{
	double average = busbw_count ? busbw_sum / busbw_count : 0;
	printf("# Out of bounds values : %lld %s\n", (long long)wrong_total, wrong_total ? "FAILED" : "OK");
	printf("# Avg bus bandwidth    : %g \n#\n# Collective test concluded: %s_perf\n#\n", average, perf_colls[o->coll].name);
	fflush(stdout);
	bool written = !o->json || write_results(o, nranks, average);
	cJSON_Delete(results);
	return wrong_total || !written || ferror(stdout);
}
