/* A port with itself: two links in this process, connected to each other. What one card and the memory on both sides of it do, without
 * another host. */
#ifndef TELPHER_PROBE_LOOP_H
#define TELPHER_PROBE_LOOP_H

#include "probe/job.h"

struct probe_loop {
	struct probe_link from, to;
	struct probe_job job;                   /* writes of from's memory into to's */
};

/* source, target: registered, and of at least `bytes`. */
int probe_loop_open(const struct probe_port *port, const struct probe_memory *source, const struct probe_memory *target, struct probe_loop *out);
void probe_loop_close(struct probe_loop *loop);
/* Median of `count` writes one by one, and the rate of `count` at once. */
int probe_loop_latency(struct probe_loop *loop, uint64_t bytes, uint32_t count, double *us);
int probe_loop_stream(struct probe_loop *loop, uint64_t bytes, uint32_t count, double *gbs);
/* One write at an offset of both, and its end. */
int probe_loop_write(struct probe_loop *loop, uint64_t offset, uint64_t bytes);

#endif
