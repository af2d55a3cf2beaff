/* The packing's inside: what is left of each resource, what a channel takes and gives back, and the walk that finds one. */
#ifndef TP_TOPO_SEARCH_PACK_H
#define TP_TOPO_SEARCH_PACK_H

#include "topo/search_model.h"

#define TP_PACK_EPSILON 1e-6            /* of a channel: what sums of doubles may be off by */

/* Orders in which a walk tries its next hops: so many are fixed, the others draw. */
enum { TP_PACK_STEADY = 5 };

struct tp_pack {
	const struct tp_problem *p;
	const struct tp_wish *wish;
	double *left;                   /* [nresources] */
	struct tp_packed now, best, kept;
	int16_t *candidates;            /* [ngpus][ngpus], a row a depth */
	double *keys;                   /* [ngpus] */
	bool *used;                     /* [ngpus] */
	int16_t *walk;                  /* [ngpus] */
	double *net_keys;               /* [nnets], with net_gpus and served [ngpus]: while NETs are ranked */
	int *net_gpus, *served;
	int *nearest;                   /* [ngpus]: kind of the nearest path to another GPU */
	int *island, nislands;          /* [ngpus] */
	bool may_part;                  /* rings may end where GPUs have little between them, and some have less than others */
	bool apart;                     /* this one does */
	double forward, back;           /* what a hop of this walk takes, of the channel's bandwidth */
	int last;                       /* where this walk must end; -1: anywhere */
	int hops, walks;                /* left to this walk, and walks to this channel: most that fail do so alike */
	int target, variant;
	uint64_t steps, stop_at, seed;
};

static inline uint32_t tp_pack_draw(struct tp_pack *pack, uint32_t below)
{
	pack->seed = pack->seed * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)((pack->seed >> 33) % below);
}

/* Taking and giving. amount is a part of a channel. */

static inline bool tp_pack_fits(struct tp_pack *pack, const struct tp_route *route, double amount)
{
	double bw = pack->wish->bw * amount;
	pack->steps++;
	for (int32_t u = route->first; u < route->first + route->nuses; u++)
		if (pack->left[pack->p->uses[u].resource] + TP_PACK_EPSILON * bw < bw * pack->p->uses[u].weight) return false;
	return route->nuses > 0;
}

static inline void tp_pack_charge(struct tp_pack *pack, const struct tp_route *route, double amount)
{
	for (int32_t u = route->first; u < route->first + route->nuses; u++)
		pack->left[pack->p->uses[u].resource] -= pack->wish->bw * amount * pack->p->uses[u].weight;
}

static inline double tp_pack_slack(const struct tp_pack *pack, const struct tp_route *route)
{
	double least = 1e18;
	for (int32_t u = route->first; u < route->first + route->nuses; u++) {
		double left = pack->left[pack->p->uses[u].resource] / pack->p->uses[u].weight;
		if (left < least) least = left;
	}
	return least;
}

/* Of all links of a way, in channels, 99 at most. */
static inline double tp_pack_mean_slack(const struct tp_pack *pack, const struct tp_route *route)
{
	double sum = 0;
	for (int32_t u = route->first; u < route->first + route->nuses; u++)
		sum += TP_MIN(pack->left[pack->p->uses[u].resource] / pack->p->uses[u].weight / pack->wish->bw, 99);
	return route->nuses ? sum / route->nuses : 0;
}

/* What a NET and the end of a channel exchange. */
struct tp_flow { int from, to; double amount; };
struct tp_ends { int first, second, last; };       /* GPUs that NETs may talk to */

static inline struct tp_ends tp_pack_ends(const struct tp_pack *pack, const int16_t *order)
{
	int gpus = pack->p->ngpus;
	return (struct tp_ends){ order[0], order[gpus > 1], order[gpus - 1] };
}

static inline int16_t *tp_pack_order(struct tp_packed *packed, const struct tp_pack *pack, int channel)
{
	return packed->order + (size_t)channel * (size_t)pack->p->ngpus;
}

/* Hops of a channel: between neighbours, and from the last to the first where it is a closed ring. */
static inline int tp_pack_hops(const struct tp_pack *pack)
{
	int gpus = pack->p->ngpus;
	return pack->wish->form == TP_FORM_RING && gpus > 1 ? gpus : gpus - 1;
}

/* Up to four flows. */
int tp_pack_net_flows(const struct tp_pack *pack, struct tp_ends ends, int net_in, int net_out, struct tp_flow flows[4]);
bool tp_pack_take_nets(struct tp_pack *pack, struct tp_ends ends, int net_in, int net_out);
void tp_pack_give_nets(struct tp_pack *pack, struct tp_ends ends, int net_in, int net_out);
bool tp_pack_take_channel(struct tp_pack *pack, const int16_t *order, int net_in, int net_out);
void tp_pack_give_channel(struct tp_pack *pack, const int16_t *order, int net_in, int net_out);
/* What hops take from here on; both: rings walked both ways at once. */
void tp_pack_set_direction(struct tp_pack *pack, bool both);
void tp_pack_append(struct tp_pack *pack, const int16_t *order, int net_in, int net_out, bool turned);
/* Walks from first to last (-1: anywhere), which are paid for by the caller; second -1: any. pack->walk is the order. */
bool tp_pack_walk(struct tp_pack *pack, int first, int second, int last);

#endif
