/* A cluster of hosts that are alike, described once: where each rank's neighbours are, computed when asked for.
 *
 * Rings: host h's channel ends where that of host h + 1 begins. Channels that cross from NET A to NET B come in pairs (A to B, B to A);
 * odd hosts take the partner's, so that NET B of one host meets NET B of the next: rails are kept, but for the one step from the last host
 * to the first where their number is odd.
 *
 * Trees: two over the hosts for every channel found. The first is the binary tree in which host h's distance from its neighbours is
 * the lowest set bit of h (0 is the root, with one child): odd hosts are its leaves. The second is the same over hosts mirrored
 * (an even number of them) or moved round by one (an odd number), so that a host has two children in one of them at most: with half of
 * the data in each no NIC carries more than a ring's would. Within a host the tree goes down the chain from its head. */
#include <assert.h>
#include <stdlib.h>

#include "topo/search_model.h"

static int channel_count(const struct tp_channels *channels) { return channels ? channels->nchannels : 0; }

static void note_places(const struct tp_topo *topo, const struct tp_channels *channels, int32_t *place)
{
	for (int c = 0; c < channel_count(channels); c++)
		for (int i = 0; i < channels->ngpus; i++)
			place[(size_t)c * (size_t)channels->ngpus + (size_t)topo->nodes[channels->channels[c].gpus[i]].ordinal] = i;
}

ncclResult_t tp_cluster_create(const struct tp_topo *topo, const struct tp_channels *rings, const struct tp_channels *trees, int nhosts,
	struct tp_cluster **out)
{
	int ngpus = topo->count[TP_TOPO_GPU];
	size_t channels = (size_t)(channel_count(rings) + channel_count(trees));
	if (nhosts < 1 || nhosts > 1 << 20) return TP_FAIL(ncclInvalidUsage, "a cluster of %d hosts: from 1 to %d", nhosts, 1 << 20);
	if ((rings && rings->ngpus != ngpus) || (trees && trees->ngpus != ngpus))
		return TP_FAIL(ncclInvalidUsage, "channels of another machine than the cluster's, which has %d GPUs a host", ngpus);
	if ((int64_t)nhosts * ngpus > INT32_MAX) return TP_FAIL(ncclInvalidUsage, "%d hosts of %d GPUs are more ranks than there are numbers", nhosts, ngpus);
	struct tp_cluster *cluster = tp_alloc(1, sizeof(*cluster), "cluster");
	int32_t *place = tp_alloc(channels * (size_t)ngpus + 1, sizeof(*place), "cluster");
	if (!cluster || !place) {
		free(cluster);
		free(place);
		return ncclSystemError;
	}
	*cluster = (struct tp_cluster){ topo, rings, trees, nhosts, ngpus, place };
	note_places(topo, rings, place);
	note_places(topo, trees, place + (size_t)channel_count(rings) * (size_t)ngpus);
	*out = cluster;
	return ncclSuccess;
}

void tp_cluster_free(struct tp_cluster *cluster)
{
	if (!cluster) return;
	free(cluster->place);
	free(cluster);
}

static int rank_of(const struct tp_cluster *cluster, int host, int32_t node)
{
	return host * cluster->ngpus + cluster->topo->nodes[node].ordinal;
}

/* ---- Rings ---- */

int tp_cluster_turn(const struct tp_channels *rings, int channel, int host)
{
	bool crosses = rings->cross_nic == 2 && rings->channels[channel].net_in != rings->channels[channel].net_out;
	/* A file's last channel may have no partner. */
	return crosses && host % 2 && (channel ^ 1) < rings->nchannels ? channel ^ 1 : channel;
}

static int turn(const struct tp_cluster *cluster, int channel, int host) { return tp_cluster_turn(cluster->rings, channel, host); }

void tp_cluster_ring(const struct tp_cluster *cluster, int channel, int rank, struct tp_ring_place *out)
{
	const struct tp_channels *rings = cluster->rings;
	assert(rings && channel >= 0 && channel < rings->nchannels && rank >= 0 && rank < cluster->nhosts * cluster->ngpus);
	int host = rank / cluster->ngpus, last = cluster->ngpus - 1, used = turn(cluster, channel, host);
	int at = cluster->place[(size_t)used * (size_t)cluster->ngpus + (size_t)(rank % cluster->ngpus)];
	const struct tp_channel *own = &rings->channels[used];
	int before = (host + cluster->nhosts - 1) % cluster->nhosts, behind = (host + 1) % cluster->nhosts;
	*out = (struct tp_ring_place){ .net_in = -1, .net_out = -1 };
	if (at > 0) {
		out->prev = rank_of(cluster, host, own->gpus[at - 1]);
		if (own->nets) out->net_in = own->nets[at].prev;
	} else {
		out->prev = rank_of(cluster, before, rings->channels[turn(cluster, channel, before)].gpus[last]);
		if (cluster->nhosts > 1) out->net_in = own->net_in;
	}
	if (at < last) {
		out->next = rank_of(cluster, host, own->gpus[at + 1]);
		if (own->nets) out->net_out = own->nets[at].next;
	} else {
		out->next = rank_of(cluster, behind, rings->channels[turn(cluster, channel, behind)].gpus[0]);
		if (cluster->nhosts > 1) out->net_out = own->net_out;
	}
}

/* ---- Trees ---- */

/* Host h's parent and children in the binary tree over n hosts; -1: none. */
static void binary_tree(int n, int h, int *up, int down[2])
{
	int bit = 1;
	*up = down[0] = down[1] = -1;
	while (bit < n && !(h & bit)) bit <<= 1;
	if (h == 0) {
		if (n > 1) down[0] = bit >> 1;
		return;
	}
	*up = (h ^ bit) | (bit << 1);
	if (*up >= n) *up = h ^ bit;
	int low = bit >> 1;
	down[0] = low ? h - low : -1;
	/* On the right side what lies behind the end is replaced by the next smaller subtree that doesn't. */
	while (low && h + low >= n) low >>= 1;
	down[1] = low ? h + low : -1;
}

static void host_tree(int n, int tree, int h, int *up, int down[2])
{
	if (!tree) {
		binary_tree(n, h, up, down);
		return;
	}
	bool even = n % 2 == 0;
	int mapped = even ? n - 1 - h : (h + n - 1) % n, *all[3] = { up, &down[0], &down[1] };
	binary_tree(n, mapped, up, down);
	for (int i = 0; i < 3; i++)
		if (*all[i] >= 0) *all[i] = even ? n - 1 - *all[i] : (*all[i] + 1) % n;
}

void tp_cluster_tree(const struct tp_cluster *cluster, int channel, int rank, struct tp_tree_place *out)
{
	const struct tp_channels *trees = cluster->trees;
	assert(trees && channel >= 0 && channel < 2 * trees->nchannels && rank >= 0 && rank < cluster->nhosts * cluster->ngpus);
	int host = rank / cluster->ngpus, c = channel / 2, up, down[2];
	const struct tp_channel *chain = &trees->channels[c];
	const int32_t *place = cluster->place + (size_t)(channel_count(cluster->rings) + c) * (size_t)cluster->ngpus;
	int at = place[rank % cluster->ngpus];
	*out = (struct tp_tree_place){ -1, { -1, -1, -1 } };
	int below = 0;
	if (at + 1 < cluster->ngpus) out->down[below++] = rank_of(cluster, host, chain->gpus[at + 1]);
	if (at > 0) {
		out->up = rank_of(cluster, host, chain->gpus[at - 1]);
		return;
	}
	host_tree(cluster->nhosts, channel % 2, host, &up, down);
	if (up >= 0) out->up = rank_of(cluster, up, chain->gpus[0]);
	for (int i = 0; i < 2; i++)
		if (down[i] >= 0) out->down[below++] = rank_of(cluster, down[i], chain->gpus[0]);
}

int tp_cluster_tree_depth(const struct tp_cluster *cluster)
{
	int deepest = 0;
	for (int host = 0; host < cluster->nhosts; host++) {
		int depth = 0, up = host, down[2];
		while (up >= 0) {
			binary_tree(cluster->nhosts, up, &up, down);
			depth += up >= 0;
		}
		deepest = TP_MAX(deepest, depth);
	}
	return deepest;
}
