/* `telpher explain --topo`: what is asked, and what was found out about a machine; found by explain_topo.c, printed by the other two. */
#ifndef TELPHER_EXPLAIN_TOPO_H
#define TELPHER_EXPLAIN_TOPO_H

#include <stdio.h>

#include "comm/ways.h"
#include "topo.h"

#define EXPLAIN_MOST_SIZES 16

struct explain_topo_request {
	const char *machine, *filter;   /* as given; NCCL_ALGO's text or NULL */
	enum tp_coll coll;
	const char *type_name, *op_name;
	size_t element;
	bool staged;                    /* see tp_choose */
	int nranks, root;               /* 0: all of the machine */
	size_t sizes[EXPLAIN_MOST_SIZES];
	int nsizes;
	bool json;
};

/* An algorithm of ours on the machine. */
struct explain_way {
	const char *why_not;            /* NULL: possible */
	bool left_out;                  /* possible, but NCCL_ALGO leaves it out */
	struct tp_cost_model model;     /* the library's, with this machine's constants for this algorithm */
	struct tp_topo_load load;       /* of a message whose block is a byte */
};

struct explain_case {
	const struct explain_topo_request *q;
	char name[256];
	int nhosts, ngpus, nranks;      /* ngpus: of a host */
	struct tp_topo_doc *doc;
	struct tp_topo *topo;
	struct tp_topo_policy policy;   /* of our links; that of the channels has relays besides */
	struct tp_topo_costs costs;
	struct tp_rails *rails;         /* NULL: one host */
	struct tp_channels *rings, *trees, *pairs;
	struct tp_topo_load ring_load;
	bool has_ring_load, is_nvidia, has_func;        /* has_func: the collective is one that NCCL has algorithms for */
	enum tp_nccl_func func;
	struct tp_nccl_job job;
	struct tp_layout *layout;
	int32_t *gpus;                  /* [ngpus] the graph's numbers, by rank */
	struct tp_cost_model library;   /* its own constants, which know no machine */
	struct tp_ways machine;         /* what the machine makes of them */
	bool all_reach, all_nvlink;     /* each GPU reaches all others' memory, by NVLink */
	int sm;                         /* the least compute capability */
	double engine_us;               /* what the engine adds to a hop across hosts */
	struct explain_way ways[TP_NALGOS];
};

/* Of one size. Terms overlap in time: they don't add up to us. */
struct explain_time { double us, latency_us, inside_us, across_us, reduce_us; size_t chunk_bytes; int nchannels; };
struct explain_times {
	struct explain_time of[TP_NALGOS];      /* us < 0: not possible */
	int best, least, best_of_all;           /* what the library takes; the model's least among those allowed, and of all */
	bool by_table;                          /* it went by the table of fused kernels */
	const char *kernel, *in_windows;        /* "TWO_SHOT/LL128", "STEPS"; the latter where buffers lie in symmetric windows; NULL: the library has none */
};
struct explain_nccl_time { double us, latency_us, data_us; int nchannels; const char *why_not; };
struct explain_nccl_times {
	struct explain_nccl_time of[TP_NCCL_ALGOS][TP_NCCL_PROTOS];
	int algo, proto;                /* the least; -1: none */
};

int explain_topo(const struct explain_topo_request *q);

size_t explain_block(const struct explain_case *c, size_t bytes);       /* of a message, as plans have it */
/* Fails where no algorithm is left. */
ncclResult_t explain_times_of(const struct explain_case *c, size_t bytes, struct explain_times *out);
void explain_nccl_times_of(const struct explain_case *c, size_t bytes, struct explain_nccl_times *out);
/* What such a kernel does, for people. */
const char *explain_kernel_text(const char *kernel);
/* The term that is the largest: "latency", "wires inside", "network" or "reduction". */
const char *explain_dominant(const struct explain_time *t);
/* Which protocol of an algorithm is the best; -1: none is possible. */
int explain_nccl_best_proto(const struct explain_nccl_times *t, int algo);

/* 0, or 1 with the reason in the log. */
int explain_topo_print(const struct explain_case *c, FILE *out);
int explain_topo_json(const struct explain_case *c, FILE *out);

/* Where choices change, from 8 B to 8 GB: ranges in order, `to` the largest power of two of each. */
struct explain_range { size_t to; int algo, proto; };
#define EXPLAIN_MOST_RANGES 32
ncclResult_t explain_ranges(const struct explain_case *c, bool nccl, struct explain_range *out, int *count);

#endif
