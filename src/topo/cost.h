/* What collectives cost on a machine's graph: alpha (microseconds a hop) and beta (bytes over the bandwidth of the wires).
 *
 * Two models, for two libraries:
 *   loads     what our plans move (who sends how much to whom, counted in the plans themselves), laid over the graph's paths: the link with
 *             most to carry for its bandwidth limits. src/plan's cost model takes its constants from there (tp_cost_fit).
 *   NCCL's    the formulas and tables with which NCCL 2.30.7 chooses, on the channels that a search found: what NCCL would take here.
 *
 * Alphas and the bandwidths are planning values; what `telpher topo record` kept in the description takes their place: a measured alpha
 * that of all paths of its type, a measured bandwidth (against the path's planned one) that of the wire that limits it, and the median of these that of
 * all other wires of the kind. */
#ifndef TP_TOPO_COST_H
#define TP_TOPO_COST_H

#include "topo/search.h"

/* ---- Alphas, and what the wires make of their planned bandwidth ---- */

#define TP_COSTS_LINKS 256
struct tp_topo_costs {
	double hop_us[TP_PATH_TYPES];           /* a message between GPUs of one host, by the type of their path */
	double net_us;                          /* between GPUs of two hosts, by their own ports (theirs, where they say it); 0: there is none */
	double yield[TP_WIRE_KINDS];            /* of the planned bandwidth: 1 where nothing was measured */
	bool hop_measured[TP_PATH_TYPES], net_measured, yield_measured[TP_WIRE_KINDS];
	int nlinks;                             /* links that limit a measured path: theirs, where it isn't that of their kind */
	struct { int32_t link; double yield; } links[TP_COSTS_LINKS];
};
/* The same with what was measured already found (tp_topo_values_of). */
ncclResult_t tp_topo_costs_with(const struct tp_topo_values *values, const struct tp_topo *topo, const struct tp_topo_policy *policy, const struct tp_rails *rails,
	struct tp_topo_costs *out);
/* What one link makes of its planned bandwidth. */
double tp_topo_costs_yield(const struct tp_topo_costs *costs, const struct tp_topo *topo, int32_t link);
/* doc: the graph's; its paths have been computed under the policy. rails: NULL where there is one host. What was measured
 * and doesn't hold any more is left out, with a WARN. */
ncclResult_t tp_topo_costs_of(const struct tp_topo_doc *doc, const struct tp_topo *topo, const struct tp_topo_policy *policy, const struct tp_rails *rails,
	struct tp_topo_costs *out);

/* ---- Loads ---- */

/* What the GPUs of one host send, in any unit: [ngpus] by ordinal, as the graph has them. */
struct tp_topo_traffic {
	int ngpus;
	double *pairs;                          /* [from * ngpus + to] */
	double *out, *in;                       /* [ngpus] to other hosts and from them, by each GPU's own ports */
};
ncclResult_t tp_topo_traffic_create(int ngpus, struct tp_topo_traffic *out);
void tp_topo_traffic_free(struct tp_topo_traffic *traffic);

struct tp_topo_limit {
	double load;                            /* units that cross the link that limits */
	double us;                              /* what they take there, a unit being a byte; 0: nothing moves */
	int32_t link;                           /* of topo->links; -1: nothing moves */
	int32_t from, to;                       /* nodes: of all that cross it, those who send most over it */
	int flows;                              /* pairs that cross it */
	double mean_us, most_us;                /* alpha: mean over what is sent, and of the farthest pair */
};
struct tp_topo_load { struct tp_topo_limit inside, across; };
/* All flows at once, each on the path that is used; links carry both ways at once. inside: the limit of what stays on the host, across: of
 * what leaves or enters it; a link that both cross counts for both. rails NULL: nothing may leave. An error names two that no path joins. */
ncclResult_t tp_topo_load_find(const struct tp_topo *topo, const struct tp_rails *rails, const struct tp_topo_costs *costs,
	const struct tp_topo_traffic *traffic, struct tp_topo_load *out);
/* The same of channels, each with the bandwidth that the search gave it: load is in GB/s, and us the share of the link's that it is. */
ncclResult_t tp_topo_channels_load(const struct tp_topo *topo, const struct tp_channels *channels, struct tp_topo_load *out);

/* ---- NCCL's model ---- */

enum tp_nccl_func { TP_NCCL_BROADCAST, TP_NCCL_REDUCE, TP_NCCL_ALL_GATHER, TP_NCCL_REDUCE_SCATTER, TP_NCCL_ALL_REDUCE, TP_NCCL_FUNCS };
enum tp_nccl_algo { TP_NCCL_TREE, TP_NCCL_RING, TP_NCCL_NVLS, TP_NCCL_NVLS_TREE, TP_NCCL_PAT, TP_NCCL_ALGOS };
enum tp_nccl_proto { TP_NCCL_LL, TP_NCCL_LL128, TP_NCCL_SIMPLE, TP_NCCL_PROTOS };
const char *tp_nccl_algo_name(enum tp_nccl_algo algo);          /* "NVLSTree", as NCCL_ALGO spells it */
const char *tp_nccl_proto_name(enum tp_nccl_proto proto);       /* "LL128" */

struct tp_nccl_graph {
	int nchannels;                          /* 0: there are none */
	double bw_intra, bw_inter, latency_us;  /* of a channel; the port's latency */
	enum tp_topo_path_type type_intra, type_inter;
	bool same;                              /* all channels are the same */
	enum tp_pattern pattern;
};
/* All that NCCL's formulas look at. */
struct tp_nccl_job {
	int nranks, nhosts, sm_min, sm_max;
	enum tp_cpu_arch arch;
	bool intel, amd;                        /* the CPUs' maker; both: different hosts */
	struct tp_nccl_graph graphs[TP_NCCL_ALGOS];
};
/* pairs: TP_PATTERN_PAIRS, NULL or without channels: no NVSwitch. nhosts alike, of which topo is one. */
void tp_nccl_job_of(const struct tp_topo *topo, const struct tp_channels *rings, const struct tp_channels *trees, const struct tp_channels *pairs,
	int nhosts, struct tp_nccl_job *out);

struct tp_nccl_cost {
	double latency_us, gbps;                /* gbps: message bytes a time, NCCL's algorithm bandwidth */
	const char *why_not;                    /* NULL: usable */
};
void tp_nccl_cost_of(const struct tp_nccl_job *job, enum tp_nccl_func func, enum tp_nccl_algo algo, enum tp_nccl_proto proto,
	struct tp_nccl_cost *out);
/* bytes: of the larger buffer. latency_us and data_us (may be NULL) are the two terms of the sum. Negative where it isn't usable. */
double tp_nccl_time(const struct tp_nccl_job *job, enum tp_nccl_func func, enum tp_nccl_algo algo, enum tp_nccl_proto proto, size_t bytes,
	double *latency_us, double *data_us);
/* The channels that a message of so many bytes would use. */
int tp_nccl_channels(const struct tp_nccl_job *job, enum tp_nccl_algo algo, enum tp_nccl_proto proto, size_t bytes);

#endif
