/* Host ranks have a topology too: cores, caches, NUMA nodes. In a ring of them only neighbours talk, so ranks stand in the order in which
 * sharing changes least: by host, CPU, smallest common place, first processor. Between two NUMA nodes such a ring goes once each way. */
#include <stdlib.h>

#include "topo/search.h"

struct seat { int32_t rank, host, cpu, cache, core, processor; };

static int32_t above(const struct tp_topo *topo, int32_t node, enum tp_topo_kind kind)
{
	for (int hops = 0; node >= 0 && hops < TP_TOPO_MAX_DEPTH; hops++, node = topo->nodes[node].parent)
		if (topo->nodes[node].kind == kind) return node;
	return -1;
}

static int32_t first_processor(const uint64_t mask[TP_CPU_WORDS])
{
	for (int word = 0; word < TP_CPU_WORDS; word++)
		if (mask[word]) return word * 64 + __builtin_ctzll(mask[word]);
	return -1;
}

static int by_seat(const void *a, const void *b)
{
	const int32_t *x = &((const struct seat *)a)->rank, *y = &((const struct seat *)b)->rank;
	for (size_t i = 1; i < sizeof(struct seat) / sizeof(int32_t); i++)
		if (x[i] != y[i]) return x[i] < y[i] ? -1 : 1;
	return x[0] < y[0] ? -1 : x[0] > y[0];
}

ncclResult_t tp_channels_order_hosts(const struct tp_topo *topo, int32_t *ranks)
{
	struct seat *seats = tp_alloc((size_t)topo->nhost_ranks + 1, sizeof(*seats), "host ranks");
	if (!seats) return ncclSystemError;
	for (int i = 0; i < topo->nhost_ranks; i++) {
		const struct tp_topo_host_rank *r = &topo->host_ranks[i];
		seats[i] = (struct seat){ r->rank, r->host, r->cpu, above(topo, r->node, TP_TOPO_CACHE), above(topo, r->node, TP_TOPO_CORE), first_processor(r->mask) };
	}
	qsort(seats, (size_t)topo->nhost_ranks, sizeof(*seats), by_seat);
	for (int i = 0; i < topo->nhost_ranks; i++) ranks[i] = seats[i].rank;
	free(seats);
	return ncclSuccess;
}
