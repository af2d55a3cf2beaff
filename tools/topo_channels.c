/* `telpher topo channels`: the rings, trees and pairs that a search finds, and what stands in the way of more. */
#include "topo.h"

#include <stdlib.h>

#include "topo/search.h"

static void print_channel(const struct tp_topo *topo, const struct tp_channels *all, const struct tp_channel *c, int index, FILE *out)
{
	fprintf(out, "  %2d:", index);
	if (c->net_in >= 0) fprintf(out, " %s >", topo->nodes[c->net_in].name);
	for (int g = 0; g < all->ngpus; g++) {
		const struct tp_topo_node *gpu = &topo->nodes[c->gpus[g]];
		if (c->nets && g && c->nets[g].prev >= 0) fprintf(out, " %s >", topo->nodes[c->nets[g].prev].name);
		fprintf(out, " %d", gpu->gpu.rank >= 0 ? gpu->gpu.rank : gpu->gpu.dev);
		if (c->nets && c->nets[g].next >= 0) fprintf(out, " > %s >", topo->nodes[c->nets[g].next].name);
	}
	if (c->net_out >= 0 && all->pattern == TP_PATTERN_RING) fprintf(out, " > %s", topo->nodes[c->net_out].name);
	fprintf(out, "\n");
}

static void print_pattern(const struct topo_machine *m, const struct tp_channels *all, enum tp_pattern pattern, const char *what, FILE *out)
{
	if (all->nchannels) {
		fprintf(out, "%d %s%s x %.4g GB/s = %.4g", all->nchannels, what, all->nchannels == 1 ? "" : "s", all->bw_intra, all->nchannels * all->bw_intra);
		/* Across hosts a tree carries as much as a ring: what it has inside is more. */
		if (m->policy.multi_host) fprintf(out, ", %.4g across hosts", all->nchannels * all->bw_inter);
		if (all->bound > 0 && pattern != TP_PATTERN_PAIRS) fprintf(out, ", where no channels could carry more than %.4g", all->bound);
		fprintf(out, "; paths %s", tp_topo_path_name(all->type_intra));
		if (m->policy.multi_host) fprintf(out, ", to the network %s", tp_topo_path_name(all->type_inter));
		fprintf(out, "\n");
	}
	for (int c = 0; c < all->nchannels; c++) print_channel(m->topo, all, &all->channels[c], c, out);
	for (int i = 0; i < all->nfindings; i++) fprintf(out, "  %s: %s\n", tp_finding_code(all->findings[i].kind), all->findings[i].text);
}

static int print_rails(const struct topo_machine *m, FILE *out)
{
	struct tp_rails *rails;
	if (tp_rails_assign(m->topo, &m->policy, &rails) != ncclSuccess) return 1;
	for (int r = 0; r < rails->nrails; r++) {
		const struct tp_rail *rail = &rails->rails[r];
		fprintf(out, "  %s:", m->topo->nodes[rail->gpu].name);
		for (int n = 0; n < rail->nnets; n++) fprintf(out, " %s", m->topo->nodes[rail->nets[n]].name);
		fprintf(out, " (%s, %.4g GB/s", tp_topo_path_name(rail->type), rail->bw);
		if (rail->share > 1) fprintf(out, ", shared by %d", rail->share);
		fprintf(out, ")\n");
	}
	for (int i = 0; i < rails->nfindings; i++) fprintf(out, "  %s: %s\n", tp_finding_code(rails->findings[i].kind), rails->findings[i].text);
	tp_rails_free(rails);
	return 0;
}

int topo_channels(const struct topo_machine *m, FILE *out)
{
	static const struct { enum tp_pattern pattern; const char *what; } patterns[] = {
		{ TP_PATTERN_RING, "ring" }, { TP_PATTERN_TREE, "tree" }, { TP_PATTERN_PAIRS, "all-pairs channel" },
	};
	if (!m->topo->count[TP_TOPO_GPU]) {
		fprintf(out, "No GPU, so no channels.\n");
		return 0;
	}
	struct tp_channels *found[TP_ARRAY_LEN(patterns)] = { NULL };
	ncclResult_t result = ncclSuccess;
	int count = 0;
	while (count < (int)TP_ARRAY_LEN(patterns) && result == ncclSuccess) {
		result = tp_channels_load(m->topo, &m->policy, patterns[count].pattern, &found[count]);
		if (result != ncclSuccess) break;
		print_pattern(m, found[count], patterns[count].pattern, patterns[count].what, out);
		count++;
	}
	if (result == ncclSuccess) result = tp_channels_dump(m->topo, (const struct tp_channels *const *)found, count, 0);
	while (count--) tp_channels_free(found[count]);
	if (result != ncclSuccess) return 1;
	if (!m->policy.multi_host || !m->topo->count[TP_TOPO_NET]) return 0;
	fprintf(out, "Rails:\n");
	return print_rails(m, out);
}
