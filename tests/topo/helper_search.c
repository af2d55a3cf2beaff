#include "topo/helper_search.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

char *helper_file(const char *path)
{
	FILE *file = fopen(path, "re");
	if (!file) fail_msg("%s can't be opened", path);
	char *text = calloc(1, 1 << 20);
	assert_non_null(text);
	size_t bytes = fread(text, 1, (1 << 20) - 1, file);
	assert_true(bytes > 0);
	fclose(file);
	return text;
}

struct tp_topo_policy helper_policy(bool multi_host)
{
	struct tp_topo_policy policy;
	tp_topo_policy_default(&policy);
	policy.multi_host = multi_host;
	return policy;
}

char *helper_replace(const char *text, const char *from, int nth, const char *to)
{
	const char *at = strstr(text, from);
	while (at && nth-- > 0) at = strstr(at + 1, from);
	if (!at) return NULL;
	char *changed = calloc(1, strlen(text) + strlen(to) + 1);
	assert_non_null(changed);
	memcpy(changed, text, (size_t)(at - text));
	strcat(changed, to);
	strcat(changed, at + strlen(from));
	return changed;
}

struct tp_topo *helper_machine(const char *name, const char *from, const char *to, bool multi_host)
{
	char path[512];
	struct tp_topo_policy policy = helper_policy(multi_host);
	snprintf(path, sizeof(path), "%s/%s", TOPO_DATA, name);
	char *text = helper_file(path);
	if (from) {
		char *changed = helper_replace(text, from, 0, to);
		if (!changed) fail_msg("%s holds no %s", name, from);
		free(text);
		text = changed;
	}
	struct tp_topo *topo = helper_topo(text, &policy);
	free(text);
	return topo;
}

static void carry(const struct tp_topo *topo, double *load, int32_t from, int32_t to, double bw)
{
	const struct tp_topo_path *path = tp_topo_path(topo, from, to);
	assert_true(path->type < TP_PATH_NET);
	for (int i = 0; i < path->nhops; i++) load[path->links[i]] += bw;
}

/* From place i of a channel to the next or the one before, and what leaves and enters each port on the way. */
static void carry_hop(const struct tp_topo *topo, double *load, double *ports, const struct tp_channel *c, int i, int to, double bw)
{
	int32_t out = !c->nets ? -1 : to > i ? c->nets[i].next : c->nets[i].prev, in = !c->nets ? -1 : to > i ? c->nets[to].prev : c->nets[to].next;
	assert_int_equal(out < 0, in < 0);
	if (out < 0) {
		carry(topo, load, c->gpus[i], c->gpus[to], bw);
		return;
	}
	assert_int_not_equal(out, in);
	assert_int_equal(topo->nodes[c->gpus[i]].host, topo->nodes[c->gpus[to]].host);
	carry(topo, load, c->gpus[i], out, bw);
	carry(topo, load, in, c->gpus[to], bw);
	ports[2 * topo->nodes[out].ordinal + 1] += bw;
	ports[2 * topo->nodes[in].ordinal] += bw;
}

static void nothing_is_oversubscribed(const struct tp_topo *topo, const struct tp_channels *all)
{
	double *load = calloc((size_t)topo->nlinks + 1, sizeof(*load)), *ports = calloc(2 * (size_t)topo->count[TP_TOPO_NET] + 1, sizeof(*ports));
	assert_non_null(load);
	assert_non_null(ports);
	bool ring = all->pattern == TP_PATTERN_RING, two = all->pattern == TP_PATTERN_BALANCED_TREE;
	for (int c = 0; c < all->nchannels; c++) {
		const struct tp_channel *channel = &all->channels[c];
		const int32_t *gpus = channel->gpus, last = gpus[all->ngpus - 1];
		for (int i = 0; i + 1 < all->ngpus; i++) {
			carry_hop(topo, load, ports, channel, i, i + 1, ring ? all->bw_intra : all->bw_intra / 2);
			if (!ring) carry_hop(topo, load, ports, channel, i + 1, i, all->bw_intra / 2);
		}
		if (channel->net_in < 0) {
			if (ring && all->ngpus > 1) carry(topo, load, last, gpus[0], all->bw_intra);
			continue;
		}
		ports[2 * topo->nodes[channel->net_in].ordinal] += all->bw_inter;
		ports[2 * topo->nodes[channel->net_out].ordinal + 1] += all->bw_inter;
		carry(topo, load, channel->net_in, gpus[0], two ? all->bw_inter / 2 : all->bw_inter);
		carry(topo, load, ring ? last : gpus[0], channel->net_out, two ? all->bw_inter / 2 : all->bw_inter);
		if (two) carry(topo, load, channel->net_in, gpus[1], all->bw_inter / 2);
		if (two) carry(topo, load, gpus[1], channel->net_out, all->bw_inter / 2);
	}
	for (int i = 0; i < topo->nlinks; i++)
		if (load[i] > topo->links[i].bw * (1 + 1e-5))
			fail_msg("%s to %s carries %g of %g", topo->nodes[topo->links[i].from].name, topo->nodes[topo->links[i].to].name, load[i], topo->links[i].bw);
	for (int i = 0; i < 2 * topo->count[TP_TOPO_NET]; i++)
		if (ports[i] > tp_topo_node_of(topo, TP_TOPO_NET, i / 2)->net.bw * (1 + 1e-5))
			fail_msg("%s carries %g of %g", tp_topo_node_of(topo, TP_TOPO_NET, i / 2)->name, ports[i], tp_topo_node_of(topo, TP_TOPO_NET, i / 2)->net.bw);
	free(load);
	free(ports);
}

struct tp_channels *helper_channels(const struct tp_topo *topo, enum tp_pattern pattern, bool multi_host)
{
	struct tp_channels *channels = NULL;
	struct tp_topo_policy policy = helper_policy(multi_host);
	char why[256];
	assert_int_equal(tp_channels_search(topo, &policy, pattern, &channels), ncclSuccess);
	if (tp_channels_check(topo, &policy, channels, why) != ncclSuccess) fail_msg("%s", why);
	if (pattern != TP_PATTERN_PAIRS && !helper_found(channels, TP_FOUND_NO_PATTERN)) nothing_is_oversubscribed(topo, channels);
	return channels;
}

double helper_total(const struct tp_channels *channels) { return channels->nchannels * channels->bw_inter; }

const char *helper_found(const struct tp_channels *channels, enum tp_finding_kind kind)
{
	for (int i = 0; i < channels->nfindings; i++)
		if (channels->findings[i].kind == kind) return channels->findings[i].text;
	return NULL;
}
