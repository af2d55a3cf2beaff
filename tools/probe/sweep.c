/* Every size from 8 bytes on; see sweep.h. Each size takes two steps: messages one by one for the latency (from post to completion), and
 * as many at once as the queues hold for the bandwidth. */
#include "probe/sweep.h"

#include <stdlib.h>
#include <string.h>

#define LATENCY_BYTES ((uint64_t)16 << 20)  /* what a size's step moves, within the bounds below */
#define STREAM_BYTES ((uint64_t)64 << 20)
enum { LATENCY_LEAST = 5, LATENCY_MOST = 400, STREAM_LEAST = 4, STREAM_MOST = 2000 };

static uint32_t repetitions(uint64_t total, uint64_t bytes, uint32_t least, uint32_t most)
{
	uint64_t n = total / bytes;
	return n < least ? least : n > most ? most : (uint32_t)n;
}

static void shape_step(struct probe_job *job, const struct probe_step *step, uint32_t count)
{
	job->shape.bytes = step->bytes;
	job->shape.count = count;
	job->notice = false;
	/* Only sends tell the other side. */
	if (job->op != PROBE_SEND) job->in = false;
}

int probe_sweep_serve(const struct probe_job *from, const struct probe_step *step)
{
	struct probe_job job = *from;
	struct probe_record record;
	uint32_t count = step->count + step->warmup;
	shape_step(&job, step, count);
	double *us = step->one_by_one && job.out ? malloc(count * sizeof(*us)) : NULL;
	if (step->one_by_one && job.out && !us) return probe_fail("out of memory");
	job.us = us;
	int status = probe_job_prepare(&job);
	probe_record_start(&record, PROBE_READY);
	if (!status) status = probe_tell(job.peer, &record);
	if (!status) status = probe_job_run(&job);
	free(us);
	probe_record_start(&record, PROBE_DONE);
	record.as.done.ok = 1;
	record.as.done.ns = job.ns;
	return status ? status : probe_tell(job.peer, &record);
}

static int run_step(const struct probe_job *from, struct probe_step *step, double *us, uint64_t *ns)
{
	struct probe_job job = *from;
	struct probe_record record;
	shape_step(&job, step, step->count + step->warmup);
	job.us = us;
	int status = probe_job_prepare(&job);
	probe_record_start(&record, PROBE_STEP);
	record.as.step = *step;
	if (!status) status = probe_tell(job.peer, &record);
	if (!status) status = probe_hear(job.peer, PROBE_READY, PROBE_PATIENCE_MS(step->bytes), &record);
	if (!status) status = probe_job_run(&job);
	/* The other side's part of it takes as long as this one's. */
	if (!status) status = probe_hear(job.peer, PROBE_DONE, PROBE_PATIENCE_MS(job.ns / 3), &record);
	*ns = job.ns;
	return status;
}

static int measure(const struct probe_job *job, uint64_t bytes, int iterations, struct probe_point *out)
{
	struct probe_step step = { .bytes = bytes, .one_by_one = 1, .warmup = 2,
		.count = iterations ? (uint32_t)iterations : repetitions(LATENCY_BYTES, bytes, LATENCY_LEAST, LATENCY_MOST) };
	double *us = malloc((step.count + step.warmup) * sizeof(*us));
	uint64_t ns = 0;
	if (!us) return probe_fail("out of memory");
	int status = run_step(job, &step, us, &ns);
	if (!status) {
		double *counted = us + step.warmup;
		out->bytes = bytes;
		out->latency_us = tp_median(counted, (int)step.count);       /* sorts them */
		out->least_us = counted[0];
		out->p99_us = counted[(size_t)(step.count - 1) * 99 / 100];
	}
	free(us);
	if (status) return status;
	step.one_by_one = 0;
	step.warmup = 0;
	step.count = out->messages = iterations ? (uint32_t)iterations : repetitions(STREAM_BYTES, bytes, STREAM_LEAST, STREAM_MOST);
	status = run_step(job, &step, NULL, &ns);
	if (!status && ns) out->gbs = (double)bytes * step.count / (double)ns;
	return status;
}

int probe_sweep_run(const struct probe_job *job, uint64_t most, int iterations, struct probe_sweep *out)
{
	double bytes[PROBE_SWEEP_MAX], us[PROBE_SWEEP_MAX];
	struct probe_sweep s = { .count = 0 };
	memcpy(s.title, out->title, sizeof(s.title));
	for (uint64_t size = PROBE_SWEEP_FIRST; s.count < PROBE_SWEEP_MAX; size *= 2) {
		/* The largest is what was asked for, be it a power of two or not. */
		uint64_t now = size < most ? size : most;
		struct probe_point *p = &s.points[s.count];
		int status = measure(job, now, iterations, p);
		if (status) return status;
		bytes[s.count] = (double)now;
		us[s.count++] = p->latency_us;
		if (p->gbs > s.peak_gbs) s.peak_gbs = p->gbs;
		if (now == most) break;
	}
	s.fitted = probe_fit(s.count, bytes, us, &s.fit);
	*out = s;
	return 0;
}

void probe_sweep_print(const struct probe_sweep *s, FILE *out)
{
	char a[32], b[32], c[32], d[32];
	fprintf(out, "%12s  %12s  %10s  %10s  %10s\n", "bytes", "latency us", "least us", "p99 us", "GB/s");
	for (int i = 0; i < s->count; i++) {
		const struct probe_point *p = &s->points[i];
		fprintf(out, "%12llu  %12s  %10s  %10s  %10s\n", (unsigned long long)p->bytes, probe_digits(p->latency_us, a), probe_digits(p->least_us, b),
			probe_digits(p->p99_us, c), probe_digits(p->gbs, d));
	}
	if (!s->fitted) {
		fprintf(out, "no line through these times: measure again, or up to a larger -s\n");
		return;
	}
	fprintf(out, "alpha = %s us, beta = %s GB/s (time = alpha + bytes / beta); peak %s GB/s\n", probe_digits(s->fit.alpha_us, a), probe_digits(s->fit.beta_gbs, b),
		probe_digits(s->peak_gbs, c));
	fprintf(out, "S* = alpha x beta = %s KB: latency rules below it, bandwidth above\n", probe_digits(s->fit.s_star / 1000, d));
}

cJSON *probe_sweep_json(const struct probe_sweep *s)
{
	cJSON *json = cJSON_CreateObject(), *points = cJSON_AddArrayToObject(json, "points");
	for (int i = 0; i < s->count; i++) {
		const struct probe_point *p = &s->points[i];
		cJSON *one = cJSON_CreateObject();
		cJSON_AddNumberToObject(one, "bytes", (double)p->bytes);
		cJSON_AddNumberToObject(one, "latency_us", p->latency_us);
		cJSON_AddNumberToObject(one, "least_us", p->least_us);
		cJSON_AddNumberToObject(one, "p99_us", p->p99_us);
		cJSON_AddNumberToObject(one, "messages", p->messages);
		cJSON_AddNumberToObject(one, "gbs", p->gbs);
		cJSON_AddItemToArray(points, one);
	}
	cJSON_AddNumberToObject(json, "peak_gbs", s->peak_gbs);
	if (!s->fitted) return json;
	cJSON_AddNumberToObject(json, "alpha_us", s->fit.alpha_us);
	cJSON_AddNumberToObject(json, "beta_gbs", s->fit.beta_gbs);
	cJSON_AddNumberToObject(json, "s_star_bytes", s->fit.s_star);
	return json;
}
