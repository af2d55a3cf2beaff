/* One end of a transfer; see write.h. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "probe/write.h"

int probe_end_open(struct probe_end *end, const struct probe_write_options *options, const char *side)
{
	*end = (struct probe_end){ .options = options, .side = side, .peer = { .fd = -1 } };
	/* What can't be is said before anybody is waited for. */
	int status = options->gpu >= 0 ? probe_find_gpu(options->gpu, &end->gpu) : 0;
	return status ? status : probe_open_port(options->device, options->gid, &end->port);
}

/* Too much for one message, or for the immediate data that says how much it was: said, since counters will show it. */
static void note_limits(const struct probe_end *end, uint64_t bytes)
{
	const struct probe_shape *s = &end->job.shape;
	uint64_t offset, share;
	probe_share(s, 0, &offset, &share);
	if (share > s->max_message)
		probe_note("%llu bytes are more than %s moves in a message (%u, max_msg_sz) or a request names (2 GiB): %llu requests a queue pair, %s",
			(unsigned long long)share, end->port.ib->text, end->port.ib->attr.max_msg_sz, (unsigned long long)probe_requests(s, 0),
			end->op == PROBE_READ ? "one after the other" : "the last with the immediate data");
	if (share > UINT32_MAX && end->op != PROBE_READ)
		probe_note("%llu bytes don't fit 32 bits of immediate data: IMM is their low 32 bits; the whole number was said over TCP", (unsigned long long)bytes);
}

int probe_end_prepare(struct probe_end *end, enum probe_op op, bool both_ways, uint64_t bytes, int nqps, bool active)
{
	uint64_t half = tp_align_up(bytes, 4096);
	end->op = op;
	end->both_ways = both_ways;
	int status = probe_alloc(end->gpu ? PROBE_GPU : PROBE_HUGE, end->gpu, both_ways ? half + bytes : bytes, -1, &end->memory);
	if (!status) status = probe_register(&end->port, &end->memory, end->options->dma_buf);
	if (!status) status = probe_link_create(&end->port, nqps, &end->link);
	if (!status) status = probe_link_to_init(&end->link);
	if (status) return status;
	end->job = (struct probe_job){ .link = &end->link, .peer = &end->peer, .op = op, .memory = &end->memory, .notice = true,
		.shape = { .bytes = bytes, .nqps = (uint32_t)nqps }, .in_at = both_ways ? half : 0, .out = active || both_ways, .in = !active || both_ways };
	end->mine = (struct probe_hello){ .bytes = bytes, .op = (uint8_t)op, .both_ways = both_ways,
		.addr = (uint64_t)(uintptr_t)end->memory.ptr + end->job.in_at, .rkey = end->memory.mr->rkey };
	probe_link_describe(&end->link, &end->mine);
	tp_secret_random(&end->mine.seed, sizeof(end->mine.seed));
	/* Who is read from has the content where the other side looks. */
	if (op == PROBE_READ) return end->job.in ? probe_fill(&end->memory, end->job.in_at, bytes, end->mine.seed) : 0;
	return end->job.out ? probe_fill(&end->memory, end->job.out_at, bytes, end->mine.seed) : 0;
}

int probe_end_connect(struct probe_end *end, const struct probe_hello *remote)
{
	int status = probe_link_learn(&end->link, remote);
	if (!status) status = probe_link_to_rtr(&end->link);
	if (!status) status = probe_link_to_rts(&end->link);
	if (status) return status;
	end->job.remote_addr = remote->addr;
	end->job.remote_rkey = remote->rkey;
	end->job.shape.max_message = probe_largest_message(end->mine.max_message, remote->max_message);
	note_limits(end, end->job.shape.bytes);
	return 0;
}

static bool is_checked(const struct probe_end *end) { return end->op == PROBE_READ ? end->job.out : end->job.in; }
static uint64_t checked_at(const struct probe_end *end) { return end->op == PROBE_READ ? end->job.out_at : end->job.in_at; }

int probe_end_expect(struct probe_end *end)
{
	int status = is_checked(end) ? probe_wipe(&end->memory, checked_at(end), end->job.shape.bytes) : 0;
	return status ? status : probe_job_prepare(&end->job);
}

int probe_end_check(struct probe_end *end)
{
	uint64_t expected = 0;
	end->ok = true;
	snprintf(end->verdict, sizeof(end->verdict), "verify OK");
	if (!is_checked(end)) return 0;
	int status = probe_verify(&end->memory, checked_at(end), end->job.shape.bytes, end->link.remote.seed, &end->ok, end->verdict, sizeof(end->verdict));
	for (uint32_t q = 0; end->op != PROBE_READ && q < end->job.shape.nqps; q++) {
		uint64_t offset, bytes;
		probe_share(&end->job.shape, q, &offset, &bytes);
		expected += (uint32_t)bytes;
	}
	if (status || !end->ok || end->op == PROBE_READ || end->job.imm == expected) return status;
	end->ok = false;
	snprintf(end->verdict, sizeof(end->verdict), "verify FAILED: IMM should be %llu", (unsigned long long)expected);
	return 0;
}

int probe_end_tell_done(struct probe_end *end)
{
	struct probe_record record;
	probe_record_start(&record, PROBE_DONE);
	record.as.done.ns = end->job.ns;
	record.as.done.imm = end->job.imm;
	record.as.done.ok = end->ok;
	snprintf(record.as.done.text, sizeof(record.as.done.text), "%s", end->verdict);
	return probe_tell(&end->peer, &record);
}

static void print_lines(const struct probe_end *end)
{
	static const char *const verbs[] = { "wrote", "read", "sent" };
	char ms[32], gbs[32], gbit[32];
	double rate = end->job.ns ? (double)end->job.shape.bytes / (double)end->job.ns : 0;
	if (end->job.out)
		printf("[%s] %s %llu bytes in %s ms → %s GB/s (%s Gb/s)\n", end->side, verbs[end->op], (unsigned long long)end->job.shape.bytes,
			probe_digits((double)end->job.ns / 1e6, ms), probe_digits(rate, gbs), probe_digits(8 * rate, gbit));
	if (end->op == PROBE_READ && end->job.out) printf("[%s] %s\n", end->side, end->verdict);
	if (end->op != PROBE_READ && end->job.in) printf("[%s] got IMM=%llu, %s\n", end->side, (unsigned long long)end->job.imm, end->verdict);
}

static int print_as_json(const struct probe_end *end, const struct probe_done *theirs)
{
	char gid[48];
	cJSON *json = cJSON_CreateObject(), *remote = cJSON_CreateObject();
	cJSON_AddStringToObject(json, "side", end->side);
	cJSON_AddStringToObject(json, "op", probe_op_name((int)end->op));
	cJSON_AddNumberToObject(json, "bytes", (double)end->job.shape.bytes);
	cJSON_AddNumberToObject(json, "qps", end->link.nqps);
	cJSON_AddBoolToObject(json, "both_ways", end->both_ways);
	cJSON_AddStringToObject(json, "memory", end->memory.kind == PROBE_GPU ? (end->options->dma_buf ? "GPU, DMA-BUF" : "GPU") : "host");
	cJSON_AddItemToObject(json, "local", probe_port_json(&end->port));
	cJSON_AddStringToObject(remote, "host", end->link.remote.host);
	cJSON_AddStringToObject(remote, "port", end->link.remote.port);
	cJSON_AddStringToObject(remote, "gid", tp_ib_gid_format(end->link.remote.gid, gid));
	cJSON_AddItemToObject(json, "remote", remote);
	if (end->job.out) {
		cJSON_AddNumberToObject(json, "ms", (double)end->job.ns / 1e6);
		cJSON_AddNumberToObject(json, "gbs", end->job.ns ? (double)end->job.shape.bytes / (double)end->job.ns : 0);
	}
	if (end->job.in && end->op != PROBE_READ) cJSON_AddNumberToObject(json, "imm", (double)end->job.imm);
	cJSON_AddBoolToObject(json, "verified", end->ok && theirs->ok);
	if (end->sweep.count) cJSON_AddItemToObject(json, "sweep", probe_sweep_json(&end->sweep));
	return probe_print_json(json);
}

int probe_end_report(const struct probe_end *end, const struct probe_done *theirs)
{
	if (end->options->json) {
		int status = print_as_json(end, theirs);
		if (status) return status;
	} else {
		print_lines(end);
		if (end->sweep.count) probe_sweep_print(&end->sweep, stdout);
		fflush(stdout);
	}
	if (!end->ok) return probe_fail("what arrived isn't what was sent: %s", end->verdict);
	if (!theirs->ok) return probe_fail("%s: %s", end->peer.name, theirs->text);
	return end->options->svg && end->sweep.count ? probe_draw(&end->sweep, end->options->svg) : 0;
}

void probe_end_close(struct probe_end *end)
{
	probe_link_destroy(&end->link);
	if (end->memory.ptr) probe_free(&end->memory);
	probe_part(&end->peer);
}
