/* The client of `telpher probe write`: it says what is done, and does it. */
#include <stdio.h>
#include <string.h>

#include "probe/write.h"

static int meet(struct probe_end *end)
{
	const struct probe_write_options *o = end->options;
	struct probe_record record;
	int status = probe_meet(o->server, o->port, &end->peer);
	probe_record_start(&record, PROBE_HELLO);
	record.as.hello = end->mine;
	record.as.hello.sweep = o->sweep;
	if (!status) status = probe_tell(&end->peer, &record);
	if (!status) status = probe_hear(&end->peer, PROBE_HELLO, PROBE_PATIENCE_MS(end->mine.bytes), &record);
	if (!status && (record.as.hello.bytes != end->mine.bytes || record.as.hello.op != end->mine.op))
		status = probe_fail("%s: it answered for another transfer", end->peer.name);
	if (!status) status = probe_end_connect(end, &record.as.hello);
	/* A sweep's own receives come first. */
	if (!status && !o->sweep) status = probe_end_expect(end);
	probe_record_start(&record, PROBE_READY);
	if (!status) status = probe_tell(&end->peer, &record);
	return status ? status : probe_hear(&end->peer, PROBE_READY, PROBE_PATIENCE_MS(end->mine.bytes), &record);
}

static int sweep(struct probe_end *end)
{
	struct probe_record record;
	snprintf(end->sweep.title, sizeof(end->sweep.title), "RDMA %s%s, %.60s to %.60s, %d queue pair%s", probe_op_name((int)end->op),
		end->both_ways ? " both ways" : "", end->port.ib->text, end->link.remote.host, end->link.nqps, end->link.nqps == 1 ? "" : "s");
	int status = probe_sweep_run(&end->job, end->job.shape.bytes, TP_MAX(end->options->iterations, 0), &end->sweep);
	/* The whole block once more, to be verified. */
	if (!status) status = probe_end_expect(end);
	probe_record_start(&record, PROBE_STEP);
	record.as.step = (struct probe_step){ .bytes = end->job.shape.bytes, .count = 1, .last = 1 };
	if (!status) status = probe_tell(&end->peer, &record);
	return status ? status : probe_hear(&end->peer, PROBE_READY, PROBE_PATIENCE_MS(end->mine.bytes), &record);
}

int probe_client(const struct probe_write_options *options)
{
	struct probe_end end;
	struct probe_record record;
	int status = probe_end_open(&end, options, "client");
	/* Before minutes of measuring. */
	if (!status && options->svg) status = probe_draw_can(options->svg);
	if (!status) status = probe_end_prepare(&end, options->op, options->both_ways, options->bytes, options->nqps, true);
	if (!status) status = meet(&end);
	if (!status && options->sweep) status = sweep(&end);
	if (!status) status = probe_job_run(&end.job);
	if (!status) status = probe_end_check(&end);
	if (!status) status = probe_end_tell_done(&end);
	/* The other side looks at what came first. */
	if (!status) status = probe_hear(&end.peer, PROBE_DONE, PROBE_PATIENCE_MS(end.mine.bytes), &record);
	if (!status) status = probe_end_report(&end, &record.as.done);
	probe_end_close(&end);
	return status;
}
