/* The orders in which rings go: in which neighbours are near to each other. The domains (hosts) stay one after the other, so that a ring comes to each once.
 *
 * Host processes stand by what they share, NUMA node, cache, core; where each runs all ranks know. GPUs stand as in the rings that the search finds on
 * their host's graph, an order a ring, channels taking turns with them: along NVLinks where not all GPUs are joined alike, and with those at
 * the ends whose ports a ring comes in and leaves by, so that rails are kept. Each rank finds its host's (by counts, so all find the same) and tells all others where it
 * stands; a host whose ranks contradict each other goes by their numbers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/gpu.h"
#include "comm/topo.h"
#include "topo/search.h"

struct place { uint8_t count, at[TP_CHANNELS_MAX]; };   /* of a GPU rank: in how many orders, and where in its host's */

/* ---- Host processes ---- */

struct seat { int32_t domain, numa, cache, core, processor, rank; };

static int by_seat(const void *a, const void *b)
{
	const int32_t *x = a, *y = b;
	for (size_t i = 0; i < sizeof(struct seat) / sizeof(int32_t); i++)
		if (x[i] != y[i]) return x[i] < y[i] ? -1 : 1;
	return 0;
}

static int32_t first_processor(const uint64_t mask[TP_CPU_WORDS])
{
	for (int word = 0; word < TP_CPU_WORDS; word++)
		if (mask[word]) return word * 64 + __builtin_ctzll(mask[word]);
	return -1;
}

static ncclResult_t order_processes(const struct ncclComm *comm, int *order)
{
	struct seat *seats = tp_alloc((size_t)comm->nranks, sizeof(*seats), "the places of ranks");
	if (!seats) return ncclSystemError;
	for (int r = 0; r < comm->nranks; r++) {
		const struct tp_topo_card *card = &comm->topo->cards[r];
		seats[r] = (struct seat){ comm->layout->domain[r], card->place.numa, card->place.cache, card->place.core, first_processor(card->mask), r };
	}
	qsort(seats, (size_t)comm->nranks, sizeof(*seats), by_seat);
	for (int r = 0; r < comm->nranks; r++) order[r] = seats[r].rank;
	free(seats);
	return ncclSuccess;
}

/* ---- GPUs ---- */

static bool all_alike(const struct tp_topo *graph)
{
	int n = graph->count[TP_TOPO_GPU];
	const struct tp_topo_path *first = n > 1 ? tp_topo_path(graph, graph->of_kind[TP_TOPO_GPU][0], graph->of_kind[TP_TOPO_GPU][1]) : NULL;
	for (int a = 0; a < n; a++)
		for (int b = 0; b < n; b++) {
			const struct tp_topo_path *path = tp_topo_path(graph, graph->of_kind[TP_TOPO_GPU][a], graph->of_kind[TP_TOPO_GPU][b]);
			if (a != b && (path->type != first->type || path->bw != first->bw)) return false;
		}
	return true;
}

/* Is each of the graph's GPUs one rank's? */
static bool has_all(const struct ncclComm *comm)
{
	const struct tp_boot *boot = comm->boot;
	const struct tp_topo *graph = comm->topo->graph;
	bool seen[TP_TOPO_LOCAL_MAX] = { false };
	if (!graph || boot->nlocal < 2 || boot->nlocal > TP_TOPO_LOCAL_MAX || graph->count[TP_TOPO_GPU] != boot->nlocal) return false;
	for (int l = 0; l < boot->nlocal; l++) {
		int32_t gpu = tp_comm_topo_gpu(comm, boot->local_ranks[l]);
		if (gpu < 0 || seen[graph->nodes[gpu].ordinal]) return false;
		seen[graph->nodes[gpu].ordinal] = true;
	}
	return true;
}

static ncclResult_t search(const struct ncclComm *comm, struct tp_comm_topo *t)
{
	struct tp_topo_policy direct = t->policy;
	bool many = comm->boot->nhosts > 1;
	direct.pxn = direct.nvb = false;
	direct.multi_host = many;
	TP_TRY(tp_topo_compute_paths(t->graph, &direct));
	/* What can't be found, or read from a file, has been told; a job doesn't fail for it. */
	if ((many && t->graph->count[TP_TOPO_NET]) || (!many && !all_alike(t->graph)))
		if (tp_channels_load(t->graph, &direct, TP_PATTERN_RING, &t->rings) != ncclSuccess) t->rings = NULL;
	if (t->rings && tp_channels_stand_in(t->rings)) {
		tp_channels_free(t->rings);
		t->rings = NULL;
	}
	return tp_topo_compute_paths(t->graph, &t->policy);
}

ncclResult_t tp_comm_rings(const struct ncclComm *comm, const struct tp_channels **out)
{
	struct tp_comm_topo *t = comm->topo;
	if (!t->rings_sought && has_all(comm)) TP_TRY(search(comm, t));
	t->rings_sought = true;
	*out = t->rings;
	return ncclSuccess;
}

static ncclResult_t find_places(const struct ncclComm *comm, struct place *out)
{
	int32_t own = tp_comm_topo_gpu(comm, comm->rank);
	const struct tp_channels *rings;
	TP_TRY(tp_comm_rings(comm, &rings));
	if (!rings) return ncclSuccess;
	out->count = (uint8_t)TP_MIN(TP_MIN(rings->nchannels, TP_CHANNELS_MAX), comm->nchannels);
	for (int o = 0; o < out->count; o++) {
		const struct tp_channel *channel = &rings->channels[tp_cluster_turn(rings, o, comm->layout->domain[comm->rank])];
		for (int i = 0; i < rings->ngpus; i++)
			if (channel->gpus[i] == own) out->at[o] = (uint8_t)i;
	}
	return ncclSuccess;
}

/* Of all domains: where they begin in an order, and how many orders each has. */
struct hosts { int *first, *counts; bool *seen; };

/* Ranks of one domain have each place once in each of their orders; a domain where that isn't so has none. */
static void judge(const struct tp_layout *layout, const struct place *places, struct hosts *hosts)
{
	for (int r = 0; r < layout->nranks; r++)
		if (layout->place[r] == 0) hosts->counts[layout->domain[r]] = TP_MIN(places[r].count, TP_CHANNELS_MAX);
	for (int o = 0; o < TP_CHANNELS_MAX; o++) {
		memset(hosts->seen, 0, (size_t)layout->nranks * sizeof(*hosts->seen));
		for (int r = 0; r < layout->nranks; r++) {
			int d = layout->domain[r], at = places[r].at[o];
			if (o >= hosts->counts[d]) continue;
			bool *seen = at < layout->domain_size[d] ? &hosts->seen[hosts->first[d] + at] : NULL;
			if (!seen || *seen || places[r].count != hosts->counts[d]) hosts->counts[d] = 0;
			else *seen = true;
		}
	}
}

static void fill_orders(const struct tp_layout *layout, const struct place *places, const struct hosts *hosts, int norders, int *orders)
{
	for (int o = 0; o < norders; o++) {
		int *order = orders + (size_t)o * (size_t)layout->nranks;
		for (int r = 0; r < layout->nranks; r++) {
			int d = layout->domain[r];
			order[hosts->first[d] + (hosts->counts[d] ? places[r].at[o % hosts->counts[d]] : layout->place[r])] = r;
		}
	}
}

static ncclResult_t make_orders(const struct ncclComm *comm, const struct place *places, struct hosts *hosts, int *norders, int **orders)
{
	const struct tp_layout *layout = comm->layout;
	for (int d = 1; d < layout->ndomains; d++) hosts->first[d] = hosts->first[d - 1] + layout->domain_size[d - 1];
	judge(layout, places, hosts);
	int most = 0;
	for (int d = 0; d < layout->ndomains; d++) most = TP_MAX(most, hosts->counts[d]);
	if (!most) return ncclSuccess;
	*orders = tp_alloc((size_t)most * (size_t)comm->nranks, sizeof(**orders), "the orders of rings");
	if (!*orders) return ncclSystemError;
	fill_orders(layout, places, hosts, most, *orders);
	*norders = most;
	return ncclSuccess;
}

static ncclResult_t order_gpus(struct ncclComm *comm, int *norders, int **orders)
{
	size_t domains = (size_t)comm->layout->ndomains, n = (size_t)comm->nranks;
	struct place *places = tp_alloc(n, sizeof(*places), "the places of ranks");
	struct hosts hosts = { tp_alloc(domains, sizeof(int), "the places of ranks"), tp_alloc(domains, sizeof(int), "the places of ranks"),
		tp_alloc(n, sizeof(bool), "the places of ranks") };
	ncclResult_t result = places && hosts.first && hosts.counts && hosts.seen ? ncclSuccess : ncclSystemError;
	if (result == ncclSuccess) result = find_places(comm, &places[comm->rank]);
	if (result == ncclSuccess) result = tp_boot_all_gather(comm->boot, places, sizeof(*places));
	if (result == ncclSuccess) result = make_orders(comm, places, &hosts, norders, orders);
	free(hosts.seen);
	free(hosts.counts);
	free(hosts.first);
	free(places);
	return result;
}

/* ---- Both ---- */

/* Rank 0's line for each channel is NCCL's. */
static void log_channels(const struct ncclComm *comm)
{
	char line[1024];
	const struct tp_layout *layout = comm->layout;
	if (!tp_log_wants(TP_LOG_INFO, TP_INIT) || comm->rank != 0) return;
	for (int c = 0; c < comm->nchannels; c++) {
		const int *order = layout->norders ? layout->orders + (size_t)(c % layout->norders) * (size_t)comm->nranks : NULL;
		int used = 0;
		for (int i = 0; i < comm->nranks && used < (int)sizeof(line) - 16; i++)
			used += snprintf(line + used, sizeof(line) - (size_t)used, " %d", order ? order[i] : i);
		TP_INFO(TP_INIT, "Channel %02d/%02d :%s", c, comm->nchannels, line);
	}
}

/* As they would be without. */
static bool is_plain(const struct tp_layout *layout, const int *order)
{
	for (int i = 1; i < layout->nranks; i++)
		if (layout->domain[order[i]] == layout->domain[order[i - 1]] && order[i] < order[i - 1]) return false;
	return true;
}

ncclResult_t tp_comm_order_rings(struct ncclComm *comm)
{
	int norders = 0, *orders = NULL;
	ncclResult_t result = ncclSuccess;
	/* Of two there is one ring. */
	if (comm->nranks > 2 && comm->gpu) {
		result = order_gpus(comm, &norders, &orders);
	} else if (comm->nranks > 2) {
		orders = tp_alloc((size_t)comm->nranks, sizeof(*orders), "the order of rings");
		result = orders ? order_processes(comm, orders) : ncclSystemError;
		norders = 1;
	}
	if (result == ncclSuccess && norders == 1 && is_plain(comm->layout, orders)) norders = 0;
	if (result == ncclSuccess) result = tp_layout_set_orders(comm->layout, norders, orders);
	if (result == ncclSuccess) result = tp_links_set_ring_orders(comm->links, norders, orders);
	free(orders);
	if (result == ncclSuccess) log_channels(comm);
	return result;
}
