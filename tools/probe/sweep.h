/* Every size from 8 bytes on: latency, bandwidth, and what they are made of. */
#ifndef TELPHER_PROBE_SWEEP_H
#define TELPHER_PROBE_SWEEP_H

#include <stdio.h>

#include "probe/fit.h"
#include "probe/job.h"

#define PROBE_SWEEP_FIRST 8
#define PROBE_SWEEP_MAX 48

struct probe_point { uint64_t bytes; uint32_t messages; double latency_us, least_us, p99_us, gbs; };
struct probe_sweep {
	int count;
	struct probe_point points[PROBE_SWEEP_MAX];
	bool fitted;
	struct probe_fit fit;                   /* of the latencies */
	double peak_gbs;
	char title[200];
};

/* The client's side, on a link and with halves that job (a copy of the block's) describes; iterations 0: by size. */
int probe_sweep_run(const struct probe_job *job, uint64_t most, int iterations, struct probe_sweep *out);
/* The server's side of one STEP. */
int probe_sweep_serve(const struct probe_job *job, const struct probe_step *step);
void probe_sweep_print(const struct probe_sweep *sweep, FILE *out);
cJSON *probe_sweep_json(const struct probe_sweep *sweep);
/* draw.c: both curves over the size, the fitted line and S*, as SVG. */
/* Can that file be written? What it holds stays. */
int probe_draw_can(const char *path);
int probe_draw(const struct probe_sweep *sweep, const char *path);

#endif
