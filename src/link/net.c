/* Net links: how their ends find each other and are given up. One listener a rank serves all its receiving ends; whoever
 * connects says which link it is, so a sender may come before its receiver asks for the link. Connections are made at first
 * use. Nothing here knows which transport moves the bytes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sched.h>

#include "base/text.h"
#include "link/net_link.h"

#define PATIENCE_MS 2000            /* for peers that take nothing, at the end: of all links together */
#define QUIET_LOOKS 64
#define MANY_ENDS 8
#define GPU_CHUNK ((size_t)128 << 10)
#define FALLBACK "Socket"           /* the network that every host has */
#define MOST_DEVICES 65536          /* that a rank can say it has */

enum { PARAM_CHUNK, PARAM_DEPTH, PARAM_LEND, PARAM_MISMATCH };
static struct tp_param params[] = {
	[PARAM_CHUNK] = { .name = "TELPHER_NET_CHUNK", .kind = TP_PARAM_BYTES, .fallback = "512K", .min = 4096, .max = 64 << 20,
		.doc = "bytes that a slot of a network link holds, the same on all ranks; unset: 128K for GPU ranks" },
	[PARAM_DEPTH] = { .name = "TELPHER_NET_DEPTH", .kind = TP_PARAM_INT, .fallback = "8", .min = 2, .max = TP_NET_MAX_REQUESTS,
		.doc = "slots of a network link, rounded up to a power of two" },
	[PARAM_LEND] = { .name = "TELPHER_NET_LEND", .kind = TP_PARAM_BOOL, .fallback = "1", .max = 1,
		.doc = "1: large chunks are sent from where they lie, where plan and network can; 0: copied into slots" },
	[PARAM_MISMATCH] = { .name = "NCCL_IGNORE_NET_MISMATCH", .kind = TP_PARAM_BOOL, .fallback = "1", .max = 1,
		.doc = "0: ranks with different numbers of network devices are an error; 1: what both ends have is used" },
};
TP_PARAM_TABLE("link", params)

/* What each rank tells all others. */
struct net_card { char network[24]; uint64_t capacity; int32_t devs, cross; uint8_t forced; unsigned char handle[TP_NET_HANDLE_BYTES]; };

/* What all have is the last resort. Whoever lacks the better one says why; rank 0 says it in any case. */
static void warn_of_fallback(const struct tp_boot *boot, const struct net_card *cards, int r)
{
	const char *own = cards[boot->rank].network, *better = strcmp(cards[0].network, FALLBACK) != 0 ? cards[0].network : cards[r].network, *why;

	if (strcmp(own, FALLBACK) == 0) {
		why = tp_net_why_not_named(better);
		TP_WARN("rank %d (%s) can't use network %s, which others have (%s), so all ranks use %s instead. NCCL_NET=%s makes this an error", boot->rank,
			boot->peers[boot->rank].host_name, better, why ? why : "no reason is known", FALLBACK, better);
	} else if (boot->rank == 0) {
		TP_WARN("rank 0 (%s) could use network %s, but rank %d (%s) can't, so all ranks use %s instead", boot->peers[0].host_name, own, r, boot->peers[r].host_name, FALLBACK);
	}
}

/* *common: all came with the same network. */
static ncclResult_t gather_cards(struct tp_net_links *nets, const unsigned char *handle, bool *common)
{
	const struct tp_boot *boot = nets->boot;
	struct net_card *cards = tp_alloc((size_t)boot->nranks, sizeof(*cards), "the ranks' network addresses");
	struct net_card *mine;
	ncclResult_t result;
	bool forced = false;

	*common = true;
	if (!cards) return ncclSystemError;
	mine = &cards[boot->rank];
	mine->forced = nets->forced;
	snprintf(mine->network, sizeof(mine->network), "%s", nets->ops->name);
	mine->capacity = nets->capacity;
	mine->devs = nets->may_choose ? nets->ndevs : 1;
	mine->cross = nets->cross;
	memcpy(mine->handle, handle, sizeof(mine->handle));
	result = tp_boot_all_gather(nets->boot, cards, sizeof(*cards));
	for (int r = 0; r < boot->nranks && result == ncclSuccess; r++) {
		tp_text_clean(cards[r].network, sizeof(cards[r].network));
		forced |= cards[r].forced != 0;
	}
	for (int r = 0; r < boot->nranks && result == ncclSuccess && *common; r++) {
		*common = strcmp(cards[r].network, cards[0].network) == 0;
		if (!*common && !forced)
			warn_of_fallback(boot, cards, r);
		else if (!*common)
			result = TP_FAIL(ncclInvalidUsage, "rank 0 (%s) uses network %s, rank %d (%s) uses %s: they must be the same (NCCL_NET)",
				boot->peers[0].host_name, cards[0].network, r, boot->peers[r].host_name, cards[r].network);
		else if (cards[r].capacity != cards[0].capacity)
			result = TP_FAIL(ncclInvalidUsage, "TELPHER_NET_CHUNK is %llu on rank 0 (%s) and %llu on rank %d (%s): it must be the same on all",
				(unsigned long long)cards[0].capacity, boot->peers[0].host_name, (unsigned long long)cards[r].capacity, r, boot->peers[r].host_name);
		else if (cards[r].devs != cards[0].devs && !tp_param_int(&params[PARAM_MISMATCH]))
			result = TP_FAIL(ncclInvalidUsage, "rank 0 (%s) has %d devices of network %s and rank %d (%s) has %d, and NCCL_IGNORE_NET_MISMATCH=0: make the hosts the same (is a "
				"device missing in a container?), or name the common set (NCCL_IB_HCA)", boot->peers[0].host_name, (int)cards[0].devs, cards[0].network, r,
				boot->peers[r].host_name, (int)cards[r].devs);
		else if (cards[r].devs < 1 || cards[r].devs > MOST_DEVICES)
			result = TP_FAIL(ncclInternalError, "rank %d (%s) says that it has %d network devices: 1 to %d are possible", r, boot->peers[r].host_name, (int)cards[r].devs,
				MOST_DEVICES);
		memcpy(nets->handles + (size_t)r * TP_NET_HANDLE_BYTES, cards[r].handle, TP_NET_HANDLE_BYTES);
		nets->most_devs = TP_MAX(nets->most_devs, cards[r].devs);
		if (cards[r].cross == TP_CROSS_NEVER || nets->cross == TP_CROSS_ALWAYS) nets->cross = cards[r].cross;
	}
	free(cards);
	return result;
}

/* Ranks of one host share out the devices; interfaces only where the user names several: unasked, the first is the one that all
 * can reach. Which ones are near is found out later (net_seat.c). */
static ncclResult_t choose_device(struct tp_net_links *nets)
{
	struct tp_param *names = tp_param_find("NCCL_SOCKET_IFNAME");

	TP_TRY(nets->ops->devices(&nets->ndevs));
	nets->may_choose = nets->ops->spreads || (names && tp_param_is_set(names));
	nets->dev = nets->may_choose ? nets->boot->local % nets->ndevs : 0;
	return ncclSuccess;
}

static bool lends(const struct tp_net_links *nets)
{
	struct tp_net_properties p = { 0 };

	return nets->ops->isendv && tp_param_int(&params[PARAM_LEND]) && nets->ops->properties(nets->dev, &p) == ncclSuccess && p.max_parts >= TP_NET_LENT_PARTS;
}

static bool pins(const struct tp_net_links *nets)
{
	struct tp_net_properties p = { 0 };

	return !nets->ops->any_memory && nets->ops->properties(nets->dev, &p) == ncclSuccess && !p.software;
}

ncclResult_t tp_net_links_listen(struct tp_boot *boot, const struct tp_net_links_options *options, unsigned char *handle, struct tp_net_links **out)
{
	struct tp_net_links *nets = tp_alloc(1, sizeof(*nets), "network links");
	ncclResult_t result = ncclSystemError;

	if (!nets) return ncclSystemError;
	nets->boot = boot;
	nets->gpu = options->gpu;
	nets->nchannels = options->nchannels;
	nets->cross = options->cross_nic;
	nets->most_devs = 1;
	nets->patience_ms = PATIENCE_MS;
	nets->capacity = tp_align_up((size_t)tp_param_int(&params[PARAM_CHUNK]), TP_CACHE_LINE);
	/* Rings in pinned memory, and a channel for each block: so smaller ones, unless the user says what he wants. */
	if (nets->gpu && !tp_param_is_set(&params[PARAM_CHUNK])) nets->capacity = GPU_CHUNK;
	nets->stride = tp_align_up(sizeof(struct tp_slot) + nets->capacity, 4096);
	for (nets->nslots = 2; nets->nslots < (uint32_t)tp_param_int(&params[PARAM_DEPTH]);) nets->nslots *= 2;
	nets->handles = tp_alloc((size_t)boot->nranks, TP_NET_HANDLE_BYTES, "the ranks' network addresses");
	if (!nets->handles) goto destroy;
	nets->forced = tp_net_is_forced() || (options->net_name && *options->net_name);
	result = tp_net_choose(options->net_name, &nets->ops);
	if (result != ncclSuccess) goto destroy;
	tp_net_log_using(nets->ops);
	result = choose_device(nets);
	if (result != ncclSuccess) goto destroy;
	nets->lends = lends(nets);
	nets->pins = pins(nets);
	snprintf(nets->via, sizeof(nets->via), "NET/%s/%d", nets->ops->name, nets->dev);
	result = nets->ops->listen(nets->dev, handle, &nets->listeners[0]);
	if (result != ncclSuccess) goto destroy;
	nets->nlisteners = 1;
	*out = nets;
	return ncclSuccess;
destroy:
	tp_net_links_destroy(nets);
	return result;
}

ncclResult_t tp_net_links_create(struct tp_boot *boot, const struct tp_net_links_options *options, struct tp_net_links **out)
{
	unsigned char handle[TP_NET_HANDLE_BYTES];
	struct tp_net_links_options fallback = *options;
	struct tp_net_links *nets;
	ncclResult_t result;
	bool common;

	TP_TRY(tp_net_links_listen(boot, options, handle, &nets));
	result = gather_cards(nets, handle, &common);
	if (result == ncclSuccess && !common) {
		tp_net_links_destroy(nets);
		fallback.net_name = FALLBACK;
		TP_TRY(tp_net_links_listen(boot, &fallback, handle, &nets));
		result = gather_cards(nets, handle, &common);
	}
	if (result != ncclSuccess) {
		tp_net_links_destroy(nets);
		return result;
	}
	*out = nets;
	return ncclSuccess;
}

static void fill_hello(const struct tp_net_links *nets, const struct tp_link_net *end, struct tp_net_hello *hello)
{
	memset(hello, 0, sizeof(*hello));
	memcpy(hello->secret, nets->boot->secret, TP_SECRET_BYTES);
	hello->comm_hash = nets->boot->comm_hash;
	hello->from = end ? end->from : -1;
	hello->to = end ? end->to : nets->boot->rank;
	hello->channel = end ? (uint8_t)end->channel : 0;
	hello->lane_class = end ? (uint8_t)end->lane_class : 0;
}

static ncclResult_t end_ready(struct tp_link_net *end, void *comm)
{
	struct tp_net_links *nets = end->nets;

	end->comm = comm;
	TP_TRY(tp_net_ring_register(end));
	end->state = TP_NET_READY;
	if (!end->sending) nets->nexpected--;
	return ncclSuccess;
}

static bool is_for(const struct tp_net_hello *hello, const struct tp_link_net *end)
{
	return !end->sending && hello->from == end->from && hello->channel == end->channel && hello->lane_class == end->lane_class;
}

/* Somebody who knows the secret came: to its end, or to those who came early. */
static ncclResult_t route(struct tp_net_links *nets, const struct tp_net_hello *hello, void *comm)
{
	if (hello->to != nets->boot->rank || hello->from < 0 || hello->from >= nets->boot->nranks || hello->from == hello->to
		|| hello->channel >= nets->nchannels || hello->lane_class >= TP_LINK_CLASSES) {
		nets->ops->close_recv(comm);
		return TP_FAIL(ncclInternalError, "rank %d: a connection came for link (channel %d, class %d) %d -> %d, which this rank can't have",
			nets->boot->rank, hello->channel, hello->lane_class, hello->from, hello->to);
	}
	for (int i = 0; i < nets->nends; i++) {
		if (!is_for(hello, nets->ends[i])) continue;
		if (nets->ends[i]->state == TP_NET_CONNECTING) return end_ready(nets->ends[i], comm);
		nets->ops->close_recv(comm);
		return TP_FAIL(ncclInternalError, "rank %d: rank %d connected twice for channel %d, class %d", nets->boot->rank, hello->from, hello->channel,
			hello->lane_class);
	}
	if (nets->nearly == nets->size_early) {
		int size = nets->size_early ? nets->size_early * 2 : 8;
		struct tp_net_guest *more = realloc(nets->early, (size_t)size * sizeof(*more));
		if (!more) {
			nets->ops->close_recv(comm);
			return TP_FAIL(ncclSystemError, "no memory for %d connections that came early", size);
		}
		nets->early = more;
		nets->size_early = size;
	}
	nets->early[nets->nearly++] = (struct tp_net_guest){ *hello, comm };
	return ncclSuccess;
}

static ncclResult_t accept_all(struct tp_net_links *nets, bool *moved)
{
	struct tp_net_hello expect, who;
	void *comm;

	fill_hello(nets, NULL, &expect);
	expect.stays = nets->seats != NULL;
	for (int l = 0; l < nets->nlisteners && nets->nexpected > 0;) {
		TP_TRY(nets->ops->accept(nets->listeners[l], &expect, &who, &comm));
		if (!comm) {
			l++;
			continue;
		}
		*moved = true;
		TP_TRY(route(nets, &who, comm));
	}
	return ncclSuccess;
}

static ncclResult_t connect_end(struct tp_link_net *end, bool *moved)
{
	struct tp_net_links *nets = end->nets;
	struct tp_net_hello hello;
	void *comm = NULL;

	fill_hello(nets, end, &hello);
	TP_TRY(nets->ops->connect(end->dev, tp_net_links_handle(nets, end->channel, end->to), &hello, &end->connecting, &comm));
	if (!comm) return ncclSuccess;
	*moved = true;
	return end_ready(end, comm);
}

static ncclResult_t add_end(struct tp_net_links *nets, struct tp_link_net *end)
{
	if (nets->nends == nets->size_ends) {
		int size = nets->size_ends ? nets->size_ends * 2 : 16;
		struct tp_link_net **more = realloc(nets->ends, (size_t)size * sizeof(*more));
		if (!more) return TP_FAIL(ncclSystemError, "no memory for %d network links", size);
		nets->ends = more;
		nets->size_ends = size;
	}
	nets->ends[nets->nends++] = end;
	return ncclSuccess;
}

static ncclResult_t take_early(struct tp_link_net *end)
{
	struct tp_net_links *nets = end->nets;

	for (int i = 0; i < nets->nearly; i++) {
		void *comm = nets->early[i].comm;
		if (!is_for(&nets->early[i].hello, end)) continue;
		nets->early[i] = nets->early[--nets->nearly];
		return end_ready(end, comm);
	}
	return ncclSuccess;
}

static void discard(struct tp_link_net *end)
{
	memset(end->link, 0, sizeof(*end->link));
	free(end);
}

/* Among those that are moved. An end that isn't there afterwards is gone. */
static ncclResult_t open_locked(struct tp_link_net *end)
{
	struct tp_net_links *nets = end->nets;
	const struct tp_boot_peer *peers = nets->boot->peers;
	bool moved = false;
	ncclResult_t result = add_end(nets, end);

	if (result != ncclSuccess) {
		tp_net_ring_free(end);
		discard(end);
		return result;
	}
	end->link->net = end;
	if (!end->sending) nets->nexpected++;
	if (end->far_refused) tp_net_gdr_give_up(end);
	TP_INFO(TP_INIT | TP_NET, "Channel %02d/0 : %d[%d] -> %d[%d] [%s] via NET/%s/%d%s", end->channel, end->from, (int)peers[end->from].device, end->to,
		(int)peers[end->to].device, end->sending ? "send" : "receive", nets->ops->name, end->dev, end->far_slots ? "/GDRDMA" : "");
	result = end->sending ? connect_end(end, &moved) : take_early(end);
	if (result != ncclSuccess) tp_net_links_close(nets, end->link);
	return result;
}

ncclResult_t tp_net_links_open(struct tp_net_links *nets, pthread_mutex_t *links_lock, int channel, int lane_class, int from, int to, struct tp_link *link)
{
	const struct tp_boot *boot = nets->boot;
	struct tp_link_net *end = tp_alloc(1, sizeof(*end), "a network link");

	if (!end) return ncclSystemError;
	*end = (struct tp_link_net){ .nets = nets, .link = link, .sending = from == boot->rank, .from = from, .to = to, .channel = channel,
		.lane_class = lane_class, .dev = tp_net_links_device(nets, channel, from, to) };
	/* Without the lock: of GPU ranks this calls CUDA. */
	ncclResult_t result = tp_net_ring_make(end, link);
	if (result != ncclSuccess) {
		discard(end);
		return result;
	}
	link->kind = TP_LINK_NET;
	link->peer = end->sending ? to : from;
	link->peer_pid = boot->peers[link->peer].pid;
	if (links_lock) pthread_mutex_lock(links_lock);
	result = open_locked(end);
	if (links_lock) pthread_mutex_unlock(links_lock);
	return result;
}

bool tp_net_link_is_ready(const struct tp_link *link)
{
	return link->net->state != TP_NET_CONNECTING;
}

ncclResult_t tp_net_link_check(const struct tp_link *link)
{
	const struct tp_link_net *end = link->net;

	if (!end || end->state != TP_NET_LEFT) return ncclSuccess;
	return TP_FAIL(ncclRemoteError, "rank %d (%s) has left the communicator, but rank %d still waits for data from it", end->from,
		end->nets->boot->peers[end->from].host_name, end->to);
}

/* A look at a receiving end costs a system call. Of many, those that were long silent have their turn in every eighth call. */
static bool may_rest(const struct tp_net_links *nets, const struct tp_link_net *end, int i)
{
	return !end->sending && end->quiet > QUIET_LOOKS && nets->nends > MANY_ENDS && ((uint32_t)i + nets->turn) % 8 != 0;
}

ncclResult_t tp_net_links_progress(struct tp_net_links *nets, bool *moved)
{
	nets->turn++;
	if (nets->nexpected > 0) TP_TRY(accept_all(nets, moved));
	for (int i = 0; i < nets->nends; i++) {
		struct tp_link_net *end = nets->ends[i];
		if (end->state == TP_NET_CONNECTING && end->sending) TP_TRY(connect_end(end, moved));
		if (end->state == TP_NET_READY && !may_rest(nets, end, i)) {
			bool this_moved = false;
			TP_TRY(tp_net_link_pump(end, &this_moved));
			end->quiet = this_moved ? 0 : end->quiet + 1;
			*moved |= this_moved;
		}
		if (end->state == TP_NET_LOST) TP_TRY(tp_net_link_mourn(end));
	}
	return ncclSuccess;
}

static bool has_unsent(struct tp_link_net *end)
{
	if (end->state == TP_NET_RECALLED) return false;
	if (end->sending && end->nets->gpu) tp_net_link_see_published(end);
	return end->sending && end->finished != end->link->next;
}

bool tp_net_links_need_progress(const struct tp_net_links *nets)
{
	for (int i = 0; i < nets->nends; i++)
		if (has_unsent(nets->ends[i])) return true;
	return false;
}

int tp_net_links_poll_fds(struct tp_net_links *nets, int *fds, uint32_t *events, int max)
{
	const struct tp_net_ops *ops = nets->ops;
	int n = 0;

	for (int l = 0; l < nets->nlisteners && nets->nexpected > 0 && ops->poll_listen_fds && n < max; l++)
		n += ops->poll_listen_fds(nets->listeners[l], fds + n, events + n, max - n);
	for (int i = 0; i < nets->nends && n < max; i++) {
		struct tp_link_net *end = nets->ends[i];
		if (end->state == TP_NET_CONNECTING && end->sending && ops->poll_connect_fds)
			n += ops->poll_connect_fds(end->connecting, fds + n, events + n, max - n);
		else if (end->state == TP_NET_READY && ops->poll_fds)
			n += ops->poll_fds(end->comm, fds + n, events + n, max - n);
	}
	return n;
}

const char *tp_net_links_via(const struct tp_net_links *nets) { return nets->via; }

const struct tp_net_ops *tp_net_links_ops(const struct tp_net_links *nets, int *dev)
{
	*dev = nets->dev;
	return nets->ops;
}
size_t tp_net_links_capacity(const struct tp_net_links *nets) { return nets->capacity; }

/* Nobody waits for data any more: aborted here, or an error that all ranks hear of. */
static bool is_over(const struct tp_boot *boot)
{
	return (boot->abort && atomic_load_explicit(boot->abort, memory_order_relaxed)) ||
		(boot->alarm && atomic_load_explicit(boot->alarm, memory_order_relaxed));
}

/* What was published counts as sent for its sender, so it must go out; but a peer that takes nothing must not hold us. */
static void flush(struct tp_link_net *end)
{
	struct tp_net_links *nets = end->nets;
	uint64_t since = tp_clock_ms();

	while (has_unsent(end) && !is_over(nets->boot)) {
		bool moved = false;
		if (tp_net_links_progress(nets, &moved) != ncclSuccess) return;
		if (moved) since = tp_clock_ms();
		else if (tp_clock_ms() - since > nets->patience_ms) break;
		else sched_yield();
	}
	if (!has_unsent(end)) return;
	if (!is_over(nets->boot)) nets->patience_ms = 0;
	TP_INFO(TP_NET, "network link (channel %d, class %d) %d -> %d closed with %u chunks unsent", end->channel, end->lane_class, end->from, end->to,
		(unsigned)(end->link->next - end->finished));
}

void tp_net_links_close(struct tp_net_links *nets, struct tp_link *link)
{
	struct tp_link_net *end = link->net;

	if (!end) return;
	if (end->sending) {
		flush(end);
		if (end->state == TP_NET_READY && !has_unsent(end) && !is_over(nets->boot)) tp_net_link_say_bye(end);
		if (end->connecting && nets->ops->cancel_connect) nets->ops->cancel_connect(end->connecting);
	} else if (end->state == TP_NET_CONNECTING) {
		nets->nexpected--;
	}
	/* The memory last: until the connection is closed data may be on its way out of it, or into it. */
	if (end->comm && end->sending) nets->ops->close_send(end->comm);
	else if (end->comm) nets->ops->close_recv(end->comm);
	end->comm = NULL;
	tp_net_grants_drop(end);
	if (end->mhandle) nets->ops->dereg_memory(NULL, end->mhandle);
	if (end->headers_mhandle) nets->ops->dereg_memory(NULL, end->headers_mhandle);
	for (int i = 0; i < nets->nends; i++)
		if (nets->ends[i] == end) {
			nets->ends[i] = nets->ends[--nets->nends];
			break;
		}
	tp_net_ring_free(end);
	free(end);
	memset(link, 0, sizeof(*link));
}

void tp_net_links_destroy(struct tp_net_links *nets)
{
	if (!nets) return;
	while (nets->nends > 0) tp_net_links_close(nets, nets->ends[nets->nends - 1]->link);
	for (int i = 0; i < nets->nearly; i++) nets->ops->close_recv(nets->early[i].comm);
	for (int l = 0; l < nets->nlisteners; l++) nets->ops->close_listen(nets->listeners[l]);
	while (nets->buffers) {
		struct tp_net_buffer *buffer = nets->buffers;
		tp_net_buffer_unlist(nets, buffer);
		tp_net_buffer_free(nets, buffer);
	}
	tp_net_loans_close(nets);
	tp_net_rings_destroy(nets);
	free(nets->early);
	free(nets->ends);
	free(nets->handles);
	free(nets->seats);
	free(nets->vias);
	free(nets);
}
