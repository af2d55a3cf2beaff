/* `telpher probe matrix`: every GPU by every NIC, with GPUDirect and through host memory; on a machine without GPUs the memory of every NUMA
 * node by every NIC. Each port writes to itself, so both directions of its PCIe link are busy and no other host is needed. What is
 * measured can be put onto the machine's map (telpher topo record). */
#include <dirent.h>
#include <popt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "probe/staged.h"
#include "topo.h"

#define SMALL 8
#define LATENCIES 200
#define CHUNK ((size_t)1 << 20)
#define MOST_NODES 64

struct options { char *device, *size, *record; int gid, repetitions, json; size_t bytes; };
struct place { const struct tp_gpu *gpu; int numa; char name[24], map_name[24]; };
struct cell { bool direct_there, staged_there, dma_buf; double us, direct_gbs, staged_gbs; char why[300]; };

/* All NUMA nodes. */
static int find_nodes(struct place *out, int most)
{
	DIR *dir = opendir("/sys/devices/system/node");
	struct dirent *entry;
	int count = 0, n;
	char end;
	while (dir && (entry = readdir(dir)) && count < most) {
		if (sscanf(entry->d_name, "node%d%c", &n, &end) != 1) continue;
		out[count] = (struct place){ .numa = n };
		snprintf(out[count].name, sizeof(out[count].name), "NUMA node %d", n);
		snprintf(out[count++].map_name, sizeof(out[0].map_name), "cpu%d", n);
	}
	if (dir) closedir(dir);
	if (count > 0) return count;
	out[0] = (struct place){ .numa = -1, .name = "host memory", .map_name = "cpu0" };
	return 1;
}

static int find_places(struct place *out, int most, int *count, bool *gpus)
{
	int n = 0;
	if (tp_gpu_open(gpus) != ncclSuccess) return probe_fail_below(NULL);
	if (*gpus && tp_gpu_count(&n) != ncclSuccess) return probe_fail_below(NULL);
	*count = *gpus ? TP_MIN(n, most) : find_nodes(out, most);
	for (int i = 0; *gpus && i < *count; i++) {
		int status = probe_find_gpu(i, &out[i].gpu);
		if (status) return status;
		out[i].numa = -1;
		snprintf(out[i].name, sizeof(out[i].name), "GPU %d", i);
		snprintf(out[i].map_name, sizeof(out[i].map_name), "gpu%d", i);
	}
	return 0;
}

static int measure_direct(const struct probe_port *port, const struct options *o, const struct place *p, struct cell *out)
{
	struct probe_memory from = { 0 }, to = { 0 };
	struct probe_loop loop = { 0 };
	enum probe_kind kind = p->gpu ? PROBE_GPU : PROBE_HUGE;
	double gbs[64];
	int n = TP_MIN(o->repetitions, (int)TP_ARRAY_LEN(gbs)), status = probe_alloc(kind, p->gpu, o->bytes, p->numa, &from);
	if (!status) status = probe_alloc(kind, p->gpu, o->bytes, p->numa, &to);
	if (!status) status = probe_register_either(port, &from, &out->dma_buf);
	if (!status) status = probe_register_either(port, &to, &out->dma_buf);
	if (!status) status = probe_loop_open(port, &from, &to, &loop);
	if (!status) status = probe_loop_latency(&loop, SMALL, LATENCIES, &out->us);
	for (int i = 0; i < n && !status; i++) status = probe_loop_stream(&loop, o->bytes, 4, &gbs[i]);
	if (!status) out->direct_gbs = tp_median(gbs, n);
	out->direct_there = !status;
	probe_loop_close(&loop);
	if (from.ptr) probe_free(&from);
	if (to.ptr) probe_free(&to);
	return status;
}

static int measure_staged(const struct probe_port *port, const struct options *o, const struct place *p, struct cell *out)
{
	struct probe_staged staged;
	double gbs[64];
	int n = TP_MIN(o->repetitions, (int)TP_ARRAY_LEN(gbs)), status = probe_staged_open(port, p->gpu, o->bytes, p->numa, &staged);
	if (status) return status;
	for (int i = 0; i < n && !status; i++) {
		double start = probe_now_us();
		status = probe_staged_move(&staged, o->bytes, CHUNK);
		gbs[i] = (double)o->bytes / (probe_now_us() - start) / 1000;
	}
	if (!status) status = probe_staged_check(&staged, o->bytes);
	if (!status) out->staged_gbs = tp_median(gbs, n);
	out->staged_there = !status;
	probe_staged_close(&staged);
	return status;
}

/* What can't be measured leaves its place empty: the others are worth having. It was said why. */
static void measure(const struct probe_port *port, const struct options *o, const struct place *p, struct cell *out)
{
	if (measure_direct(port, o, p, out)) snprintf(out->why, sizeof(out->why), "%s", probe_last_error());
	if (p->gpu && measure_staged(port, o, p, out)) snprintf(out->why, sizeof(out->why), "%s", probe_last_error());
}

static int record(const struct options *o, const struct place *p, const struct probe_port *port, const struct cell *c)
{
	char alpha[40], bw[40];
	const char *values[] = { alpha, bw };
	if (!o->record || !c->direct_there) return 0;
	snprintf(alpha, sizeof(alpha), "alpha=%.6g", c->us);
	snprintf(bw, sizeof(bw), "bw=%.6g", c->direct_gbs);
	return topo_record(o->record, p->map_name, port->ib->context->name, values, 2) ? 1 : 0;
}

static void add_cell(const struct options *o, const struct place *p, const struct probe_port *port, const struct cell *c, cJSON *cells)
{
	char a[32] = "-", b[32] = "-", d[32] = "-";
	cJSON *one = cJSON_CreateObject();
	cJSON_AddStringToObject(one, "memory", p->name);
	cJSON_AddStringToObject(one, "port", port->ib->text);
	if (c->direct_there) {
		cJSON_AddNumberToObject(one, "latency_us", c->us);
		cJSON_AddNumberToObject(one, p->gpu ? "gpudirect_gbs" : "gbs", c->direct_gbs);
		if (p->gpu) cJSON_AddStringToObject(one, "gpudirect_by", c->dma_buf ? "DMA-BUF" : "nvidia-peermem");
		probe_digits(c->us, a);
		probe_digits(c->direct_gbs, b);
	}
	if (c->staged_there) {
		cJSON_AddNumberToObject(one, "staged_gbs", c->staged_gbs);
		probe_digits(c->staged_gbs, d);
	}
	if (c->why[0]) cJSON_AddStringToObject(one, "why_not", c->why);
	cJSON_AddItemToArray(cells, one);
	if (o->json) return;
	printf("%-14s  %-16s  %12s  %14s", p->name, port->ib->text, a, b);
	if (p->gpu) printf("  %12s", d);
	printf("\n");
}

static int run(const struct options *o)
{
	struct place places[MOST_NODES];
	struct probe_port port;
	bool gpus = false;
	char text[32];
	int count = 0, empty = 0, status = probe_open_port(o->device, o->gid, &port);
	if (!status) status = find_places(places, MOST_NODES, &count, &gpus);
	if (status) return status;
	cJSON *json = cJSON_CreateObject(), *cells = cJSON_AddArrayToObject(json, "cells");
	cJSON_AddBoolToObject(json, "gpus", gpus);
	if (!o->json)
		printf("%-14s  %-16s  %12s  %14s%s\n", "memory", "port", "8 B, us", gpus ? "GPUDirect GB/s" : "GB/s", gpus ? "   staged GB/s" : "");
	for (int p = 0; p < tp_ib_port_count() && !status; p++) {
		status = probe_use_port(p, &port);
		for (int i = 0; i < count && !status; i++) {
			struct cell cell = { 0 };
			measure(&port, o, &places[i], &cell);
			empty += !cell.direct_there && !cell.staged_there;
			add_cell(o, &places[i], &port, &cell, cells);
			status = record(o, &places[i], &port, &cell);
		}
	}
	if (!status && !o->json) {
		printf("\nA port writes to itself, %s at a time: a read and a write of that memory for each byte.%s\n", probe_size_text(o->bytes, text),
			gpus ? " Staged: copied to pinned memory, written, copied back, one after the other." : "");
		if (!gpus) printf("No GPU here that CUDA's driver knows: GPU by NIC, with GPUDirect and without, is left out.\n");
		if (o->record) printf("Recorded in %s: telpher topo explain shows it there.\n", o->record);
	}
	if (!status && o->json) status = probe_print_json(json);
	else cJSON_Delete(json);
	return status ? status : empty > 0;
}

int probe_matrix(int argc, char **argv)
{
	struct options o = { .gid = -1, .repetitions = 5, .bytes = (size_t)4 << 20 };
	struct poptOption options[] = {
		{ "device", 'd', POPT_ARG_STRING, &o.device, 0, "only this RDMA device (all that can be used)", "DEV" },
		{ "gid", 'g', POPT_ARG_INT, &o.gid, 0, "index of the ports' GIDs (chosen)", "GID" },
		{ "size", 's', POPT_ARG_STRING, &o.size, 0, "bytes of a write (4M)", "BYTES" },
		{ "repetitions", 'n', POPT_ARG_INT, &o.repetitions, 0, "of each measurement, of which the median is printed (5)", "N" },
		{ "record", 0, POPT_ARG_STRING, &o.record, 0, "put it onto this map (telpher topo xml -o FILE makes one)", "FILE" },
		{ "json", 0, POPT_ARG_NONE, &o.json, 0, "print JSON", NULL },
		POPT_AUTOHELP
		POPT_TABLEEND
	};
	poptContext context = poptGetContext(argv[0], argc, (const char **)argv, options, 0);
	if (!context) return probe_fail("out of memory");
	int code = tool_next_option(context, options), status;
	if (code < -1) status = probe_usage("%s: %s", poptBadOption(context, 0), poptStrerror(code));
	else if (poptPeekArg(context)) status = probe_usage("it takes no arguments");
	else if (o.size && (!tool_parse_size(o.size, &o.bytes) || o.bytes < SMALL)) status = probe_usage("-s %s: no size of %d bytes or more", o.size, SMALL);
	else if (o.repetitions < 1 || o.repetitions > 64) status = probe_usage("--repetitions %d: from 1 to 64", o.repetitions);
	else if (o.gid < -1 || o.gid > 255) status = probe_usage("-g %d: a GID's index is from 0 to 255", o.gid);
	else status = run(&o);
	free(o.device);
	free(o.size);
	free(o.record);
	poptFreeContext(context);
	return status;
}
