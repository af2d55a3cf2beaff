/* From what the wires allow to what is used: GPUs that may not reach each other go through a CPU; ports are reached over C2C, through
 * another GPU (PXN), or, where they may not touch GPU memory, through a CPU. */
#include <string.h>

#include "topo/build.h"
#include "topo/paths.h"

static int merged_type(int a, int b)
{
	int far = TP_MAX(a, b), near = TP_MIN(a, b);
	return far == TP_PATH_PHB && near == TP_PATH_C2C ? TP_PATH_P2C : far;
}

static struct tp_topo_path *at(struct tp_topo *topo, int32_t from, int32_t to)
{
	const struct tp_topo_internal *in = topo->internal;
	return &topo->internal->used[in->end_of[from] * in->nends + in->end_of[to]];
}

/* from, through, to: one path. Where one half is missing nothing changes. */
static ncclResult_t go_through(struct tp_topo *topo, int32_t from, int32_t through, int32_t to, bool pxn)
{
	const struct tp_topo_path first = *tp_topo_path(topo, from, through), second = *tp_topo_path(topo, through, to);
	if (first.type == TP_PATH_DIS || second.type == TP_PATH_DIS) return ncclSuccess;
	int32_t nhops = first.nhops + second.nhops, *links = tp_paths_keep(topo, nhops);
	if (!links) return ncclSystemError;
	memcpy(links, first.links, (size_t)first.nhops * sizeof(*links));
	memcpy(links + first.nhops, second.links, (size_t)second.nhops * sizeof(*links));
	*at(topo, from, to) = (struct tp_topo_path){ .type = pxn ? TP_PATH_PXN : (enum tp_topo_path_type)merged_type(first.type, second.type),
		.bw = TP_MIN(first.bw, second.bw), .nhops = nhops, .links = links, .limit = tp_paths_limit(topo, links, nhops) };
	return ncclSuccess;
}

static ncclResult_t apply_p2p(struct tp_topo *topo, const struct tp_topo_policy *policy)
{
	for (int32_t g = 0; g < topo->count[TP_TOPO_GPU]; g++) {
		int32_t to = topo->of_kind[TP_TOPO_GPU][g], cpu = tp_paths_near_cpu(topo, to);
		for (int32_t p = 0; p < topo->count[TP_TOPO_GPU]; p++) {
			int32_t from = topo->of_kind[TP_TOPO_GPU][p];
			struct tp_topo_p2p p2p;
			if (p == g || cpu < 0) continue;
			TP_TRY(tp_topo_decide_p2p(topo, policy, from, to, &p2p));
			if (!p2p.use) TP_TRY(go_through(topo, from, cpu, to, false));
		}
	}
	return ncclSuccess;
}

/* A port whose CPU is joined to the GPU by C2C, and which is the GPU's nearest anyway, is as good as one under its switch. */
static void apply_c2c(struct tp_topo *topo)
{
	for (int32_t g = 0; g < topo->count[TP_TOPO_GPU]; g++) {
		int32_t nets[256], gpu = topo->of_kind[TP_TOPO_GPU][g], cpu = tp_paths_near_cpu(topo, gpu);
		if (cpu < 0) continue;
		int count = tp_paths_nearest(topo, gpu, TP_TOPO_NET, nets, (int)TP_ARRAY_LEN(nets));
		for (int i = 0; i < count; i++) {
			if (merged_type(tp_topo_path(topo, gpu, cpu)->type, tp_topo_path(topo, nets[i], cpu)->type) != TP_PATH_P2C) continue;
			struct tp_topo_path *there = at(topo, gpu, nets[i]), *back = at(topo, nets[i], gpu);
			there->type = TP_MIN(there->type, TP_PATH_P2C);
			back->type = TP_MIN(back->type, TP_PATH_P2C);
		}
	}
}

static ncclResult_t apply_pxn(struct tp_topo *topo, const struct tp_topo_policy *policy, int32_t gpu, int32_t net, int32_t relay)
{
	struct tp_topo_gdr gdr;
	if (relay < 0 || relay == gpu || topo->nodes[relay].host != topo->nodes[gpu].host) return ncclSuccess;
	const struct tp_topo_path *its = tp_topo_path(topo, relay, net), *own = tp_topo_path(topo, gpu, net);
	int reach = policy->pxn_c2c ? TP_PATH_P2C : TP_PATH_PXB;
	if ((int)its->type > reach || tp_topo_path(topo, relay, gpu)->type > TP_PATH_NVL) return ncclSuccess;
	/* Worth it where the relay's way is wider, or the own one goes through a CPU. */
	if (its->bw <= own->bw && own->type <= TP_PATH_PXN) return ncclSuccess;
	TP_TRY(tp_topo_decide_gdr(topo, policy, relay, net, true, &gdr));
	return gdr.mode == TP_GDR_OFF ? ncclSuccess : go_through(topo, gpu, relay, net, true);
}

/* Up to here the relay is looked for anew for every GPU, as NCCL does: each diversion may change who is nearest. Beyond, once a port. */
#define MAX_LOOKED_FOR_ANEW 8192

static ncclResult_t apply_nets(struct tp_topo *topo, const struct tp_topo_policy *policy)
{
	bool anew = (int64_t)topo->count[TP_TOPO_NET] * topo->count[TP_TOPO_GPU] <= MAX_LOOKED_FOR_ANEW;
	for (int32_t n = 0; n < topo->count[TP_TOPO_NET]; n++) {
		int32_t net = topo->of_kind[TP_TOPO_NET][n], relay = policy->pxn ? tp_topo_local_gpu(topo, net) : -1;
		for (int32_t g = 0; g < topo->count[TP_TOPO_GPU]; g++) {
			int32_t gpu = topo->of_kind[TP_TOPO_GPU][g];
			struct tp_topo_gdr gdr;
			if (g && anew && policy->pxn) relay = tp_topo_local_gpu(topo, net);
			TP_TRY(apply_pxn(topo, policy, gpu, net, relay));
			if (tp_topo_path(topo, gpu, net)->type >= TP_PATH_PHB) continue;
			TP_TRY(tp_topo_decide_gdr(topo, policy, gpu, net, false, &gdr));
			int32_t cpu = tp_paths_near_cpu(topo, gpu);
			if (gdr.mode != TP_GDR_OFF || cpu < 0) continue;
			TP_TRY(go_through(topo, net, cpu, gpu, false));
			TP_TRY(go_through(topo, gpu, cpu, net, false));
		}
	}
	return ncclSuccess;
}

static double total_of(const struct tp_topo *topo, const struct tp_topo_node *gpu)
{
	double nvlink = 0, pci = 0;
	for (int32_t l = gpu->first_link; l < gpu->first_link + gpu->nlinks; l++) {
		if (topo->links[l].kind == TP_WIRE_NVL) nvlink += topo->links[l].bw;
		if (topo->links[l].kind == TP_WIRE_PCI) pci = topo->links[l].bw;
	}
	return TP_MAX(nvlink, pci);
}

/* What a search starts from. */
static void sum_up(struct tp_topo *topo, const struct tp_topo_policy *policy)
{
	enum tp_topo_kind to = policy->multi_host ? TP_TOPO_NET : TP_TOPO_GPU;
	topo->max_bw = topo->total_bw = 0;
	if (!policy->multi_host && topo->count[TP_TOPO_GPU] == 1) {
		topo->max_bw = topo->total_bw = tp_topo_constant("local");
		return;
	}
	for (int32_t g = 0; g < topo->count[TP_TOPO_GPU]; g++) {
		const struct tp_topo_node *gpu = tp_topo_node_of(topo, TP_TOPO_GPU, g);
		for (int32_t i = 0; i < topo->count[to]; i++) {
			const struct tp_topo_path *path = tp_topo_wire_path(topo, gpu->index, topo->of_kind[to][i]);
			if (path->nhops) topo->max_bw = TP_MAX(topo->max_bw, path->bw);
		}
		topo->total_bw = TP_MAX(topo->total_bw, total_of(topo, gpu));
	}
}

ncclResult_t tp_paths_apply(struct tp_topo *topo, const struct tp_topo_policy *policy)
{
	topo->internal->nets_per_gpu = policy->nets_per_gpu;
	TP_TRY(apply_p2p(topo, policy));
	apply_c2c(topo);
	TP_TRY(apply_nets(topo, policy));
	sum_up(topo, policy);
	return ncclSuccess;
}
