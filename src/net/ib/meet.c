/* How two ends meet. The Socket transport's handshake proves over TCP that they belong together; the same connection then carries
 * who each is:
 *
 *   connector: queue pairs in INIT     META ->
 *                                           <- META    acceptor: queue pairs in INIT with receives posted, then RTR and RTS
 *   RTR, RTS                          READY ->         from here on both may write
 *
 * Where rdma_cm connects queue pairs (cm.c) the acceptor's aren't moved before its META, but by the connector's requests, which come before READY.
 * Neither end blocks on the other; a refusal says why. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/text.h"
#include "net/ib/ib.h"
#include "net/socket.h"
#include "net/socket_hello.h"

enum phase { MEETING, SENDING_META, READING_META, CONNECTING, SENDING_READY, READING_READY, MET };

struct talk {                           /* either end, once TCP is there */
	int fd;
	enum phase phase;
	uint64_t since_ms, limit_ms;
	size_t moved;
	struct tp_ib_record out, in;
	struct tp_ib_wire_meta peer;
	struct tp_ib_comm *comm;
};

struct connecting {
	struct tp_net_hello hello;
	int dev, least;                     /* least: ports of the listener's device */
	void *socket;                       /* the Socket transport's state */
	struct talk talk;
};

struct guest { struct tp_net_hello hello; struct talk talk; struct guest *next; };
struct listener { void *socket; int dev; bool stays; struct guest *guests; };

/* ---- which ports ---- */

/* Behind the Socket transport's part a listener's handle says how many ports its device has, so that a connector that has fewer
 * makes as many paths. */
#define SIZE_AT sizeof(struct tp_wire_handle)
_Static_assert(SIZE_AT + 8 <= TP_NET_HANDLE_BYTES, "the handle must fit");
static const unsigned char size_magic[7] = { 'I', 'b', 'P', 'o', 'r', 't', 's' };

static void write_size(void *handle, int nports)
{
	unsigned char *at = (unsigned char *)handle + SIZE_AT;

	memcpy(at, size_magic, sizeof(size_magic));
	at[sizeof(size_magic)] = (unsigned char)nports;
}

static int read_size(const void *handle)
{
	const unsigned char *at = (const unsigned char *)handle + SIZE_AT;
	int nports = at[sizeof(size_magic)];

	return memcmp(at, size_magic, sizeof(size_magic)) == 0 && nports <= TP_IB_MAX_MERGED ? TP_MAX(nports, 1) : 1;
}

/* A port without an address to use makes no path. Where the peer has more ports, ours have several paths each. */
static ncclResult_t add_way(struct tp_ib_comm *comm, const struct tp_ib_device *device, int way, int least)
{
	struct tp_ib_port *ports[TP_IB_MAX_MERGED];
	struct tp_ib_gid_choice gids[TP_IB_MAX_MERGED];
	int n = 0, wanted;

	for (int i = 0; i < device->nports; i++)
		if (tp_ib_port_has_gid(device->ports[i], &gids[n])) ports[n++] = device->ports[i];
	wanted = n > 0 ? TP_MAX(n, least) : 0;
	for (int i = 0; i < wanted; i++)
		if (tp_ib_comm_has_room(comm, ports[i % n])) TP_TRY(tp_ib_comm_add_path(comm, way, ports[i % n], &gids[i % n]));
	return ncclSuccess;
}

/* The ways over this device, then over the next ones. Several paths over the only device stand in for each other. */
static ncclResult_t own_paths(struct tp_ib_comm *comm, int dev, int least)
{
	int count = tp_ib_device_count();
	struct tp_ib_gid_choice gid;

	for (int i = 0; i < count && comm->nways < comm->params.max_paths; i++)
		TP_TRY(add_way(comm, tp_ib_device((dev + i) % count), comm->nways, least));
	if (comm->nways == 1 && comm->npaths > 1 && comm->params.max_paths > 1 && comm->params.failover) TP_TRY(add_way(comm, tp_ib_device(dev), 1, least));
	return comm->npaths > 0 ? ncclSuccess : tp_ib_port_gid(tp_ib_device(dev)->ports[0], &gid);
}

int tp_ib_count_paths(const struct tp_ib_params *params, int dev)
{
	int count = tp_ib_device_count(), ways = TP_MIN(params->max_paths, count), paths = 0;

	for (int i = 0; i < ways; i++) paths += TP_MAX(tp_ib_device((dev + i) % count)->nports, tp_ib_device(dev)->nports);
	if (ways == 1 && paths > 1 && params->max_paths > 1 && params->failover) paths *= 2;
	return TP_MIN(paths, TP_IB_MAX_PATHS);
}

/* What a path of the peer's is to lead to: a port of the same network; of these one that no other path of this way has, then one that
 * none has at all; as near as leading bits tell; of the device that both ends agreed on; at the same place in both hosts' lists (rails). */
struct seek {
	const struct tp_ib_params *params;
	const struct tp_ib_wire_path *peer;
	uint32_t in_way, taken, usable;     /* our ports, by bit */
	bool again;                         /* the peer's port has a path of this way already */
	int first;                          /* our device's first port */
	int agreed;                         /* our device, where the first way is to end there; else -1 */
	struct tp_ib_gid_choice gids[TP_IB_MAX_PORTS];
};

static int fitness(const struct seek *seek, int at)
{
	const struct tp_ib_wire_path *peer = seek->peer;
	const struct tp_ib_port *port = tp_ib_port(at);
	int enough = tp_ib_gid_network_bits(peer->gid, seek->params->subnet_bits), device = seek->agreed >= 0 && peer->way == 0 ? seek->agreed : peer->index;
	int bits = TP_MIN(tp_ib_gid_common_bits(seek->gids[at].raw, peer->gid), enough);
	bool taken = seek->taken >> at & 1, in_way = seek->in_way >> at & 1;

	if (!(seek->usable >> at & 1) || port->attr.link_layer != peer->link_layer) return -1;
	/* Several paths of one port, here or there, only where they surely meet. */
	if ((taken || seek->again) && bits < enough) return -1;
	return (bits >= enough) * 4096 + (!in_way * 2 + !taken) * 1024 + 4 * bits + 2 * (port->device == device) + (port->place == peer->place);
}

static int nearest_port(const struct seek *seek)
{
	int count = tp_ib_port_count(), best = -1, most = -1;

	for (int i = 0; i < count; i++) {
		int at = (seek->first + i) % count, found = fitness(seek, at);
		if (found <= most) continue;
		best = at;
		most = found;
	}
	return best;
}

static bool has_path_of_way(const struct tp_ib_wire_meta *peer, uint32_t p)
{
	const struct tp_ib_wire_path *path = &peer->paths[p], *other;

	for (uint32_t i = 0; i < p; i++) {
		other = &peer->paths[i];
		if (other->port && other->way == path->way && other->index == path->index && other->place == path->place) return true;
	}
	return false;
}

/* Where the networks are routed to each other nothing in the addresses says that a port may have several paths; but the peer's port that
 * an earlier way reached from one of ours is reached so again. */
static int port_of_earlier_way(const struct tp_ib_comm *comm, const struct seek *seek, const struct tp_ib_wire_meta *peer, uint32_t p)
{
	const struct tp_ib_wire_path *path = &peer->paths[p];

	for (uint32_t i = 0; i < p; i++) {
		const struct tp_ib_wire_path *other = &peer->paths[i];
		if (other->way == path->way || other->index != path->index || other->place != path->place || !comm->paths[i].port) continue;
		int at = (int)(comm->paths[i].port - tp_ib_port(0));
		if (!(seek->in_way >> at & 1)) return at;
	}
	return -1;
}

static ncclResult_t matching_paths(struct tp_ib_comm *comm, const struct tp_ib_wire_meta *peer, const struct listener *l)
{
	int dev = l->dev;
	struct seek seek = { .params = &comm->params, .agreed = l->stays ? dev : -1, .first = (int)(tp_ib_device(dev)->ports[0] - tp_ib_port(0)) };

	for (int i = 0; i < tp_ib_port_count(); i++)
		if (tp_ib_port_has_gid(tp_ib_port(i), &seek.gids[i])) seek.usable |= 1u << i;
	for (uint32_t p = 0; p < peer->npaths; p++) {
		seek.peer = &peer->paths[p];
		seek.again = has_path_of_way(peer, p);
		if (p > 0 && seek.peer->way != peer->paths[p - 1].way) seek.in_way = 0;
		int at = seek.peer->port ? nearest_port(&seek) : -1;
		if (at < 0 && seek.peer->port) at = port_of_earlier_way(comm, &seek, peer, p);
		if (at >= 0 && !tp_ib_comm_has_room(comm, tp_ib_port(at))) at = -1;
		TP_TRY(tp_ib_comm_add_path(comm, seek.peer->way, tp_ib_port(at), at >= 0 ? &seek.gids[at] : NULL));
		if (at < 0) continue;
		seek.in_way |= 1u << at;
		seek.taken |= 1u << at;
	}
	return ncclSuccess;
}

static void warn_of_other_set(struct tp_ib_comm *comm, const struct tp_ib_wire_meta *peer)
{
	static _Atomic uint32_t warned;
	struct tp_ib_wire_meta own;

	tp_ib_comm_describe(comm, &own);
	if ((peer->ports == own.ports && peer->kinds == own.kinds) || atomic_exchange_explicit(&warned, 1, memory_order_relaxed)) return;
	TP_WARN("NET/IB : rank %d (%s) has %d ports (%s), rank %d (%s) has %u (%s): what both have is used. Make all hosts the same, or name the common set by NCCL_IB_HCA",
		comm->sending ? comm->from : comm->to, own.host, tp_ib_port_count(), own.set, peer->rank, peer->host, peer->ports, peer->set);
}

/* Both ends must do it the same way, and neither should find out by waiting in vain. */
static ncclResult_t check_connect(const struct tp_net_hello *who, const struct tp_ib_wire_meta *peer)
{
	static const char *const names[] = { [TP_IB_BY_TCP] = "tcp", [TP_IB_BY_RDMA_CM] = "rdma_cm" };
	struct tp_ib_params params;

	tp_ib_params_read(&params);
	if (peer->connect == params.connect) return ncclSuccess;
	return TP_FAIL(ncclInvalidUsage, "NET/IB : rank %d -> rank %d : TELPHER_IB_CONNECT is %s at rank %d (%s), and %s at rank %d (%s): set it to the same on all ranks", who->from, who->to,
		names[peer->connect], peer->rank, peer->host, names[params.connect], who->to, tp_host_name());
}

/* ---- talking ---- */

static void start_talk(struct talk *talk, int fd, enum phase phase, uint64_t limit_ms)
{
	*talk = (struct talk){ .fd = fd, .phase = phase, .since_ms = tp_clock_ms(), .limit_ms = limit_ms };
}

static void end_talk(struct talk *talk)
{
	if (talk->fd >= 0) close(talk->fd);
	talk->fd = -1;
	tp_ib_comm_destroy(talk->comm);
	talk->comm = NULL;
}

static const char *who_text(const struct tp_net_hello *who, char *text, size_t bytes)
{
	snprintf(text, bytes, "rank %d -> rank %d [channel %d]", who->from, who->to, who->channel);
	return text;
}

/* 1: the record is sent whole, 0: later. */
static ncclResult_t push(struct talk *talk, const struct tp_net_hello *who, bool *whole)
{
	char text[96];

	*whole = false;
	while (talk->moved < talk->out.head.bytes) {
		ssize_t n = send(talk->fd, (char *)&talk->out + talk->moved, talk->out.head.bytes - talk->moved, MSG_DONTWAIT | MSG_NOSIGNAL);
		if (n < 0 && errno == EINTR) continue;
		if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return ncclSuccess;
		if (n < 0) return TP_FAIL(ncclRemoteError, "NET/IB : %s : the peer has gone while the connection was made: %s", who_text(who, text, sizeof(text)), strerror(errno));
		talk->moved += (size_t)n;
	}
	talk->moved = 0;
	*whole = true;
	return ncclSuccess;
}

static ncclResult_t pull(struct talk *talk, const struct tp_net_hello *who, int wanted, bool *whole)
{
	char text[96];
	const char *why;
	long length = 0;

	*whole = false;
	for (;;) {
		/* Only this record: what comes behind it is for the watch thread. */
		size_t want = talk->moved < sizeof(talk->in.head) ? sizeof(talk->in.head) - talk->moved : talk->in.head.bytes - talk->moved;
		ssize_t n = want > 0 ? recv(talk->fd, (char *)&talk->in + talk->moved, want, MSG_DONTWAIT) : 0;
		if (n < 0 && errno == EINTR) continue;
		if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
		if (want > 0 && n <= 0)
			return TP_FAIL(ncclRemoteError, "NET/IB : %s : the peer closed the connection while it was made: has it died, or failed itself?", who_text(who, text, sizeof(text)));
		talk->moved += (size_t)n;
		length = tp_ib_record_check(&talk->in, talk->moved, &why);
		if (length < 0) return TP_FAIL(ncclRemoteError, "NET/IB : %s : %s", who_text(who, text, sizeof(text)), why);
		if (length > 0) break;
	}
	if (length == 0) {
		if (tp_clock_ms() - talk->since_ms < talk->limit_ms) return ncclSuccess;
		return TP_FAIL(ncclRemoteError, "NET/IB : %s : the peer has said nothing for %llu ms while the connection was made", who_text(who, text, sizeof(text)),
			(unsigned long long)talk->limit_ms);
	}
	talk->moved = 0;
	*whole = true;
	if (talk->in.head.type == TP_IB_REFUSED) {
		tp_text_clean(talk->in.as.text.text, sizeof(talk->in.as.text.text));
		return TP_FAIL(ncclRemoteError, "NET/IB : %s : the peer refuses: %s", who_text(who, text, sizeof(text)), talk->in.as.text.text);
	}
	/* Nothing but a refusal was expected. */
	if (wanted == TP_IB_REFUSED || talk->in.head.type != wanted)
		return TP_FAIL(ncclRemoteError, "NET/IB : %s : record %u came where %d was expected", who_text(who, text, sizeof(text)), talk->in.head.type, wanted);
	if (wanted == TP_IB_META && (why = tp_ib_wire_check_meta(&talk->in.as.meta)) != NULL)
		return TP_FAIL(ncclRemoteError, "NET/IB : %s : what the peer says of itself is wrong: %s", who_text(who, text, sizeof(text)), why);
	return ncclSuccess;
}

/* Tells the peer why it won't be; it would see a closed connection only. */
static void refuse(struct talk *talk)
{
	struct tp_ib_record record;

	tp_ib_record_start(&record, TP_IB_REFUSED);
	snprintf(record.as.text.text, sizeof(record.as.text.text), "%.511s", tp_log_last_error());
	if (talk->fd >= 0 && send(talk->fd, &record, record.head.bytes, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) return;
}

static void decide_adaptive(struct tp_ib_comm *comm)
{
	bool infiniband = comm->paths[0].port && comm->paths[0].port->attr.link_layer == IBV_LINK_LAYER_INFINIBAND;

	comm->adaptive = comm->params.adaptive >= 0 ? comm->params.adaptive : infiniband;
}

static ncclResult_t met(struct talk *talk, void **out)
{
	union tp_addr addr;
	socklen_t length = sizeof(addr);
	int fd = talk->fd;

	memset(&addr, 0, sizeof(addr));
	if (getpeername(fd, &addr.sa, &length) == 0) tp_addr_format(&addr, talk->comm->peer);
	talk->fd = -1;
	TP_TRY(tp_ib_control_add(&talk->comm->control, fd));
	talk->phase = MET;
	*out = talk->comm;
	talk->comm = NULL;
	return ncclSuccess;
}

/* ---- connecting ---- */

static ncclResult_t connecting_step(struct connecting *c, void **out)
{
	struct talk *talk = &c->talk;
	bool whole, over;

	switch (talk->phase) {
	case SENDING_META:
		TP_TRY(push(talk, &c->hello, &whole));
		if (!whole) return ncclSuccess;
		talk->phase = READING_META;
		/* fall through */
	case READING_META:
		TP_TRY(pull(talk, &c->hello, TP_IB_META, &whole));
		if (!whole) return ncclSuccess;
		decide_adaptive(talk->comm);
		warn_of_other_set(talk->comm, &talk->in.as.meta);
		TP_TRY(tp_ib_comm_learn(talk->comm, &talk->in.as.meta));
		talk->peer = talk->in.as.meta;
		talk->phase = CONNECTING;
		talk->since_ms = tp_clock_ms();
		/* fall through */
	case CONNECTING:
		tp_ib_comm_connecting(talk->comm, &over);
		if (!over) return pull(talk, &c->hello, TP_IB_REFUSED, &whole);
		TP_TRY(tp_ib_comm_connected(talk->comm, &talk->peer));
		tp_ib_record_start(&talk->out, TP_IB_READY);
		talk->out.as.revive.path = (uint32_t)talk->comm->active;
		talk->out.as.revive.attempt = tp_ib_live_mask(talk->comm);
		talk->phase = SENDING_READY;
		/* fall through */
	case SENDING_READY:
		TP_TRY(push(talk, &c->hello, &whole));
		return whole ? met(talk, out) : ncclSuccess;
	case MEETING: case READING_READY: case MET: break;
	}
	return ncclInternalError;
}

/* TCP is there and proven: now the queue pairs. */
static ncclResult_t begin_talk(struct connecting *c, void *socket_comm)
{
	struct tp_ib_params params;
	struct tp_sock_params sock;

	tp_ib_params_read(&params);
	tp_sock_get_params(0, &sock);
	start_talk(&c->talk, tp_sock_comm_take_fd(socket_comm), SENDING_META, (uint64_t)sock.connect_ms);
	TP_TRY(tp_ib_comm_create(true, &c->hello, params.qps, &c->talk.comm));
	if (params.connect == TP_IB_BY_RDMA_CM) TP_TRY(tp_ib_cm_create(c->talk.comm));
	TP_TRY(own_paths(c->talk.comm, c->dev, c->least));
	tp_ib_record_start(&c->talk.out, TP_IB_META);
	tp_ib_comm_describe(c->talk.comm, &c->talk.out.as.meta);
	return ncclSuccess;
}

void tp_ib_cancel_connect(void *state)
{
	struct connecting *c = state;

	if (!c) return;
	if (c->socket) tp_sock_cancel_connect(c->socket);
	end_talk(&c->talk);
	free(c);
}

ncclResult_t tp_ib_connect(int dev, const void *handle, const struct tp_net_hello *hello, void **state, void **send_comm)
{
	struct connecting *c = *state;
	void *socket_comm = NULL;
	ncclResult_t result = ncclSuccess;

	*send_comm = NULL;
	if (!c) {
		c = tp_alloc(1, sizeof(*c), "a connection under way");
		if (!c) return ncclSystemError;
		c->hello = *hello;
		c->dev = dev;
		c->least = read_size(handle);
		c->talk.fd = -1;
		*state = c;
	}
	if (c->talk.phase == MEETING) {
		result = tp_sock_connect_one(handle, hello, &c->socket, &socket_comm);
		if (result == ncclSuccess && !socket_comm) return ncclSuccess;
		if (result == ncclSuccess) result = begin_talk(c, socket_comm);
	}
	if (result == ncclSuccess) result = connecting_step(c, send_comm);
	if (result == ncclSuccess && !*send_comm) return ncclSuccess;
	if (result != ncclSuccess) refuse(&c->talk);
	tp_ib_cancel_connect(c);
	*state = NULL;
	return result;
}

static int add_cm_fd(const struct talk *talk, int *fds, uint32_t *events, int max)
{
	if (max < 1 || !talk->comm || !talk->comm->cm || (talk->phase != CONNECTING && talk->phase != READING_READY)) return 0;
	fds[0] = tp_ib_cm_fd(talk->comm);
	events[0] = EPOLLIN;
	return 1;
}

int tp_ib_poll_connect_fds(void *state, int *fds, uint32_t *events, int max)
{
	struct connecting *c = state;

	if (!c || max < 1) return 0;
	if (c->talk.phase == MEETING) return tp_sock_poll_connect_fds(c->socket, fds, events, max);
	fds[0] = c->talk.fd;
	events[0] = c->talk.phase == READING_META || c->talk.phase == CONNECTING ? EPOLLIN : EPOLLOUT;
	return 1 + add_cm_fd(&c->talk, fds + 1, events + 1, max - 1);
}

/* ---- accepting ---- */

ncclResult_t tp_ib_listen(int dev, void *handle, void **out)
{
	struct listener *l = tp_alloc(1, sizeof(*l), "a listener");
	ncclResult_t result;

	if (!l) return ncclSystemError;
	l->dev = dev;
	result = tp_ib_device(dev) ? tp_sock_listen(0, handle, &l->socket) : TP_FAIL(ncclInternalError, "NET/IB : there is no device %d", dev);
	if (result != ncclSuccess) {
		free(l);
		return result;
	}
	write_size(handle, tp_ib_device(dev)->nports);
	*out = l;
	return ncclSuccess;
}

static ncclResult_t guest_step(struct listener *l, struct guest *g, void **out)
{
	struct talk *talk = &g->talk;
	const struct tp_ib_wire_meta *peer = &talk->in.as.meta;
	bool whole, over;

	switch (talk->phase) {
	case READING_META:
		TP_TRY(pull(talk, &g->hello, TP_IB_META, &whole));
		if (!whole) return ncclSuccess;
		TP_TRY(check_connect(&g->hello, peer));
		TP_TRY(tp_ib_comm_create(false, &g->hello, (int)peer->nqps, &talk->comm));
		talk->comm->split = peer->split;
		if (peer->connect == TP_IB_BY_RDMA_CM) TP_TRY(tp_ib_cm_create(talk->comm));
		TP_TRY(matching_paths(talk->comm, peer, l));
		decide_adaptive(talk->comm);
		warn_of_other_set(talk->comm, peer);
		TP_TRY(tp_ib_comm_learn(talk->comm, peer));
		talk->peer = *peer;
		if (!talk->comm->cm) TP_TRY(tp_ib_comm_connected(talk->comm, peer));
		tp_ib_record_start(&talk->out, TP_IB_META);
		tp_ib_comm_describe(talk->comm, &talk->out.as.meta);
		talk->phase = SENDING_META;
		/* fall through */
	case SENDING_META:
		TP_TRY(push(talk, &g->hello, &whole));
		if (!whole) return ncclSuccess;
		talk->phase = READING_READY;
		/* fall through */
	case READING_READY:
		tp_ib_comm_connecting(talk->comm, &over);
		TP_TRY(pull(talk, &g->hello, TP_IB_READY, &whole));
		if (!whole) return ncclSuccess;
		/* Its requests came before it. */
		tp_ib_comm_connecting(talk->comm, &over);
		if (talk->comm->cm) TP_TRY(tp_ib_comm_connected(talk->comm, &talk->peer));
		TP_TRY(tp_ib_comm_settle(talk->comm, &talk->in.as.revive));
		return met(talk, out);
	case MEETING: case CONNECTING: case SENDING_READY: case MET: break;
	}
	return ncclInternalError;
}

static ncclResult_t admit(struct listener *l, const struct tp_net_hello *expect)
{
	struct tp_sock_params sock;
	struct tp_net_hello who;
	void *comm;

	tp_sock_get_params(0, &sock);
	for (;;) {
		TP_TRY(tp_sock_accept(l->socket, expect, &who, &comm));
		if (!comm) return ncclSuccess;
		int fd = tp_sock_comm_take_fd(comm);
		struct guest *g = tp_alloc(1, sizeof(*g), "a connection being accepted"), **at = &l->guests;
		if (!g) {
			close(fd);
			return ncclSystemError;
		}
		g->hello = who;
		start_talk(&g->talk, fd, READING_META, (uint64_t)sock.connect_ms);
		while (*at) at = &(*at)->next;
		*at = g;
	}
}

ncclResult_t tp_ib_accept(void *listener, const struct tp_net_hello *expect, struct tp_net_hello *who, void **recv_comm)
{
	struct listener *l = listener;

	*recv_comm = NULL;
	l->stays = expect->stays;
	TP_TRY(admit(l, expect));
	for (struct guest **at = &l->guests; *at;) {
		struct guest *g = *at;
		ncclResult_t result = guest_step(l, g, recv_comm);
		if (result == ncclSuccess && !*recv_comm) {
			at = &g->next;
			continue;
		}
		if (result != ncclSuccess) refuse(&g->talk);
		else *who = g->hello;
		*at = g->next;
		end_talk(&g->talk);
		free(g);
		return result;
	}
	return ncclSuccess;
}

int tp_ib_poll_listen_fds(void *listener, int *fds, uint32_t *events, int max)
{
	struct listener *l = listener;
	int n = tp_sock_poll_listen_fds(l->socket, fds, events, max);

	for (struct guest *g = l->guests; g && n < max; g = g->next) {
		fds[n] = g->talk.fd;
		events[n++] = g->talk.phase == SENDING_META ? EPOLLOUT : EPOLLIN;
		n += add_cm_fd(&g->talk, fds + n, events + n, max - n);
	}
	return n;
}

ncclResult_t tp_ib_close_listen(void *listener)
{
	struct listener *l = listener;

	if (!l) return ncclSuccess;
	while (l->guests) {
		struct guest *g = l->guests;
		l->guests = g->next;
		end_talk(&g->talk);
		free(g);
	}
	tp_sock_close_listen(l->socket);
	free(l);
	return ncclSuccess;
}
