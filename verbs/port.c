/* Endpoints: sockets made, packets sent and received in bulk (port.h). */
#include <errno.h>
#include <linux/udp.h>
#include <netinet/ip.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "verbs/engine.h"
#include "verbs/last.h"
#include "verbs/port.h"
#include "verbs/rc.h"
#include "verbs/tsan.h"

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#define UDP_GRO 104
#endif
#ifndef SOL_UDP
#define SOL_UDP 17
#endif
enum { SOURCE_FIRST = 49152, SOURCE_COUNT = 16384, RECEIVE_BYTES = 8 << 20, SEND_BYTES = 4 << 20 };
enum { BUDGET_FIRST = 64 << 10, BUDGET_MAX = 1 << 20 };
enum { BATCH = 8, BUFFER_BYTES = 65536, CONTROL_BYTES = 128, BATCHES = 4 };

/* A packet orders what its sender did before what its receiver does. Where both are threads of one process the thread sanitizer can't
 * know that: it goes from one socket to another. */
static char order_of_packets;

struct tp_receiver {
	struct mmsghdr messages[BATCH];
	struct iovec vectors[BATCH];
	union tp_addr from[BATCH];
	_Alignas(struct cmsghdr) uint8_t control[BATCH][CONTROL_BYTES];
	uint8_t buffers[BATCH][BUFFER_BYTES];
};

static struct tp_endpoint *_Atomic endpoints;
static pthread_mutex_t endpoints_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

struct tp_endpoint *tp_endpoint_first(void) { return atomic_load_explicit(&endpoints, memory_order_acquire); }

static void close_all(struct tp_endpoint *endpoint)
{
	if (endpoint->receive_fd >= 0)
		close(endpoint->receive_fd);
	for (int i = 0; i < TP_PORT_SENDERS; i++) {
		int fd = atomic_load_explicit(&endpoint->senders[i], memory_order_relaxed);
		if (fd >= 0)
			close(fd);
	}
}

/* A forked child must not take its parent's packets. Its own endpoints are made anew. */
static void fork_child(void)
{
	for (struct tp_endpoint *e = tp_endpoint_first(); e; e = e->next)
		close_all(e);
	atomic_store_explicit(&endpoints, NULL, memory_order_relaxed);
	pthread_mutex_init(&endpoints_lock, NULL);
	tp_wire_forget();
	tp_rc_hold_forget();
	tp_last_forget();
	tp_flow_forget();
}
static void watch_fork(void) { pthread_atfork(NULL, NULL, fork_child); }

static void set_int(int fd, int level, int option, int value) { setsockopt(fd, level, option, &value, sizeof(value)); }

static int open_socket(int family, int *fd)
{
	int s = socket(family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (s < 0)
		return TP_CARD_FAIL(errno, "no socket for RoCE v2: %s", strerror(errno));
	if (family == AF_INET6) {
		set_int(s, IPPROTO_IPV6, IPV6_V6ONLY, 1);
		set_int(s, IPPROTO_IPV6, IPV6_MTU_DISCOVER, IPV6_PMTUDISC_DO);
	} else {
		set_int(s, IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO);
	}
	*fd = s;
	return 0;
}

static void set_receiving(int fd, int family)
{
	set_int(fd, SOL_SOCKET, SO_RCVBUF, RECEIVE_BYTES);
	set_int(fd, SOL_UDP, UDP_GRO, 1);
	if (family == AF_INET6) {
		set_int(fd, IPPROTO_IPV6, IPV6_RECVTCLASS, 1);
		set_int(fd, IPPROTO_IPV6, IPV6_RECVHOPLIMIT, 1);
	} else {
		set_int(fd, IPPROTO_IP, IP_RECVTOS, 1);
		set_int(fd, IPPROTO_IP, IP_RECVTTL, 1);
	}
}

static union tp_addr with_port(const union tp_addr *addr, uint16_t port)
{
	union tp_addr out = *addr;
	out.v4.sin_port = htons(port);      /* at the same place in IPv6's */
	return out;
}

int tp_endpoint_bind(const union tp_addr *addr, bool reuse, int *fd)
{
	int s = -1, error = open_socket(addr->sa.sa_family, &s);
	if (error)
		return error;
	union tp_addr local = with_port(addr, TP_WIRE_UDP_PORT);
	if (reuse)
		set_int(s, SOL_SOCKET, SO_REUSEPORT, 1);
	set_receiving(s, addr->sa.sa_family);
	if (bind(s, &local.sa, tp_addr_len(&local)) < 0) {
		error = errno;
		close(s);
		return error;
	}
	*fd = s;
	return 0;
}

static struct tp_endpoint *new_endpoint(const union tp_addr *addr)
{
	struct tp_endpoint *e = tp_alloc(1, sizeof(*e), "an endpoint of the wire");
	if (!e)
		return NULL;
	e->receiver = tp_alloc(1, sizeof(*e->receiver), "receive buffers of the wire");
	if (!e->receiver) {
		free(e);
		return NULL;
	}
	e->addr = with_port(addr, TP_WIRE_UDP_PORT);
	e->receive_fd = -1;
	e->budget = BUDGET_FIRST;
	pthread_mutex_init(&e->receive_lock, NULL);
	pthread_mutex_init(&e->lock, NULL);
	for (int i = 0; i < TP_PORT_SENDERS; i++)
		atomic_init(&e->senders[i], -1);
	return e;
}

/* Half of the buffer: the other half is for what is sent twice, and for what others send there. */
static void set_budget(struct tp_endpoint *e)
{
	int bytes = 0;
	socklen_t length = sizeof(bytes);
	if (getsockopt(e->receive_fd, SOL_SOCKET, SO_RCVBUF, &bytes, &length) == 0)
		e->budget = (uint32_t)TP_MIN(bytes / 2, (int)BUDGET_MAX);
}

static bool same_host(const union tp_addr *a, const union tp_addr *b)
{
	if (a->sa.sa_family != b->sa.sa_family)
		return false;
	return a->sa.sa_family == AF_INET6 ? memcmp(&a->v6.sin6_addr, &b->v6.sin6_addr, 16) == 0 : a->v4.sin_addr.s_addr == b->v4.sin_addr.s_addr;
}

int tp_endpoint_open(const union tp_addr *addr, struct tp_endpoint **out)
{
	pthread_once(&fork_once, watch_fork);
	pthread_mutex_lock(&endpoints_lock);
	int error = 0;
	struct tp_endpoint *e = tp_endpoint_first();
	while (e && (e->multicast || !same_host(&e->addr, addr)))
		e = e->next;
	if (!e) {
		e = new_endpoint(addr);
		error = e ? tp_share_socket(&e->addr, &e->receive_fd) : ENOMEM;
		if (!error) {
			set_budget(e);
			e->next = tp_endpoint_first();
			/* Pairs with the acquire in tp_endpoint_first: who finds it sees it whole. */
			atomic_store_explicit(&endpoints, e, memory_order_release);
		} else if (e) {
			free(e->receiver);
			free(e);
		}
	}
	pthread_mutex_unlock(&endpoints_lock);
	if (!error)
		*out = e;
	return error;
}

int tp_endpoint_join(const union tp_addr *group, const union tp_addr *local, uint32_t ifindex, struct tp_endpoint **out)
{
	struct tp_endpoint *e = new_endpoint(group);
	if (!e)
		return ENOMEM;
	e->multicast = true;
	int error = open_socket(group->sa.sa_family, &e->receive_fd);
	if (!error) {
		int s = e->receive_fd, joined;
		set_int(s, SOL_SOCKET, SO_REUSEADDR, 1);
		set_receiving(s, group->sa.sa_family);
		if (group->sa.sa_family == AF_INET6) {
			struct ipv6_mreq request = { .ipv6mr_multiaddr = group->v6.sin6_addr, .ipv6mr_interface = ifindex };
			set_int(s, IPPROTO_IPV6, IPV6_MULTICAST_ALL, 0);
			joined = setsockopt(s, IPPROTO_IPV6, IPV6_ADD_MEMBERSHIP, &request, sizeof(request));
		} else {
			struct ip_mreqn request = { .imr_multiaddr = group->v4.sin_addr, .imr_address = local->v4.sin_addr, .imr_ifindex = (int)ifindex };
			set_int(s, IPPROTO_IP, IP_MULTICAST_ALL, 0);
			joined = setsockopt(s, IPPROTO_IP, IP_ADD_MEMBERSHIP, &request, sizeof(request));
		}
		if (joined < 0 || bind(s, &e->addr.sa, tp_addr_len(&e->addr)) < 0) {
			char text[TP_ADDR_TEXT];
			error = TP_CARD_FAIL(errno, "can't receive the group %s: %s", tp_addr_format(&e->addr, text), strerror(errno));
		}
	}
	if (error) {
		tp_endpoint_leave(e);
		return error;
	}
	*out = e;
	return 0;
}

void tp_endpoint_leave(struct tp_endpoint *endpoint)
{
	close_all(endpoint);
	pthread_mutex_destroy(&endpoint->receive_lock);
	pthread_mutex_destroy(&endpoint->lock);
	free(endpoint->receiver);
	free(endpoint);
}

/* ---- sending ---- */

/* Kernels before 4.18, and what stands in for one, may take no notice of the wish in a message, and send it all as one packet. */
static bool can_segment(int fd)
{
	int size;
	socklen_t length = sizeof(size);
	return getsockopt(fd, SOL_UDP, UDP_SEGMENT, &size, &length) == 0;
}

/* A socket on a free port of the range, tried from a random one. */
static int make_sender(struct tp_endpoint *e, uint32_t n)
{
	int s = -1, error = open_socket(e->addr.sa.sa_family, &s);
	if (error)
		return error;
	set_int(s, SOL_SOCKET, SO_SNDBUF, SEND_BYTES);
	set_int(s, SOL_SOCKET, SO_RCVBUF, 1);       /* nothing that comes here is for us */
	if (!can_segment(s)) {
		TP_INFO(TP_NET, "the kernel knows no segmentation offload for UDP: packets are sent one by one");
		atomic_store_explicit(&e->whole, true, memory_order_relaxed);
	}
	if (e->addr.sa.sa_family == AF_INET6) {
		set_int(s, IPPROTO_IPV6, IPV6_MULTICAST_IF, (int)e->addr.v6.sin6_scope_id);
	} else {
		struct ip_mreqn from = { .imr_address = e->addr.v4.sin_addr };
		setsockopt(s, IPPROTO_IP, IP_MULTICAST_IF, &from, sizeof(from));
	}
	uint16_t random;
	tp_secret_random(&random, sizeof(random));
	union tp_addr local = e->addr;
	error = EADDRINUSE;
	for (int i = 0; i < SOURCE_COUNT && error == EADDRINUSE; i++) {
		local = with_port(&e->addr, (uint16_t)(SOURCE_FIRST + (random + i * 61) % SOURCE_COUNT));
		error = bind(s, &local.sa, tp_addr_len(&local)) < 0 ? errno : 0;
	}
	if (error) {
		char text[TP_ADDR_TEXT];
		close(s);
		return TP_CARD_FAIL(error, "no source port is to be had at %s: %s", tp_addr_format(&e->addr, text), strerror(error));
	}
	e->sender_ports[n] = local.v4.sin_port;
	/* Pairs with the acquire in sender_fd: the port is there too. */
	atomic_store_explicit(&e->senders[n], s, memory_order_release);
	return 0;
}

int tp_endpoint_sender(struct tp_endpoint *endpoint, uint32_t n, union tp_addr *out)
{
	int error = 0;
	pthread_mutex_lock(&endpoint->lock);
	if (atomic_load_explicit(&endpoint->senders[n], memory_order_relaxed) < 0)
		error = make_sender(endpoint, n);
	pthread_mutex_unlock(&endpoint->lock);
	if (error)
		return error;
	*out = endpoint->addr;
	out->v4.sin_port = endpoint->sender_ports[n];
	return 0;
}

bool tp_endpoint_is_sender(const union tp_addr *addr)
{
	for (struct tp_endpoint *e = tp_endpoint_first(); e; e = e->next)
		for (int i = 0; same_host(&e->addr, addr) && i < TP_PORT_SENDERS; i++)
			if (atomic_load_explicit(&e->senders[i], memory_order_acquire) >= 0 && e->sender_ports[i] == addr->v4.sin_port)
				return true;
	return false;
}

static size_t put_control(uint8_t *at, int level, int type, const void *value, size_t bytes)
{
	struct cmsghdr *c = (struct cmsghdr *)(void *)at;
	memset(at, 0, CMSG_SPACE(bytes));
	c->cmsg_level = level;
	c->cmsg_type = type;
	c->cmsg_len = CMSG_LEN(bytes);
	memcpy(CMSG_DATA(c), value, bytes);
	return CMSG_SPACE(bytes);
}

static size_t make_control(const struct tp_route *route, uint32_t segment, uint8_t *out)
{
	size_t bytes = 0;
	bool v6 = route->to.sa.sa_family == AF_INET6;
	int tos = route->tos, ttl = route->ttl;
	if (segment) {
		uint16_t size = (uint16_t)segment;
		bytes += put_control(out + bytes, SOL_UDP, UDP_SEGMENT, &size, sizeof(size));
	}
	if (tos)
		bytes += put_control(out + bytes, v6 ? IPPROTO_IPV6 : IPPROTO_IP, v6 ? IPV6_TCLASS : IP_TOS, &tos, sizeof(tos));
	if (ttl)
		bytes += put_control(out + bytes, v6 ? IPPROTO_IPV6 : IPPROTO_IP, v6 ? IPV6_HOPLIMIT : IP_TTL, &ttl, sizeof(ttl));
	return bytes;
}

int tp_endpoint_send(struct tp_endpoint *endpoint, uint32_t sender, const struct tp_route *route, const struct tp_frame *frames, int count,
	int *error)
{
	struct mmsghdr messages[TP_PORT_FRAMES];
	struct iovec vectors[TP_PORT_FRAMES];
	_Alignas(struct cmsghdr) uint8_t control[TP_PORT_FRAMES][CONTROL_BYTES];
	int fd = atomic_load_explicit(&endpoint->senders[sender], memory_order_acquire);
	for (int i = 0; i < count; i++) {
		uint32_t segment = frames[i].bytes > frames[i].segment ? frames[i].segment : 0;
		vectors[i] = (struct iovec){ .iov_base = (void *)(uintptr_t)frames[i].data, .iov_len = frames[i].bytes };
		messages[i].msg_hdr = (struct msghdr){ .msg_name = (void *)(uintptr_t)&route->to, .msg_namelen = tp_addr_len(&route->to),
			.msg_iov = &vectors[i], .msg_iovlen = 1, .msg_control = control[i],
			.msg_controllen = make_control(route, segment, control[i]) };
	}
	int sent = 0;
	*error = 0;
	tp_tsan_release(&order_of_packets);
	while (sent < count) {
		int n = count - sent == 1 ? (sendmsg(fd, &messages[sent].msg_hdr, MSG_DONTWAIT) < 0 ? -1 : 1) :
			sendmmsg(fd, messages + sent, (unsigned)(count - sent), MSG_DONTWAIT);
		if (n > 0) {
			sent += n;
		} else if (errno != EINTR) {
			*error = errno == ENOBUFS || errno == EWOULDBLOCK ? EAGAIN : errno;
			break;
		}
	}
	return sent;
}

/* ---- receiving ---- */

/* Reads what the kernel says of a message; returns the length of its packets (0: it is one). */
static uint32_t read_control(struct msghdr *message, struct tp_ingress *packet)
{
	int segment = 0;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c)) {
		int value = 0;
		memcpy(&value, CMSG_DATA(c), TP_MIN(sizeof(value), c->cmsg_len - CMSG_LEN(0)));
		if (c->cmsg_level == SOL_UDP && c->cmsg_type == UDP_GRO)
			segment = value;
		else if ((c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_TOS) || (c->cmsg_level == IPPROTO_IPV6 && c->cmsg_type == IPV6_TCLASS))
			packet->tos = (uint8_t)value;
		else if ((c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_TTL) || (c->cmsg_level == IPPROTO_IPV6 && c->cmsg_type == IPV6_HOPLIMIT))
			packet->ttl = (uint8_t)value;
	}
	return segment > 0 ? (uint32_t)segment : 0;
}

/* The packet of that place in a message. */
static void take_one(struct tp_ingress *packet, const uint8_t *message, uint32_t segment, uint32_t total, uint32_t place,
	void (*take)(const struct tp_ingress *, void *), void *arg)
{
	packet->data = message + place * segment;
	packet->bytes = TP_MIN(segment, total - place * segment);
	packet->index = (uint16_t)place;
	take(packet, arg);
}

static int split(struct tp_endpoint *endpoint, int i, void (*take)(const struct tp_ingress *, void *), void *arg)
{
	struct tp_receiver *r = endpoint->receiver;
	struct tp_ingress packet = { .endpoint = endpoint, .from = r->from[i], .to = endpoint->addr };
	uint32_t segment = read_control(&r->messages[i].msg_hdr, &packet), total = r->messages[i].msg_len;
	if (r->messages[i].msg_hdr.msg_flags & MSG_TRUNC)
		return 0;
	if (!segment)
		segment = total;
	/* An acknowledgement behind requests was due before them (add_ack in rc_request.c). */
	uint32_t last = total ? (total - 1) / segment : 0;
	bool swapped = last > 0 && tp_wire_operation(r->buffers[i][last * segment]) == TP_OP_ACK;
	if (swapped)
		take_one(&packet, r->buffers[i], segment, total, last, take, arg);
	for (uint32_t k = 0; k * segment < total && !(swapped && k == last); k++)
		take_one(&packet, r->buffers[i], segment, total, k, take, arg);
	return total ? (int)last + 1 : 0;
}

int tp_endpoint_receive(struct tp_endpoint *endpoint, void (*take)(const struct tp_ingress *packet, void *arg), void *arg)
{
	if (pthread_mutex_trylock(&endpoint->receive_lock) != 0)
		return -1;
	struct tp_receiver *r = endpoint->receiver;
	int packets = 0, n = BATCH;
	for (int round = 0; round < BATCHES && n == BATCH; round++) {
		for (int i = 0; i < BATCH; i++) {
			r->vectors[i] = (struct iovec){ .iov_base = r->buffers[i], .iov_len = BUFFER_BYTES };
			r->messages[i].msg_hdr = (struct msghdr){ .msg_name = &r->from[i], .msg_namelen = sizeof(r->from[i]), .msg_iov = &r->vectors[i],
				.msg_iovlen = 1, .msg_control = r->control[i], .msg_controllen = CONTROL_BYTES };
		}
		n = recvmmsg(endpoint->receive_fd, r->messages, BATCH, MSG_DONTWAIT, NULL);
		tp_tsan_acquire(&order_of_packets);
		for (int i = 0; i < n; i++)
			packets += split(endpoint, i, take, arg);
	}
	pthread_mutex_unlock(&endpoint->receive_lock);
	return packets;
}
