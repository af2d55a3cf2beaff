/* A port with itself; see loop.h. */
#include "probe/loop.h"

#include <stdlib.h>
#include <string.h>

int probe_loop_open(const struct probe_port *port, const struct probe_memory *source, const struct probe_memory *target, struct probe_loop *out)
{
	struct probe_hello a = { .addr = (uint64_t)(uintptr_t)source->ptr, .rkey = source->mr->rkey };
	struct probe_hello b = { .addr = (uint64_t)(uintptr_t)target->ptr, .rkey = target->mr->rkey };
	memset(out, 0, sizeof(*out));
	int status = probe_link_create(port, 1, &out->from);
	if (!status) status = probe_link_create(port, 1, &out->to);
	if (!status) status = probe_link_to_init(&out->from);
	if (!status) status = probe_link_to_init(&out->to);
	if (!status) {
		probe_link_describe(&out->from, &a);
		probe_link_describe(&out->to, &b);
		status = probe_link_learn(&out->from, &b);
	}
	if (!status) status = probe_link_learn(&out->to, &a);
	if (!status) status = probe_link_to_rtr(&out->from);
	if (!status) status = probe_link_to_rtr(&out->to);
	if (!status) status = probe_link_to_rts(&out->from);
	if (!status) status = probe_link_to_rts(&out->to);
	if (status) {
		probe_loop_close(out);
		return status;
	}
	out->job = (struct probe_job){ .link = &out->from, .op = PROBE_WRITE, .memory = source, .out = true, .remote_addr = b.addr, .remote_rkey = b.rkey,
		.shape = { .nqps = 1, .max_message = probe_largest_message(port->ib->attr.max_msg_sz, port->ib->attr.max_msg_sz) } };
	return 0;
}

void probe_loop_close(struct probe_loop *loop)
{
	probe_link_destroy(&loop->from);
	probe_link_destroy(&loop->to);
}

static int run(struct probe_loop *loop, uint64_t bytes, uint32_t count, double *us)
{
	loop->job.shape.bytes = bytes;
	loop->job.shape.count = count;
	loop->job.us = us;
	int status = probe_job_prepare(&loop->job);
	return status ? status : probe_job_run(&loop->job);
}

int probe_loop_latency(struct probe_loop *loop, uint64_t bytes, uint32_t count, double *us)
{
	double *all = malloc(count * sizeof(*all));
	if (!all) return probe_fail("out of memory");
	int status = run(loop, bytes, count, all);
	if (!status) *us = tp_median(all, (int)count);
	free(all);
	return status;
}

int probe_loop_stream(struct probe_loop *loop, uint64_t bytes, uint32_t count, double *gbs)
{
	int status = run(loop, bytes, count, NULL);
	if (!status) *gbs = loop->job.ns ? (double)bytes * count / (double)loop->job.ns : 0;
	return status;
}

int probe_loop_write(struct probe_loop *loop, uint64_t offset, uint64_t bytes)
{
	struct probe_job whole = loop->job;
	loop->job.out_at += offset;
	loop->job.remote_addr += offset;
	int status = run(loop, bytes, 1, NULL);
	loop->job.out_at = whole.out_at;
	loop->job.remote_addr = whole.remote_addr;
	return status;
}
