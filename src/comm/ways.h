/* What each plan costs on the machine that is there, for GPU ranks: the bytes that it sends, counted in its own programs and laid over the paths of
 * the graph, and the hops that these take. A switch that joins all alike, a mesh whose pairs differ, PCIe whose branches share their way up, host
 * memory in between: each is what comes of the paths, so no kind of machine is told apart by name. The library's communicators choose by it
 * (ways_agree.c), and so does `telpher explain --topo`, by the same functions.
 *
 * Counted are blocks of one byte; of collectives with a root, with rank 0 as that. */
#ifndef TP_COMM_WAYS_H
#define TP_COMM_WAYS_H

#include "plan/plan.h"
#include "topo/cost.h"

#define TP_WAYS_COLLS TP_SEND_RECV

struct tp_way {
	float inside_us, across_us;     /* a byte of a block, at the link that limits; 0: nothing crosses one */
	float hop_us;                   /* within a host; 0: there is none */
};
struct tp_ways {
	bool known;                     /* false: the library's own constants are all there is */
	float net_us;                   /* a hop to another host, the engine's part with it */
	struct tp_way of[TP_WAYS_COLLS][TP_NALGOS];
};

/* A host as its plans see it. gpus: of each of its ranks, by place, the GPU's number in the graph (ordinal). The graph's paths are those of our own
 * links, which go through no other GPU. rails NULL: there is one host. */
struct tp_ways_host {
	const struct tp_topo *graph;
	const struct tp_rails *rails;
	const struct tp_topo_costs *costs;
	const struct tp_layout *layout;
	const int32_t *gpus;
};
/* The load of that domain's plans; *can false: the plan can't be. An error where the graph joins two that would send to each other by no path. */
ncclResult_t tp_ways_load(const struct tp_ways_host *host, enum tp_coll coll, enum tp_algo algo, int domain, bool *can, struct tp_topo_load *out);
struct tp_way tp_way_of(enum tp_algo algo, const struct tp_topo_load *load);
/* What the engine adds to a hop across hosts: by the library's constants, GPU ranks over TCP less host ranks over it. */
double tp_ways_engine_us(void);

/* The library's model with what is known of one algorithm. What a table (TELPHER_TUNE_FILE) says of the links stays. */
void tp_ways_model(const struct tp_ways *ways, const struct tp_layout *layout, enum tp_coll coll, enum tp_algo algo, const struct tp_cost_model *library,
	struct tp_cost_model *out);

/* The choice for one message. library: the model without a machine; nchannels: the most there are. */
struct tp_ways_call {
	const struct tp_layout *layout;
	const struct tp_ways *ways;
	const struct tp_cost_model *library;
	enum tp_coll coll;
	int root, nchannels;
	size_t block_bytes;
	bool staged;
	const char *filter;
};
ncclResult_t tp_ways_choose(const struct tp_ways_call *call, struct tp_choice *out);
/* Are all GPUs of a host joined alike? The table of fused kernels was measured where they are, and is heeded there, whatever the model says. */
bool tp_ways_are_even(const struct tp_ways *ways);
/* The kernels' wish (exec/cuda.h, tp_cuda_exec_suggest) and the number of channels over a choice. True: it went by the wish. */
bool tp_ways_fit(const struct tp_ways_call *call, bool wants, enum tp_algo wanted, struct tp_choice *choice);

#endif
