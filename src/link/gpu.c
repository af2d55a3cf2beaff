/* Links of GPU ranks: which memory a pair meets in, and where a kernel finds it. All memory inside a host is there after create; the
 * rings of network links come with their connections. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "link/internal.h"

static bool is_pinned(const struct tp_links *links, int a, int b)
{
	return links->boot->peers[a].host == links->boot->peers[b].host && !tp_gpu_links_reach(links, a, b) && !links->shm_disabled;
}

static ncclResult_t make_segment(struct tp_links *links)
{
	struct tp_gpu_links *g = links->gpu;
	size_t bytes = (size_t)links->boot->nlocal * g->shape.bytes;
	void *base;
	if (!g->host_refused || links->shm_disabled) return ncclSuccess;
	TP_TRY(tp_boot_share(links->boot, bytes, "links of GPUs", &base));
	return tp_gpu_register_host(g->gpu, base, bytes, "links of GPUs", &g->segment);
}

static const char *refusal_text(enum tp_gpu_refusal refusal)
{
	switch (refusal) {
	case TP_GPU_DISABLED: return "NCCL_P2P_DISABLE=1 on some rank";
	case TP_GPU_TOO_FAR: return "they are farther apart than NCCL_P2P_LEVEL allows";
	case TP_GPU_DISTANCE_UNKNOWN: return "NCCL_P2P_LEVEL is set, and without NVML their distance isn't known";
	case TP_GPU_NO_ACCESS: return "CUDA gives no peer access between the two";
	case TP_GPU_NOT_SHARED: return "neither CUDA VMM nor CUDA IPC works between processes here";
	case TP_GPU_NOT_MAPPED: return "the peer's memory can't be mapped (see the log)";
	case TP_GPU_BAD_DATA: return "a test word didn't get through peer access (IOMMU or ACS?)";
	default: return "";
	}
}

static enum tp_gpu_refusal refusal_of(const struct tp_links *links, int from, int to)
{
	const struct tp_boot_peer *peers = links->boot->peers;
	enum tp_gpu_refusal refusal = links->gpu->cards[from].refusal[peers[to].local];
	return refusal != TP_GPU_TAKEN ? refusal : links->gpu->cards[to].refusal[peers[from].local];
}

/* Never in silence: once a rank, as a warning only where the user hasn't asked for it. */
static void report_refusals(const struct tp_links *links)
{
	const struct tp_boot *boot = links->boot;
	for (int l = 0; l < boot->nlocal; l++) {
		int rank = boot->local_ranks[l];
		if (rank == boot->rank || tp_gpu_links_reach(links, boot->rank, rank)) continue;
		enum tp_gpu_refusal refusal = refusal_of(links, boot->rank, rank);
		if (refusal == TP_GPU_NOT_MAPPED || refusal == TP_GPU_BAD_DATA)
			TP_WARN("rank %d and rank %d don't use peer access: %s. %s", boot->rank, rank, refusal_text(refusal),
				links->gpu->maps[l].why[0] ? links->gpu->maps[l].why : "They meet in host memory, which is slower");
		else
			TP_INFO(TP_INIT | TP_P2P, "rank %d and rank %d don't use peer access: %s", boot->rank, rank, refusal_text(refusal));
	}
}

ncclResult_t tp_gpu_links_create(struct tp_links *links, const struct tp_links_options *options)
{
	struct tp_gpu_links *g = links->gpu = tp_alloc(1, sizeof(*g), "links of GPUs");
	if (!g) return ncclSystemError;
	g->gpu = options->gpu;
	g->cards = tp_alloc((size_t)links->boot->nranks, sizeof(*g->cards), "the ranks' GPUs");
	g->maps = tp_alloc((size_t)links->boot->nlocal, sizeof(*g->maps), "the GPUs of the host");
	if (!g->cards || !g->maps) return ncclSystemError;
	TP_TRY(tp_gpu_links_agree(links, options));
	TP_TRY(make_segment(links));
	report_refusals(links);
	const struct tp_gpu_shape *s = &g->shape;
	TP_INFO(TP_INIT, "links inside the host: %zu bytes of device memory, %zu pinned; slots of %zu bytes x %u, %zu x %u for rings", g->arena.mapped,
		g->segment.bytes, s->capacity, s->nslots, s->wide_capacity, s->wide_nslots);
	return ncclSuccess;
}

void tp_gpu_links_destroy(struct tp_links *links)
{
	struct tp_gpu_links *g = links->gpu;
	if (!g) return;
	tp_mem_unmap(g->maps, links->boot->nlocal);
	tp_gpu_free(&g->segment);
	tp_mem_free_shown(&g->arena);
	free(g->maps);
	free(g->cards);
	free(g->next);
	free(g);
	links->gpu = NULL;
}

ncclResult_t tp_links_set_ring_orders(struct tp_links *links, int norders, const int *orders)
{
	const struct tp_boot *boot = links->boot;
	struct tp_gpu_links *g = links->gpu;
	int nlocal = boot->nlocal;
	if (!g || !norders || nlocal < 2) return ncclSuccess;
	uint8_t *next = tp_alloc((size_t)links->nchannels * (size_t)nlocal, 1, "the orders of rings");
	if (!next) return ncclSystemError;
	for (int c = 0; c < links->nchannels; c++) {
		const int *order = orders + (size_t)(c % norders) * (size_t)boot->nranks;
		int first = -1, last = -1;
		for (int i = 0; i < boot->nranks; i++) {
			const struct tp_boot_peer *peer = &boot->peers[order[i]];
			if (peer->host != boot->host) continue;
			if (last >= 0) next[c * nlocal + last] = (uint8_t)peer->local;
			else first = peer->local;
			last = peer->local;
		}
		next[c * nlocal + last] = (uint8_t)first;
	}
	free(g->next);
	g->shape.next = g->next = next;
	return ncclSuccess;
}

/* Where this rank's kernels see the arena of a place, of the kind of memory that the pair meets in. */
static unsigned char *arena_of(const struct tp_links *links, int local, bool pinned)
{
	const struct tp_gpu_links *g = links->gpu;
	if (pinned) return (unsigned char *)g->segment.ptr + (size_t)local * g->shape.bytes;
	return local == links->boot->local ? g->arena.ptr : g->maps[local].ptr;
}

static const char *via_of(const struct tp_links *links, int from, int to)
{
	const struct tp_boot_peer *peers = links->boot->peers;
	if (peers[from].host != peers[to].host) return tp_net_links_via_of(links->nets, from, to);
	if (!tp_gpu_links_reach(links, from, to)) return links->shm_disabled ? tp_net_links_via_of(links->nets, from, to) : "SHM/direct/direct";
	if (peers[from].process_hash == peers[to].process_hash) return "P2P/direct pointer";
	return links->gpu->cards[to].vmm ? "P2P/CUMEM" : "P2P/IPC";
}

static void fill_net(const struct tp_link *link, struct tp_device_link *out)
{
	*out = (struct tp_device_link){ .stride = (uint32_t)link->stride, .mask = link->mask, .capacity = (uint32_t)link->capacity, .kind = TP_LINK_NET,
		.peer = link->peer };
	tp_net_ring_places(link, out);
}

/* Where some pairs of a host meet over the network, their slots limit all: no rank knows whether a ring leads over others' such pairs. */
size_t tp_links_ring_capacity(const struct tp_links *links)
{
	if (!links->gpu) return links->shape.capacity;
	size_t wide = links->gpu->shape.wide_capacity;
	return links->gpu->any_refused && links->shm_disabled ? TP_MIN(wide, tp_net_links_capacity(links->nets)) : wide;
}

static void fill_local(const struct tp_links *links, int channel, int lane_class, int from, int to, struct tp_device_link *out)
{
	const struct tp_boot *boot = links->boot;
	const struct tp_gpu_shape *s = &links->gpu->shape;
	int a = boot->peers[from].local, b = boot->peers[to].local;
	bool pinned = is_pinned(links, from, to);
	struct tp_gpu_ring ring = tp_gpu_shape_ring(s, channel, lane_class, a, b);
	*out = (struct tp_device_link){ .slots = (uint64_t)(uintptr_t)(arena_of(links, b, pinned) + ring.place), .flag_stride = (uint32_t)ring.stride,
		.head = (uint64_t)(uintptr_t)(arena_of(links, a, pinned) + tp_gpu_shape_head(s, channel, lane_class, b)), .stride = (uint32_t)ring.stride,
		.mask = ring.nslots - 1, .capacity = (uint32_t)TP_MIN(ring.capacity, tp_links_ring_capacity(links)), .kind = pinned ? TP_LINK_SHM : TP_LINK_P2P_DEVICE,
		.peer = from == boot->rank ? to : from };
	out->flags = out->slots;
}

ncclResult_t tp_links_get_device(struct tp_links *links, int channel, int lane_class, int from, int to, struct tp_device_link *out)
{
	const struct tp_boot *boot = links->boot;
	int peer = from == boot->rank ? to : from;
	if (!links->gpu) return TP_FAIL(ncclInternalError, "rank %d has host links, a kernel's end of one was asked for", boot->rank);
	if (from == to || (from != boot->rank && to != boot->rank) || peer < 0 || peer >= boot->nranks || channel < 0 || channel >= links->nchannels ||
		lane_class < 0 || lane_class >= TP_LINK_CLASSES)
		return TP_FAIL(ncclInternalError, "rank %d has no end of link (channel %d of %d, class %d) %d -> %d of %d ranks", boot->rank, channel,
			links->nchannels, lane_class, from, to, boot->nranks);
	if (!tp_gpu_links_reach(links, from, to) && !is_pinned(links, from, to)) {
		struct tp_link *link;
		TP_TRY(tp_links_get(links, channel, lane_class, from, to, &link));
		fill_net(link, out);
		return ncclSuccess;
	}
	fill_local(links, channel, lane_class, from, to, out);
	if (from == boot->rank)
		TP_INFO(TP_INIT | TP_P2P, "Channel %02d/%d : %d[%d] -> %d[%d] via %s", channel, lane_class == TP_LINK_CLASSES - 1, from,
			(int)boot->peers[from].device, to, (int)boot->peers[to].device, via_of(links, from, to));
	return ncclSuccess;
}

void *tp_links_region(struct tp_links *links, int rank)
{
	const struct tp_boot *boot = links->boot;
	const struct tp_gpu_links *g = links->gpu;
	if (!g || boot->peers[rank].host != boot->host || (g->any_refused && links->shm_disabled)) return NULL;
	unsigned char *arena = arena_of(links, boot->peers[rank].local, g->host_refused);
	return arena ? arena + g->shape.region : NULL;
}

bool tp_links_reaches(const struct tp_links *links, int a, int b)
{
	return links->gpu ? tp_gpu_links_reach(links, a, b) : false;
}

void tp_gpu_links_path(const struct tp_links *links, int from, int to, struct tp_link_path *out)
{
	const struct tp_boot *boot = links->boot;
	const struct tp_gpu_card *cards = links->gpu->cards;
	char how[24] = "";
	out->via = via_of(links, from, to);
	if (!tp_gpu_links_reach(links, from, to)) {
		snprintf(out->text, sizeof(out->text), "not P2P: %s%s", refusal_text(refusal_of(links, from, to)),
			links->shm_disabled ? "; not SHM: NCCL_SHM_DISABLE=1 on some rank" : "");
		return;
	}
	if (memcmp(cards[from].uuid, cards[to].uuid, sizeof(cards[from].uuid)) == 0) snprintf(how, sizeof(how), "one GPU");
	else if (boot->peers[from].host == boot->host) tp_gpu_bus_path_name(cards[from].bus_id, cards[to].bus_id, how, sizeof(how));
	snprintf(out->text, sizeof(out->text), "%s", how);
}
