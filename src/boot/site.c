/* A process's share of one communicator: the host's control segment and what else is shared, all memfds that the process of
 * the host's first rank makes and hands to the others over an abstract Unix socket. Share 0 is the control segment. */
#include "boot/internal.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SHARES_MAX 4096
#define LINGER_MS 2000
#define WATCH_TICK_MS 1000

struct tp_site *tp_site_find(uint64_t name, const uint8_t **secret)
{
	for (struct tp_site *site = tp_service.sites; site; site = site->next)
		if (site->name == name && site->seg) {
			if (secret) *secret = site->secret;
			return site;
		}
	return NULL;
}

static struct tp_share *find_share(struct tp_site *site, uint32_t index)
{
	struct tp_share *share = site->shares;
	while (share && share->index != index) share = share->next;
	if (share) return share;
	share = tp_alloc(1, sizeof(*share), "shared segment");
	if (!share) return NULL;
	share->index = index;
	share->fd = -1;
	share->next = site->shares;
	site->shares = share;
	return share;
}

static void hand_out(struct tp_site *site, struct tp_share *share, struct tp_conn *conn)
{
	uint64_t bytes = share->bytes;
	if (share->state == TP_SHARE_FAILED) {
		tp_conn_send_fail(conn, ncclSystemError, share->text);
	} else {
		tp_conn_send(conn, TP_FRAME_HAVE, &bytes, sizeof(bytes));
		tp_conn_send_fd(conn, share->fd);
	}
	conn->ops = NULL;
	tp_conn_close_flushed(conn);
	if (++share->served == site->seg->nprocs - 1 && share->index > 0 && share->fd >= 0) {
		close(share->fd);
		share->fd = -1;
	}
}

/* ---- the leader's side */

static const char *asked_frame(struct tp_conn *conn, enum tp_wire_type type, const void *data, size_t bytes)
{
	struct tp_site *site = conn->owner;
	uint32_t index;
	if (type != TP_FRAME_ASK || bytes != sizeof(index)) return "sent a frame that is none of a segment's";
	memcpy(&index, data, sizeof(index));
	if (index >= SHARES_MAX) return "asked for a segment that can't be";
	struct tp_share *share = find_share(site, index);
	if (!share) return "asked for a segment there is no memory for";
	if (share->state == TP_SHARE_ASKED) {
		if (conn->tag >= 0) return "asked twice";
		conn->tag = (int)index;
		conn->next_of_owner = share->waiting;
		share->waiting = conn;
	} else {
		hand_out(site, share, conn);
	}
	return NULL;
}

static void asked_closed(struct tp_conn *conn, enum tp_conn_end how, const char *why)
{
	struct tp_site *site = conn->owner;
	(void)how;
	(void)why;
	if (conn->tag < 0) return;
	struct tp_share *share = find_share(site, (uint32_t)conn->tag);
	for (struct tp_conn **at = share ? &share->waiting : NULL; at && *at; at = &(*at)->next_of_owner)
		if (*at == conn) {
			*at = conn->next_of_owner;
			break;
		}
}

static const struct tp_conn_ops asked_ops = { .frame = asked_frame, .closed = asked_closed };

void tp_site_adopt_segment(struct tp_site *site, struct tp_conn *conn)
{
	pid_t pid;
	uid_t uid = 0;
	if (!conn->is_unix || !site->leader || tp_unix_peer(conn->source.fd, &pid, &uid) != ncclSuccess) {
		tp_conn_close(conn);
		return;
	}
	if (uid != geteuid()) {
		tp_conn_stranger(conn, "is of another user");
		tp_conn_close(conn);
		return;
	}
	conn->owner = site;
	conn->tag = -1;
	conn->ops = &asked_ops;
}

static void listener_name(const struct tp_site *site, int host, char name[64])
{
	struct { uint8_t what[8]; uint8_t session[16]; int32_t host; } __attribute__((packed)) text = { .what = "segment", .host = host };
	uint8_t mac[TP_SECRET_BYTES];
	memcpy(text.session, site->session, sizeof(text.session));
	tp_secret_mac(site->secret, &text, sizeof(text), mac);
	int at = snprintf(name, 64, "telpher-");
	for (int i = 0; i < 16; i++) at += snprintf(name + at, 64 - (size_t)at, "%02x", mac[i]);
}

static ncclResult_t make_share(struct tp_share *share, const char *what, size_t bytes)
{
	share->bytes = bytes;
	TP_TRY(tp_shm_create(what, bytes, &share->fd));
	return tp_shm_map(share->fd, bytes, &share->base);
}

/* The share is decided: who waits for it, here and elsewhere, is told. */
static void settle(struct tp_site *site, struct tp_share *share, ncclResult_t result)
{
	share->state = result == ncclSuccess ? TP_SHARE_HERE : TP_SHARE_FAILED;
	if (result != ncclSuccess && !share->text[0]) snprintf(share->text, sizeof(share->text), "%s", tp_log_last_error());
	while (share->waiting) {
		struct tp_conn *conn = share->waiting;
		share->waiting = conn->next_of_owner;
		conn->tag = -1;
		hand_out(site, share, conn);
	}
	if (share->fd >= 0 && site->seg && site->seg->nprocs == 1) {
		close(share->fd);
		share->fd = -1;
	}
	pthread_cond_broadcast(&site->cond);
}

/* ---- the others' side */

static void ask_failed(struct tp_site *site, struct tp_share *share, const char *why)
{
	share->conn = NULL;
	if (share->state != TP_SHARE_ASKED) return;
	snprintf(share->text, sizeof(share->text), "the process of the host's first rank %s before it handed out the shared segment", why);
	settle(site, share, ncclRemoteError);
}

static struct tp_share *share_of(struct tp_site *site, const struct tp_conn *conn)
{
	struct tp_share *share = site->shares;
	while (share && share->conn != conn) share = share->next;
	return share;
}

static void ask_open(struct tp_conn *conn)
{
	uint32_t index = (uint32_t)conn->tag;
	tp_conn_send(conn, TP_FRAME_ASK, &index, sizeof(index));
}

static const char *ask_frame(struct tp_conn *conn, enum tp_wire_type type, const void *data, size_t bytes)
{
	struct tp_site *site = conn->owner;
	struct tp_share *share = share_of(site, conn);
	struct tp_wire_fail told;
	uint64_t size;
	if (share && type == TP_FRAME_HAVE && bytes == sizeof(size)) {
		memcpy(&size, data, sizeof(size));
		share->bytes = size;
		conn->want_fd = true;
	} else if (share && type == TP_FRAME_FAIL && tp_wire_fail_read(&told, data, bytes)) {
		snprintf(share->text, sizeof(share->text), "%.*s", (int)sizeof(share->text) - 1, told.text);
		share->conn = NULL;
		tp_conn_close(conn);
		settle(site, share, ncclSystemError);
	} else {
		return "sent a frame that is none of a segment's";
	}
	return NULL;
}

static void ask_descriptor(struct tp_conn *conn, int fd)
{
	struct tp_site *site = conn->owner;
	struct tp_share *share = share_of(site, conn);
	tp_conn_close(conn);
	if (!share) {
		if (fd >= 0) close(fd);
		return;
	}
	share->conn = NULL;
	ncclResult_t result = fd < 0 ? ncclSystemError : tp_shm_map(fd, share->bytes, &share->base);
	if (share->index == 0) site->lock_fd = share->fd = fd;
	else if (fd >= 0) close(fd);
	if (result == ncclSuccess && share->index == 0) {
		if (share->bytes < sizeof(struct tp_segment) || ((struct tp_segment *)share->base)->bytes > share->bytes) result = ncclInternalError;
		else site->seg = share->base;
	}
	settle(site, share, result);
}

static void ask_closed(struct tp_conn *conn, enum tp_conn_end how, const char *why)
{
	struct tp_site *site = conn->owner;
	struct tp_share *share = share_of(site, conn);
	(void)how;
	if (share) ask_failed(site, share, why);
}

static const struct tp_conn_ops ask_ops = { .open = ask_open, .frame = ask_frame, .descriptor = ask_descriptor, .closed = ask_closed };

/* One host means one network namespace (for abstract sockets), one PID namespace (for pidfds) and one user (for each other's
 * memory). Where NCCL_HOSTID says otherwise than the kernel, the user is told. */
static ncclResult_t meet_leader(const struct tp_site *site, const char *name, int *out)
{
	pid_t pid = 0;
	uid_t uid = 0;
	int fd = -1, error = tp_unix_try_connect(name, 0, &fd);
	if (error)
		return TP_FAIL(ncclRemoteError, "this process (pid %d) counts as of one host (%s) with rank %d (pid %d), but can't reach it by an abstract Unix "
			"socket: %s. It has ended, or the two are in different network namespaces (containers): then set another NCCL_HOSTID in each",
			(int)getpid(), tp_host_name(), site->leader_rank, site->leader_pid, strerror(error));
	ncclResult_t result = tp_unix_peer(fd, &pid, &uid);
	if (result == ncclSuccess && uid != geteuid())
		result = TP_FAIL(ncclInvalidUsage, "this process (pid %d) runs as user %u, rank %d (pid %d) of the same host (%s) as user %u: all ranks of a host "
			"must run as one user", (int)getpid(), (unsigned)geteuid(), site->leader_rank, site->leader_pid, tp_host_name(), (unsigned)uid);
	else if (result == ncclSuccess && pid != site->leader_pid)
		result = TP_FAIL(ncclInvalidUsage, "rank %d of this host (%s) has pid %d in its own PID namespace and %d (0: none) in that of this process (pid "
			"%d): the ranks of a host must share one PID namespace; set another NCCL_HOSTID in each container, or start them with a common one",
			site->leader_rank, tp_host_name(), site->leader_pid, (int)pid, (int)getpid());
	if (result != ncclSuccess) close(fd);
	else *out = fd;
	return result;
}

static void ask_leader(struct tp_site *site, struct tp_share *share, int host, uint64_t deadline_ms)
{
	char name[64];
	int fd = -1;
	listener_name(site, host, name);
	ncclResult_t result = meet_leader(site, name, &fd);
	if (result == ncclSuccess)
		result = tp_conn_call(fd, NULL, TP_WIRE_SEGMENT, 0, site->name, site->secret, deadline_ms, &ask_ops, site, &share->conn);
	if (result != ncclSuccess) settle(site, share, result);
	else share->conn->tag = (int)share->index;
}

/* ---- both */

static ncclResult_t wait_share(struct tp_site *site, struct tp_share *share, struct tp_joiner *joiner, _Atomic uint32_t *abort,
	uint64_t deadline_ms)
{
	struct tp_event event;
	while (share->state == TP_SHARE_ASKED) {
		uint64_t now = tp_clock_ms();
		if (abort && atomic_load_explicit(abort, memory_order_relaxed)) return TP_FAIL(ncclInternalError, "waiting for a shared segment was aborted");
		if (joiner && joiner->result != ncclSuccess) return TP_FAIL(joiner->result, "rank %d: %s", joiner->join.rank, joiner->text);
		if (!joiner && site->seg && tp_event_get(site->seg, &event))
			return TP_FAIL(event.result == ncclSuccess ? ncclRemoteError : event.result, "waiting for a shared segment ended: %s", event.text);
		if (deadline_ms && now > deadline_ms) return TP_FAIL(ncclRemoteError, "time is over while waiting for the host's shared segment");
		tp_service_wait(&site->cond, now + TP_BOOT_SLICE_MS);
	}
	if (share->state == TP_SHARE_FAILED) return TP_FAIL(ncclSystemError, "no shared segment: %s", share->text);
	return ncclSuccess;
}

ncclResult_t tp_site_share(struct tp_site *site, uint32_t index, size_t bytes, const char *what, bool make,
	struct tp_joiner *joiner, _Atomic uint32_t *abort, uint64_t deadline_ms, void **base)
{
	tp_service_lock();
	struct tp_share *share = find_share(site, index);
	if (!share) {
		tp_service_unlock();
		return ncclSystemError;
	}
	if (make) settle(site, share, make_share(share, what, bytes));
	else if (!site->leader && !share->conn && share->state == TP_SHARE_ASKED)
		ask_leader(site, share, site->seg ? site->seg->host : joiner->seat.host, deadline_ms);
	ncclResult_t result = wait_share(site, share, joiner, abort, deadline_ms);
	if (result == ncclSuccess && bytes && share->bytes != bytes)
		result = TP_FAIL(ncclInternalError, "the ranks of a host asked for %zu and %zu bytes of one shared segment (%s)", share->bytes, bytes, what);
	if (result == ncclSuccess) *base = share->base;
	tp_service_unlock();
	return result;
}

/* The control segment of this host, made by its first rank. */
static ncclResult_t make_segment(struct tp_site *site, struct tp_joiner *joiner)
{
	struct tp_segment plan;
	char name[64];
	int fd;
	size_t bytes = tp_segment_plan(joiner->table, joiner->seat.host, &plan);
	struct tp_share *share = find_share(site, 0);
	if (!bytes || !share) return ncclSystemError;
	TP_TRY(make_share(share, "telpher-control", bytes));
	site->seg = share->base;
	tp_segment_fill(site->seg, &plan, joiner->table);
	if (plan.nprocs > 1) site->lock_fd = share->fd;
	if (plan.nprocs > 1) {
		listener_name(site, joiner->seat.host, name);
		TP_TRY(tp_unix_listen(name, 4096, &fd));
		TP_TRY(tp_service_listen(fd, true, &site->listener));
	}
	settle(site, share, ncclSuccess);
	tp_conn_wake_held(site->name);
	return ncclSuccess;
}

static void free_site(struct tp_site *site)
{
	tp_conn_close_all_of(site);     /* those that ask for shares, and those that have not asked yet */
	while (site->shares) {
		struct tp_share *share = site->shares;
		site->shares = share->next;
		if (share->fd >= 0) close(share->fd);
		tp_shm_unmap(share->base);
		free(share);
	}
	tp_service_unlisten(site->listener);
	for (struct tp_site **at = &tp_service.sites; *at; at = &(*at)->next)
		if (*at == site) {
			*at = site->next;
			break;
		}
	/* Connections of this site that were accepted but are still unproven keep no pointer to it. An event of this batch may
	 * name its pidfd, so the memory goes with the batch. */
	site->next = tp_service.dead_sites;
	tp_service.dead_sites = site;
}

void tp_site_free_dead(void)
{
	while (tp_service.dead_sites) {
		struct tp_site *site = tp_service.dead_sites;
		tp_service.dead_sites = site->next;
		pthread_cond_destroy(&site->cond);
		free(site);
	}
}

/* Which secret: bound to this one meeting at the root, so an id that serves twice (NCCL_COMM_ID) never gives the same. */
static void site_secret(const struct tp_joiner *joiner, uint8_t out[TP_SECRET_BYTES])
{
	struct { uint8_t what[8]; uint8_t session[16]; } __attribute__((packed)) text = { .what = "member" };
	memcpy(text.session, joiner->seat.session, sizeof(text.session));
	tp_secret_mac(joiner->first.secret, &text, sizeof(text), out);
}

static struct tp_site *new_site(const struct tp_joiner *joiner, const uint8_t secret[TP_SECRET_BYTES], uint64_t name)
{
	if (tp_service_use() != ncclSuccess) return NULL;
	struct tp_site *site = tp_alloc(1, sizeof(*site), "communicator's place in this process");
	if (!site) {
		tp_service_unuse();
		return NULL;
	}
	site->name = name;
	memcpy(site->secret, secret, sizeof(site->secret));
	memcpy(site->session, joiner->seat.session, sizeof(site->session));
	site->leader = joiner->table != NULL;
	site->pidfd = (struct tp_source){ .kind = TP_SOURCE_PIDFD, .fd = -1 };
	site->watching = site->lock_fd = -1;
	site->leader_rank = joiner->seat.leader_rank;
	site->leader_pid = joiner->seat.leader_pid;
	tp_service_init_cond(&site->cond);
	site->next = tp_service.sites;
	tp_service.sites = site;
	return site;
}

static void begin_duties(struct tp_site *site)
{
	const struct tp_segment_proc *procs = tp_segment_procs(site->seg);
	site->proc = 0;
	while (site->proc < site->seg->nprocs - 1 && procs[site->proc].process_hash != tp_service.process_hash) site->proc++;
	site->rank = procs[site->proc].first_rank;
	tp_watch_hold(site);
	tp_watch_start(site);
	if (site->leader && site->seg->nhosts > 1) tp_mesh_start(site);
	if (site->seg->nprocs > 1 && !site->tick_ms) {
		site->tick_ms = tp_clock_ms() + WATCH_TICK_MS;
		tp_service_poke(site->tick_ms);
	}
}

ncclResult_t tp_site_open(struct tp_joiner *joiner, _Atomic uint32_t *abort, struct tp_site **out)
{
	uint8_t secret[TP_SECRET_BYTES];
	ncclResult_t result = ncclSuccess;
	void *base;
	site_secret(joiner, secret);
	uint64_t name = tp_id_name(secret);
	tp_service_lock();
	struct tp_site *site = tp_service.sites;
	while (site && site->name != name) site = site->next;
	bool first = !site;
	if (first) site = new_site(joiner, secret, name);
	if (site) site->users++;
	else result = ncclSystemError;
	if (result == ncclSuccess && joiner->table) {
		result = make_segment(site, joiner);
		if (result != ncclSuccess) settle(site, find_share(site, 0), result);
	}
	tp_service_unlock();
	if (site && result == ncclSuccess) result = tp_site_share(site, 0, 0, "telpher-control", false, joiner, abort, joiner->deadline_ms, &base);
	if (result == ncclSuccess) {
		tp_service_lock();
		if (first) begin_duties(site);
		tp_service_unlock();
		*out = site;
	} else if (site) {
		tp_site_close(site);
	}
	return result;
}

static void end_site(struct tp_site *site)
{
	tp_mesh_close(site);
	free_site(site);
	tp_service_unuse();
}

void tp_site_close(struct tp_site *site)
{
	struct tp_event event;
	tp_service_lock();
	if (--site->users > 0) {
		tp_service_unlock();
		return;
	}
	bool broken = site->seg && tp_event_get(site->seg, &event);
	tp_watch_stop(site);
	tp_mesh_leave(site, !broken);
	site->closing = true;
	site->close_ms = tp_clock_ms() + LINGER_MS;
	/* What is still on its way to other hosts is worth a moment, but not the caller's. */
	if (site->seg && !tp_mesh_flushed(site)) tp_service_poke(tp_clock_ms() + 5);
	else end_site(site);
	tp_service_unlock();
}

static void tick(struct tp_site *site, uint64_t now_ms)
{
	tp_mesh_retry(site, now_ms);
	if (site->closing) {
		if (tp_mesh_flushed(site) || site->close_ms <= now_ms) end_site(site);
		else tp_service_poke(now_ms + 5);
		return;
	}
	if (!site->tick_ms) return;
	if (site->tick_ms <= now_ms) {
		tp_watch_look(site);
		tp_mesh_tick(site, now_ms);
		site->tick_ms = now_ms + (site->speaker ? TP_LIFE_TICK_MS : WATCH_TICK_MS);
	}
	tp_service_poke(site->tick_ms);
}

void tp_site_tick(uint64_t now_ms)
{
	struct tp_site *next;
	for (struct tp_site *site = tp_service.sites; site; site = next) {
		next = site->next;
		tick(site, now_ms);
	}
}
