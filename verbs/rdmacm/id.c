/* Identifiers, event channels, addresses. */
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>
#include "verbs/rdmacm/cm.h"

enum { MAX_BACKLOG = 1024, RETIRED = 64 };

pthread_mutex_t cm_lock = PTHREAD_MUTEX_INITIALIZER;
struct cm_id *cm_ids;
static pthread_cond_t acked_cond = PTHREAD_COND_INITIALIZER;

/* ---- channels and events ---- */

struct rdma_event_channel *rdma_create_event_channel(void)
{
	int error = cm_bus_start();
	struct cm_channel *channel = error ? NULL : calloc(1, sizeof(*channel));
	if (!channel) {
		errno = error ? error : ENOMEM;
		return NULL;
	}
	channel->last = &channel->first;
	channel->pub.fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
	if (channel->pub.fd < 0) {
		free(channel);
		return NULL;
	}
	return &channel->pub;
}

static void unlink_locked(struct cm_id *id)
{
	for (struct cm_id **at = &cm_ids; *at; at = &(*at)->next)
		if (*at == id) {
			*at = id->next;
			break;
		}
}

/* Takes an event out of its channel, and the ring for it back. The count may have been read by a thread
 * that comes for the event just now, and the program decides whether a read waits: so this one must not. */
static void take_out_locked(struct cm_channel *channel, struct cm_event **at)
{
	eventfd_t one;
	struct iovec part = { &one, sizeof(one) };
	struct cm_event *event = *at;
	int error = errno;
	*at = event->next;
	if (channel->last == &event->next)
		channel->last = at;
	event->next = NULL;
	/* A kernel that can't leaves one ring too many: who fetches then waits for the next event. */
	if (preadv2(channel->pub.fd, &part, 1, -1, RWF_NOWAIT) < 0)
		errno = error;
}

/* A request that the program was never told of. */
static void refuse_unseen_locked(struct cm_id *request)
{
	cm_leave_locked(request);
	unlink_locked(request);
	free(request);
}

/* Frees a channel, but a while later: a program (rping) may have a thread that comes back to one which another thread has destroyed at
 * its end. It finds no descriptor then, as it would find none with the kernel. */
static void retire_locked(struct cm_channel *channel)
{
	static struct cm_channel *retired[RETIRED];
	static unsigned count;
	close(channel->pub.fd);
	channel->pub.fd = -1;
	channel->first = NULL;
	free(retired[count % RETIRED]);
	retired[count++ % RETIRED] = channel;
}

/* Ids that are still there have lost their connections, as when the kernel closes a channel: the program may still destroy them. */
void rdma_destroy_event_channel(struct rdma_event_channel *pub)
{
	struct cm_channel *channel = (struct cm_channel *)pub;
	pthread_mutex_lock(&cm_lock);
	for (struct cm_event *event = channel->first, *next; event; event = next) {
		next = event->next;
		if (event->pub.id && event->owner != cm_of(event->pub.id))
			refuse_unseen_locked(cm_of(event->pub.id));
		free(event);
	}
	for (struct cm_id *id = cm_ids; id; id = id->next)
		if (id->channel == channel) {
			cm_leave_locked(id);
			cm_bus_release(id->port_fd);
			id->port_fd = -1;
			id->channel = NULL;
		}
	retire_locked(channel);
	pthread_mutex_unlock(&cm_lock);
}

void cm_raise_locked(struct cm_id *id, struct cm_id *listener, enum rdma_cm_event_type type, int status, const struct rdma_conn_param *conn,
	const struct rdma_ud_param *ud)
{
	struct cm_event *event = calloc(1, sizeof(*event));
	struct cm_channel *channel = id->channel;
	if (!event || !channel) {
		free(event);
		return;
	}
	event->pub.id = &id->pub;
	event->pub.listen_id = listener ? &listener->pub : NULL;
	event->pub.event = type;
	event->pub.status = status;
	event->owner = listener ? listener : id;
	const void *data = conn ? conn->private_data : ud ? ud->private_data : NULL;
	uint8_t bytes = conn ? conn->private_data_len : ud ? ud->private_data_len : 0;
	if (data)
		memcpy(event->private_data, data, bytes);
	if (ud) {
		event->pub.param.ud = *ud;
		event->pub.param.ud.private_data = bytes ? event->private_data : NULL;
	} else if (conn) {
		event->pub.param.conn = *conn;
		event->pub.param.conn.private_data = bytes ? event->private_data : NULL;
	}
	*channel->last = event;
	channel->last = &event->next;
	eventfd_write(channel->pub.fd, 1);
}

void cm_raise_joined_locked(struct cm_id *id, const struct rdma_ud_param *ud, void *context)
{
	struct cm_event **place = id->channel ? id->channel->last : NULL;
	cm_raise_locked(id, NULL, RDMA_CM_EVENT_MULTICAST_JOIN, 0, NULL, ud);
	if (place && *place)
		(*place)->pub.param.ud.private_data = context;
}

void cm_raise_written_locked(struct cm_id *id, enum rdma_cm_event_type type, int status, uint64_t arg)
{
	struct cm_event **place = id->channel ? id->channel->last : NULL;
	cm_raise_locked(id, NULL, type, status, NULL, NULL);
	/* The newest member of the event's union. */
	if (place && *place)
		memcpy(&(*place)->pub.param, &arg, sizeof(arg));
}

int rdma_get_cm_event(struct rdma_event_channel *pub, struct rdma_cm_event **out)
{
	struct cm_channel *channel = (struct cm_channel *)pub;
	if (!pub || !out)
		return cm_fail(EINVAL);
	for (;;) {
		eventfd_t one;
		if (eventfd_read(pub->fd, &one))
			return -1;
		pthread_mutex_lock(&cm_lock);
		struct cm_event *event = channel->first;
		if (event) {
			channel->first = event->next;
			if (!channel->first)
				channel->last = &channel->first;
			if (cm_fetch_locked(event)) {
				event->owner->given++;
			} else {
				free(event);
				event = NULL;
			}
		}
		pthread_mutex_unlock(&cm_lock);
		/* None: its id was destroyed meanwhile, or it is the end of what never began. */
		if (event) {
			*out = &event->pub;
			return 0;
		}
	}
}

int rdma_ack_cm_event(struct rdma_cm_event *pub)
{
	if (!pub)
		return cm_fail(EINVAL);
	struct cm_event *event = (struct cm_event *)pub;
	pthread_mutex_lock(&cm_lock);
	event->owner->acked++;
	pthread_cond_broadcast(&acked_cond);
	pthread_mutex_unlock(&cm_lock);
	free(event);
	return 0;
}

int cm_complete(struct cm_id *id)
{
	if (!id->sync)
		return 0;
	if (id->pub.event) {
		rdma_ack_cm_event(id->pub.event);
		id->pub.event = NULL;
	}
	if (rdma_get_cm_event(id->pub.channel, &id->pub.event))
		return -1;
	int status = id->pub.event->status;
	if (id->pub.event->event == RDMA_CM_EVENT_REJECTED)
		return cm_fail(ECONNREFUSED);
	return status ? cm_fail(status < 0 ? -status : status) : 0;
}

/* ---- ids ---- */

struct cm_id *cm_new(struct rdma_event_channel *channel, void *context, enum rdma_port_space space)
{
	struct cm_id *id = calloc(1, sizeof(*id));
	if (!id)
		return NULL;
	id->pub.channel = channel;
	id->channel = (struct cm_channel *)channel;
	id->pub.context = context;
	id->pub.ps = space;
	id->pub.qp_type = space == RDMA_PS_UDP || space == RDMA_PS_IPOIB ? IBV_QPT_UD : IBV_QPT_RC;
	id->ud = id->pub.qp_type == IBV_QPT_UD;
	id->port_fd = -1;
	id->ack_timeout = 17;       /* as Linux has it for RoCE: a packet lives 2^16 units, and one more */
	id->retry_count = id->rnr_retry_count = 7;
	if (getrandom(&id->psn, sizeof(id->psn), 0) != sizeof(id->psn) || getrandom(&id->transaction, sizeof(id->transaction), 0) != sizeof(id->transaction))
		id->psn = (uint32_t)cm_now_ms();
	id->psn &= 0xffffff;
	return id;
}

int rdma_create_id(struct rdma_event_channel *channel, struct rdma_cm_id **out, void *context, enum rdma_port_space space)
{
	struct rdma_event_channel *its = channel ? channel : rdma_create_event_channel();
	struct cm_id *id = its ? cm_new(its, context, space) : NULL;
	if (!id) {
		if (its && !channel)
			rdma_destroy_event_channel(its);
		return its ? cm_fail(ENOMEM) : -1;
	}
	id->sync = !channel;
	pthread_mutex_lock(&cm_lock);
	id->next = cm_ids;
	cm_ids = id;
	pthread_mutex_unlock(&cm_lock);
	*out = &id->pub;
	return 0;
}

/* Takes the events of id out of the channel. Requests that its program was never told of are refused. */
static void drop_events_locked(struct cm_id *id)
{
	struct cm_channel *channel = id->channel;
	for (struct cm_event **at = channel ? &channel->first : NULL; at && *at;) {
		struct cm_event *event = *at;
		if (event->owner != id && event->pub.id != &id->pub) {
			at = &event->next;
			continue;
		}
		struct cm_id *request = event->pub.id != &id->pub ? cm_of(event->pub.id) : NULL;
		take_out_locked(channel, at);
		free(event);
		if (request)
			refuse_unseen_locked(request);
	}
}

int rdma_destroy_id(struct rdma_cm_id *pub)
{
	struct cm_id *id = cm_of(pub);
	if (pub->event) {
		rdma_ack_cm_event(pub->event);
		pub->event = NULL;
	}
	cm_forget_groups(id);
	pthread_mutex_lock(&cm_lock);
	cm_leave_locked(id);
	cm_bus_release(id->port_fd);
	drop_events_locked(id);
	unlink_locked(id);
	/* Its connections go on without it; a request that is repeated is still known by having had a listener. */
	for (struct cm_id *other = cm_ids; other; other = other->next)
		if (other->listener == id)
			other->listener = other;
	while (id->given != id->acked)
		pthread_cond_wait(&acked_cond, &cm_lock);
	struct cm_channel *own = id->sync ? id->channel : NULL;
	pthread_mutex_unlock(&cm_lock);
	if (own)
		rdma_destroy_event_channel(&own->pub);
	free(pub->route.path_rec);
	free(id->for_requests);
	rdma_freeaddrinfo(id->resolved);
	free(id);
	return 0;
}

int rdma_migrate_id(struct rdma_cm_id *pub, struct rdma_event_channel *channel)
{
	struct cm_id *id = cm_of(pub);
	struct rdma_event_channel *its = channel ? channel : rdma_create_event_channel();
	if (!its)
		return -1;
	pthread_mutex_lock(&cm_lock);
	struct cm_channel *from = id->channel, *to = (struct cm_channel *)its;
	bool was_sync = id->sync;
	for (struct cm_event **at = from && from != to ? &from->first : NULL; at && *at;) {
		struct cm_event *event = *at;
		if (event->pub.id != pub && event->owner != id) {
			at = &event->next;
			continue;
		}
		take_out_locked(from, at);
		*to->last = event;
		to->last = &event->next;
		eventfd_write(its->fd, 1);
		/* A request that waits to be fetched goes where its listener goes. */
		event->pub.id->channel = its;
		cm_of(event->pub.id)->channel = to;
	}
	pub->channel = its;
	id->channel = to;
	id->sync = !channel;
	pthread_mutex_unlock(&cm_lock);
	if (was_sync && from && from != to)
		rdma_destroy_event_channel(&from->pub);
	return 0;
}

/* ---- addresses ---- */

static uint16_t *port_at(struct sockaddr_storage *addr) { return &((struct sockaddr_in *)(void *)addr)->sin_port; }

static socklen_t length_of(const struct sockaddr *addr)
{
	return addr->sa_family == AF_INET ? sizeof(struct sockaddr_in) : addr->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6) : 0;
}

static bool is_any(const struct sockaddr *addr)
{
	static const uint8_t zeros[16];
	return addr->sa_family == AF_INET ? !memcmp(&((const struct sockaddr_in *)(const void *)addr)->sin_addr, zeros, 4) :
		!memcmp(&((const struct sockaddr_in6 *)(const void *)addr)->sin6_addr, zeros, 16);
}

static bool is_loopback(const struct sockaddr *addr)
{
	if (addr->sa_family == AF_INET)
		return *(const uint8_t *)&((const struct sockaddr_in *)(const void *)addr)->sin_addr == 127;
	return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)(const void *)addr)->sin6_addr);
}

static void warn_of_source(const struct sockaddr *addr)
{
	char name[INET6_ADDRSTRLEN] = "?", text[256];
	inet_ntop(addr->sa_family, addr->sa_family == AF_INET6 ? (const void *)&((const struct sockaddr_in6 *)(const void *)addr)->sin6_addr :
		(const void *)&((const struct sockaddr_in *)(const void *)addr)->sin_addr, name, sizeof(name));
	snprintf(text, sizeof(text), "no GID of the software card has the address %s: `telpher verbs gids` shows those it has; TELPHER_VERBS_GIDS=all "
		"gives each address one, TELPHER_VERBS_IFNAME chooses interfaces", name);
	tp_card_inner_warn(text);
}

/* The device of the source address. Loopback addresses that no GID has stand for the first GID. */
static int bind_device(struct cm_id *id, const struct sockaddr *addr)
{
	union ibv_gid gid;
	struct rdma_cm_id *pub = &id->pub;
	struct ibv_port_attr port;
	cm_gid_of(addr, &gid);
	struct ibv_context *verbs = cm_device_of(&gid, &pub->port_num, &id->sgid_index);
	if (!verbs && is_loopback(addr))
		verbs = cm_device_any(&gid, &pub->port_num, &id->sgid_index);
	if (!verbs) {
		warn_of_source(addr);
		return ENODEV;
	}
	if (ibv_query_port(verbs, pub->port_num, &port))
		return errno;
	pub->verbs = verbs;
	pub->pd = pub->pd ? pub->pd : cm_device_pd(verbs);
	id->mtu = (uint8_t)port.active_mtu;
	pub->route.addr.addr.ibaddr.sgid = gid;
	pub->route.addr.addr.ibaddr.pkey = htons(0xffff);
	return 0;
}

static int hold_port_locked(struct cm_id *id)
{
	uint16_t *port = port_at(&id->pub.route.addr.src_storage);
	if (id->port_fd >= 0)
		return 0;
	id->held_ms = cm_now_ms();
	if (*port)
		return cm_bus_hold((uint16_t)id->pub.ps, ntohs(*port), &id->port_fd);
	int error = EADDRINUSE;
	for (int tries = 0; tries < 1000 && error == EADDRINUSE; tries++) {
		uint16_t number;
		if (getrandom(&number, sizeof(number), 0) != sizeof(number))
			return errno;
		number = (uint16_t)(32768 + number % 28232);
		error = cm_bus_hold((uint16_t)id->pub.ps, number, &id->port_fd);
		if (!error)
			*port = htons(number);
	}
	return error;
}

/* Holds the port, or a free one where it is 0: the id is bound then. */
static int hold_port(struct cm_id *id)
{
	pthread_mutex_lock(&cm_lock);
	int error = hold_port_locked(id);
	if (!error)
		id->state = CM_BOUND;
	pthread_mutex_unlock(&cm_lock);
	return error;
}

/* A loopback address that no GID has is bound to no device: who listens there can be reached by any of this machine's, and libfabric,
 * whose servers ask for such an address when they are told none, then takes the devices' own, which other machines can reach. */
static bool has_no_device(const struct sockaddr *addr)
{
	union ibv_gid gid;
	uint8_t port, index;
	cm_gid_of(addr, &gid);
	return is_any(addr) || (is_loopback(addr) && !cm_device_of(&gid, &port, &index));
}

static int bind_addr(struct cm_id *id, const struct sockaddr *addr)
{
	socklen_t bytes = length_of(addr);
	if (!bytes)
		return EAFNOSUPPORT;
	if (id->state != CM_IDLE)
		return EINVAL;
	memset(&id->pub.route.addr.src_storage, 0, sizeof(id->pub.route.addr.src_storage));
	memcpy(&id->pub.route.addr.src_storage, addr, bytes);
	int error = has_no_device(addr) ? 0 : bind_device(id, addr);
	return error ? error : hold_port(id);
}

int rdma_bind_addr(struct rdma_cm_id *pub, struct sockaddr *addr)
{
	int error = bind_addr(cm_of(pub), addr);
	return error ? cm_fail(error) : 0;
}

int rdma_listen(struct rdma_cm_id *pub, int backlog)
{
	struct cm_id *id = cm_of(pub);
	struct sockaddr_storage any = { .ss_family = AF_INET };
	int error = id->state == CM_IDLE ? bind_addr(id, (struct sockaddr *)&any) : id->state == CM_BOUND ? hold_port(id) : EINVAL;
	if (error)
		return cm_fail(error);
	pthread_mutex_lock(&cm_lock);
	id->backlog = backlog > 0 && backlog < MAX_BACKLOG ? backlog : MAX_BACKLOG;
	id->state = CM_LISTENING;
	pthread_mutex_unlock(&cm_lock);
	/* Where the wire can't be heard (that was logged, with its cure) this machine's processes still can. */
	tp_card_inner_gsi_listen(pub->verbs ? &pub->route.addr.addr.ibaddr.sgid : NULL);
	return 0;
}

/* The address that the system would send from. */
static int find_source(const struct sockaddr *to, struct sockaddr_storage *out)
{
	struct sockaddr_storage probe = { 0 };
	socklen_t bytes = sizeof(*out);
	memcpy(&probe, to, length_of(to));
	if (!*port_at(&probe))
		*port_at(&probe) = htons(4791);
	int fd = socket(to->sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	int error = fd < 0 || connect(fd, (struct sockaddr *)&probe, length_of(to)) || getsockname(fd, (struct sockaddr *)out, &bytes) ? errno : 0;
	if (fd >= 0)
		close(fd);
	*port_at(out) = 0;
	return error;
}

static int resolve(struct cm_id *id, const struct sockaddr *from, const struct sockaddr *to)
{
	struct rdma_addr *addr = &id->pub.route.addr;
	if (!length_of(to) || (id->state != CM_IDLE && id->state != CM_BOUND))
		return length_of(to) ? EINVAL : EAFNOSUPPORT;
	uint16_t port = from && length_of(from) ? ((const struct sockaddr_in *)(const void *)from)->sin_port : *port_at(&addr->src_storage);
	int error = 0;
	if (from && length_of(from) && !is_any(from))
		memcpy(&addr->src_storage, from, length_of(from));
	else if (id->state == CM_IDLE || is_any(&addr->src_addr))
		error = find_source(to, &addr->src_storage);
	*port_at(&addr->src_storage) = port;
	memset(&addr->dst_storage, 0, sizeof(addr->dst_storage));
	memcpy(&addr->dst_storage, to, length_of(to));
	if (!error)
		error = bind_device(id, &addr->src_addr);
	if (error)
		return error;
	cm_gid_of(to, &addr->addr.ibaddr.dgid);
	if (is_loopback(to))
		addr->addr.ibaddr.dgid = addr->addr.ibaddr.sgid;
	return hold_port(id);
}

int rdma_resolve_addr(struct rdma_cm_id *pub, struct sockaddr *from, struct sockaddr *to, int timeout_ms)
{
	struct cm_id *id = cm_of(pub);
	(void)timeout_ms;       /* the answer is there at once */
	int error = to ? resolve(id, from, to) : EINVAL;
	if (error)
		return cm_fail(error);
	pthread_mutex_lock(&cm_lock);
	cm_raise_locked(id, NULL, RDMA_CM_EVENT_ADDR_RESOLVED, 0, NULL, NULL);
	pthread_mutex_unlock(&cm_lock);
	return cm_complete(id);
}

int rdma_resolve_route(struct rdma_cm_id *pub, int timeout_ms)
{
	struct cm_id *id = cm_of(pub);
	(void)timeout_ms;
	struct ibv_sa_path_rec *path = pub->verbs && !pub->route.path_rec ? calloc(1, sizeof(*path)) : NULL;
	if (!pub->verbs || (!path && !pub->route.path_rec))
		return cm_fail(pub->verbs ? ENOMEM : EINVAL);
	if (path) {
		*path = (struct ibv_sa_path_rec){ .dgid = pub->route.addr.addr.ibaddr.dgid, .sgid = pub->route.addr.addr.ibaddr.sgid, .hop_limit = 64,
			.traffic_class = id->tos, .reversible = 1, .numb_path = 1, .pkey = htons(0xffff), .mtu_selector = 2, .mtu = id->mtu,
			.rate_selector = 2, .rate = 16, .packet_life_time_selector = 2, .packet_life_time = 18 };
		pub->route.path_rec = path;
		pub->route.num_paths = 1;
	}
	pthread_mutex_lock(&cm_lock);
	cm_raise_locked(id, NULL, RDMA_CM_EVENT_ROUTE_RESOLVED, 0, NULL, NULL);
	pthread_mutex_unlock(&cm_lock);
	return cm_complete(id);
}

__be16 rdma_get_src_port(struct rdma_cm_id *pub) { return *port_at(&pub->route.addr.src_storage); }
__be16 rdma_get_dst_port(struct rdma_cm_id *pub) { return *port_at(&pub->route.addr.dst_storage); }
