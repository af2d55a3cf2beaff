/* The server of `telpher probe write`: one client, which says what is done. */
#include <stdio.h>
#include <string.h>

#include "probe/write.h"

static int meet(struct probe_end *end, struct probe_hello *client)
{
	const struct probe_write_options *o = end->options;
	struct probe_listener listener;
	struct probe_record record;
	char text[160], room[32], wanted[32];
	int status = probe_listen(o->port, &listener);
	if (status) return status;
	probe_note("waiting at TCP port %d, with %s", o->port, probe_port_text(&end->port, text, sizeof(text)));
	status = probe_accept(&listener, &end->peer);
	probe_stop_listening(&listener);
	if (!status) status = probe_hear(&end->peer, PROBE_HELLO, PROBE_ANSWER_MS, &record);
	if (status) return status;
	*client = record.as.hello;
	if (client->bytes > o->bytes)
		return probe_fail("the client has %s, this server room for %s: start both with the same -s", probe_size_text((size_t)client->bytes, wanted),
			probe_size_text(o->bytes, room));
	return 0;
}

static int answer(struct probe_end *end, const struct probe_hello *client)
{
	struct probe_record record;
	int status = probe_end_prepare(end, (enum probe_op)client->op, client->both_ways, client->bytes, (int)client->nqps, false);
	if (!status) status = probe_end_connect(end, client);
	/* Receives lie ready before the client hears a queue pair's number; of a sweep, before each step. */
	if (!status && !client->sweep) status = probe_end_expect(end);
	probe_record_start(&record, PROBE_HELLO);
	record.as.hello = end->mine;
	record.as.hello.sweep = client->sweep;
	if (!status) status = probe_tell(&end->peer, &record);
	if (!status) status = probe_hear(&end->peer, PROBE_READY, PROBE_PATIENCE_MS(end->mine.bytes), &record);
	probe_record_start(&record, PROBE_READY);
	return status ? status : probe_tell(&end->peer, &record);
}

/* Steps, until the one that is the whole block. */
static int serve_sweep(struct probe_end *end)
{
	struct probe_record record;
	for (;;) {
		int status = probe_hear(&end->peer, PROBE_STEP, PROBE_WHILE_ALIVE_MS, &record);
		if (status) return status;
		const struct probe_step *step = &record.as.step;
		if (step->bytes > end->job.shape.bytes) return probe_fail("%s: a step of more bytes than it announced", end->peer.name);
		if (step->last) break;
		status = probe_sweep_serve(&end->job, step);
		if (status) return status;
	}
	int status = probe_end_expect(end);
	probe_record_start(&record, PROBE_READY);
	return status ? status : probe_tell(&end->peer, &record);
}

int probe_server(const struct probe_write_options *options)
{
	struct probe_end end;
	struct probe_hello client;
	struct probe_record record;
	int status = probe_end_open(&end, options, "server");
	if (!status) status = meet(&end, &client);
	if (!status) status = answer(&end, &client);
	if (!status && client.sweep) status = serve_sweep(&end);
	if (!status) status = probe_job_run(&end.job);
	if (!status) status = probe_end_check(&end);
	if (!status) status = probe_hear(&end.peer, PROBE_DONE, PROBE_PATIENCE_MS(end.mine.bytes), &record);
	if (!status) status = probe_end_tell_done(&end);
	if (!status) status = probe_end_report(&end, &record.as.done);
	probe_end_close(&end);
	return status;
}
