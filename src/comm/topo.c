/* The machine as a communicator sees it.
 *
 * Each process describes what it sees (topo_find.c), once. At init every rank tells every other a few hundred bytes: the hash of its
 * description, where it runs, which network device it uses. Host ranks of one machine have the same description, so that nothing more
 * need be sent; where they differ, and for GPUs, of which each process sees its own, the descriptions of a host go through memory that
 * its ranks share and are made one. The graph of the host is made from that by whoever needs it: GPU ranks, of which each then tells its way
 * to its neighbours and its NIC, and of host ranks the first of a host where there is a network to judge, a file to write or an
 * expectation to check, or all where there are network devices to choose among (topo_seat.c).
 *
 * But for that choice nothing here decides over how data goes: what can't be read or contradicts itself is a warning, and no topology. */
#include <stdlib.h>
#include <string.h>

#include "comm/gpu.h"
#include "comm/topo.h"
#include "topo/search.h"

#define MAX_TEXTS ((size_t)16 << 20)    /* of one host */

/* What came from a peer ends. */
static void clean(char *text, size_t bytes, unsigned char first)
{
	text[bytes - 1] = 0;
	for (char *c = text; *c; c++)
		if ((unsigned char)*c < first || (unsigned char)*c >= 0x7f) *c = '?';
}
static void clean_name(char *name, size_t bytes) { clean(name, bytes, ' ' + 1); }
static void clean_text(char *text, size_t bytes) { clean(text, bytes, ' '); }

static void clean_card(struct tp_topo_card *card)
{
	clean_name(card->net, sizeof(card->net));
	clean_name(card->bus_id, sizeof(card->bus_id));
	clean_text(card->address, sizeof(card->address));
}

/* Do ranks of some host see different things? All ranks find the same answer. */
static ncclResult_t any_differ(const struct ncclComm *comm, bool *differ)
{
	const struct tp_topo_card *cards = comm->topo->cards;
	uint64_t *first = tp_alloc((size_t)comm->boot->nhosts, sizeof(*first), "what hosts look like");
	if (!first) return ncclSystemError;
	*differ = false;
	for (int r = 0; r < comm->nranks; r++) {
		const struct tp_boot_peer *peer = &comm->boot->peers[r];
		if (peer->local == 0) first[peer->host] = cards[r].doc_hash;
		else *differ |= cards[r].doc_hash != first[peer->host];
	}
	free(first);
	return ncclSuccess;
}

/* Another rank of this host, before it in the order, sees the same. */
static bool is_repeated(const struct ncclComm *comm, int local)
{
	const struct tp_topo_card *cards = comm->topo->cards;
	const int *ranks = comm->boot->local_ranks;
	for (int l = 0; l < local; l++)
		if (cards[ranks[l]].doc_hash == cards[ranks[local]].doc_hash) return true;
	return false;
}

static size_t bytes_of(const struct ncclComm *comm, int local)
{
	const struct tp_topo_card *card = &comm->topo->cards[comm->boot->local_ranks[local]];
	return card->doc_hash && !is_repeated(comm, local) ? card->doc_bytes : 0;
}

/* Texts of this host's ranks, in memory that lives as long as the communicator; repeated ones are left out. */
static ncclResult_t exchange_texts(struct ncclComm *comm, const struct tp_topo_found *own, struct tp_topo_text *texts)
{
	struct tp_boot *boot = comm->boot;
	size_t total = 0;
	char *base = NULL;
	for (int l = 0; l < boot->nlocal; l++) total += bytes_of(comm, l);
	if (total && total <= MAX_TEXTS && boot->nlocal > 1) TP_TRY(tp_boot_share(boot, total, "descriptions of the machine", (void **)&base));
	for (int l = 0, at = 0; l < boot->nlocal && base; l++) {
		size_t bytes = bytes_of(comm, l);
		if (l == boot->local && bytes && own && own->bytes == bytes) memcpy(base + at, own->text, bytes);
		texts[l] = (struct tp_topo_text){ .text = base + at, .bytes = bytes, .rank = boot->local_ranks[l] };
		at += (int)bytes;
	}
	return tp_boot_barrier(boot);
}

static ncclResult_t add_ranks(const struct ncclComm *comm, struct tp_topo_doc *doc)
{
	for (int l = 0; l < comm->boot->nlocal; l++) {
		int rank = comm->boot->local_ranks[l];
		const struct tp_topo_card *card = &comm->topo->cards[rank];
		if (comm->gpu) TP_TRY(tp_topo_doc_set_rank(doc, card->bus_id, rank));
		else TP_TRY(tp_topo_doc_add_host_rank(doc, rank, card->mask));
	}
	return ncclSuccess;
}

static ncclResult_t join_texts(struct tp_comm_topo *t, const struct tp_topo_text *texts, int count)
{
	char *notes = NULL;
	size_t bytes = 0;
	FILE *out = open_memstream(&notes, &bytes);
	if (!out) return TP_FAIL(ncclSystemError, "out of memory: the descriptions of the machine's ranks");
	ncclResult_t result = tp_topo_doc_join(texts, count, out, &t->doc);
	fclose(out);
	if (result == ncclSuccess && notes && *notes) t->notes = notes;
	else free(notes);
	return result;
}

static ncclResult_t read_values(struct tp_comm_topo *t)
{
	size_t bytes = 0;
	FILE *out = open_memstream(&t->refused, &bytes);
	if (!out) return TP_FAIL(ncclSystemError, "out of memory: what was measured");
	ncclResult_t result = tp_topo_values_of(t->doc, t->graph, out, &t->values);
	fclose(out);
	return result;
}

static ncclResult_t make_graph(const struct ncclComm *comm, struct tp_comm_topo *t, const struct tp_topo_text *texts, int count)
{
	TP_TRY(join_texts(t, texts, count));
	/* A file's GPUs are those that were found with a rank; its CPUs are where ranks run, whatever was found. */
	if (comm->gpu) TP_TRY(add_ranks(comm, t->doc));
	TP_TRY(tp_topo_doc_settle("", &t->doc));
	if (!comm->gpu) TP_TRY(add_ranks(comm, t->doc));
	TP_TRY(tp_topo_build(t->doc, &t->graph));
	TP_TRY(tp_topo_policy_load(&t->policy));
	t->policy.multi_host = tp_links_have_net(comm->links);
	t->policy.net_within = TP_OFF;          /* links between ranks of a host are no network's unless all are (NCCL_SHM_DISABLE) */
	TP_TRY(tp_topo_compute_paths(t->graph, &t->policy));
	return read_values(t);
}

/* Of host ranks few need it, and what it would say of a network has been said if the process has judged it before. */
static bool needs_graph(const struct ncclComm *comm, const struct tp_topo_found *own)
{
	char once[48];
	if (comm->gpu || tp_topo_files_wanted(comm) || tp_links_may_seat(comm->links)) return true;
	if (comm->boot->local != 0) return false;
	if (tp_watch_expect_is_set()) return true;
	snprintf(once, sizeof(once), "judged %llx", (unsigned long long)(own ? own->hash : 0));
	return tp_links_have_net(comm->links) && tp_topo_first_time(once);
}

int32_t tp_comm_topo_gpu(const struct ncclComm *comm, int rank)
{
	const struct tp_comm_topo *t = comm->topo;
	int32_t node = t->graph ? tp_topo_find_rank(t->graph, rank) : -1;
	/* Several ranks may share a GPU, which has the number of one. */
	if (node < 0 && t->graph && t->cards[rank].bus_id[0]) node = tp_topo_find_name(t->graph, t->cards[rank].bus_id);
	return node >= 0 && t->graph->nodes[node].kind == TP_TOPO_GPU ? node : -1;
}

int32_t tp_comm_topo_net(const struct tp_topo *graph, const char *name, int port)
{
	size_t bytes = strnlen(name, 31);       /* as it was described */
	for (int32_t n = 0; n < graph->count[TP_TOPO_NET] && bytes; n++) {
		const struct tp_topo_node *net = tp_topo_node_of(graph, TP_TOPO_NET, n);
		if (net->net.port == port && strncmp(net->name, name, bytes) == 0 && (!net->name[bytes] || net->name[bytes] == ':')) return net->index;
	}
	return -1;
}

/* ---- NICs at GPU memory */

static void judge_gdr(const struct ncclComm *comm, int32_t gpu, const struct tp_net_properties *p, struct tp_links_gdr *links, enum tp_topo_reason *reason)
{
	const struct tp_comm_topo *t = comm->topo;
	struct tp_topo_gdr writes, reads;
	int32_t net = t->graph ? tp_comm_topo_net(t->graph, p->name, (int)p->port) : -1;
	*reason = TP_WHY_NIC_UNABLE;
	if (!(p->memory & (TP_NET_CUDA | TP_NET_DMABUF))) {
		snprintf(links->why, sizeof(links->why), "%s", p->no_gpu_memory[0] ? p->no_gpu_memory : "the transport takes host memory");
	} else if (gpu < 0 || net < 0) {
		snprintf(links->why, sizeof(links->why), "the topology isn't known");
	} else if (tp_topo_decide_gdr(t->graph, &t->policy, gpu, net, false, &writes) == ncclSuccess && tp_topo_decide_gdr(t->graph, &t->policy, gpu, net, true, &reads) == ncclSuccess) {
		const struct tp_topo_why *why = writes.mode == TP_GDR_OFF ? &writes.why : &reads.why;
		*links = (struct tp_links_gdr){ .receive = writes.mode != TP_GDR_OFF, .send = reads.mode != TP_GDR_OFF, .flush = writes.flush };
		*reason = why->reason;
		if (!links->receive || !links->send) snprintf(links->why, sizeof(links->why), "%.199s", why->text);
		if (links->receive)
			TP_INFO(TP_INIT | TP_NET | TP_GRAPH, "GPU Direct RDMA for GPU %d / HCA %s (%s): read %d, flush %d, %s", comm->gpu->gpu->ordinal, p->name, why->text, links->send, links->flush,
				writes.flush_why.text);
	}
}

/* For each device that links take turns with: what the topology allows, and then what is possible. The row has it of the first. */
static ncclResult_t open_gdr(const struct ncclComm *comm, struct tp_topo_row *row)
{
	int dev = 0, count = 0;
	const struct tp_net_ops *ops = tp_links_net(comm->links, &dev);
	int32_t gpu = tp_comm_topo_gpu(comm, comm->rank);
	if (!ops || ops->devices(&count) != ncclSuccess || count < 1) return ncclSuccess;
	int nseats = 0;
	const struct tp_link_seat *seats = tp_links_seats(comm->links, comm->rank, &nseats);
	if (seats) dev = seats[0].dev;
	struct tp_links_gdr *list = tp_alloc((size_t)count, sizeof(*list), "which network devices reach GPU memory");
	if (!list) return ncclSystemError;
	enum tp_topo_reason reason = TP_WHY_NIC_UNABLE;
	bool wanted = false;
	for (int d = 0; d < count; d++) {
		struct tp_net_properties p;
		enum tp_topo_reason one;
		if ((!ops->spreads && d != dev) || ops->properties(d, &p) != ncclSuccess) continue;
		judge_gdr(comm, gpu, &p, &list[d], &one);
		if (d != dev) continue;
		reason = one;
		wanted = list[d].receive;
	}
	ncclResult_t result = tp_links_set_gdr(comm->links, list, count);
	row->gdr_receive = list[dev].receive;
	row->gdr_send = list[dev].send;
	row->gdr_reason = (uint8_t)(wanted && !list[dev].receive ? TP_WHY_NIC_UNABLE : reason);
	snprintf(row->gdr_why, sizeof(row->gdr_why), "%.183s", list[dev].why);
	free(list);
	return result;
}

static void fill_net(const struct ncclComm *comm, int32_t gpu, struct tp_topo_row *row)
{
	const struct tp_comm_topo *t = comm->topo;
	int32_t net = tp_comm_topo_net(t->graph, t->cards[comm->rank].net, t->cards[comm->rank].port), best = tp_topo_local_net(t->graph, gpu, 0);
	row->net_type = row->best_type = TP_PATH_DIS;
	if (best >= 0) {
		row->best_type = (uint8_t)tp_topo_wire_path(t->graph, gpu, best)->type;
		snprintf(row->best_net, sizeof(row->best_net), "%.31s", t->graph->nodes[best].name);
	}
	if (net < 0) return;
	row->net_type = (uint8_t)tp_topo_wire_path(t->graph, gpu, net)->type;
	const struct tp_topo_value *value = tp_topo_value_between(&t->values, gpu, net);
	row->net_measured_gbps = value ? (float)value->gbps : 0;
	row->net_measured_us = value ? (float)value->alpha_us : 0;
}

static ncclResult_t fill_row(const struct ncclComm *comm, struct tp_topo_row *row)
{
	const struct tp_comm_topo *t = comm->topo;
	const struct tp_boot *boot = comm->boot;
	int32_t gpu = tp_comm_topo_gpu(comm, comm->rank);
	if (gpu < 0) return ncclSuccess;
	for (int l = 0; l < TP_MIN(boot->nlocal, TP_TOPO_LOCAL_MAX); l++) {
		int32_t peer = tp_comm_topo_gpu(comm, boot->local_ranks[l]);
		struct tp_topo_p2p p2p;
		row->type[l] = TP_PATH_DIS;
		if (peer < 0) continue;
		TP_TRY(tp_topo_decide_p2p(t->graph, &t->policy, gpu, peer, &p2p));
		row->type[l] = (uint8_t)(gpu == peer ? TP_PATH_LOC : p2p.type);
		row->reason[l] = (uint8_t)p2p.why.reason;
		row->gbps[l] = (float)p2p.bw;
		const struct tp_topo_value *value = gpu != peer ? tp_topo_value_between(&t->values, gpu, peer) : NULL;
		row->measured_gbps[l] = value ? (float)value->gbps : 0;
		row->measured_us[l] = value ? (float)value->alpha_us : 0;
	}
	fill_net(comm, gpu, row);
	row->known = 1;
	return ncclSuccess;
}

static void forget_graph(struct tp_comm_topo *t)
{
	tp_channels_free(t->rings);
	tp_topo_free(t->graph);
	tp_topo_doc_free(t->doc);
	t->rings = NULL;
	t->graph = NULL;
	t->doc = NULL;
	free(t->values.list);
	t->values = (struct tp_topo_values){ .list = NULL };
}

static ncclResult_t open_rows(struct ncclComm *comm)
{
	struct tp_comm_topo *t = comm->topo;
	t->rows = tp_alloc((size_t)comm->nranks, sizeof(*t->rows), "the GPUs' paths");
	if (!t->rows) return ncclSystemError;
	if (t->graph && fill_row(comm, &t->rows[comm->rank]) != ncclSuccess) memset(&t->rows[comm->rank], 0, sizeof(t->rows[0]));
	TP_TRY(open_gdr(comm, &t->rows[comm->rank]));
	TP_TRY(tp_boot_all_gather(comm->boot, t->rows, sizeof(*t->rows)));
	for (int r = 0; r < comm->nranks; r++) {
		clean_name(t->rows[r].best_net, sizeof(t->rows[r].best_net));
		clean_text(t->rows[r].gdr_why, sizeof(t->rows[r].gdr_why));
	}
	return ncclSuccess;
}

static ncclResult_t open_graph(struct ncclComm *comm, struct tp_topo_text *texts)
{
	struct tp_comm_topo *t = comm->topo;
	const struct tp_topo_found *own = NULL;
	int count = comm->boot->nlocal;
	bool differ;
	if (!tp_topo_find_own(comm, &own)) own = NULL;
	TP_TRY(any_differ(comm, &differ));
	if (differ) TP_TRY(exchange_texts(comm, own, texts));
	if (!texts[0].text && own) {
		texts[0] = (struct tp_topo_text){ .text = own->text, .bytes = own->bytes, .rank = comm->rank };
		count = 1;
	}
	if (own && needs_graph(comm, own) && make_graph(comm, t, texts, count) != ncclSuccess) {
		forget_graph(t);
		TP_WARN("comm %p rank %d: the topology of host %s can't be made out (see above): nothing is known of its paths", (void *)comm, comm->rank,
			comm->boot->peers[comm->rank].host_name);
	}
	return ncclSuccess;
}

static bool net_takes_gpu_memory(const struct ncclComm *comm)
{
	int dev = 0;
	const struct tp_net_ops *ops = tp_links_net(comm->links, &dev);
	struct tp_net_properties p;
	if (!ops || ops->properties(dev, &p) != ncclSuccess) return false;
	return (p.memory & (TP_NET_CUDA | TP_NET_DMABUF)) || (strcmp(ops->name, "IB") == 0 && !p.software);
}

ncclResult_t tp_comm_topo_open(struct ncclComm *comm)
{
	struct tp_comm_topo *t = tp_alloc(1, sizeof(*t), "the topology");
	if (!t) return ncclSystemError;
	comm->topo = t;
	t->cards = tp_alloc((size_t)comm->nranks, sizeof(*t->cards), "what ranks say of their machines");
	if (!t->cards) return ncclSystemError;
	t->net_takes_gpu_memory = net_takes_gpu_memory(comm);
	tp_topo_fill_card(comm, &t->cards[comm->rank]);
	TP_TRY(tp_boot_all_gather(comm->boot, t->cards, sizeof(*t->cards)));
	for (int r = 0; r < comm->nranks; r++) clean_card(&t->cards[r]);
	struct tp_topo_text *texts = tp_alloc((size_t)comm->boot->nlocal, sizeof(*texts), "descriptions of the machine");
	if (!texts) return ncclSystemError;
	ncclResult_t result = open_graph(comm, texts);
	free(texts);
	if (result == ncclSuccess) result = tp_topo_seat_links(comm);
	if (result == ncclSuccess && comm->gpu) result = open_rows(comm);
	if (result != ncclSuccess) return result;
	tp_topo_warn(comm);
	tp_topo_write_files(comm);
	tp_topo_seat_engine(comm);
	return ncclSuccess;
}

void tp_comm_topo_close(struct ncclComm *comm)
{
	struct tp_comm_topo *t = comm->topo;
	if (!t) return;
	forget_graph(t);
	free(t->notes);
	free(t->refused);
	free(t->rows);
	free(t->cards);
	free(t);
	comm->topo = NULL;
}
