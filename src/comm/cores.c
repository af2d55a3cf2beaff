/* Do ranks share processors? Several virtual hosts or containers may be one machine, and ranks may be bound to processors of
 * their own; so each rank tells which machine it is on and where it may run, and the ranks of a machine are counted against
 * the processors that any of them may use. */
#include <stdlib.h>

#include "comm/internal.h"

struct usage { int ranks, cores; };

static int count_bits(const uint64_t mask[TP_CPU_WORDS])
{
	int n = 0;
	for (int w = 0; w < TP_CPU_WORDS; w++) n += __builtin_popcountll(mask[w]);
	return n;
}

void tp_cores_fill(struct tp_cores_place *out)
{
	out->machine = tp_machine_hash();
	out->count = tp_cpu_count();
	tp_cpu_mask(out->mask);
}

static const struct tp_cores_place *place_of(const void *all, size_t stride, int rank)
{
	return (const void *)((const char *)all + stride * (size_t)rank);
}

/* How many ranks a machine has, and how many processors they may use between them. */
static struct usage usage_of(const void *all, size_t stride, int nranks, uint64_t machine)
{
	uint64_t mask[TP_CPU_WORDS] = { 0 };
	struct usage usage = { 0 };
	int most = 0, limited = 0;
	for (int r = 0; r < nranks; r++) {
		const struct tp_cores_place *place = place_of(all, stride, r);
		if (place->machine != machine) continue;
		usage.ranks++;
		most = TP_MAX(most, place->count);
		limited |= place->count < count_bits(place->mask);      /* a quota */
		for (int w = 0; w < TP_CPU_WORDS; w++) mask[w] |= place->mask[w];
	}
	int all_cores = count_bits(mask);
	usage.cores = TP_MAX(1, limited || all_cores == 0 ? most : all_cores);
	return usage;
}

ncclResult_t tp_cores_judge(struct ncclComm *comm, const void *all, size_t stride)
{
	const struct tp_boot *boot = comm->boot;
	int *ranks_of_host = tp_alloc((size_t)boot->nhosts, sizeof(int), "the hosts' ranks");
	if (!ranks_of_host) return ncclSystemError;
	for (int r = 0; r < comm->nranks; r++) ranks_of_host[boot->peers[r].host]++;
	uint64_t machine = place_of(all, stride, comm->rank)->machine;
	struct usage usage = usage_of(all, stride, comm->nranks, machine);
	comm->crowded = usage.ranks > usage.cores;
	/* The model has one number for all domains: the least, a machine's processors shared out among its ranks. */
	int least = INT_MAX;
	for (int r = 0; r < comm->nranks; r++) {
		if (boot->peers[r].local != 0) continue;
		uint64_t other = place_of(all, stride, r)->machine;
		if (other != machine) usage = usage_of(all, stride, comm->nranks, machine = other);
		least = TP_MIN(least, TP_MAX(1, usage.cores * ranks_of_host[boot->peers[r].host] / usage.ranks));
	}
	comm->model.cores_per_domain = least;
	free(ranks_of_host);
	return ncclSuccess;
}
