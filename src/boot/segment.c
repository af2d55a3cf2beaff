/* The layout of a host's control segment, computed from the table of ranks. */
#include "boot/segment.h"
#include "boot/wire.h"
#include <stdlib.h>
#include <string.h>

static int count_procs(const struct tp_wire_peer *peers, int nranks, int host, uint64_t *hashes)
{
	int nprocs = 0;
	for (int r = 0; r < nranks; r++) {
		if (peers[r].host != host) continue;
		int p = nprocs - 1;
		while (p >= 0 && hashes[p] != peers[r].process_hash) p--;
		if (p < 0) hashes[nprocs++] = peers[r].process_hash;
	}
	return nprocs;
}

static uint64_t place(uint64_t *at, size_t bytes, size_t unit)
{
	uint64_t here = tp_align_up(*at, unit);
	*at = here + bytes;
	return here;
}

size_t tp_segment_plan(const void *table, int host, struct tp_segment *out)
{
	const struct tp_wire_table *head = table;
	const struct tp_wire_peer *peers = tp_wire_table_peers(table);
	size_t n = (size_t)head->nranks;
	uint64_t *hashes = tp_alloc(n, sizeof(*hashes), "processes of a host");
	if (!hashes) return 0;
	memset(out, 0, sizeof(*out));
	out->nranks = head->nranks;
	out->nhosts = head->nhosts;
	out->host = host;
	out->nprocs = count_procs(peers, head->nranks, host, hashes);
	free(hashes);
	for (size_t r = 0; r < n; r++) out->nlocal += peers[r].host == host;
	size_t local = (size_t)out->nlocal;
	uint64_t at = sizeof(*out);
	out->bells = place(&at, local * sizeof(struct tp_bell), TP_CACHE_LINE);
	out->procs = place(&at, (size_t)out->nprocs * sizeof(struct tp_segment_proc), TP_CACHE_LINE);
	out->ranks = place(&at, local * sizeof(struct tp_segment_rank), TP_CACHE_LINE);
	out->local_ranks = place(&at, local * sizeof(int), TP_CACHE_LINE);
	out->host_first = place(&at, ((size_t)head->nhosts + 1) * sizeof(int), TP_CACHE_LINE);
	out->host_ranks = place(&at, n * sizeof(int), TP_CACHE_LINE);
	out->peers = place(&at, n * sizeof(struct tp_boot_peer), TP_CACHE_LINE);
	out->remote_calls = place(&at, n * sizeof(struct tp_segment_call), TP_CACHE_LINE);
	out->gather_bytes = n * TP_BOOT_GATHER_MAX;
	out->gather = place(&at, 2 * out->gather_bytes, 4096);
	out->bytes = at;
	return at;
}

/* In order of their first rank. */
static void fill_procs(struct tp_segment *seg, const struct tp_wire_peer *peers)
{
	struct tp_segment_proc *procs = tp_segment_procs(seg);
	struct tp_segment_rank *ranks = tp_segment_ranks(seg);
	const int *local_ranks = tp_segment_local_ranks(seg);
	int known = 0;
	for (int i = 0; i < seg->nlocal; i++) {
		const struct tp_wire_peer *peer = &peers[local_ranks[i]];
		int p = known - 1;
		while (p >= 0 && procs[p].process_hash != peer->process_hash) p--;
		if (p < 0) {
			p = known++;
			procs[p].process_hash = peer->process_hash;
			procs[p].first_rank = local_ranks[i];
			procs[p].pid = peer->pid;
		}
		procs[p].nranks++;
		ranks[i].proc = p;
	}
}

void tp_segment_fill(struct tp_segment *seg, const struct tp_segment *plan, const void *table)
{
	const struct tp_wire_table *head = table;
	const struct tp_wire_host *hosts = (const void *)(head + 1);
	const struct tp_wire_peer *wire = tp_wire_table_peers(table);
	seg->bytes = plan->bytes;
	seg->nranks = plan->nranks;
	seg->nlocal = plan->nlocal;
	seg->nhosts = plan->nhosts;
	seg->host = plan->host;
	seg->nprocs = plan->nprocs;
	seg->peers = plan->peers;
	seg->local_ranks = plan->local_ranks;
	seg->host_first = plan->host_first;
	seg->host_ranks = plan->host_ranks;
	seg->procs = plan->procs;
	seg->ranks = plan->ranks;
	seg->bells = plan->bells;
	seg->remote_calls = plan->remote_calls;
	seg->gather = plan->gather;
	seg->gather_bytes = plan->gather_bytes;
	tp_wire_table_index(table, tp_segment_host_first(seg), tp_segment_host_ranks(seg));
	struct tp_boot_peer *peers = tp_segment_peers(seg);
	int *local_ranks = tp_segment_local_ranks(seg);
	const int *first = tp_segment_host_first(seg), *by_host = tp_segment_host_ranks(seg);
	for (int h = 0; h < seg->nhosts; h++) {
		for (int i = first[h]; i < first[h + 1]; i++) {
			int r = by_host[i];
			struct tp_boot_peer *peer = &peers[r];
			peer->rank = r;
			peer->host = h;
			peer->local = i - first[h];
			peer->pid = wire[r].pid;
			peer->device = wire[r].device;
			peer->host_hash = hosts[h].hash;
			peer->process_hash = wire[r].process_hash;
			memcpy(peer->host_name, hosts[h].name, sizeof(peer->host_name));
			tp_wire_addr_get(&wire[r].service, &peer->service);
			if (h == seg->host) local_ranks[peer->local] = r;
		}
	}
	fill_procs(seg, wire);
}
