/* GPU ranks agree on what plans cost on their machines. The ranks of a host share its plans out, each lays some over the graph that they have in
 * common, and all tell all what came of it. The slowest host counts. Where some host's graph isn't known, or joins not all of its GPUs, none has a say, and
 * the library's own constants decide. */
#include <stdlib.h>
#include <string.h>

#include "comm/gpu.h"
#include "comm/topo.h"
#include "comm/ways.h"

enum { COMBINATIONS = TP_WAYS_COLLS * TP_NALGOS };
#define MOST_RANKS 4096         /* beyond it the plans alone take long */

/* Followed by `share` ways: those whose number is the rank's place on its host, and one more for each rank there on from it. */
struct said { uint32_t known; float net_us; struct tp_way ways[]; };

static int share_of(const struct ncclComm *comm)
{
	int least = comm->layout->domain_size[0];
	for (int d = 1; d < comm->layout->ndomains; d++) least = TP_MIN(least, comm->layout->domain_size[d]);
	return (COMBINATIONS + least - 1) / least;
}

/* The GPUs of this host's ranks, by place; false: not all are known, or no path joins two of them. */
static bool find_gpus(const struct ncclComm *comm, int32_t *gpus)
{
	const struct tp_topo *graph = comm->topo->graph;
	int nlocal = comm->boot->nlocal;
	for (int l = 0; l < nlocal; l++) {
		int32_t node = tp_comm_topo_gpu(comm, comm->boot->local_ranks[l]);
		if (node < 0) return false;
		gpus[l] = graph->nodes[node].ordinal;
	}
	for (int a = 0; a < nlocal; a++)
		for (int b = 0; b < nlocal; b++) {
			const struct tp_topo_path *path = tp_topo_path(graph, graph->of_kind[TP_TOPO_GPU][gpus[a]], graph->of_kind[TP_TOPO_GPU][gpus[b]]);
			if (gpus[a] != gpus[b] && (path->type >= TP_PATH_NET || path->bw <= 0)) return false;
		}
	return true;
}

static bool have_ports(const struct tp_topo *graph, const struct tp_rails *rails, const int32_t *gpus, int ngpus)
{
	for (int l = 0; l < ngpus; l++) {
		const struct tp_rail *rail = &rails->rails[gpus[l]];
		if (!rail->nnets || tp_topo_path(graph, rail->gpu, rail->nets[0])->bw <= 0) return false;
	}
	return true;
}

static ncclResult_t count_share(const struct ncclComm *comm, const struct tp_ways_host *host, struct said *out)
{
	for (int i = comm->boot->local, k = 0; i < COMBINATIONS; i += comm->boot->nlocal, k++) {
		enum tp_algo algo = (enum tp_algo)(i % TP_NALGOS);
		struct tp_topo_load load;
		bool can;
		TP_TRY(tp_ways_load(host, (enum tp_coll)(i / TP_NALGOS), algo, comm->layout->domain[comm->rank], &can, &load));
		if (can) out->ways[k] = tp_way_of(algo, &load);
	}
	out->known = 1;
	return ncclSuccess;
}

static ncclResult_t count_host(const struct ncclComm *comm, const struct tp_topo_policy *policy, int32_t *gpus, struct said *out)
{
	const struct tp_comm_topo *t = comm->topo;
	struct tp_ways_host host = { .graph = t->graph, .layout = comm->layout, .gpus = gpus };
	struct tp_rails *rails = NULL;
	struct tp_topo_costs costs;
	if (!find_gpus(comm, gpus)) return ncclSuccess;
	if (policy->multi_host) TP_TRY(tp_rails_assign(t->graph, policy, &rails));
	ncclResult_t result = ncclSuccess;
	if (!rails || have_ports(t->graph, rails, gpus, comm->boot->nlocal)) {
		result = tp_topo_costs_with(&t->values, t->graph, policy, rails, &costs);
		host.rails = rails;
		host.costs = &costs;
		if (result == ncclSuccess) result = count_share(comm, &host, out);
		if (result == ncclSuccess && rails) out->net_us = (float)(costs.net_us + tp_ways_engine_us());
	}
	tp_rails_free(rails);
	return result;
}

/* What can't be found has been told; a job doesn't fail for it. */
static ncclResult_t count_own(const struct ncclComm *comm, struct said *out, size_t bytes)
{
	struct tp_comm_topo *t = comm->topo;
	struct tp_topo_policy direct = t->policy;
	if (!t->graph || comm->nranks > MOST_RANKS) return ncclSuccess;
	int32_t *gpus = tp_alloc((size_t)comm->boot->nlocal, sizeof(*gpus), "the GPUs of ranks");
	if (!gpus) return ncclSystemError;
	direct.pxn = direct.nvb = false;
	direct.multi_host = comm->boot->nhosts > 1;
	ncclResult_t result = tp_topo_compute_paths(t->graph, &direct);
	if (result == ncclSuccess && count_host(comm, &direct, gpus, out) != ncclSuccess) memset(out, 0, bytes);
	free(gpus);
	return result == ncclSuccess ? tp_topo_compute_paths(t->graph, &t->policy) : result;
}

static void take(struct tp_way *way, const struct tp_way *said)
{
	way->inside_us = TP_MAX(way->inside_us, said->inside_us);
	way->across_us = TP_MAX(way->across_us, said->across_us);
	way->hop_us = TP_MAX(way->hop_us, said->hop_us);
}

static bool is_sane(float us) { return us >= 0 && us < 1e6f; }

static void join(const struct ncclComm *comm, const char *all, size_t stride, struct tp_ways *out)
{
	struct tp_ways ways = { .known = true };
	for (int r = 0; r < comm->nranks; r++) {
		const struct tp_boot_peer *peer = &comm->boot->peers[r];
		const struct said *said = (const void *)(all + (size_t)r * stride);
		int nlocal = comm->layout->domain_size[comm->layout->domain[r]];
		ways.known &= said->known == 1 && is_sane(said->net_us);
		ways.net_us = TP_MAX(ways.net_us, said->net_us);
		for (int i = peer->local, k = 0; i < COMBINATIONS && ways.known; i += nlocal, k++) {
			const struct tp_way *way = &said->ways[k];
			ways.known &= is_sane(way->inside_us) && is_sane(way->across_us) && is_sane(way->hop_us);
			take(&ways.of[i / TP_NALGOS][i % TP_NALGOS], way);
		}
	}
	*out = ways;
}

static void tell(const struct ncclComm *comm)
{
	const struct tp_ways *ways = comm->ways;
	if (comm->rank != 0) return;
	if (!ways->known) {
		TP_INFO(TP_INIT | TP_TUNING, "algorithms are chosen by the library's own constants: no topology joins all GPUs%s", comm->boot->nhosts > 1 ? " and a network port of each" : "");
		return;
	}
	const struct tp_way *pairs = &ways->of[TP_ALL_REDUCE][TP_ALGO_TWO_SHOT], *ring = &ways->of[TP_ALL_REDUCE][TP_ALGO_RING];
	TP_INFO(TP_INIT | TP_TUNING, "algorithms are chosen by the topology: inside a host an all-reduce carries %.4g GB/s by all pairs, %.4g by rings%s",
		pairs->inside_us > 0 ? 1e-3 / (double)pairs->inside_us : 0, ring->inside_us > 0 ? 1e-3 / (double)ring->inside_us : 0,
		tp_ways_are_even(ways) ? "" : ": the GPUs are not joined alike");
}

ncclResult_t tp_comm_open_ways(struct ncclComm *comm)
{
	size_t stride = sizeof(struct said) + (size_t)share_of(comm) * sizeof(struct tp_way);
	comm->ways = tp_alloc(1, sizeof(*comm->ways), "what plans cost here");
	if (!comm->ways) return ncclSystemError;
	if (!comm->gpu || comm->nranks < 2) return ncclSuccess;
	char *all = tp_alloc((size_t)comm->nranks, stride, "what plans cost on all machines");
	if (!all) return ncclSystemError;
	ncclResult_t result = count_own(comm, (void *)(all + (size_t)comm->rank * stride), stride);
	if (result == ncclSuccess) result = tp_boot_all_gather(comm->boot, all, stride);
	if (result == ncclSuccess) {
		join(comm, all, stride, comm->ways);
		tell(comm);
	}
	free(all);
	return result;
}
