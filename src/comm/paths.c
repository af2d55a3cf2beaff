/* Which path a pair of ranks takes, what the topology says of it, and why it takes no better one: of each better kind the reason, as a code
 * for programs and as a sentence. What links did comes from them; what the machine could do, from what ranks told each other at init. */
#include <stdlib.h>
#include <string.h>

#include "comm/gpu.h"
#include "comm/topo.h"

static void add_text(char *text, size_t bytes, const char *between, const char *more)
{
	size_t used = strlen(text);
	if (*more && used < bytes) snprintf(text + used, bytes - used, "%s%s", used ? between : "", more);
}

static enum tp_topo_path_type host_type(const struct tp_topo_place *a, const struct tp_topo_place *b)
{
	if (a->core >= 0 && a->core == b->core) return TP_PATH_LOC;
	if (a->cache >= 0 && a->cache == b->cache) return TP_PATH_PIX;
	if (a->numa < 0 || b->numa < 0) return TP_PATH_TYPES;
	return a->numa == b->numa ? TP_PATH_PHB : TP_PATH_SYS;
}

static bool is_direct(const struct tp_watch_path *path) { return strncmp(path->via, "P2P", 3) == 0; }
static bool is_net(const struct tp_watch_path *path) { return strncmp(path->via, "NET", 3) == 0; }

/* The sentence is known of this host's pairs. */
static bool decide_p2p(const struct ncclComm *comm, int from, int to, struct tp_topo_p2p *out)
{
	const struct tp_comm_topo *t = comm->topo;
	int32_t a = tp_comm_topo_gpu(comm, from), b = tp_comm_topo_gpu(comm, to);
	return comm->boot->peers[from].host == comm->boot->host && a >= 0 && b >= 0 && a != b && tp_topo_decide_p2p(t->graph, &t->policy, a, b, out) == ncclSuccess;
}

/* Of a pair that isn't direct though it is joined; "": not known. What the topology would allow and links found impossible has no code there. */
static const char *p2p_code(const struct ncclComm *comm, int from, int to)
{
	const struct tp_topo_row *row = &comm->topo->rows[from];
	int local = comm->boot->peers[to].local;
	if (!row->known || local >= TP_TOPO_LOCAL_MAX || row->reason[local] >= TP_WHY_COUNT) return "";
	return row->reason[local] == TP_WHY_BEST ? "no-access" : tp_topo_reason_code(row->reason[local]);
}

/* In place of what is planned, and said so. */
static void take_measured(float gbps, float us, struct tp_watch_path *path)
{
	if (gbps > 0) path->gbps = gbps;
	if (us > 0) path->latency_us = us;
	if (gbps > 0 || us > 0) add_text(path->why, sizeof(path->why), "; ", gbps <= 0 ? "latency measured" : us <= 0 ? "bandwidth measured" : "measured");
}

static void describe_local(const struct ncclComm *comm, int from, int to, struct tp_watch_path *path)
{
	const struct tp_comm_topo *t = comm->topo;
	const struct tp_topo_row *row = t->rows ? &t->rows[from] : NULL;
	int local = comm->boot->peers[to].local;
	enum tp_topo_path_type type = TP_PATH_TYPES;
	path->latency_us = (float)comm->model.inside.latency_us;
	path->gbps = comm->model.inside.us_per_byte > 0 ? (float)(1e-3 / comm->model.inside.us_per_byte) : 0;
	if (!row) type = host_type(&t->cards[from].place, &t->cards[to].place);
	else if (row->known && local < TP_TOPO_LOCAL_MAX) type = row->type[local];
	if (type < TP_PATH_TYPES) snprintf(path->type, sizeof(path->type), "%s", tp_topo_path_name(type));
	if (!row || type >= TP_PATH_TYPES) return;
	take_measured(row->measured_gbps[local], row->measured_us[local], path);
	if (is_direct(path)) {
		if (row->measured_gbps[local] <= 0) path->gbps = row->gbps[local];
		if (row->reason[local] < TP_WHY_COUNT && row->reason[local] != TP_WHY_BEST)
			add_text(path->code, sizeof(path->code), ",", tp_topo_reason_code(row->reason[local]));
		return;
	}
	struct tp_topo_p2p p2p;
	add_text(path->code, sizeof(path->code), ",", p2p_code(comm, from, to));
	if (decide_p2p(comm, from, to, &p2p) && !p2p.use) add_text(path->why, sizeof(path->why), "; ", p2p.why.text);
}

/* "mlx5_0:2" */
static void port_name(const char *name, int port, char *out, size_t bytes)
{
	if (port > 1) snprintf(out, bytes, "%.25s:%d", name, (int)(uint16_t)port);
	else snprintf(out, bytes, "%s", name);
}

static int count_ports(const struct ncclComm *comm, int rank)
{
	int count = 0;
	return tp_links_seats(comm->links, rank, &count) ? TP_MIN(count, comm->nchannels) : 1;
}

/* Of all ports that a rank's channels take turns with. */
static float rate_of(const struct ncclComm *comm, int rank)
{
	int count = 0;
	const struct tp_link_seat *seats = tp_links_seats(comm->links, rank, &count);
	float sum = 0;
	for (int i = 0; seats && i < TP_MIN(count, comm->nchannels); i++) sum += seats[i].gbps;
	return seats ? sum : comm->topo->cards[rank].gbps;
}

static float lesser(float a, float b) { return b > 0 && b < a ? b : a; }

/* Why NICs don't reach the GPUs' memory; "": they do. The sentence is of the end that doesn't. */
static const char *gdr_code(const struct ncclComm *comm, int from, int to, char *text, size_t bytes)
{
	const struct tp_topo_row *a = &comm->topo->rows[from], *b = &comm->topo->rows[to], *row = a->gdr_send ? b : a;
	if (bytes) text[0] = 0;
	if (a->gdr_send && b->gdr_receive) return "";
	snprintf(text, bytes, "no GDR at rank %d: %s", row == a ? from : to, row->gdr_why);
	return row->gdr_reason >= TP_WHY_COUNT ? "nic-unable" : tp_topo_reason_code(row->gdr_reason);
}

static void describe_remote(const struct ncclComm *comm, int from, int to, struct tp_watch_path *path)
{
	const struct tp_comm_topo *t = comm->topo;
	const struct tp_topo_card *a = &t->cards[from];
	if (!a->net[0]) return;
	snprintf(path->type, sizeof(path->type), "%s", tp_topo_path_name(TP_PATH_NET));
	port_name(a->net, a->port, path->device, sizeof(path->device));
	path->gbps = lesser(rate_of(comm, from), rate_of(comm, to));
	path->latency_us = a->latency_us > 0 ? a->latency_us : (float)comm->model.across.latency_us;
	path->devices = count_ports(comm, from);
	if (!t->rows) return;
	/* Of one port, and of the slower end's. */
	const struct tp_topo_row *x = &t->rows[from], *y = &t->rows[to];
	if (path->devices < 2 && (x->net_measured_gbps > 0 || y->net_measured_gbps > 0))
		take_measured(lesser(x->net_measured_gbps > 0 ? x->net_measured_gbps : path->gbps, y->net_measured_gbps), TP_MAX(x->net_measured_us, y->net_measured_us), path);
	char text[216];
	const char *code = gdr_code(comm, from, to, text, sizeof(text));
	path->gdr = !*code;
	if (path->gdr) return;
	add_text(path->why, sizeof(path->why), "; ", text);
	add_text(path->code, sizeof(path->code), ",", code);
}

void tp_comm_topo_describe(const struct ncclComm *comm, int from, int to, struct tp_watch_path *path)
{
	path->gdr = -1;
	if (!comm->topo || !comm->topo->cards || from == to) return;
	if (is_net(path)) describe_remote(comm, from, to, path);
	else describe_local(comm, from, to, path);
}

bool tp_comm_topo_address(const struct ncclComm *comm, int rank, char *text, size_t bytes)
{
	const struct tp_topo_card *card = comm->topo && comm->topo->cards ? &comm->topo->cards[rank] : NULL;
	if (!card || !card->address[0]) return false;
	snprintf(text, bytes, "%s, %s", card->net, card->address);
	return true;
}

bool tp_comm_topo_meeting(const struct ncclComm *comm, int from, int to, char *text, size_t bytes)
{
	const struct tp_link_seat *sender, *receiver;
	char here[160], there[160];
	if (!tp_links_meet(comm->links, 0, from, to, &sender, &receiver)) {
		if (!tp_comm_topo_address(comm, from, here, sizeof(here)) || !tp_comm_topo_address(comm, to, there, sizeof(there))) return false;
	} else {
		if (!sender->address[0] || !receiver->address[0]) return false;
		snprintf(here, sizeof(here), "%s, %s", sender->name, sender->address);
		snprintf(there, sizeof(there), "%s, %s", receiver->name, receiver->address);
	}
	snprintf(text, bytes, "%s -> %s", here, there);
	return true;
}

/* ---- Channels */

int tp_comm_topo_channels(const struct ncclComm *comm, const struct tp_watch_path *path, struct tp_watch_channel *out, int max)
{
	const struct tp_link_seat *sender, *receiver;
	bool differ = false;
	if (!comm->topo || !is_net(path)) return 0;
	int count = TP_MIN(comm->nchannels, max);
	for (int c = 0; c < count; c++) {
		memset(&out[c], 0, sizeof(out[c]));
		if (!tp_links_meet(comm->links, c, path->from, path->to, &sender, &receiver)) return 0;
		port_name(sender->name, sender->port, out[c].device, sizeof(out[c].device));
		out[c].gbps = lesser(sender->gbps, receiver->gbps);
		out[c].latency_us = sender->latency_us > 0 ? sender->latency_us : (float)comm->model.across.latency_us;
		differ |= strcmp(out[c].device, out[0].device) != 0;
	}
	return differ ? count : 0;
}

/* ---- Refusals */

static void refuse(struct tp_watch_refusal *list, int *count, const char *kind, const char *code, const char *text)
{
	static const char said[] = "not SHM: ";         /* by the key */
	if (strncmp(text, said, sizeof(said) - 1) == 0) text += sizeof(said) - 1;
	struct tp_watch_refusal *r = &list[(*count)++];
	snprintf(r->kind, sizeof(r->kind), "%s", kind);
	snprintf(r->code, sizeof(r->code), "%s", code);
	snprintf(r->text, sizeof(r->text), "%s", text);
}

/* All ranks have one transport. Where it is the last resort, this rank says what keeps it from a better one. */
static void refuse_network(const struct ncclComm *comm, struct tp_watch_refusal *list, int *count)
{
	int dev = 0;
	const struct tp_net_ops *ops = tp_links_net(comm->links, &dev);
	if (!ops || strcmp(ops->name, "Socket") != 0) return;
	if (tp_net_is_forced() || comm->config.net_name[0]) {
		refuse(list, count, "NET/IB", "forced", comm->config.net_name[0] ? "the communicator's netName asks for Socket" : "NCCL_NET asks for Socket");
		return;
	}
	const char *why = tp_net_why_not_named("IB");
	refuse(list, count, "NET/IB", why ? "no-rdma" : "other-rank", why ? why : "this rank could, another can't: see its warning");
}

int tp_comm_topo_refusals(const struct ncclComm *comm, const struct tp_watch_path *path, const char *link, struct tp_watch_refusal list[TP_REFUSALS_MAX])
{
	const struct tp_boot_peer *a = &comm->boot->peers[path->from], *b = &comm->boot->peers[path->to];
	bool known = comm->topo && comm->topo->rows, far = a->host != b->host;
	int count = 0;
	char text[216];
	struct tp_topo_p2p p2p;
	if (path->from == path->to) return 0;
	if (comm->gpu && !is_direct(path)) {
		const char *code = far ? "other-host" : known ? p2p_code(comm, path->from, path->to) : "";
		refuse(list, &count, "P2P", code, !far && known && decide_p2p(comm, path->from, path->to, &p2p) && !p2p.use ? p2p.why.text : link);
	}
	if (is_net(path)) refuse(list, &count, comm->gpu ? "SHM" : "SHM/CMA", far ? "other-host" : "disabled", link);
	else if (strcmp(path->via, "SHM") == 0 && !comm->gpu) refuse(list, &count, "SHM/CMA", "no-access", link);
	if (is_net(path)) refuse_network(comm, list, &count);
	if (path->gdr == 0 && known)
		refuse(list, &count, "GDR", gdr_code(comm, path->from, path->to, text, sizeof(text)), text);
	return count;
}
