/* Channels as NCCL's <graphs>, out and in. A graph of NCCL's is read whatever found it; what it says of the machine is checked against
 * the machine, and where it asks more of a link than that has, it is warned of and obeyed: the user's file wins.
 *
 * Devices are named by dev, as NCCL does; in a domain of several hosts dev says too little, so that GPUs have their rank besides and
 * NETs the host's hash. */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "topo/doc.h"
#include "topo/search_model.h"

enum { P_FILE, P_DUMP, P_DUMP_RANK };
static struct tp_param graph_params[] = {
	[P_FILE] = { .name = "NCCL_GRAPH_FILE", .kind = TP_PARAM_STRING,
		.doc = "channels to take instead of searching for them; those that it lacks are searched for (telpher topo, and NCCL_GRAPH_DUMP_FILE of GPU ranks)" },
	[P_DUMP] = { .name = "NCCL_GRAPH_DUMP_FILE", .kind = TP_PARAM_STRING, .doc = "where to write the channels that were found (telpher topo, GPU ranks)" },
	[P_DUMP_RANK] = { .name = "NCCL_GRAPH_DUMP_FILE_RANK", .kind = TP_PARAM_INT, .fallback = "0", .max = INT_MAX,
		.doc = "the rank that writes NCCL_GRAPH_DUMP_FILE" },
};
TP_PARAM_TABLE("topo", graph_params)

static int id_of(enum tp_pattern pattern)
{
	return pattern == TP_PATTERN_RING ? 0 : pattern == TP_PATTERN_PAIRS ? 3 : 1;
}

/* ---- Out ---- */

static ncclResult_t add_net(const struct tp_topo *topo, struct tp_topo_doc *doc, struct tp_element *channel, int32_t node)
{
	if (node < 0) return ncclSuccess;
	struct tp_element *net = tp_doc_add(doc, channel, "net");
	if (!net) return ncclSystemError;
	TP_TRY(tp_doc_setf(doc, net, "dev", "%d", topo->nodes[node].net.dev));
	if (topo->nhosts < 2) return ncclSuccess;
	return tp_doc_setf(doc, net, "host_hash", "0x%" PRIx64, topo->host_hash[topo->nodes[node].host]);
}

static ncclResult_t add_gpu(const struct tp_topo *topo, struct tp_topo_doc *doc, struct tp_element *channel, int32_t node, const struct tp_hop_nets *nets)
{
	struct tp_element *gpu = tp_doc_add(doc, channel, "gpu");
	if (!gpu) return ncclSystemError;
	TP_TRY(tp_doc_setf(doc, gpu, "dev", "%d", topo->nodes[node].gpu.dev));
	/* Attributes, which NCCL passes over: it takes a <net> between GPUs for the next channel's. */
	if (nets && nets->prev >= 0) TP_TRY(tp_doc_setf(doc, gpu, "prevnet", "%d", topo->nodes[nets->prev].net.dev));
	if (nets && nets->next >= 0) TP_TRY(tp_doc_setf(doc, gpu, "nextnet", "%d", topo->nodes[nets->next].net.dev));
	if (topo->nodes[node].gpu.rank < 0) return ncclSuccess;
	return tp_doc_setf(doc, gpu, "rank", "%d", topo->nodes[node].gpu.rank);
}

static ncclResult_t add_graph(const struct tp_topo *topo, struct tp_topo_doc *doc, const struct tp_channels *c)
{
	struct tp_element *graph = tp_doc_add(doc, doc->root, "graph");
	if (!graph) return ncclSystemError;
	TP_TRY(tp_doc_setf(doc, graph, "id", "%d", id_of(c->pattern)));
	TP_TRY(tp_doc_setf(doc, graph, "pattern", "%d", (int)c->pattern));
	TP_TRY(tp_doc_setf(doc, graph, "crossnic", "%d", c->cross_nic));
	TP_TRY(tp_doc_setf(doc, graph, "nchannels", "%d", c->nchannels));
	TP_TRY(tp_doc_setf(doc, graph, "speedintra", "%.9g", c->bw_intra));
	TP_TRY(tp_doc_setf(doc, graph, "speedinter", "%.9g", c->bw_inter));
	TP_TRY(tp_doc_setf(doc, graph, "latencyinter", "%.9g", c->latency_inter_us));
	/* NCCL knows no NET within a host; prevnet and nextnet say it. */
	TP_TRY(tp_doc_set(doc, graph, "typeintra", tp_topo_path_name(c->by_net ? TP_MIN(c->type_intra, TP_PATH_SYS) : c->type_intra)));
	TP_TRY(tp_doc_set(doc, graph, "typeinter", tp_topo_path_name(c->type_inter)));
	TP_TRY(tp_doc_setf(doc, graph, "samechannels", "%d", c->same));
	for (int i = 0; i < c->nchannels; i++) {
		struct tp_element *channel = tp_doc_add(doc, graph, "channel");
		if (!channel) return ncclSystemError;
		TP_TRY(add_net(topo, doc, channel, c->channels[i].net_in));
		for (int g = 0; g < c->ngpus; g++) TP_TRY(add_gpu(topo, doc, channel, c->channels[i].gpus[g], c->channels[i].nets ? &c->channels[i].nets[g] : NULL));
		TP_TRY(add_net(topo, doc, channel, c->channels[i].net_out));
	}
	return ncclSuccess;
}

static ncclResult_t make_doc(const struct tp_topo *topo, const struct tp_channels *const *all, int count, struct tp_topo_doc **out)
{
	struct tp_topo_doc *doc;
	TP_TRY(tp_doc_create("graphs", "graphs", &doc));
	ncclResult_t result = tp_doc_set(doc, doc->root, "version", "1");
	for (int i = 0; i < count && result == ncclSuccess; i++) result = add_graph(topo, doc, all[i]);
	if (result == ncclSuccess) *out = doc;
	else tp_topo_doc_free(doc);
	return result;
}

ncclResult_t tp_channels_text(const struct tp_topo *topo, const struct tp_channels *const *all, int count, char **text, size_t *bytes)
{
	struct tp_topo_doc *doc;
	TP_TRY(make_doc(topo, all, count, &doc));
	ncclResult_t result = tp_topo_doc_text(doc, text, bytes);
	tp_topo_doc_free(doc);
	return result;
}

static bool dump_is_wanted(int rank)
{
	const char *path = tp_param_string(&graph_params[P_DUMP]);
	return path && *path && rank == tp_param_int(&graph_params[P_DUMP_RANK]);
}

bool tp_channels_files_are_wanted(int rank)
{
	const char *path = tp_param_string(&graph_params[P_FILE]);
	return dump_is_wanted(rank) || (path && *path && rank == 0);
}

ncclResult_t tp_channels_dump(const struct tp_topo *topo, const struct tp_channels *const *all, int count, int rank)
{
	struct tp_topo_doc *doc;
	const char *path = tp_param_string(&graph_params[P_DUMP]);
	if (!dump_is_wanted(rank)) return ncclSuccess;
	TP_TRY(make_doc(topo, all, count, &doc));
	ncclResult_t result = tp_topo_doc_write(doc, path);
	tp_topo_doc_free(doc);
	return result;
}

/* ---- In ---- */

struct in {
	const struct tp_topo *topo;
	const struct tp_topo_doc *doc;
	struct tp_channels *channels;
};

/* The GPU or NET with these numbers; what: for the error. Several fit, or none: an error. */
static ncclResult_t find_device(const struct in *in, const struct tp_element *e, enum tp_topo_kind kind, int32_t *out)
{
	int64_t dev, rank;
	uint64_t host;
	char where[TP_WHERE_BYTES];
	int found = 0;
	bool has_host = tp_element_get(e, "host_hash") != NULL;
	if (!tp_element_get(e, "dev")) return TP_FAIL(ncclInvalidUsage, "%s has no dev", tp_element_where(in->doc, e, where));
	TP_TRY(tp_element_int(in->doc, e, "dev", -1, INT_MAX, -1, &dev));
	TP_TRY(tp_element_int(in->doc, e, "rank", -1, INT_MAX, -1, &rank));
	TP_TRY(tp_element_hex(in->doc, e, "host_hash", 0, &host));
	for (int i = 0; i < in->topo->count[kind]; i++) {
		const struct tp_topo_node *node = tp_topo_node_of(in->topo, kind, i);
		if ((kind == TP_TOPO_GPU ? node->gpu.dev : node->net.dev) != dev) continue;
		if (kind == TP_TOPO_GPU && rank >= 0 && node->gpu.rank >= 0 && node->gpu.rank != rank) continue;
		if (has_host && in->topo->host_hash[node->host] != host) continue;
		*out = node->index;
		found++;
	}
	if (found == 1) return ncclSuccess;
	const char *what = kind == TP_TOPO_GPU ? "GPU" : "NIC";
	if (found) return TP_FAIL(ncclInvalidUsage, "%s: %d %ss have the number %" PRId64 "; %s would say which", tp_element_where(in->doc, e, where), found,
		what, dev, kind == TP_TOPO_GPU ? "rank" : "host_hash");
	return TP_FAIL(ncclInvalidUsage, "%s: this machine has no %s %" PRId64 "%s", tp_element_where(in->doc, e, where), what, dev,
		rank >= 0 ? " of that rank" : "");
}

/* The port of the GPU's host by which it exchanges with a neighbour; -1: directly. */
static ncclResult_t read_hop_net(const struct in *in, const struct tp_element *e, const char *name, int32_t gpu, int32_t *out)
{
	int64_t dev;
	char where[TP_WHERE_BYTES];
	*out = -1;
	TP_TRY(tp_element_int(in->doc, e, name, -1, INT_MAX, -1, &dev));
	for (int i = 0; i < in->topo->count[TP_TOPO_NET] && dev >= 0 && *out < 0; i++) {
		const struct tp_topo_node *net = tp_topo_node_of(in->topo, TP_TOPO_NET, i);
		if (net->net.dev == dev && net->host == in->topo->nodes[gpu].host) *out = net->index;
	}
	if (dev < 0 || *out >= 0) return ncclSuccess;
	return TP_FAIL(ncclInvalidUsage, "%s: %s=\"%" PRId64 "\", and its host has no NIC %" PRId64, tp_element_where(in->doc, e, where), name, dev, dev);
}

static ncclResult_t read_hops(const struct in *in, const struct tp_element *e, int place, struct tp_channel *channel)
{
	struct tp_hop_nets nets;
	TP_TRY(read_hop_net(in, e, "prevnet", channel->gpus[place], &nets.prev));
	TP_TRY(read_hop_net(in, e, "nextnet", channel->gpus[place], &nets.next));
	if (!channel->nets && nets.prev < 0 && nets.next < 0) return ncclSuccess;
	if (!channel->nets) {
		channel->nets = tp_alloc((size_t)in->channels->ngpus + 1, sizeof(*channel->nets), "channels");
		if (!channel->nets) return ncclSystemError;
		for (int i = 0; i < in->channels->ngpus; i++) channel->nets[i] = (struct tp_hop_nets){ -1, -1 };
	}
	channel->nets[place] = nets;
	in->channels->by_net = true;
	return ncclSuccess;
}

static ncclResult_t read_channel(const struct in *in, const struct tp_element *e, struct tp_channel *channel)
{
	char where[TP_WHERE_BYTES];
	int gpus = 0, nets = 0, behind = 0, want = in->channels->ngpus;
	channel->net_in = channel->net_out = -1;
	channel->gpus = tp_alloc((size_t)want + 1, sizeof(*channel->gpus), "channels");
	if (!channel->gpus) return ncclSystemError;
	for (const struct tp_element *child = e->first; child; child = child->next) {
		if (strcmp(child->name, "net") == 0) {
			int32_t net;
			if (nets == 2) return TP_FAIL(ncclInvalidUsage, "%s is the third NIC of its channel", tp_element_where(in->doc, child, where));
			TP_TRY(find_device(in, child, TP_TOPO_NET, &net));
			*(nets++ ? &channel->net_out : &channel->net_in) = net;
			behind += gpus > 0;
		} else if (strcmp(child->name, "gpu") == 0) {
			if (gpus == want || behind) return TP_FAIL(ncclInvalidUsage, "%s is one GPU too many for its channel", tp_element_where(in->doc, child, where));
			TP_TRY(find_device(in, child, TP_TOPO_GPU, &channel->gpus[gpus]));
			for (int i = 0; i < gpus; i++)
				if (channel->gpus[i] == channel->gpus[gpus])
					return TP_FAIL(ncclInvalidUsage, "%s is there twice in its channel", tp_element_where(in->doc, child, where));
			TP_TRY(read_hops(in, child, gpus, channel));
			gpus++;
		}
	}
	if (gpus != want)
		return TP_FAIL(ncclInvalidUsage, "%s has %d GPUs, the machine %d", tp_element_where(in->doc, e, where), gpus, want);
	if (nets == 1) return TP_FAIL(ncclInvalidUsage, "%s has one NIC: two, in and out, or none", tp_element_where(in->doc, e, where));
	for (int i = 0; channel->nets && i <= gpus; i++)
		if ((i && channel->nets[i - 1].next >= 0) != (i < gpus && channel->nets[i].prev >= 0))
			return TP_FAIL(ncclInvalidUsage, "%s: a hop by NICs of one host has a nextnet at the one GPU and a prevnet at the next, and GPU %d of the channel has one of them alone",
				tp_element_where(in->doc, e, where), i < gpus ? i : i - 1);
	return ncclSuccess;
}

static ncclResult_t read_type(const struct in *in, const struct tp_element *graph, const char *name, enum tp_topo_path_type *out)
{
	char where[TP_WHERE_BYTES];
	const char *text = tp_element_get(graph, name);
	*out = TP_PATH_LOC;
	if (!text) return ncclSuccess;
	for (int type = 0; type < TP_PATH_TYPES; type++)
		if (strcmp(text, tp_topo_path_name((enum tp_topo_path_type)type)) == 0) return *out = (enum tp_topo_path_type)type, ncclSuccess;
	return TP_FAIL(ncclInvalidUsage, "%s: %s=\"%.20s\" is no kind of path: LOC, NVL, NVB, C2C, PIX, PXB, P2C, PXN, PHB, SYS, NET",
		tp_element_where(in->doc, graph, where), name, text);
}

static ncclResult_t read_graph(const struct in *in, const struct tp_element *graph)
{
	struct tp_channels *c = in->channels;
	int64_t pattern, cross, nchannels, same;
	char where[TP_WHERE_BYTES];
	TP_TRY(tp_element_int(in->doc, graph, "pattern", 1, 5, -1, &pattern));
	TP_TRY(tp_element_int(in->doc, graph, "crossnic", 0, 2, 0, &cross));
	TP_TRY(tp_element_int(in->doc, graph, "nchannels", 0, 1024, -1, &nchannels));
	TP_TRY(tp_element_int(in->doc, graph, "samechannels", 0, 1, 0, &same));
	TP_TRY(tp_element_real(in->doc, graph, "speedintra", 0, 1e6, 0, &c->bw_intra));
	TP_TRY(tp_element_real(in->doc, graph, "speedinter", 0, 1e6, c->bw_intra, &c->bw_inter));
	TP_TRY(tp_element_real(in->doc, graph, "latencyinter", 0, 1e9, 0, &c->latency_inter_us));
	TP_TRY(read_type(in, graph, "typeintra", &c->type_intra));
	TP_TRY(read_type(in, graph, "typeinter", &c->type_inter));
	if (pattern < 0 || id_of((enum tp_pattern)pattern) != id_of(c->pattern))
		return TP_FAIL(ncclInvalidUsage, "%s: pattern %" PRId64 " under the id of another", tp_element_where(in->doc, graph, where), pattern);
	c->pattern = (enum tp_pattern)pattern;
	c->cross_nic = (int)cross;
	c->same = same;
	int there = 0;
	for (const struct tp_element *e = graph->first; e; e = e->next) there += strcmp(e->name, "channel") == 0;
	if (there != nchannels)
		return TP_FAIL(ncclInvalidUsage, "%s says %" PRId64 " channels and has %d", tp_element_where(in->doc, graph, where), nchannels, there);
	c->channels = tp_alloc((size_t)there + 1, sizeof(*c->channels), "channels");
	if (!c->channels) return ncclSystemError;
	for (const struct tp_element *e = graph->first; e; e = e->next)
		if (strcmp(e->name, "channel") == 0) TP_TRY(read_channel(in, e, &c->channels[c->nchannels++]));
	if (c->by_net) c->type_intra = TP_PATH_NET;
	return ncclSuccess;
}

static ncclResult_t find_graph(const struct tp_topo_doc *doc, enum tp_pattern pattern, const struct tp_element **out)
{
	*out = NULL;
	if (strcmp(doc->root->name, "graphs") != 0) return TP_FAIL(ncclInvalidUsage, "%s:%d: <%.40s> holds no channels, <graphs> does", doc->name,
		doc->root->line, doc->root->name);
	for (const struct tp_element *e = doc->root->first; e; e = e->next) {
		int64_t id;
		char where[TP_WHERE_BYTES];
		if (strcmp(e->name, "graph") != 0) continue;
		TP_TRY(tp_element_int(doc, e, "id", 0, 100, -1, &id));
		if (id != id_of(pattern)) continue;
		if (*out) return TP_FAIL(ncclInvalidUsage, "%s: the id %" PRId64 " is there twice", tp_element_where(doc, e, where), id);
		*out = e;
	}
	return ncclSuccess;
}

static ncclResult_t from_doc(const struct tp_topo *topo, const struct tp_topo_doc *doc, enum tp_pattern pattern, struct tp_channels **out)
{
	const struct tp_element *graph;
	TP_TRY(find_graph(doc, pattern, &graph));
	if (!graph) return *out = NULL, ncclSuccess;
	struct tp_channels *channels = tp_alloc(1, sizeof(*channels), "channels");
	if (!channels) return ncclSystemError;
	channels->pattern = pattern;
	channels->ngpus = topo->count[TP_TOPO_GPU];
	struct in in = { topo, doc, channels };
	ncclResult_t result = read_graph(&in, graph);
	if (result == ncclSuccess) *out = channels;
	else tp_channels_free(channels);
	return result;
}

ncclResult_t tp_channels_parse(const struct tp_topo *topo, const char *text, size_t bytes, const char *name, enum tp_pattern pattern,
	struct tp_channels **out)
{
	struct tp_topo_doc *doc;
	TP_TRY(tp_topo_doc_parse(text, bytes, name, &doc));
	ncclResult_t result = from_doc(topo, doc, pattern, out);
	tp_topo_doc_free(doc);
	return result;
}

ncclResult_t tp_channels_load(const struct tp_topo *topo, const struct tp_topo_policy *policy, enum tp_pattern pattern,
	struct tp_channels **out)
{
	const char *path = tp_param_string(&graph_params[P_FILE]);
	struct tp_channels *read = NULL;
	if (path && *path) {
		struct tp_topo_doc *doc;
		char why[256];
		TP_TRY(tp_topo_doc_read(path, &doc));
		ncclResult_t result = from_doc(topo, doc, pattern, &read);
		tp_topo_doc_free(doc);
		if (result != ncclSuccess) return result;
		if (read && read->by_net && (policy->net_within == TP_OFF || !policy->multi_host)) {
			TP_WARN("NCCL_GRAPH_FILE %s, graph %d: GPUs of one host reach each other by NICs there (prevnet, nextnet), which ranks don't do%s; channels are searched for "
				"instead", path, id_of(pattern), policy->multi_host ? "" : " within one host");
			tp_channels_free(read);
			read = NULL;
		}
		if (read && tp_channels_check(topo, policy, read, why) == ncclInvalidUsage)
			TP_WARN("NCCL_GRAPH_FILE %s, graph %d: %s; it is obeyed", path, id_of(pattern), why);
	}
	if (!read) return tp_channels_search(topo, policy, pattern, out);
	*out = read;
	return ncclSuccess;
}
