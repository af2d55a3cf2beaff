/* `telpher explain --topo` for programs: one object. */
#include "explain_topo.h"

#include <cjson/cJSON.h>

#include "coll.h"

static void add_limit(const struct explain_case *c, cJSON *to, const char *name, const struct tp_topo_limit *limit, size_t block)
{
	if (limit->link < 0) return;
	const struct tp_topo_link *link = &c->topo->links[limit->link];
	cJSON *o = cJSON_AddObjectToObject(to, name);
	cJSON_AddStringToObject(o, "from", c->topo->nodes[link->from].name);
	cJSON_AddStringToObject(o, "to", c->topo->nodes[link->to].name);
	cJSON_AddStringToObject(o, "kind", tp_topo_link_name(link->kind));
	cJSON_AddNumberToObject(o, "gbps", link->bw * tp_topo_costs_yield(&c->costs, c->topo, limit->link));
	cJSON_AddNumberToObject(o, "bytes", limit->load * (double)block);
	cJSON_AddNumberToObject(o, "us", limit->us * (double)block);
	cJSON_AddNumberToObject(o, "flows", limit->flows);
	if (limit->from < 0) return;
	const struct tp_topo_path *path = tp_topo_path(c->topo, limit->from, limit->to);
	cJSON *hops = cJSON_AddArrayToObject(o, "hops");
	for (int32_t i = 0; i < path->nhops; i++) {
		const struct tp_topo_link *l = &c->topo->links[path->links[i]];
		cJSON *hop = cJSON_CreateObject();
		cJSON_AddStringToObject(hop, "from", c->topo->nodes[l->from].name);
		cJSON_AddStringToObject(hop, "to", c->topo->nodes[l->to].name);
		cJSON_AddStringToObject(hop, "kind", tp_topo_link_name(l->kind));
		cJSON_AddNumberToObject(hop, "gbps", l->bw);
		cJSON_AddBoolToObject(hop, "limit", path->links[i] == limit->link);
		cJSON_AddItemToArray(hops, hop);
	}
}

static void add_ways(const struct explain_case *c, cJSON *to, const struct explain_times *t, size_t block)
{
	cJSON *list = cJSON_AddArrayToObject(to, "candidates");
	for (int a = 0; a < TP_NALGOS; a++) {
		const struct explain_time *x = &t->of[a];
		cJSON *o = cJSON_CreateObject();
		cJSON_AddItemToArray(list, o);
		cJSON_AddStringToObject(o, "algorithm", tp_algo_name((enum tp_algo)a));
		if (x->us < 0) {
			cJSON_AddStringToObject(o, "why_not", c->ways[a].why_not);
			continue;
		}
		cJSON_AddBoolToObject(o, "allowed", !c->ways[a].left_out);
		cJSON_AddNumberToObject(o, "us", x->us);
		cJSON_AddNumberToObject(o, "times", x->us / t->of[t->best].us);
		cJSON_AddNumberToObject(o, "latency_us", x->latency_us);
		cJSON_AddNumberToObject(o, "inside_us", x->inside_us);
		cJSON_AddNumberToObject(o, "network_us", x->across_us);
		cJSON_AddNumberToObject(o, "reduction_us", x->reduce_us);
		cJSON_AddStringToObject(o, "dominant", explain_dominant(x));
		cJSON_AddNumberToObject(o, "chunk_bytes", (double)x->chunk_bytes);
		cJSON_AddNumberToObject(o, "channels", x->nchannels);
		add_limit(c, o, "inside_limit", &c->ways[a].load.inside, block);
		add_limit(c, o, "network_limit", &c->ways[a].load.across, block);
	}
}

static void add_nccl(const struct explain_case *c, cJSON *to, size_t bytes)
{
	struct explain_nccl_times t;
	explain_nccl_times_of(c, bytes, &t);
	if (t.algo < 0) return;
	cJSON *nccl = cJSON_AddObjectToObject(to, "nccl"), *list;
	cJSON_AddStringToObject(nccl, "algorithm", tp_nccl_algo_name((enum tp_nccl_algo)t.algo));
	cJSON_AddStringToObject(nccl, "protocol", tp_nccl_proto_name((enum tp_nccl_proto)t.proto));
	list = cJSON_AddArrayToObject(nccl, "candidates");
	for (int a = 0; a < TP_NCCL_ALGOS; a++) {
		for (int p = 0; p < TP_NCCL_PROTOS; p++) {
			const struct explain_nccl_time *x = &t.of[a][p];
			cJSON *o = cJSON_CreateObject();
			cJSON_AddItemToArray(list, o);
			cJSON_AddStringToObject(o, "algorithm", tp_nccl_algo_name((enum tp_nccl_algo)a));
			cJSON_AddStringToObject(o, "protocol", tp_nccl_proto_name((enum tp_nccl_proto)p));
			if (x->us < 0) {
				cJSON_AddStringToObject(o, "why_not", x->why_not ? x->why_not : "it has no bandwidth");
				continue;
			}
			cJSON_AddNumberToObject(o, "us", x->us);
			cJSON_AddNumberToObject(o, "times", x->us / t.of[t.algo][t.proto].us);
			cJSON_AddNumberToObject(o, "latency_us", x->latency_us);
			cJSON_AddNumberToObject(o, "data_us", x->data_us);
			cJSON_AddNumberToObject(o, "channels", x->nchannels);
		}
	}
}

static bool has_nccl(const struct explain_case *c) { return c->is_nvidia && c->has_func && c->nranks > 1; }

static int add_size(const struct explain_case *c, cJSON *sizes, size_t bytes)
{
	struct explain_times t;
	if (explain_times_of(c, bytes, &t) != ncclSuccess) return 1;
	cJSON *o = cJSON_CreateObject();
	cJSON_AddItemToArray(sizes, o);
	cJSON_AddNumberToObject(o, "bytes", (double)bytes);
	cJSON_AddNumberToObject(o, "block_bytes", (double)explain_block(c, bytes));
	cJSON_AddStringToObject(o, "algorithm", tp_algo_name((enum tp_algo)t.best));
	cJSON_AddNumberToObject(o, "us", t.of[t.best].us);
	cJSON_AddStringToObject(o, "dominant", explain_dominant(&t.of[t.best]));
	cJSON_AddStringToObject(o, "of_all", tp_algo_name((enum tp_algo)t.best_of_all));
	cJSON_AddStringToObject(o, "by", t.by_table ? "table" : "model");
	cJSON_AddStringToObject(o, "least", tp_algo_name((enum tp_algo)t.least));
	if (t.kernel) cJSON_AddStringToObject(o, "kernel", t.kernel);
	if (t.in_windows) cJSON_AddStringToObject(o, "kernel_in_windows", t.in_windows);
	add_ways(c, o, &t, explain_block(c, bytes));
	if (has_nccl(c)) add_nccl(c, o, bytes);
	return 0;
}

static int add_ranges(const struct explain_case *c, cJSON *root, const char *name, bool nccl)
{
	struct explain_range list[EXPLAIN_MOST_RANGES];
	int count;
	if (explain_ranges(c, nccl, list, &count) != ncclSuccess) return 1;
	cJSON *array = cJSON_AddArrayToObject(root, name);
	for (int i = 0; i < count; i++) {
		cJSON *o = cJSON_CreateObject();
		cJSON_AddItemToArray(array, o);
		cJSON_AddNumberToObject(o, "to_bytes", (double)list[i].to);
		cJSON_AddStringToObject(o, "algorithm", nccl ? tp_nccl_algo_name((enum tp_nccl_algo)list[i].algo) : tp_algo_name((enum tp_algo)list[i].algo));
		if (nccl) cJSON_AddStringToObject(o, "protocol", tp_nccl_proto_name((enum tp_nccl_proto)list[i].proto));
	}
	return 0;
}

static void add_channels(cJSON *root, const char *name, const struct tp_channels *all)
{
	cJSON *o = cJSON_AddObjectToObject(root, name);
	cJSON_AddNumberToObject(o, "channels", all->nchannels);
	cJSON_AddNumberToObject(o, "bw_intra", all->bw_intra);
	cJSON_AddNumberToObject(o, "bw_inter", all->bw_inter);
	cJSON_AddStringToObject(o, "type_intra", tp_topo_path_name(all->type_intra));
	cJSON_AddStringToObject(o, "type_inter", tp_topo_path_name(all->type_inter));
}

/* Of each GPU: its name and those of its ports. */
static void add_ports(const struct explain_case *c, cJSON *root)
{
	if (!c->rails) return;
	cJSON *list = cJSON_AddArrayToObject(root, "ports");
	for (int r = 0; r < c->rails->nrails; r++) {
		const struct tp_rail *rail = &c->rails->rails[r];
		cJSON *o = cJSON_CreateObject();
		cJSON_AddItemToArray(list, o);
		cJSON_AddStringToObject(o, "gpu", c->topo->nodes[rail->gpu].name);
		cJSON *names = cJSON_AddArrayToObject(o, "nets");
		for (int n = 0; n < rail->nnets; n++) cJSON_AddItemToArray(names, cJSON_CreateString(c->topo->nodes[rail->nets[n]].name));
	}
}

int explain_topo_json(const struct explain_case *c, FILE *out)
{
	cJSON *root = cJSON_CreateObject();
	cJSON_AddStringToObject(root, "machine", c->name);
	cJSON_AddNumberToObject(root, "hosts", c->nhosts);
	cJSON_AddNumberToObject(root, "ranks", c->nranks);
	cJSON_AddStringToObject(root, "collective", tp_coll_name(c->q->coll));
	if (c->q->filter) cJSON_AddStringToObject(root, "nccl_algo", c->q->filter);
	cJSON_AddNumberToObject(root, "net_us", c->costs.net_us);
	cJSON_AddNumberToObject(root, "engine_us", c->nhosts > 1 ? c->engine_us : 0);
	add_channels(root, "rings", c->rings);
	add_channels(root, "trees", c->trees);
	add_ports(c, root);
	cJSON *sizes = cJSON_AddArrayToObject(root, "sizes");
	int status = 0;
	for (int i = 0; i < c->q->nsizes && !status; i++) status = add_size(c, sizes, c->q->sizes[i]);
	if (!status) status = add_ranges(c, root, "by_size", false);
	if (!status && has_nccl(c)) status = add_ranges(c, root, "nccl_by_size", true);
	char *text = status ? NULL : cJSON_Print(root);
	cJSON_Delete(root);
	if (!text) return 1;
	fprintf(out, "%s\n", text);
	cJSON_free(text);
	return 0;
}
