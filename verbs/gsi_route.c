/* Packets for QP 1 find their process (gsi.h); the keeper's part, which needs nothing of the card. */
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "verbs/card.h"
#include "verbs/cm_name.h"
#include "verbs/gsi.h"
#include "verbs/rc.h"

enum { SOURCE_FIRST = 49152, SOURCE_COUNT = 16384, SOURCE_TRIES = 64 };

bool tp_gsi_parse(const struct tp_ingress *in, struct tp_cm_mad *mad)
{
	struct tp_packet packet;
	struct tp_icrc icrc;
	if (in->bytes != TP_GSI_PACKET_BYTES || !tp_wire_parse(in->data, in->bytes, &packet) ||
		packet.opcode != (TP_WIRE_UD << 5 | TP_OP_SEND_ONLY) || packet.qpn != TP_GSI_QPN || packet.qkey != TP_CARD_QKEY_GSI ||
		(packet.pkey & 0x7fff) != (TP_CARD_PKEY & 0x7fff) || packet.bytes != TP_MAD_BYTES)
		return false;
	tp_icrc_prepare(&in->from, &in->to, &icrc);
	return tp_wire_icrc_fits(&icrc, in) && tp_cm_parse(packet.payload, packet.bytes, mad);
}

/* ---- answers for nobody ---- */

/* What the manager itself says of connections and services that aren't there; false: nothing. */
static bool make_answer(const struct tp_cm_mad *mad, struct tp_cm_mad *out)
{
	*out = (struct tp_cm_mad){ .transaction = mad->transaction, .remote_id = mad->local_id, .service_id = mad->service_id };
	switch (mad->kind) {
	case TP_CM_REQ:
		out->kind = TP_CM_REJ;
		out->about = TP_CM_ABOUT_REQ;
		out->reason = TP_REJ_INVALID_SERVICE;
		return true;
	case TP_CM_REP:
		out->kind = TP_CM_REJ;
		out->local_id = mad->remote_id;
		out->about = TP_CM_ABOUT_REP;
		out->reason = TP_REJ_INVALID_COMM_ID;
		return true;
	case TP_CM_DREQ:
		out->kind = TP_CM_DREP;
		out->local_id = mad->remote_id;
		return true;
	case TP_CM_SIDR_REQ:
		out->kind = TP_CM_SIDR_REP;
		out->local_id = mad->local_id;
		out->status = 1;        /* unsupported service */
		return true;
	default: return false;
	}
}

/* An unconnected socket with DF, for the identification 0 (port.h). */
static int open_sender(const union tp_addr *addr, union tp_addr *local)
{
	bool v6 = addr->sa.sa_family == AF_INET6;
	int always = v6 ? IPV6_PMTUDISC_DO : IP_PMTUDISC_DO, error = EADDRINUSE;
	int s = socket(addr->sa.sa_family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (s < 0)
		return -1;
	setsockopt(s, v6 ? IPPROTO_IPV6 : IPPROTO_IP, v6 ? IPV6_MTU_DISCOVER : IP_MTU_DISCOVER, &always, sizeof(always));
	*local = *addr;
	for (int i = 0; i < SOURCE_TRIES && error == EADDRINUSE; i++) {
		uint16_t random;
		tp_secret_random(&random, sizeof(random));
		local->v4.sin_port = htons((uint16_t)(SOURCE_FIRST + random % SOURCE_COUNT));
		error = bind(s, &local->sa, tp_addr_len(local)) < 0 ? errno : 0;
	}
	if (!error)
		return s;
	close(s);
	return -1;
}

void tp_gsi_utter(const union tp_addr *own, const union tp_addr *peer, const struct tp_packet *packet)
{
	union tp_addr from, to = *peer;
	struct tp_icrc icrc;
	uint8_t data[TP_WIRE_HEADERS_MAX + TP_MAD_BYTES + TP_WIRE_ICRC_BYTES];
	int s = open_sender(own, &from);
	if (s < 0)
		return;
	to.v4.sin_port = htons(TP_WIRE_UDP_PORT);
	size_t bytes = tp_wire_build(packet, data);
	if (packet->bytes)
		memcpy(data + bytes, packet->payload, packet->bytes);
	bytes += packet->bytes;
	tp_icrc_prepare(&from, &to, &icrc);
	tp_icrc_store(data + bytes, tp_icrc_of(&icrc, 0, data, bytes));
	sendto(s, data, bytes + TP_WIRE_ICRC_BYTES, MSG_DONTWAIT, &to.sa, tp_addr_len(&to));
	close(s);
}

void tp_gsi_say(const union tp_addr *own, const union tp_addr *peer, const struct tp_cm_mad *mad)
{
	uint8_t bytes[TP_MAD_BYTES];
	struct tp_packet packet = { .opcode = TP_WIRE_UD << 5 | TP_OP_SEND_ONLY, .pkey = TP_CARD_PKEY, .qpn = TP_GSI_QPN, .src_qpn = TP_GSI_QPN,
		.qkey = TP_CARD_QKEY_GSI, .payload = bytes, .bytes = TP_MAD_BYTES };
	tp_cm_build(mad, bytes);
	tp_gsi_utter(own, peer, &packet);
}

static void answer(const struct tp_ingress *in, const struct tp_cm_mad *mad)
{
	struct tp_cm_mad reply;
	if (make_answer(mad, &reply))
		tp_gsi_say(&in->to, &in->from, &reply);
}

/* ---- requests that came: a peer that gives one up before it has our number names its own (tp_cm_rej_of_peer) ---- */

enum { ASKED = 512 };
struct asked { union tp_addr from; uint32_t id; struct tp_cm_name port; };
static struct asked asked[ASKED];   /* the newest ones */
static uint32_t asked_count;        /* ever; some entry is the oldest's */
static pthread_mutex_t asked_lock = PTHREAD_MUTEX_INITIALIZER;

static bool same_host(const union tp_addr *a, const union tp_addr *b)
{
	if (a->sa.sa_family != b->sa.sa_family)
		return false;
	return a->sa.sa_family == AF_INET6 ? !memcmp(&a->v6.sin6_addr, &b->v6.sin6_addr, 16) : a->v4.sin_addr.s_addr == b->v4.sin_addr.s_addr;
}

static struct asked *find_asked_locked(const union tp_addr *from, uint32_t id)
{
	for (uint32_t i = 0; i < TP_MIN(asked_count, (uint32_t)ASKED); i++)
		if (asked[i].id == id && same_host(&asked[i].from, from))
			return &asked[i];
	return NULL;
}

static void note_asked(const union tp_addr *from, uint32_t id, const struct tp_cm_name *port)
{
	pthread_mutex_lock(&asked_lock);
	struct asked *entry = find_asked_locked(from, id);
	if (!entry)
		entry = &asked[asked_count++ % ASKED];
	*entry = (struct asked){ .from = *from, .id = id, .port = *port };
	pthread_mutex_unlock(&asked_lock);
}

static bool whom_asked(const union tp_addr *from, uint32_t id, struct tp_cm_name *port)
{
	pthread_mutex_lock(&asked_lock);
	struct asked *entry = find_asked_locked(from, id);
	if (entry)
		*port = entry->port;
	pthread_mutex_unlock(&asked_lock);
	return entry != NULL;
}

/* ---- on to the process ---- */

void (*tp_gsi_saw)(const struct tp_ingress *in, const struct tp_cm_mad *mad);

void tp_gsi_route(const struct tp_ingress *in, bool struck)
{
	static _Atomic int unix_fd = -1;
	static _Atomic int owner;       /* a forked child has its own credentials */
	struct tp_cm_mad mad;
	struct tp_cm_name name;
	struct sockaddr_un address;
	if (!tp_gsi_parse(in, &mad))
		return;
	if (tp_gsi_saw)
		tp_gsi_saw(in, &mad);
	if (tp_cm_rej_of_peer(&mad) ? !whom_asked(&in->from, mad.local_id, &name) : !tp_cm_name_of_mad(&mad, &name)) {
		answer(in, &mad);
		return;
	}
	if (mad.kind == TP_CM_REQ)
		note_asked(&in->from, mad.local_id, &name);
	int fd = atomic_load_explicit(&unix_fd, memory_order_relaxed);
	if (fd < 0 || atomic_load_explicit(&owner, memory_order_relaxed) != getpid()) {
		fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
		atomic_store_explicit(&unix_fd, fd, memory_order_relaxed);
		atomic_store_explicit(&owner, getpid(), memory_order_relaxed);
	}
	struct tp_gsi_parcel parcel = { .magic = TP_GSI_MAGIC, .tos = in->tos, .ttl = in->ttl, .struck = struck, .from = in->from, .to = in->to };
	memcpy(parcel.packet, in->data, sizeof(parcel.packet));
	socklen_t length = tp_cm_name_address(&name, &address);
	/* A full queue is a lost message: it is sent again. */
	if (sendto(fd, &parcel, sizeof(parcel), MSG_DONTWAIT | MSG_NOSIGNAL, (struct sockaddr *)&address, length) < 0 && errno == ECONNREFUSED)
		answer(in, &mad);
}
