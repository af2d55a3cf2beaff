/* Which network devices each rank uses. The rails of the host (topo/search.h) are shared out among its ranks by all of them alike, each for itself, on the
 * graph that they have in common: a GPU's nearest, a host process's on its NUMA node, none used by two where another is as near. What came
 * of it each rank tells all others (link.h), so it need not be the same that they would have found. Where rings go over several hosts, a GPU at a ring's end
 * uses on its channel the port that the search for rings gave it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/gpu.h"
#include "comm/topo.h"
#include "topo/search.h"

/* The transport's number of each of the graph's ports: by name, since a file or another rank may count otherwise. */
static ncclResult_t number_ports(const struct ncclComm *comm, int *dev_of)
{
	const struct tp_topo *graph = comm->topo->graph;
	int dev = 0, count = 0;
	const struct tp_net_ops *ops = tp_links_net(comm->links, &dev);
	for (int32_t n = 0; n < graph->count[TP_TOPO_NET]; n++) dev_of[n] = -1;
	TP_TRY(ops->devices(&count));
	for (int d = 0; d < count; d++) {
		struct tp_net_properties p;
		if (ops->properties(d, &p) != ncclSuccess) continue;
		int32_t net = tp_comm_topo_net(graph, p.name, (int)p.port);
		if (net >= 0 && dev_of[graph->nodes[net].ordinal] < 0) dev_of[graph->nodes[net].ordinal] = d;
	}
	return ncclSuccess;
}

static int32_t place_of(const struct ncclComm *comm, int rank)
{
	const struct tp_topo *graph = comm->topo->graph;
	if (comm->gpu) return tp_comm_topo_gpu(comm, rank);
	for (int32_t h = 0; h < graph->nhost_ranks; h++)
		if (graph->host_ranks[h].rank == rank) return graph->host_ranks[h].node < 0 ? -1 : graph->host_ranks[h].cpu;
	return -1;
}

static bool has(const struct tp_link_seats *seats, int dev)
{
	for (int i = 0; i < seats->count; i++)
		if (seats->devs[i] == dev) return true;
	return false;
}

static void add(struct tp_link_seats *seats, int dev, int rail)
{
	if (seats->count == TP_LINK_SEATS_MAX || has(seats, dev)) return;
	seats->devs[seats->count] = dev;
	seats->rails[seats->count++] = rail;
}

/* A file may say which ports of the hosts are wired together; otherwise those with the same number are. */
static void add_port(const struct tp_topo *graph, const int *dev_of, int32_t net, struct tp_link_seats *seats)
{
	const struct tp_topo_node *node = &graph->nodes[net];
	int dev = dev_of[node->ordinal];
	if (dev >= 0) add(seats, dev, node->net.rail >= 0 ? node->net.rail : dev);
}

static void fill(const struct ncclComm *comm, const struct tp_rails *rails, const int *dev_of, struct tp_link_seats *out)
{
	const struct tp_topo *graph = comm->topo->graph;
	const struct tp_rail *own = &rails->rails[comm->boot->local];
	int dev = 0;
	/* Where any device leads to any peer channels take turns; else all of a rank's links use one. */
	bool spreads = tp_links_net(comm->links, &dev)->spreads;
	int most = spreads ? TP_MIN(comm->nchannels, TP_LINK_SEATS_MAX) : 1;
	for (int i = 0; i < own->nnets && out->count < most; i++) add_port(graph, dev_of, own->nets[i], out);
	out->near = out->count;
	for (int32_t n = 0; n < graph->count[TP_TOPO_NET]; n++) add_port(graph, dev_of, graph->of_kind[TP_TOPO_NET][n], out);
}

/* The place of a port's device, from 1; 0: it isn't among them. */
static uint8_t place_in(const struct tp_topo *graph, const int *dev_of, int32_t net, const struct tp_link_seats *seats)
{
	int dev = net < 0 ? -1 : dev_of[graph->nodes[net].ordinal];
	for (int i = 0; i < seats->count && dev >= 0; i++)
		if (seats->devs[i] == dev) return (uint8_t)(i + 1);
	return 0;
}

/* The ports by which the rings that were found leave and enter the host: a GPU at a ring's end uses that one on the ring's channel, as the search reckoned. */
static ncclResult_t take_rings(const struct ncclComm *comm, const int *dev_of, struct tp_link_seats *out)
{
	const struct tp_topo *graph = comm->topo->graph;
	const struct tp_channels *rings = NULL;
	int dev = 0;
	if (!comm->gpu || comm->boot->nhosts < 2 || !tp_links_net(comm->links, &dev)->spreads) return ncclSuccess;
	TP_TRY(tp_comm_rings(comm, &rings));
	if (!rings) return ncclSuccess;
	int32_t own = tp_comm_topo_gpu(comm, comm->rank);
	out->nrings = TP_MIN(TP_MIN(rings->nchannels, TP_LINK_RINGS_MAX), comm->nchannels);
	for (int c = 0; c < out->nrings; c++) {
		const struct tp_channel *channel = &rings->channels[tp_cluster_turn(rings, c, comm->layout->domain[comm->rank])];
		if (channel->gpus[rings->ngpus - 1] == own) out->out[c] = place_in(graph, dev_of, channel->net_out, out);
		if (channel->gpus[0] == own) out->in[c] = place_in(graph, dev_of, channel->net_in, out);
	}
	return ncclSuccess;
}

/* GPUs relay for each other's ports in NCCL (PXN); our links go through none. */
static ncclResult_t share_out(const struct ncclComm *comm, struct tp_rails **out)
{
	struct tp_comm_topo *t = comm->topo;
	struct tp_topo_policy direct = t->policy;
	int nlocal = comm->boot->nlocal;
	int32_t *places = tp_alloc((size_t)nlocal, sizeof(*places), "the places of ranks");
	if (!places) return ncclSystemError;
	for (int l = 0; l < nlocal; l++) places[l] = place_of(comm, comm->boot->local_ranks[l]);
	direct.pxn = direct.nvb = false;
	direct.multi_host = true;
	ncclResult_t result = tp_topo_compute_paths(t->graph, &direct);
	if (result == ncclSuccess) result = tp_rails_assign_places(t->graph, &direct, places, nlocal, out);
	free(places);
	if (tp_topo_compute_paths(t->graph, &t->policy) == ncclSuccess || result != ncclSuccess) return result;
	tp_rails_free(*out);
	return ncclSystemError;
}

static ncclResult_t choose(const struct ncclComm *comm, struct tp_link_seats *out)
{
	const struct tp_topo *graph = comm->topo->graph;
	struct tp_rails *rails;
	if (!graph || !graph->count[TP_TOPO_NET]) return ncclSuccess;
	int *dev_of = tp_alloc((size_t)graph->count[TP_TOPO_NET], sizeof(*dev_of), "the numbers of network ports");
	if (!dev_of) return ncclSystemError;
	ncclResult_t result = number_ports(comm, dev_of);
	if (result == ncclSuccess) result = share_out(comm, &rails);
	if (result == ncclSuccess) {
		fill(comm, rails, dev_of, out);
		tp_rails_free(rails);
		if (out->near) result = take_rings(comm, dev_of, out);
	}
	free(dev_of);
	return result;
}

/* Nothing is known of the machine: by turns, as ranks stand on it. */
static ncclResult_t take_turns(const struct ncclComm *comm, struct tp_link_seats *out)
{
	int dev = 0, count = 0;
	const struct tp_net_ops *ops = tp_links_net(comm->links, &dev);
	TP_TRY(ops->devices(&count));
	for (int d = 0; d < count; d++) add(out, (dev + d) % count, (dev + d) % count);
	out->near = ops->spreads ? TP_MIN(TP_MIN(comm->nchannels, TP_LINK_SEATS_MAX), out->count) : 1;
	return ncclSuccess;
}

/* A rank's card names the first of what it uses. */
static void correct_cards(const struct ncclComm *comm)
{
	for (int r = 0; r < comm->nranks; r++) {
		struct tp_topo_card *card = &comm->topo->cards[r];
		int count = 0;
		const struct tp_link_seat *seat = tp_links_seats(comm->links, r, &count);
		card->port = seat->port;
		card->gbps = seat->gbps;
		card->latency_us = seat->latency_us;
		memcpy(card->net, seat->name, sizeof(card->net));
		memcpy(card->address, seat->address, sizeof(card->address));
	}
}

ncclResult_t tp_topo_seat_links(struct ncclComm *comm)
{
	struct tp_link_seats seats = { .near = 0 };
	char text[256];
	size_t used = 0;
	if (!tp_links_may_seat(comm->links)) return ncclSuccess;
	if (choose(comm, &seats) != ncclSuccess) {
		TP_WARN("comm %p rank %d: which network devices are near isn't found out (see above): they are taken by turns", (void *)comm, comm->rank);
		seats.near = 0;
	}
	if (!seats.near) {
		seats = (struct tp_link_seats){ .near = 0 };
		TP_TRY(take_turns(comm, &seats));
	}
	TP_TRY(tp_links_seat(comm->links, &seats));
	correct_cards(comm);
	int count = 0;
	const struct tp_link_seat *own = tp_links_seats(comm->links, comm->rank, &count);
	for (int i = 0; i < count && used < sizeof(text); i++) used += (size_t)snprintf(text + used, sizeof(text) - used, " %d:%s", own[i].dev, own[i].name);
	TP_INFO(TP_INIT | TP_NET, "rank %d sends by%s", comm->rank, text);
	return ncclSuccess;
}
