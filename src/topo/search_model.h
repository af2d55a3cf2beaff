/* The packing problem behind the channel search, without the machine: places (GPUs, then NETs), routes between them, and what each
 * route takes of which resource. A resource is a directed link of the graph, or several that the same routes take in the same
 * measure, of which the narrowest counts. */
#ifndef TP_TOPO_SEARCH_MODEL_H
#define TP_TOPO_SEARCH_MODEL_H

#include "topo/search.h"

#define TP_SEARCH_MAX_GPUS 1024

struct tp_use {
	int32_t resource;
	float weight;                   /* 1, or more where a way is less efficient than its links */
};

struct tp_route {
	int32_t first, nuses;           /* in problem->uses; nuses 0: there is no route */
	enum tp_topo_path_type type;
	int32_t nhops;
};

struct tp_problem {
	int ngpus, nnets, nresources;
	double *capacity;               /* [nresources] */
	int32_t *link;                  /* [nresources] of topo->links, the narrowest; -1: the port of a NET */
	struct tp_route *routes;        /* [ngpus + nnets][ngpus + nnets]; NET to NET none */
	struct tp_use *uses;
	int32_t *port;                  /* [nnets]: NETs of one physical port have one number */
	int16_t *via;                   /* [ngpus][ngpus]: the NET by which a GPU reaches another of its host; -1: directly. NULL: all directly */
	int nvia;                       /* pairs that go by NETs */
	double unit;                    /* the bandwidth a channel should have: an NVLink's */
	double channel_max;             /* more than this a channel can't move */
};

static inline const struct tp_route *tp_route_of(const struct tp_problem *p, int from, int to)
{
	return &p->routes[(size_t)from * (size_t)(p->ngpus + p->nnets) + (size_t)to];
}
static inline int tp_via(const struct tp_problem *p, int from, int to) { return p->via ? p->via[from * p->ngpus + to] : -1; }
static inline int tp_net_place(const struct tp_problem *p, int net) { return p->ngpus + net; }

/* by_net: GPUs of a host that only a CPU joins reach each other out of the one's NIC and in by the other's, where both have one nearer than that. */
ncclResult_t tp_problem_create(const struct tp_topo *topo, const struct tp_topo_policy *policy, bool by_net, struct tp_problem **out);
void tp_problem_free(struct tp_problem *p);
/* Resources that the same routes take in the same measure become one. Called by tp_problem_create. */
ncclResult_t tp_problem_merge(struct tp_problem *p);

/* Islands of GPUs that NVLink joins, numbered from 0; how many there are. Arrays of ngpus. */
int tp_problem_islands(const struct tp_problem *p, int *island, int *queue);

/* What a channel is, and which routes it may take. */
enum tp_form { TP_FORM_RING, TP_FORM_RING_NETS, TP_FORM_CHAIN, TP_FORM_CHAIN_NETS, TP_FORM_CHAIN_TWO_HEADS };
struct tp_wish {
	enum tp_form form;
	enum tp_topo_path_type type_intra, type_inter;  /* not farther than these */
	int cross_nic;
	int most;                       /* channels */
	double bw;                      /* of a channel */
	double within;                  /* chains: times bw, between GPUs; 0 is 1 */
};

static inline bool tp_form_has_nets(enum tp_form form) { return form == TP_FORM_RING_NETS || form >= TP_FORM_CHAIN_NETS; }
static inline bool tp_form_is_ring(enum tp_form form) { return form <= TP_FORM_RING_NETS; }

/* How many channels of wish->bw there can be at most (an upper bound), from what each GPU and NET can send and receive, and from links
 * that every channel must cross. */
struct tp_bound;
ncclResult_t tp_bound_create(const struct tp_problem *p, const struct tp_wish *wish, struct tp_bound **out);
int tp_bound_channels(const struct tp_bound *bound, double bw, int most);
double tp_bound_total(const struct tp_bound *bound);    /* GB/s of all channels together, whatever their bandwidth */
void tp_bound_free(struct tp_bound *bound);

struct tp_packed {
	int n;
	int16_t *order;                 /* [n][ngpus] */
	int16_t *net_in, *net_out;      /* [n] */
};
struct tp_pack;
/* may_part: some rings end where GPUs have little between them, where that differs. */
ncclResult_t tp_pack_create(const struct tp_problem *p, bool may_part, struct tp_pack **out);
bool tp_pack_is_uneven(const struct tp_problem *p);     /* are some GPUs joined better than others? Behind a switch none are */
void tp_pack_free(struct tp_pack *pack);
/* As many channels as it finds within `budget` hops, up to `target`. The result belongs to the pack until the next call. */
const struct tp_packed *tp_pack_run(struct tp_pack *pack, const struct tp_wish *wish, int target, uint64_t budget);
uint64_t tp_pack_steps(const struct tp_pack *pack);     /* in all calls */

/* The search itself. packed is the caller's to free by tp_search_free; packed.n 0: there is nothing. */
struct tp_search_result {
	struct tp_packed packed;
	enum tp_form form;
	int cross_nic;
	double bw_intra, bw_inter, bound;
	uint64_t steps;
};
ncclResult_t tp_search_run(const struct tp_problem *p, bool ring, int cross_nic, int most, struct tp_search_result *out);
/* The same where only more than this (GB/s of all channels) is of use: n 0 where there isn't more. */
ncclResult_t tp_search_run_above(const struct tp_problem *p, bool ring, int cross_nic, int most, double above, struct tp_search_result *out);
void tp_search_free(struct tp_search_result *result);

/* What channels of bandwidth 1 take of every resource, within the domain and at the NETs. Arrays of nresources. */
void tp_packed_load(const struct tp_problem *p, enum tp_form form, const struct tp_packed *packed, double *intra, double *inter);

/* Every GPU to every other, behind a switch; no channels where there is none. */
ncclResult_t tp_channels_pairs(const struct tp_topo *topo, const struct tp_topo_policy *policy, const struct tp_problem *p,
	struct tp_channels *channels);

/* Findings, appended to an array that the caller frees. */
ncclResult_t tp_finding_add(struct tp_finding **all, int *count, enum tp_finding_kind kind, int32_t node, int32_t peer, const char *format, ...)
	__attribute__((format(printf, 6, 7)));
/* Looks at what was found, and says what stands in the way of more. load: of every resource, as a part of its capacity. */
ncclResult_t tp_channels_explain(const struct tp_topo *topo, const struct tp_topo_policy *policy, const struct tp_problem *p,
	struct tp_channels *channels, const double *load);

#endif
