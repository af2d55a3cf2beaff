/* Closed formulas, alone: times of collectives from alpha and beta, bounds of the three paths, when a registration pays. */
#ifndef TELPHER_PROBE_FORMULA_H
#define TELPHER_PROBE_FORMULA_H

#include <stdbool.h>
#include <stddef.h>

#include "plan/plan.h"

/* Times of n ranks and S bytes (telpher perf's size: of the larger buffer) over links of alpha us and beta GB/s, the slowest on the way:
 *   ring   all-reduce           2 (n - 1) (alpha + S / (n beta))
 *          all-gather, reduce-scatter        (n - 1) (alpha + S / (n beta))
 *          broadcast, reduce    (n - 1) alpha + S / beta                       chunks follow each other
 *   tree   all-reduce           2 ceil(log2 n) alpha + 2 S / beta              two trees, each half of the bytes
 *          broadcast, reduce    ceil(log2 n) alpha + S / beta
 *   pairs  all-to-all, gather, scatter       (n - 1) (alpha + S / (n beta)) */
enum probe_formula { PROBE_RING, PROBE_TREE, PROBE_PAIRS, PROBE_FORMULAS };
const char *probe_formula_name(enum probe_formula which);
/* Negative: there is no such way. *text: the formula. */
double probe_formula_us(enum probe_formula which, enum tp_coll coll, int nranks, double bytes, double alpha_us, double beta_gbs, const char **text);

/* One way from GPU memory to GPU memory of another machine. GB/s one way; 0: not on the way, or not known. */
struct probe_stages {
	double nic;                             /* the port */
	double gpu_host, nic_host;              /* PCIe from the GPU, and from the NIC, to the memory of the host */
	double gpu_nic;                         /* from the GPU to the NIC, past the host */
	double memory;                          /* of a socket, all accesses together */
	double core_copy, core_tcp;             /* what one core copies, and drives by TCP */
};
enum probe_path { PROBE_TCP, PROBE_STAGED, PROBE_DIRECT, PROBE_PATHS };
struct probe_path_facts { const char *name; int copies, memory_accesses; const char *cpu; };
extern const struct probe_path_facts probe_path_facts[PROBE_PATHS];
/* The least of the stages, and which it is. 0: nothing is known. */
double probe_path_bound(enum probe_path path, const struct probe_stages *stages, const char **limit);

/* After how many transfers of the same memory it was worth to register it, rather than to copy into memory that was; 0: never. */
double probe_pays_after(double register_us, double deregister_us, double copy_us);

#endif
