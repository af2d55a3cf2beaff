/* Who measures with whom? All ranks measure together, in rounds: in each, ranks that are as far apart by number give and take, and no rank has two
 * parts, so that a pair's time is its own. Only pairs between which collectives move data have links, so a round may have few pairs or none.
 *
 * Pairs of one distance are held against each other alone: where several ranks of a host share its network, as many share it in all of these. That
 * holds for neighbours and, where each host has as many ranks and these follow each other, for distances of whole hosts; all other distances are
 * within hosts. */
#include <string.h>

#include "comm/pace.h"
#include "comm/topo.h"

#define MOST_DISTANCES 10

/* Ranks of each host, where all have as many, in one piece; 0: they haven't. */
static int ranks_a_host(const struct tp_boot *boot)
{
	int n = boot->nranks, each = boot->nhosts > 0 ? n / boot->nhosts : 0;
	if (!each || each * boot->nhosts != n) return 0;
	for (int r = 0; r < n; r++)
		if (boot->peers[r].local != r % each || boot->peers[r].host != boot->peers[r - r % each].host) return 0;
	return each;
}

static int add_distance(int *list, int count, int distance, int nranks)
{
	if (distance > nranks / 2 || count == MOST_DISTANCES) return count;
	for (int i = 0; i < count; i++)
		if (list[i] == distance) return count;
	list[count] = distance;
	return count + 1;
}

/* Giver and taker lie `distance` apart in the ring of ranks: blocks of so many give by turns, and who goes over the end in a phase of its own, if
 * blocks don't alternate there. */
static int phase_of(int giver, int distance, bool down, int n)
{
	bool over = down ? giver < distance : giver + distance >= n;
	return over && n % (2 * distance) ? 2 : giver / distance % 2;
}

static void add_rounds(const struct ncclComm *comm, struct tp_comm_pace *pace, int distance, bool whole_hosts, int sharing)
{
	const struct tp_boot_peer *peers = comm->boot->peers;
	int n = comm->nranks, rank = comm->rank, above = (rank + distance) % n, below = (rank + n - distance) % n;
	for (int down = 0; down < (2 * distance == n ? 1 : 2); down++) {
		int to = down ? below : above, from = down ? above : below;
		for (int phase = 0; phase < (n % (2 * distance) ? 3 : 2) && pace->nrounds < TP_PACE_ROUNDS; phase++) {
			struct tp_pace_round *round = &pace->rounds[pace->nrounds++];
			*round = (struct tp_pace_round){ .distance = distance, .sharing = sharing, .from = -1, .to = -1, .took_us = TP_PACE_NONE };
			if (phase_of(rank, distance, down, n) == phase) round->from = rank, round->to = to;
			else if (phase_of(from, distance, down, n) == phase) round->from = from, round->to = rank;
			if (round->from >= 0 && !whole_hosts && peers[round->from].host != peers[round->to].host) round->from = round->to = -1;
		}
	}
}

void tp_pace_pair_up(const struct ncclComm *comm, struct tp_comm_pace *pace)
{
	int distances[MOST_DISTANCES], count = 0, each = ranks_a_host(comm->boot), n = comm->nranks;
	int largest = 1;
	for (int r = 0; r < n; r++) largest = TP_MAX(largest, comm->boot->peers[r].local + 1);
	pace->nrounds = 0;
	count = add_distance(distances, count, 1, n);
	for (int d = each; d > 0 && d <= n / 2; d *= 2) count = add_distance(distances, count, d, n);
	for (int d = 2; d <= n / 2; d *= 2) count = add_distance(distances, count, d, n);
	for (int i = 0; i < count; i++) {
		bool whole_hosts = distances[i] == 1 || (each && distances[i] % each == 0);
		add_rounds(comm, pace, distances[i], whole_hosts, distances[i] == 1 && each ? 1 : largest);
	}
}

enum tp_pace_class tp_pace_class_of(const struct ncclComm *comm, int a, int b)
{
	const struct tp_boot_peer *x = &comm->boot->peers[a], *y = &comm->boot->peers[b];
	const struct tp_topo_card *p = &comm->topo->cards[a], *q = &comm->topo->cards[b];
	if (x->host != y->host) return p->machine == q->machine ? TP_PACE_MACHINE : TP_PACE_REMOTE;
	if (p->place.core >= 0 && p->place.core == q->place.core) return TP_PACE_CORE;
	if (p->place.cache >= 0 && p->place.cache == q->place.cache) return TP_PACE_CACHE;
	return p->place.numa >= 0 && p->place.numa == q->place.numa ? TP_PACE_NUMA : TP_PACE_APART;
}
