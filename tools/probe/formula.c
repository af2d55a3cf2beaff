/* Closed formulas; see formula.h. */
#include "probe/formula.h"

#include <math.h>

const char *probe_formula_name(enum probe_formula which)
{
	static const char *const names[] = { "ring", "tree", "pairs" };
	return names[which];
}

double probe_formula_us(enum probe_formula which, enum tp_coll coll, int nranks, double bytes, double alpha_us, double beta_gbs, const char **text)
{
	double n = nranks, depth = ceil(log2(n)), whole = bytes / beta_gbs / 1000, share = whole / n;
	bool one_way = coll == TP_BROADCAST || coll == TP_REDUCE;
	if (which == PROBE_RING && coll == TP_ALL_REDUCE) return *text = "2 (n - 1) (alpha + S / (n beta))", 2 * (n - 1) * (alpha_us + share);
	if (which == PROBE_RING && (coll == TP_ALL_GATHER || coll == TP_REDUCE_SCATTER))
		return *text = "(n - 1) (alpha + S / (n beta))", (n - 1) * (alpha_us + share);
	if (which == PROBE_RING && one_way) return *text = "(n - 1) alpha + S / beta", (n - 1) * alpha_us + whole;
	if (which == PROBE_TREE && coll == TP_ALL_REDUCE) return *text = "2 ceil(log2 n) alpha + 2 S / beta", 2 * depth * alpha_us + 2 * whole;
	if (which == PROBE_TREE && one_way) return *text = "ceil(log2 n) alpha + S / beta", depth * alpha_us + whole;
	if (which == PROBE_PAIRS && (coll == TP_ALL_TO_ALL || coll == TP_GATHER || coll == TP_SCATTER))
		return *text = "(n - 1) (alpha + S / (n beta))", (n - 1) * (alpha_us + share);
	*text = "";
	return -1;
}

const struct probe_path_facts probe_path_facts[PROBE_PATHS] = {
	[PROBE_TCP] = { "A: TCP", 2, 4, "every segment: stack and copy" },
	[PROBE_STAGED] = { "B: RDMA, staged", 1, 2, "every message: post and poll" },
	[PROBE_DIRECT] = { "C: GPUDirect RDMA", 0, 0, "every message: post and poll" },
};

static void take(double value, const char *name, double *least, const char **limit)
{
	if (!(value > 0) || (*least > 0 && value >= *least)) return;
	*least = value;
	*limit = name;
}

double probe_path_bound(enum probe_path path, const struct probe_stages *s, const char **limit)
{
	double least = 0;
	*limit = "nothing known";
	take(s->nic, "the NIC", &least, limit);
	if (path == PROBE_DIRECT) {
		take(s->gpu_nic, "PCIe from GPU to NIC", &least, limit);
		return least;
	}
	take(s->gpu_host, "the GPU's PCIe", &least, limit);
	take(s->nic_host, "the NIC's PCIe", &least, limit);
	take(s->memory / probe_path_facts[path].memory_accesses, "host memory", &least, limit);
	if (path != PROBE_TCP) return least;
	take(s->core_copy, "a core's copying", &least, limit);
	take(s->core_tcp, "a core's TCP", &least, limit);
	return least;
}

double probe_pays_after(double register_us, double deregister_us, double copy_us)
{
	return copy_us > 0 ? ceil((register_us + deregister_us) / copy_us) : 0;
}
