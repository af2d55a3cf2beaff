/* Channels: the rings, trees and pairs that collectives run over on a machine's graph, the rails of its NICs, and the same
 * repeated over the hosts of a cluster.
 *
 * A channel of bandwidth b takes b of each link that it crosses in a ring; in a tree half of b up and half of b down (a tree's
 * algorithm bandwidth is half of its bus bandwidth), and b in and b out at its NET: averaged over a double binary tree, where a host
 * is inner in one tree and a leaf in the other. Links and their bandwidths are the graph's, so that nchannels x bandwidth compares
 * with NCCL's. No link is ever asked for more than it has. The search depends on the graph and the policy alone, never on time. */
#ifndef TP_TOPO_SEARCH_H
#define TP_TOPO_SEARCH_H

#include "topo/topo.h"

#define TP_CHANNELS_MAX 32          /* found by a search; whoever uses them may split each in two */

enum tp_pattern {                   /* NCCL's numbers */
	TP_PATTERN_BALANCED_TREE = 1,   /* a chain of the domain's GPUs; the NET's traffic is halved between the first two */
	TP_PATTERN_SPLIT_TREE = 2,      /* in by the second GPU, out by the first: read from files only */
	TP_PATTERN_TREE = 3,            /* a chain; the NET at its first GPU */
	TP_PATTERN_RING = 4,
	TP_PATTERN_PAIRS = 5,           /* every GPU to every other at once, behind a switch; channel i is headed by one GPU (NVLS) */
};

enum tp_finding_kind {
	TP_FOUND_NO_PATTERN,            /* nothing joins all GPUs: one channel in plain order stands in */
	TP_FOUND_MISSING_LINK,          /* this link would let the pattern stay on the better kind of links */
	TP_FOUND_UNEVEN,                /* one GPU has less than the others, and all run at its speed */
	TP_FOUND_NARROW,                /* the link that limits runs below what it could */
	TP_FOUND_NIC_FAR,               /* a GPU's nearest NIC is farther than those of others */
	TP_FOUND_NIC_SHARED,            /* rails: fewer NICs than GPUs */
	TP_FOUND_NO_NIC,
};
const char *tp_finding_code(enum tp_finding_kind kind);      /* "missing-link": stable, for programs */

struct tp_finding {
	enum tp_finding_kind kind;
	int32_t node, peer;             /* the node, or both ends of a link; -1: none */
	char text[320];                 /* a sentence fit for a WARN */
};

struct tp_channel {
	int32_t net_in, net_out;        /* nodes; -1 within a domain. Trees: equal */
	int32_t *gpus;                  /* [ngpus] nodes: a ring's order, a tree's chain from its head */
	struct tp_hop_nets { int32_t prev, next; } *nets;       /* [ngpus] nodes: the NETs by which a GPU exchanges with its neighbours of this host; -1: directly. NULL: all directly */
};

struct tp_channels {
	enum tp_pattern pattern;
	int nchannels, ngpus;
	double bw_intra, bw_inter;      /* of a channel, GB/s; bw_inter is bw_intra where there are no NETs */
	double latency_inter_us;
	enum tp_topo_path_type type_intra, type_inter;  /* the farthest path used */
	bool same;                      /* all channels are the same */
	bool by_net;                    /* some GPUs of a host exchange by their NICs, since only a CPU joins them */
	int cross_nic;                  /* 0: each leaves by the port it came in by; 1: any; 2: in pairs, A to B and B to A */
	double bound;                   /* no channels carry more than this together; 0: not known */
	uint64_t steps;                 /* hops tried: what the search cost, the same on every machine */
	struct tp_channel *channels;
	struct tp_finding *findings;
	int nfindings;
};

/* Rings, trees (TP_PATTERN_TREE: whichever of the tree patterns carries more) or pairs over all GPUs of the graph, whose paths have
 * been computed under this policy. policy->multi_host: a channel comes in by a NET and leaves by one. Succeeds where nothing good is
 * there: one channel, and a finding that says why. TP_PATTERN_PAIRS without a switch: no channels. */
ncclResult_t tp_channels_search(const struct tp_topo *topo, const struct tp_topo_policy *policy, enum tp_pattern pattern,
	struct tp_channels **out);
void tp_channels_free(struct tp_channels *channels);
/* Is this the one channel in plain order that stands in where nothing good is there? */
bool tp_channels_stand_in(const struct tp_channels *channels);
/* Proves: every GPU once a channel, no link oversubscribed, every pair of NETs by the rule of cross_nic. An error says what isn't so
 * (without a WARN where quiet). For what a search found, and what a file says. */
ncclResult_t tp_channels_check(const struct tp_topo *topo, const struct tp_topo_policy *policy, const struct tp_channels *channels,
	char why[256]);

/* NCCL's <graphs>: read and written as NCCL does. */
ncclResult_t tp_channels_text(const struct tp_topo *topo, const struct tp_channels *const *all, int count, char **text, size_t *bytes);
/* The graph of one pattern's id in a file's text; *out NULL: it isn't in there. Names of devices must be those of topo. */
ncclResult_t tp_channels_parse(const struct tp_topo *topo, const char *text, size_t bytes, const char *name, enum tp_pattern pattern,
	struct tp_channels **out);
/* Search, or NCCL_GRAPH_FILE where it has the pattern. */
ncclResult_t tp_channels_load(const struct tp_topo *topo, const struct tp_topo_policy *policy, enum tp_pattern pattern,
	struct tp_channels **out);
/* NCCL_GRAPH_DUMP_FILE, by the rank NCCL_GRAPH_DUMP_FILE_RANK. */
ncclResult_t tp_channels_dump(const struct tp_topo *topo, const struct tp_channels *const *all, int count, int rank);

/* Has this rank something to do with either file? Rank 0 reads NCCL_GRAPH_FILE. */
bool tp_channels_files_are_wanted(int rank);

/* The order of host ranks in a ring, in which neighbours share as much as can be: ranks[topo->nhost_ranks]. */
ncclResult_t tp_channels_order_hosts(const struct tp_topo *topo, int32_t *ranks);

/* ---- Rails ---- */

/* Which NETs a GPU uses for itself. Nearest first, and no NET serves more GPUs than another where it can be helped. */
struct tp_rail {
	int32_t gpu;                    /* node: the place that was given */
	int32_t *nets;                  /* [nnets] nodes */
	int nnets, share;               /* share: GPUs that share its first NET, itself included */
	enum tp_topo_path_type type;
	double bw;                      /* GPU to NETs, all of them, this GPU's share */
};
struct tp_rails {
	struct tp_rail *rails;          /* [nrails], one a GPU */
	int nrails;
	struct tp_finding *findings;
	int nfindings;
};
/* NCCL_NETDEVS_POLICY: so many each, shared if need be. The paths have been computed under the policy, with multi_host. */
ncclResult_t tp_rails_assign(const struct tp_topo *topo, const struct tp_topo_policy *policy, struct tp_rails **out);
/* The same of ranks: [count] GPUs (several may be one), or the CPUs of host processes, -1 where one may run on several. Without findings for these. */
#define TP_RAILS_MAX 4096
ncclResult_t tp_rails_assign_places(const struct tp_topo *topo, const struct tp_topo_policy *policy, const int32_t *places, int count, struct tp_rails **out);
void tp_rails_free(struct tp_rails *rails);

/* ---- A cluster: nhosts alike, described once ---- */

/* Ranks: host x ngpus + place of the GPU among the graph's. Nothing is stored a rank: each answer is computed. */
struct tp_cluster {
	const struct tp_topo *topo;
	const struct tp_channels *rings, *trees;        /* either may be NULL; the caller's, must outlive this */
	int nhosts, ngpus;
	int32_t *place;                 /* [channels of both][ngpus]: where in its channel a GPU stands */
};
ncclResult_t tp_cluster_create(const struct tp_topo *topo, const struct tp_channels *rings, const struct tp_channels *trees, int nhosts,
	struct tp_cluster **out);
void tp_cluster_free(struct tp_cluster *cluster);
/* The found ring that a host uses for a channel of the cluster. */
int tp_cluster_turn(const struct tp_channels *rings, int channel, int host);
struct tp_ring_place { int prev, next; int32_t net_in, net_out; };      /* NETs: nodes, -1 where they aren't the way to the neighbour */
void tp_cluster_ring(const struct tp_cluster *cluster, int channel, int rank, struct tp_ring_place *out);
/* Channels 2c and 2c + 1 of a tree over hosts are the two trees over channel c of the search: a host has two children in one at most. */
struct tp_tree_place { int up, down[3]; };      /* ranks; -1: none. down[0]: within the host, or the first other host */
void tp_cluster_tree(const struct tp_cluster *cluster, int channel, int rank, struct tp_tree_place *out);
int tp_cluster_tree_depth(const struct tp_cluster *cluster);   /* hosts from the root to the farthest */

#endif
