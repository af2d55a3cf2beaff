/* `telpher probe connect`: what a connection costs, step by step, measured on a port with itself; and how many a job needs, from the very
 * plans that its ranks would run. */
#include <popt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coll.h"
#include "probe/loop.h"

#define RANKS_LOOKED_AT 64
enum { CQ_AND_QP, TO_INIT, EXCHANGE, TO_RTR, TO_RTS, DESTROY, STEPS };
static const char *const step_names[] = { "completion queue and queue pair", "to INIT", "exchange over TCP (loopback)", "to RTR", "to RTS", "destroying both" };

struct options { char *device; int gid, repetitions, nranks, nhosts, json; };

/* The exchange alone: connect, accept, a HELLO each way. */
static int exchange(const struct probe_hello *hello, struct probe_hello *got)
{
	struct probe_listener listener;
	struct probe_peer client = { .fd = -1 }, server = { .fd = -1 };
	struct probe_record record;
	int status = probe_listen(0, &listener);
	if (status) return status;
	status = probe_meet("127.0.0.1", listener.port, &client);
	if (!status) status = probe_accept(&listener, &server);
	probe_record_start(&record, PROBE_HELLO);
	record.as.hello = *hello;
	record.as.hello.bytes = 1;
	if (!status) status = probe_tell(&client, &record);
	if (!status) status = probe_hear(&server, PROBE_HELLO, PROBE_ANSWER_MS, &record);
	if (!status) status = probe_tell(&server, &record);
	if (!status) status = probe_hear(&client, PROBE_HELLO, PROBE_ANSWER_MS, &record);
	probe_stop_listening(&listener);
	probe_part(&client);
	probe_part(&server);
	if (!status) *got = record.as.hello;
	return status;
}

static double lap(double *since)
{
	double now = probe_now_us(), took = now - *since;
	*since = now;
	return took;
}

/* One queue pair, connected to itself. */
static int connect_once(const struct probe_port *port, double us[STEPS])
{
	struct probe_link link = { 0 };
	struct probe_hello hello = { 0 }, got;
	double since = probe_now_us();
	int status = probe_link_create(port, 1, &link);
	us[CQ_AND_QP] = lap(&since);
	if (!status) status = probe_link_to_init(&link);
	us[TO_INIT] = lap(&since);
	if (!status) probe_link_describe(&link, &hello);
	if (!status) status = exchange(&hello, &got);
	us[EXCHANGE] = lap(&since);
	if (!status) status = probe_link_learn(&link, &got);
	if (!status) status = probe_link_to_rtr(&link);
	us[TO_RTR] = lap(&since);
	if (!status) status = probe_link_to_rts(&link);
	us[TO_RTS] = lap(&since);
	probe_link_destroy(&link);
	us[DESTROY] = lap(&since);
	return status;
}

static int measure(const struct probe_port *port, int repetitions, double median[STEPS])
{
	double *all = calloc((size_t)repetitions * STEPS, sizeof(*all)), us[STEPS];
	int status = all ? 0 : probe_fail("out of memory");
	for (int i = 0; i < repetitions && !status; i++) {
		status = connect_once(port, us);
		for (int s = 0; s < STEPS; s++) all[s * repetitions + i] = us[s];
	}
	for (int s = 0; s < STEPS && !status; s++) median[s] = tp_median(all + s * repetitions, repetitions);
	free(all);
	return status;
}

/* Ends of links to other hosts that one rank's programs have: each is a connection's end. -1: the plan can't be. */
static int ends_of(const struct tp_plan_spec *spec, int rank)
{
	struct tp_plan *plan;
	int ends = 0;
	if (tp_plan_create(spec, rank, &plan) != ncclSuccess) return -1;
	for (uint32_t p = 0; p < plan->nprograms; p++)
		for (uint32_t l = 0; l < plan->programs[p].nlinks; l++) {
			const struct tp_plan_link *link = &plan->programs[p].links[l];
			ends += spec->layout->domain[link->from] != spec->layout->domain[link->to];
		}
	tp_plan_free(plan);
	return ends;
}

struct need { int most, total_looked, looked; };

static bool need_of(const struct tp_plan_spec *spec, struct need *out)
{
	int n = spec->layout->nranks, step = n > RANKS_LOOKED_AT ? n / RANKS_LOOKED_AT : 1;
	*out = (struct need){ 0 };
	if (tp_plan_refuses(spec)) return false;
	for (int rank = 0; rank < n; rank += step) {
		int ends = ends_of(spec, rank);
		if (ends < 0) return false;
		out->most = TP_MAX(out->most, ends);
		out->total_looked += ends;
		out->looked++;
	}
	return true;
}

static int paths_of(const struct probe_port *port) { return tp_ib_count_paths(&port->params, port->ib->device); }

static void print_need(const struct probe_port *port, const struct options *o, const struct tp_plan_spec *spec, double us, cJSON *all)
{
	struct need need;
	char a[32], b[32];
	if (!need_of(spec, &need)) return;
	int paths = paths_of(port), qps = need.most * port->params.qps * paths, mrs = 2 * need.most * paths;
	cJSON *one = cJSON_CreateObject();
	cJSON_AddStringToObject(one, "collective", tool_coll_name(spec->coll));
	cJSON_AddStringToObject(one, "algorithm", tp_algo_name(spec->algo));
	cJSON_AddNumberToObject(one, "connections", need.most);
	cJSON_AddNumberToObject(one, "mean_connections", (double)need.total_looked / need.looked);
	cJSON_AddNumberToObject(one, "queue_pairs", qps);
	cJSON_AddNumberToObject(one, "registrations", mrs);
	cJSON_AddNumberToObject(one, "set_up_ms", us * qps / 1000);
	cJSON_AddItemToArray(all, one);
	if (!o->json)
		printf("%-15s  %-17s  %11d  %8s  %11d  %13d  %10s\n", tool_coll_name(spec->coll), tp_algo_name(spec->algo), need.most,
			probe_digits((double)need.total_looked / need.looked, a), qps, mrs, probe_digits(us * qps / 1000, b));
}

static int needs(const struct probe_port *port, const struct options *o, double us, cJSON *json)
{
	struct tp_layout *layout;
	cJSON *all = cJSON_AddArrayToObject(json, "needs");
	if (tool_layout(o->nranks, o->nhosts, &layout) != ncclSuccess) return probe_fail_below(NULL);
	if (!o->json)
		printf("\nWhat a rank needs, %d ranks on %d hosts; %d queue pair%s a connection (NCCL_IB_QPS_PER_CONNECTION), %d path%s (TELPHER_IB_PATHS):\n%-15s  %-17s  %11s  %8s  "
			"%11s  %13s  %10s\n", o->nranks, o->nhosts, port->params.qps, port->params.qps == 1 ? "" : "s", paths_of(port), paths_of(port) == 1 ? "" : "s", "collective",
			"algorithm", "connections", "mean", "queue pairs", "registrations", "set up ms");
	for (int c = 0; c < TP_SEND_RECV; c++)
		for (int a = 0; a < TP_NALGOS; a++) {
			struct tp_plan_spec spec = { .coll = (enum tp_coll)c, .algo = (enum tp_algo)a, .root = tool_is_rooted((enum tp_coll)c) ? 0 : -1, .nchannels = 1, .layout = layout };
			print_need(port, o, &spec, us, all);
		}
	tp_layout_free(layout);
	if (o->json) return 0;
	printf("connections: ends at the rank that has most, one way each; a connection's end has a registration for its control block and one for its slots, a path. "
		"Ranks make them as they first need them.\n");
	if (o->nranks > RANKS_LOOKED_AT) printf("Looked at %d of %d ranks, evenly spread.\n", (o->nranks - 1) / (o->nranks / RANKS_LOOKED_AT) + 1, o->nranks);
	return 0;
}

static int run(const struct options *o)
{
	struct probe_port port;
	double us[STEPS], total = 0;
	char text[160], digits[32];
	int status = probe_open_port(o->device, o->gid, &port);
	if (!status) status = measure(&port, o->repetitions, us);
	if (status) return status;
	cJSON *json = cJSON_CreateObject(), *steps = cJSON_AddArrayToObject(json, "steps");
	cJSON_AddItemToObject(json, "local", probe_port_json(&port));
	if (!o->json) printf("%s\nOne connection, this port with itself, median of %d:\n", probe_port_text(&port, text, sizeof(text)), o->repetitions);
	for (int s = 0; s < STEPS; s++) {
		cJSON *one = cJSON_CreateObject();
		cJSON_AddStringToObject(one, "step", step_names[s]);
		cJSON_AddNumberToObject(one, "us", us[s]);
		cJSON_AddItemToArray(steps, one);
		if (s != DESTROY) total += us[s];
		if (!o->json) printf("  %-32s  %9s us\n", step_names[s], probe_digits(us[s], digits));
	}
	cJSON_AddNumberToObject(json, "total_us", total);
	if (!o->json) printf("  %-32s  %9s us\n", "all, until data can be sent", probe_digits(total, digits));
	status = needs(&port, o, total, json);
	if (!status && o->json) return probe_print_json(json);
	cJSON_Delete(json);
	return status;
}

int probe_connect(int argc, char **argv)
{
	struct options o = { .gid = -1, .repetitions = 21, .nranks = 16, .nhosts = 2 };
	struct poptOption options[] = {
		{ "device", 'd', POPT_ARG_STRING, &o.device, 0, "RDMA device (the first that can be used)", "DEV" },
		{ "gid", 'g', POPT_ARG_INT, &o.gid, 0, "index of the port's GID (chosen)", "GID" },
		{ "repetitions", 0, POPT_ARG_INT, &o.repetitions, 0, "connections to make, one after the other (21)", "N" },
		{ "ranks", 'n', POPT_ARG_INT, &o.nranks, 0, "ranks of the job (16)", "N" },
		{ "hosts", 'H', POPT_ARG_INT, &o.nhosts, 0, "hosts that share them evenly (2)", "K" },
		{ "json", 0, POPT_ARG_NONE, &o.json, 0, "print JSON", NULL },
		POPT_AUTOHELP
		POPT_TABLEEND
	};
	poptContext context = poptGetContext(argv[0], argc, (const char **)argv, options, 0);
	if (!context) return probe_fail("out of memory");
	int code = tool_next_option(context, options), status;
	if (code < -1) status = probe_usage("%s: %s", poptBadOption(context, 0), poptStrerror(code));
	else if (poptPeekArg(context)) status = probe_usage("it takes no arguments");
	else if (o.repetitions < 1 || o.repetitions > 10000) status = probe_usage("--repetitions %d: from 1 to 10000", o.repetitions);
	else if (o.nranks < 1 || o.nranks > 65536) status = probe_usage("-n %d: from 1 to 65536 ranks", o.nranks);
	else if (o.nhosts < 1 || o.nhosts > o.nranks) status = probe_usage("--hosts %d: from 1 to as many hosts as ranks (%d)", o.nhosts, o.nranks);
	else if (o.gid < -1 || o.gid > 255) status = probe_usage("-g %d: a GID's index is from 0 to 255", o.gid);
	else status = run(&o);
	free(o.device);
	poptFreeContext(context);
	return status;
}
