/* What is said of the machine: warnings where something is worse than the hardware allows, each once in the life of a process, by the
 * first rank of a host; and the files that users ask for. */
#include <stdlib.h>
#include <string.h>

#include "comm/gpu.h"
#include "comm/topo.h"
#include "topo/search.h"

#define MOST_WARNINGS 8

static void warn_once(const struct ncclComm *comm, const char *text)
{
	if (tp_topo_first_time(text)) TP_WARN("comm %p rank %d: %s", (const void *)comm, comm->rank, text);
}

/* TCP although the hardware has RDMA, and nobody asked for that. */
static void warn_of_sockets(const struct ncclComm *comm)
{
	char port[96], text[1024];
	int dev = 0, peer = 0;
	const struct tp_net_ops *ops = tp_links_net(comm->links, &dev);
	if (!ops || strcmp(ops->name, "Socket") != 0 || tp_net_is_forced() || comm->config.net_name[0]) return;
	const char *why = tp_net_why_not_named("IB");
	if (!why || !tp_topo_find_rdma("", port, sizeof(port))) return;
	while (peer < comm->nranks - 1 && comm->boot->peers[peer].host == comm->boot->host) peer++;
	snprintf(text, sizeof(text), "rank %d -> %d goes over TCP (%s), although the RDMA port %s is active here: %.600s", comm->rank, peer, comm->topo->cards[comm->rank].net, port, why);
	warn_once(comm, text);
}

static void warn_of_pairs(const struct ncclComm *comm)
{
	const struct tp_comm_topo *t = comm->topo;
	const struct tp_boot *boot = comm->boot;
	struct tp_topo_p2p first = { .use = false }, p2p;
	int from = -1, to = -1, count = 0;
	for (int a = 0; a < boot->nlocal; a++) {
		for (int b = 0; b < boot->nlocal; b++) {
			int x = boot->local_ranks[a], y = boot->local_ranks[b];
			int32_t gpu = tp_comm_topo_gpu(comm, x), peer = tp_comm_topo_gpu(comm, y);
			if (gpu < 0 || peer < 0 || gpu == peer || tp_links_reaches(comm->links, x, y)) continue;
			if (tp_topo_decide_p2p(t->graph, &t->policy, gpu, peer, &p2p) != ncclSuccess || !p2p.use) continue;
			if (count++) continue;
			first = p2p;
			from = x;
			to = y;
		}
	}
	struct tp_link_path link;
	char text[1024], more[40] = "";
	if (count > 1) snprintf(more, sizeof(more), " (and %d more pairs)", count - 1);
	if (!count || tp_links_path(comm->links, from, to, &link) != ncclSuccess) return;
	snprintf(text, sizeof(text), "rank %d -> %d goes through %s, although the two are joined %s (%s, %.4g GB/s): %s%s", from, to, link.via,
		tp_topo_path_meaning(first.type), tp_topo_path_name(first.type), first.bw, link.text, more);
	warn_once(comm, text);
}

static void warn_of_far_nics(const struct ncclComm *comm)
{
	const struct tp_comm_topo *t = comm->topo;
	const struct tp_boot *boot = comm->boot;
	char text[512];
	for (int l = 0; t->rows && l < boot->nlocal; l++) {
		int r = boot->local_ranks[l];
		const struct tp_topo_row *row = &t->rows[r];
		if (!row->known || row->net_type >= TP_PATH_DIS || row->best_type >= row->net_type) continue;
		snprintf(text, sizeof(text), "rank %d reaches other hosts by %s (%s from its GPU), although %s is nearer (%s). NCCL_IB_HCA orders the ports", r, t->cards[r].net,
			tp_topo_path_name(row->net_type), row->best_net, tp_topo_path_name(row->best_type));
		warn_once(comm, text);
		return;
	}
}

static bool is_of_network(enum tp_topo_fault fault)
{
	return fault == TP_FAULT_NO_GDR || fault == TP_FAULT_NIC_SHARED || fault == TP_FAULT_NO_NIC || fault == TP_FAULT_UNEVEN_NICS || fault == TP_FAULT_NIC_RATE;
}

static void warn_of_faults(const struct ncclComm *comm)
{
	const struct tp_comm_topo *t = comm->topo;
	struct tp_topo_warning *list;
	int count, told = 0;
	if (tp_topo_find_faults(t->graph, &t->policy, &list, &count) != ncclSuccess) return;
	for (int i = 0; i < count; i++) {
		if (is_of_network(list[i].fault) && !tp_links_have_net(comm->links)) continue;
		/* Where the transport takes host memory alone it is not the machine's fault. */
		bool ours = list[i].fault == TP_FAULT_NO_GDR && !comm->topo->net_takes_gpu_memory;
		if (ours) TP_INFO(TP_INIT | TP_GRAPH, "[%s] %s", tp_topo_fault_code(list[i].fault), list[i].text);
		else if (told++ < MOST_WARNINGS) warn_once(comm, list[i].text);
	}
	if (told > MOST_WARNINGS) TP_WARN("comm %p rank %d: and %d more faults of this machine: telpher topo show", (const void *)comm, comm->rank, told - MOST_WARNINGS);
	free(list);
}

static void warn_of_notes(const struct ncclComm *comm)
{
	char text[1024];
	if (!comm->topo->notes) return;
	snprintf(text, sizeof(text), "ranks of host %s see different things of it, so that they may choose differently (NCCL_IB_HCA, or containers that aren't alike): %.600s",
		comm->boot->peers[comm->rank].host_name, comm->topo->notes);
	for (char *c = text; *c; c++)
		if (*c == '\n') *c = c[1] ? ';' : 0;
	warn_once(comm, text);
}

/* Whoever measured wants to know that it is of no use. */
static void warn_of_values(const struct ncclComm *comm)
{
	char text[512];
	const char *line = comm->topo->refused;
	for (size_t bytes; line && *line; line += bytes + (line[bytes] == '\n')) {
		bytes = strcspn(line, "\n");
		snprintf(text, sizeof(text), "the topology of host %s: %.*s", comm->boot->peers[comm->rank].host_name, (int)TP_MIN(bytes, (size_t)300), line);
		warn_once(comm, text);
	}
}

void tp_topo_warn(const struct ncclComm *comm)
{
	if (comm->boot->local != 0) return;
	warn_of_sockets(comm);
	warn_of_notes(comm);
	if (!comm->topo->graph) return;
	warn_of_values(comm);
	if (comm->gpu) warn_of_pairs(comm);
	if (comm->gpu) warn_of_far_nics(comm);
	warn_of_faults(comm);
}

/* ---- Files */

bool tp_topo_files_wanted(const struct ncclComm *comm)
{
	return tp_topo_dump_is_wanted(comm->rank) || (comm->gpu && tp_channels_files_are_wanted(comm->rank));
}

static ncclResult_t write_channels(const struct ncclComm *comm)
{
	static const enum tp_pattern patterns[] = { TP_PATTERN_RING, TP_PATTERN_TREE, TP_PATTERN_PAIRS };
	const struct tp_comm_topo *t = comm->topo;
	struct tp_channels *all[TP_ARRAY_LEN(patterns)] = { NULL };
	ncclResult_t result = ncclSuccess;
	int count = 0;
	for (size_t i = 0; i < TP_ARRAY_LEN(patterns) && result == ncclSuccess; i++) {
		result = tp_channels_load(t->graph, &t->policy, patterns[i], &all[count]);
		if (result != ncclSuccess) break;
		TP_INFO(TP_GRAPH, "pattern %d: %d channels of %.4g GB/s, %s", (int)patterns[i], all[count]->nchannels, all[count]->bw_intra, tp_topo_path_name(all[count]->type_intra));
		for (int f = 0; f < all[count]->nfindings; f++) TP_INFO(TP_GRAPH, "[%s] %s", tp_finding_code(all[count]->findings[f].kind), all[count]->findings[f].text);
		count++;
	}
	if (result == ncclSuccess) result = tp_channels_dump(t->graph, (const struct tp_channels *const *)all, count, comm->rank);
	while (count--) tp_channels_free(all[count]);
	return result;
}

/* What can't be read or written has been told; a job doesn't fail for it. */
void tp_topo_write_files(const struct ncclComm *comm)
{
	const struct tp_comm_topo *t = comm->topo;
	if (!t->graph) return;
	tp_topo_doc_dump(t->doc, comm->rank);
	if (comm->gpu && tp_channels_files_are_wanted(comm->rank)) write_channels(comm);
}

/* ---- Expectations */

/* What links do, not what they could: p2p and gdr of this rank's own paths. */
static ncclResult_t expect_of_gpu(const struct ncclComm *comm)
{
	const struct tp_comm_topo *t = comm->topo;
	const struct tp_topo_row *row = &t->rows[comm->rank];
	for (int l = 0; l < TP_MIN(comm->boot->nlocal, TP_TOPO_LOCAL_MAX); l++) {
		int peer = comm->boot->local_ranks[l], type = row->known ? row->type[l] : TP_PATH_DIS;
		struct tp_link_path link;
		char subject[48];
		if (peer == comm->rank) continue;
		TP_TRY(tp_links_path(comm->links, comm->rank, peer, &link));
		const char *word = !tp_links_reaches(comm->links, comm->rank, peer) ? "none" : type <= TP_PATH_NVL ? "nvlink" : type == TP_PATH_NVB ? "relay" :
			type == TP_PATH_C2C ? "c2c" : type <= TP_PATH_PXB ? "pcie" : "cpu";
		snprintf(subject, sizeof(subject), "rank %d -> %d", comm->rank, peer);
		TP_TRY(tp_watch_expect("p2p", word, subject, link.text));
	}
	if (!tp_links_have_net(comm->links)) return ncclSuccess;
	char subject[64];
	snprintf(subject, sizeof(subject), "rank %d with %s", comm->rank, t->cards[comm->rank].net);
	return tp_watch_expect("gdr", row->gdr_send && row->gdr_receive ? "on" : "off", subject, row->gdr_why);
}

/* Is anything expected that only the machine's graph can tell? */
static bool expects_machine(const char *text)
{
	size_t nkeys;
	const struct tp_expect_key *keys = tp_topo_expect_keys(&nkeys);
	struct tp_expect_item item;
	while (tp_expect_next(&text, "TELPHER_EXPECT", keys, nkeys, &item) == ncclSuccess && item.key)
		if (!tp_expect_is_own(item.key) && strcmp(item.key->name, "net") != 0) return true;
	return false;
}

ncclResult_t tp_comm_topo_expect(const struct ncclComm *comm)
{
	const struct tp_comm_topo *t = comm->topo;
	struct tp_topo_unmet *unmet = NULL;
	const char *text;
	int count = 0;
	TP_TRY(tp_watch_expect_text(&text));
	if (!text) return ncclSuccess;
	if (comm->gpu) TP_TRY(expect_of_gpu(comm));
	if (comm->boot->local != 0) return ncclSuccess;
	if (!t->graph) return expects_machine(text) ? tp_watch_expect_unmet("the topology of this host isn't known, so that nothing of it is as expected") : ncclSuccess;
	TP_TRY(tp_topo_expect_check_but(t->graph, &t->policy, text, "TELPHER_EXPECT", comm->gpu ? "net|gdr|p2p" : "net", &unmet, &count));
	ncclResult_t result = ncclSuccess;
	for (int i = 0; i < count && result == ncclSuccess; i++) {
		char more[32] = "", line[600];
		if (count > 1 && i == 0) snprintf(more, sizeof(more), " (and %d more)", count - 1);
		snprintf(line, sizeof(line), "%s%s", unmet[i].text, more);
		result = tp_watch_expect_unmet(line);
	}
	free(unmet);
	return result;
}
