/* The keeper of UDP port 4791 (share.h): one a user and network namespace. It gives slots and sockets to the processes that use
 * the software card, holds the sockets, hands on what comes for QP 1, answers for those who left, and ends 5 s after the last of
 * them. */
#include <errno.h>
#include <linux/filter.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>
#include "verbs/gsi.h"
#include "verbs/keeper/last.h"
#include "verbs/keeper/watch.h"
#include "verbs/port.h"
#include "verbs/share.h"

#ifndef SO_ATTACH_REUSEPORT_CBPF
#define SO_ATTACH_REUSEPORT_CBPF 51
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif
enum { BOX_FD = 3, GROUPS = 64, RETURN_MS = 500, ROUTE_AT_ONCE = 64, LEFT_MAX = 256 };

struct group { union tp_addr addr; int fds[TP_SHARE_SLOTS]; uint32_t count; };
struct member { int fd; int slot; };

static struct group groups[GROUPS];
static int group_count;
static struct member members[TP_SHARE_SLOTS];
static int member_count;
static uint64_t free_from_ms[TP_SHARE_SLOTS];
static bool taken[TP_SHARE_SLOTS];
static int box = -1;
static bool box_adopted;

/* ---- sockets ---- */

static struct group *find_group(const union tp_addr *addr, bool make)
{
	for (int i = 0; i < group_count; i++)
		if (!memcmp(&groups[i].addr, addr, sizeof(*addr)))
			return &groups[i];
	if (!make || group_count == GROUPS)
		return NULL;
	groups[group_count].addr = *addr;
	return &groups[group_count++];
}

/* Messages of QP 1 must come one by one. */
static void uncoalesce(const struct group *group)
{
	int off = 0;
	if (group->count)
		setsockopt(group->fds[0], IPPROTO_UDP, UDP_GRO, &off, sizeof(off));
}

static void adopt(const struct tp_share_boxed *what, const int *fds, void *arg)
{
	(void)arg;
	struct group *group = find_group(&what->addr, true);
	for (uint32_t i = 0; i < what->count; i++) {
		if (group && what->first + i < TP_SHARE_SLOTS && group->count == what->first + i)
			group->fds[group->count++] = fds[i];
		else
			close(fds[i]);
	}
	if (group && what->first == 0)
		uncoalesce(group);
}

/* The box of those who were here before this keeper. Their slots rest, unless their owners come back for them. */
static int adopt_box(int fd)
{
	box = fd;
	box_adopted = true;
	int error = tp_box_look(box, adopt, NULL);
	uint32_t had = 0;
	for (int i = 0; i < group_count; i++)
		had = TP_MAX(had, groups[i].count);
	/* A slot that never had a socket may belong to somebody who is about to come back. */
	for (uint32_t slot = 1; slot < TP_SHARE_SLOTS; slot++)
		free_from_ms[slot] = tp_clock_ms() + (uint64_t)(slot < had ? (int)TP_SHARE_REST_MS : (int)RETURN_MS);
	return error;
}

/* The top byte of the destination QPN is the socket's index: the filter sees the UDP payload. */
static int steer(int fd)
{
	struct sock_filter code[] = { { BPF_LD | BPF_B | BPF_ABS, 0, 0, 5 }, { BPF_RET | BPF_A, 0, 0, 0 } };
	struct sock_fprog program = { .len = 2, .filter = code };
	return setsockopt(fd, SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, &program, sizeof(program)) < 0 ? errno : 0;
}

/* Makes the group's next sockets, and boxes them. */
static int grow(struct group *group)
{
	struct tp_share_boxed what = { .addr = group->addr, .first = group->count };
	int fds[TP_SHARE_BATCH], error = 0;
	if (group->count == 0) {
		/* Does somebody hold the port who isn't of this group? Joining would succeed, and take a share of their packets. */
		int probe;
		error = tp_endpoint_bind(&group->addr, false, &probe);
		if (error)
			return error;
		close(probe);
	}
	while (what.count < TP_SHARE_BATCH && !error) {
		error = tp_endpoint_bind(&group->addr, true, &fds[what.count]);
		what.count += error == 0;
	}
	bool first = group->count == 0;
	if (!error && first)
		error = steer(fds[0]);
	if (!error)
		error = tp_box_put(box, &what, fds);
	for (uint32_t i = 0; i < what.count; i++) {
		if (error)
			close(fds[i]);
		else
			group->fds[group->count++] = fds[i];
	}
	if (first)
		uncoalesce(group);
	return error;
}

/* ---- members ---- */

/* -1: none is free yet. */
static int new_slot(int wanted)
{
	uint64_t now = tp_clock_ms();
	if (wanted > 0 && wanted < TP_SHARE_SLOTS && !taken[wanted])
		return wanted;
	int resting = -1;
	for (int slot = 1; slot < TP_SHARE_SLOTS; slot++) {
		if (taken[slot])
			continue;
		if (free_from_ms[slot] <= now)
			return slot;
		if (resting < 0 || free_from_ms[slot] < free_from_ms[resting])
			resting = slot;
	}
	return box_adopted ? -1 : resting;
}

static struct tp_share_reply answer_hello(struct member *member, const struct tp_share_request *request, int with, int *give)
{
	struct tp_share_reply reply = { .magic = TP_SHARE_MAGIC, .version = TP_SHARE_VERSION, .status = TP_SHARE_ERROR, .slot = -1 };
	if (request->has_box && !box_adopted && group_count == 0) {
		int own = box, copy = dup(with);
		if (copy >= 0 && adopt_box(copy) == 0)
			close(own);
	}
	if (member->slot < 0) {
		member->slot = new_slot(request->slot);
		if (member->slot > 0) {
			taken[member->slot] = true;
			tp_keeper_last_drop(member->slot);
		}
	}
	reply.slot = member->slot;
	reply.error = member->slot > 0 ? 0 : ENOSPC;
	reply.status = member->slot > 0 ? TP_SHARE_OK : box_adopted ? TP_SHARE_AGAIN : TP_SHARE_ERROR;
	*give = box;
	return reply;
}

static struct tp_share_reply answer_socket(struct member *member, const struct tp_share_request *request, int *give)
{
	struct tp_share_reply reply = { .magic = TP_SHARE_MAGIC, .version = TP_SHARE_VERSION, .status = TP_SHARE_ERROR, .slot = member->slot };
	int before = group_count;
	struct group *group = member->slot > 0 ? find_group(&request->addr, true) : NULL;
	int error = group ? 0 : ENOSPC;
	while (!error && group->count <= (uint32_t)member->slot)
		error = grow(group);
	if (error && group && group->count == 0 && group_count > before)
		group_count = before;
	reply.error = error;
	reply.status = !error ? TP_SHARE_OK : error == EADDRINUSE && !box_adopted && before == 0 ? TP_SHARE_AGAIN : TP_SHARE_ERROR;
	if (!error)
		*give = group->fds[member->slot];
	return reply;
}

/* false: the member is gone, or talks nonsense. */
static bool serve(struct member *member)
{
	struct tp_share_request request;
	int with = -1, give = member->fd;
	if (tp_unix_recv_fd(member->fd, &with, &request, sizeof(request), tp_clock_ms() + 1000) != ncclSuccess)
		return false;
	struct tp_share_reply reply = { .magic = TP_SHARE_MAGIC, .version = TP_SHARE_VERSION, .status = TP_SHARE_ERROR, .error = EPROTO };
	bool good = request.magic == TP_SHARE_MAGIC && request.version == TP_SHARE_VERSION;
	if (good && request.kind == TP_SHARE_LAST) {
		if (with >= 0) {
			tp_keeper_last_read(with, member->slot);
			close(with);
		}
		return true;
	}
	if (good && request.kind == TP_SHARE_HELLO)
		reply = answer_hello(member, &request, with, &give);
	else if (good && request.kind == TP_SHARE_SOCKET)
		reply = answer_socket(member, &request, &give);
	if (with >= 0)
		close(with);
	return tp_unix_send_fd(member->fd, give, &reply, sizeof(reply)) == ncclSuccess && good;
}

static void drop(int i)
{
	int slot = members[i].slot;
	close(members[i].fd);
	if (slot > 0) {
		taken[slot] = false;
		free_from_ms[slot] = tp_clock_ms() + TP_SHARE_REST_MS;
	}
	members[i] = members[--member_count];
	tp_watch_ended();
}

static void welcome(int listener)
{
	pid_t pid;
	uid_t uid;
	int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	if (fd < 0)
		return;
	if (member_count == TP_SHARE_SLOTS || tp_unix_peer(fd, &pid, &uid) != ncclSuccess || uid != geteuid()) {
		close(fd);
		return;
	}
	members[member_count++] = (struct member){ .fd = fd, .slot = -1 };
}

/* Slot 0 is QP 1's: messages of the connection manager go on to whom they are for; what else comes there is dropped. */
static void route(const struct group *group)
{
	for (int i = 0; i < ROUTE_AT_ONCE; i++) {
		uint8_t data[2048];
		_Alignas(struct cmsghdr) uint8_t control[128];
		struct tp_ingress in = { .to = group->addr, .data = data };
		struct iovec vector = { .iov_base = data, .iov_len = sizeof(data) };
		struct msghdr message = { .msg_name = &in.from, .msg_namelen = sizeof(in.from), .msg_iov = &vector, .msg_iovlen = 1,
			.msg_control = control, .msg_controllen = sizeof(control) };
		ssize_t n = recvmsg(group->fds[0], &message, MSG_DONTWAIT);
		if (n < 0)
			return;
		for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c)) {
			int value = 0;
			memcpy(&value, CMSG_DATA(c), TP_MIN(sizeof(value), c->cmsg_len - CMSG_LEN(0)));
			if (c->cmsg_type == (c->cmsg_level == IPPROTO_IPV6 ? IPV6_TCLASS : IP_TOS))
				in.tos = (uint8_t)value;
			if (c->cmsg_type == (c->cmsg_level == IPPROTO_IPV6 ? IPV6_HOPLIMIT : IP_TTL))
				in.ttl = (uint8_t)value;
		}
		in.bytes = (uint32_t)n;
		if (!(message.msg_flags & MSG_TRUNC))
			tp_gsi_route(&in, false);
	}
}

/* The sockets of slots whose processes have left and owe something. */
struct left { int group, slot; };
static int find_left(struct left lefts[LEFT_MAX])
{
	int count = 0;
	for (int slot = 1; slot < TP_SHARE_SLOTS; slot++)
		for (int i = 0; i < group_count && count < LEFT_MAX && !taken[slot] && tp_keeper_last_any(slot); i++)
			if (groups[i].count > (uint32_t)slot)
				lefts[count++] = (struct left){ i, slot };
	return count;
}

static void run(int listener)
{
	uint64_t last_ms = tp_clock_ms();
	while (member_count || tp_clock_ms() - last_ms < TP_SHARE_LINGER_MS) {
		struct pollfd polls[1 + TP_SHARE_SLOTS + GROUPS + LEFT_MAX];
		struct left lefts[LEFT_MAX];
		int count = 1, served = member_count;
		polls[0] = (struct pollfd){ .fd = listener, .events = POLLIN };
		for (int i = 0; i < member_count; i++)
			polls[count++] = (struct pollfd){ .fd = members[i].fd, .events = POLLIN };
		for (int i = 0; i < group_count; i++)
			if (groups[i].count)
				polls[count++] = (struct pollfd){ .fd = groups[i].fds[0], .events = POLLIN };
		int left_count = find_left(lefts), lefts_at = count;
		for (int i = 0; i < left_count; i++)
			polls[count++] = (struct pollfd){ .fd = groups[lefts[i].group].fds[lefts[i].slot], .events = POLLIN };
		int due_ms = tp_watch_tick(), wait_ms = member_count ? -1 : TP_SHARE_LINGER_MS;
		if (poll(polls, (nfds_t)count, due_ms >= 0 && (wait_ms < 0 || due_ms < wait_ms) ? due_ms : wait_ms) < 0 && errno != EINTR)
			return;
		for (int i = 0; i < left_count; i++)
			if (polls[lefts_at + i].revents)
				tp_keeper_last_serve(polls[lefts_at + i].fd, &groups[lefts[i].group].addr);
		for (int i = served - 1; i >= 0; i--)
			if (polls[1 + i].revents && !serve(&members[i]))
				drop(i);
		if (polls[0].revents)
			welcome(listener);
		for (int i = 0; i < group_count; i++)
			if (groups[i].count)
				route(&groups[i]);
		if (served || member_count)
			last_ms = tp_clock_ms();
	}
}

int main(void)
{
	char name[64];
	int listener, given = -1;
	struct rlimit files;
	socklen_t length = sizeof(given);
	prctl(PR_SET_NAME, "telpher-keeper");
	signal(SIGPIPE, SIG_IGN);
	signal(SIGHUP, SIG_IGN);
	if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
		files.rlim_cur = files.rlim_max;
		setrlimit(RLIMIT_NOFILE, &files);
	}
	bool with_box = getsockopt(BOX_FD, SOL_SOCKET, SO_TYPE, &given, &length) == 0 && given == SOCK_DGRAM;
	tp_share_name(name, sizeof(name));
	/* Another was faster: it will do. */
	if (tp_unix_listen(name, 128, &listener) != ncclSuccess)
		return 0;
	for (uint64_t now = tp_clock_ms(), slot = 0; slot < TP_SHARE_SLOTS; slot++)
		free_from_ms[slot] = now;
	if (with_box) {
		if (adopt_box(BOX_FD) != 0)
			return 1;
	} else if ((box = tp_box_new()) < 0) {
		return 1;
	}
	tp_gsi_saw = tp_watch_saw;
	run(listener);
	return 0;
}
