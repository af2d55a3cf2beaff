/* Rails: which NICs are a GPU's own. GPUs are matched to NICs with as few GPUs a NIC as possible, nearest kinds first: a matching by
 * augmenting paths, widened one kind of path at a time, so that a GPU gives way to one that has no other NIC as near. A GPU
 * with several NICs as near that nobody else has got takes them all (p5: four a GPU). Ranks that are host processes are matched the same
 * way, from the CPU that they run on; to one that may run on several all NICs are as near. */
#include <stdlib.h>
#include <string.h>

#include "topo/search_model.h"

struct matching {
	const struct tp_topo *topo;
	const int32_t *places;          /* [ngpus] nodes: GPUs, or the CPUs of host ranks; -1: anywhere */
	int most_nets;                  /* of one place; 0: what the others leave */
	int near;                       /* kinds of paths up to this one are worth more than a NIC alone */
	int ngpus, nnets, share;        /* GPUs that a NIC may serve */
	int limit;                      /* kinds of paths not farther than this */
	int *net_of;                    /* [ngpus]; -1 */
	int *gpu_of;                    /* [nnets][share_max] */
	int *taken;                     /* [nnets] */
	bool *seen;                     /* [nnets] */
};

/* near: by the wires, even where data goes round by the CPU, as it does without GDR: of NICs that are then alike a GPU takes its own. */
struct reach { enum tp_topo_path_type near, type; double bw; };

static struct reach reach_of(const struct matching *m, int gpu, int net)
{
	const struct tp_topo_node *port = tp_topo_node_of(m->topo, TP_TOPO_NET, net);
	if (m->places[gpu] < 0) return (struct reach){ TP_PATH_LOC, TP_PATH_LOC, port->net.bw };
	const struct tp_topo_path *path = tp_topo_path(m->topo, m->places[gpu], port->index);
	return (struct reach){ tp_topo_wire_path(m->topo, m->places[gpu], port->index)->type, path->type, path->bw };
}

void tp_rails_free(struct tp_rails *rails)
{
	if (!rails) return;
	for (int i = 0; rails->rails && i < rails->nrails; i++) free(rails->rails[i].nets);
	free(rails->rails);
	free(rails->findings);
	free(rails);
}

static bool usable(const struct matching *m, int gpu, int net)
{
	struct reach reach = reach_of(m, gpu, net);
	return reach.type < TP_PATH_NET && reach.bw > 0 && (int)reach.near <= m->limit;
}

static int nth_net(const struct matching *m, int gpu, int i)
{
	return (i + (int)((int64_t)gpu * m->nnets / m->ngpus)) % m->nnets;
}

/* One augmenting path. A NET with room is taken before anyone has to move; those nearest in number to the GPU's own are looked at
 * first, so that GPU i has NIC i where all are alike. */
static bool place(struct matching *m, int gpu)
{
	for (int i = 0; i < m->nnets; i++) {
		int net = nth_net(m, gpu, i);
		if (m->seen[net] || m->taken[net] >= m->share || !usable(m, gpu, net)) continue;
		m->gpu_of[(size_t)net * (size_t)m->ngpus + (size_t)m->taken[net]++] = gpu;
		m->net_of[gpu] = net;
		return true;
	}
	for (int i = 0; i < m->nnets; i++) {
		int net = nth_net(m, gpu, i), *served = m->gpu_of + (size_t)net * (size_t)m->ngpus;
		if (m->seen[net] || !usable(m, gpu, net)) continue;
		m->seen[net] = true;
		for (int s = 0; s < m->taken[net]; s++) {
			if (!place(m, served[s])) continue;
			served[s] = gpu;
			m->net_of[gpu] = net;
			return true;
		}
	}
	return false;
}

static void match(struct matching *m)
{
	for (int gpu = 0; gpu < m->ngpus; gpu++) m->net_of[gpu] = -1;
	int placed = 0, fair = m->nnets ? (m->ngpus + m->nnets - 1) / m->nnets : 0;
	/* Fair shares first by nearer kinds; then, where some NIC is out of reach of those that have none, larger shares. */
	for (m->share = fair; m->share <= m->ngpus && placed < m->ngpus && m->nnets; m->share++)
		for (m->limit = TP_PATH_LOC; m->limit <= m->near && placed < m->ngpus; m->limit++)
			for (int gpu = 0; gpu < m->ngpus; gpu++) {
				memset(m->seen, 0, (size_t)m->nnets * sizeof(*m->seen));
				placed += m->net_of[gpu] < 0 && place(m, gpu);
			}
	for (m->share = fair; m->share <= m->ngpus && placed < m->ngpus && m->nnets; m->share++)
		for (m->limit = m->near + 1; m->limit < TP_PATH_NET && placed < m->ngpus; m->limit++)
			for (int gpu = 0; gpu < m->ngpus; gpu++) {
				memset(m->seen, 0, (size_t)m->nnets * sizeof(*m->seen));
				placed += m->net_of[gpu] < 0 && place(m, gpu);
			}
}

/* The matched NET, then free ones that are as near to no other GPU nearer, shared out in turns. */
static ncclResult_t hand_out(struct matching *m, struct tp_rails *rails)
{
	for (int gpu = 0; gpu < m->ngpus; gpu++) {
		struct tp_rail *rail = &rails->rails[gpu];
		rail->gpu = m->places[gpu];
		rail->nets = tp_alloc((size_t)m->nnets + 1, sizeof(*rail->nets), "rails");
		if (!rail->nets) return ncclSystemError;
		int net = m->net_of[gpu];
		rail->type = TP_PATH_DIS;
		if (net < 0) continue;
		struct reach reach = reach_of(m, gpu, net);
		rail->nets[rail->nnets++] = tp_topo_node_of(m->topo, TP_TOPO_NET, net)->index;
		rail->type = reach.type;
		rail->share = m->taken[net];
		rail->bw = reach.bw / rail->share;
	}
	for (int net = 0; net < m->nnets; net++) {
		int best = -1;
		if (m->taken[net]) continue;
		for (int gpu = 0; gpu < m->ngpus; gpu++) {
			struct reach reach = reach_of(m, gpu, net);
			if (m->net_of[gpu] < 0 || reach.near > reach_of(m, gpu, m->net_of[gpu]).near || reach.bw <= 0 || (m->most_nets && rails->rails[gpu].nnets >= m->most_nets)) continue;
			if (best < 0 || rails->rails[gpu].nnets < rails->rails[best].nnets) best = gpu;
		}
		if (best < 0) continue;
		rails->rails[best].nets[rails->rails[best].nnets++] = tp_topo_node_of(m->topo, TP_TOPO_NET, net)->index;
		rails->rails[best].bw += reach_of(m, best, net).bw;
	}
	return ncclSuccess;
}

static bool has_net(const struct tp_rail *rail, int32_t net)
{
	for (int i = 0; i < rail->nnets; i++)
		if (rail->nets[i] == net) return true;
	return false;
}

/* NCCL_NETDEVS_POLICY says how many: then those of others too, if they are as near. */
static void add_others(const struct matching *m, struct tp_rails *rails)
{
	for (int gpu = 0; m->most_nets && gpu < m->ngpus; gpu++) {
		struct tp_rail *rail = &rails->rails[gpu];
		if (m->net_of[gpu] < 0) continue;
		struct reach own = reach_of(m, gpu, m->net_of[gpu]);
		for (int net = 0; net < m->nnets && rail->nnets < m->most_nets; net++) {
			struct reach reach = reach_of(m, gpu, net);
			int32_t node = tp_topo_node_of(m->topo, TP_TOPO_NET, net)->index;
			if (reach.near == own.near && reach.type == own.type && reach.bw >= own.bw && !has_net(rail, node)) rail->nets[rail->nnets++] = node;
		}
	}
}

static ncclResult_t explain(const struct matching *m, struct tp_rails *rails)
{
	int nearest = TP_PATH_DIS;
	if (m->near != TP_PATH_PXB) return ncclSuccess;
	for (int gpu = 0; gpu < m->ngpus; gpu++) nearest = TP_MIN(nearest, (int)rails->rails[gpu].type);
	if (!m->nnets) return tp_finding_add(&rails->findings, &rails->nfindings, TP_FOUND_NO_NIC, -1, -1, "the machine has no NIC");
	for (int gpu = 0; gpu < m->ngpus; gpu++) {
		const struct tp_rail *rail = &rails->rails[gpu];
		const char *name = rail->gpu < 0 ? "a rank" : m->topo->nodes[rail->gpu].name;
		if (!rail->nnets) {
			TP_TRY(tp_finding_add(&rails->findings, &rails->nfindings, TP_FOUND_NO_NIC, rail->gpu, -1, "%s reaches no NIC", name));
			continue;
		}
		const char *net = m->topo->nodes[rail->nets[0]].name;
		if ((int)rail->type > TP_PATH_PXB && (int)rail->type > nearest)
			TP_TRY(tp_finding_add(&rails->findings, &rails->nfindings, TP_FOUND_NIC_FAR, rail->gpu, rail->nets[0],
				"%s has no NIC of its own near it: the nearest one free is %s, %s (%s), where others have %s", name, net,
				tp_topo_path_name(rail->type), tp_topo_path_meaning(rail->type), tp_topo_path_name((enum tp_topo_path_type)nearest)));
		if (rail->share > 1)
			TP_TRY(tp_finding_add(&rails->findings, &rails->nfindings, TP_FOUND_NIC_SHARED, rail->gpu, rail->nets[0],
				"%s shares %s with %d other GPU%s: %.4g GB/s for each", name, net, rail->share - 1, rail->share > 2 ? "s" : "", rail->bw));
	}
	return ncclSuccess;
}

static ncclResult_t assign(struct matching *m, struct tp_rails **out)
{
	size_t gpus = (size_t)m->ngpus + 1, nets = (size_t)m->nnets + 1;
	struct tp_rails *rails = tp_alloc(1, sizeof(*rails), "rails");
	if (rails) rails->rails = tp_alloc(gpus, sizeof(*rails->rails), "rails");
	m->net_of = tp_alloc(gpus, sizeof(*m->net_of), "rails");
	m->gpu_of = tp_alloc(nets * gpus, sizeof(*m->gpu_of), "rails");
	m->taken = tp_alloc(nets, sizeof(*m->taken), "rails");
	m->seen = tp_alloc(nets, sizeof(*m->seen), "rails");
	ncclResult_t result = rails && rails->rails && m->net_of && m->gpu_of && m->taken && m->seen ? ncclSuccess : ncclSystemError;
	if (result == ncclSuccess) {
		rails->nrails = m->ngpus;
		match(m);
		result = hand_out(m, rails);
	}
	if (result == ncclSuccess) add_others(m, rails);
	if (result == ncclSuccess) result = explain(m, rails);
	free(m->net_of);
	free(m->gpu_of);
	free(m->taken);
	free(m->seen);
	if (result == ncclSuccess) *out = rails;
	else tp_rails_free(rails);
	return result;
}

ncclResult_t tp_rails_assign_places(const struct tp_topo *topo, const struct tp_topo_policy *policy, const int32_t *places, int count, struct tp_rails **out)
{
	struct matching m = { .topo = topo, .places = places, .ngpus = count, .nnets = topo->count[TP_TOPO_NET], .near = TP_PATH_PHB,
		.most_nets = policy->nets_per_gpu };
	if (m.ngpus > TP_RAILS_MAX || m.nnets > TP_SEARCH_MAX_GPUS)
		return TP_FAIL(ncclInvalidUsage, "rails of %d ranks and %d NICs: one host may have %d and %d", m.ngpus, m.nnets, TP_RAILS_MAX, TP_SEARCH_MAX_GPUS);
	/* A GPU's NIC is worth having behind its own switch, a processor's on its own node. */
	for (int i = 0; i < count; i++)
		if (places[i] >= 0 && topo->nodes[places[i]].kind == TP_TOPO_GPU) m.near = TP_PATH_PXB;
	return assign(&m, out);
}

ncclResult_t tp_rails_assign(const struct tp_topo *topo, const struct tp_topo_policy *policy, struct tp_rails **out)
{
	return tp_rails_assign_places(topo, policy, topo->of_kind[TP_TOPO_GPU], topo->count[TP_TOPO_GPU], out);
}
