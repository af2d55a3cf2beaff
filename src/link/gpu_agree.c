/* Which GPUs of a host load and store each other's memory. CUDA is asked, the user's wishes are heard (NCCL_P2P_DISABLE,
 * NCCL_P2P_LEVEL), the memory is mapped, and then data is written and read through the mappings: machines whose IOMMU or virtualisation
 * breaks peer access promise it all the same. Each rank judges its side; a pair is joined where both sides agree. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"
#include "link/internal.h"

enum { PARAM_P2P_DISABLE, PARAM_P2P_LEVEL, PARAM_P2P_BYTES };
static struct tp_param params[] = {
	[PARAM_P2P_DISABLE] = { .name = "NCCL_P2P_DISABLE", .kind = TP_PARAM_BOOL, .fallback = "0", .max = 1,
		.doc = "1: GPUs don't use each other's memory; they meet in pinned host memory" },
	[PARAM_P2P_LEVEL] = { .name = "NCCL_P2P_LEVEL", .kind = TP_PARAM_STRING,
		.doc = "how far apart GPUs may be that use each other's memory: LOC, NVL, NVB, C2C, PIX, PXB, P2C, PXN, PHB or SYS (0 to 4: LOC, PIX, PXB, PHB, SYS); "
		"unset: wherever CUDA allows it" },
	[PARAM_P2P_BYTES] = { .name = "TELPHER_P2P_BYTES", .kind = TP_PARAM_BYTES, .fallback = "24M", .min = 1 << 20, .max = 1 << 30,
		.doc = "memory of a GPU rank for its links inside the host, of which it takes at most 16M where large messages go through pipes; equal on all ranks" },
};
TP_PARAM_TABLE("link", params)

#define LINE 128
#define PINNED_LIMIT ((size_t)16 << 20)     /* pinning takes time, and PCIe is soon full */
#define SMALL_LIMIT ((size_t)16 << 20)      /* where large messages don't need them */

static int32_t parse_level(void)
{
	const char *text = tp_param_string(&params[PARAM_P2P_LEVEL]);
	if (!text || !*text) return TP_GPU_UNKNOWN;
	int level = tp_gpu_level_parse(text);
	if (level < 0) TP_WARN("NCCL_P2P_LEVEL=%.32s is no level: " TP_GPU_LEVEL_NAMES "; it is ignored", text);
	return tp_gpu_level_distance(level);
}

static void fill_card(const struct tp_links_options *options, bool shm_disabled, struct tp_gpu_card *card)
{
	const struct tp_gpu *gpu = options->gpu;
	*card = (struct tp_gpu_card){ .nchannels = options->nchannels, .p2p_disabled = (int32_t)tp_param_int(&params[PARAM_P2P_DISABLE]),
		.shm_disabled = shm_disabled, .level = parse_level(), .vmm = gpu->vmm, .shares = gpu->vmm || gpu->ipc, .region_bytes = options->region_bytes,
		.arena_bytes = (uint64_t)tp_param_int(&params[PARAM_P2P_BYTES]) };
	memcpy(card->uuid, gpu->uuid, sizeof(card->uuid));
	memcpy(card->bus_id, gpu->bus_id, sizeof(card->bus_id));
}

/* What must be equal is; what one rank forbids is forbidden to all. */
static ncclResult_t check_cards(struct tp_links *links)
{
	const struct tp_boot *boot = links->boot;
	struct tp_gpu_card *cards = links->gpu->cards, *first = &cards[0];
	int32_t disabled = 0, shm_disabled = 0, level = TP_GPU_UNKNOWN;
	for (int r = 0; r < boot->nranks; r++) {
		const char *host = boot->peers[r].host_name;
		if (cards[r].nchannels != first->nchannels)
			return TP_FAIL(ncclInvalidUsage, "rank 0 wants %d channels and rank %d (%s) wants %d: they must be equal", (int)first->nchannels, r, host,
				(int)cards[r].nchannels);
		if (cards[r].arena_bytes != first->arena_bytes)
			return TP_FAIL(ncclInvalidUsage, "TELPHER_P2P_BYTES is %llu on rank 0 and %llu on rank %d (%s): it must be the same on all",
				(unsigned long long)first->arena_bytes, (unsigned long long)cards[r].arena_bytes, r, host);
		if (cards[r].region_bytes != first->region_bytes)
			return TP_FAIL(ncclInternalError, "rank 0 wants %llu bytes for fused kernels and rank %d (%s) %llu", (unsigned long long)first->region_bytes, r,
				host, (unsigned long long)cards[r].region_bytes);
		if (boot->peers[r].local >= TP_GPU_LOCAL_MAX)
			return TP_FAIL(ncclInvalidUsage, "host %s has more than %d ranks with GPUs", host, TP_GPU_LOCAL_MAX);
		tp_text_clean(cards[r].bus_id, sizeof(cards[r].bus_id));
		disabled |= cards[r].p2p_disabled;
		shm_disabled |= cards[r].shm_disabled;
		level = TP_MIN(level, cards[r].level);
	}
	for (int r = 0; r < boot->nranks; r++) {
		cards[r].p2p_disabled = disabled;
		cards[r].level = level;
	}
	links->shm_disabled = shm_disabled != 0;
	return ncclSuccess;
}

static enum tp_gpu_refusal judge(const struct tp_links *links, int rank)
{
	const struct tp_boot_peer *peers = links->boot->peers;
	const struct tp_gpu *gpu = links->gpu->gpu;
	const struct tp_gpu_card *peer = &links->gpu->cards[rank];
	char why[128];
	bool same = memcmp(gpu->uuid, peer->uuid, sizeof(gpu->uuid)) == 0;
	if (peer->p2p_disabled) return TP_GPU_DISABLED;
	if (peers[rank].process_hash != peers[links->boot->rank].process_hash && !peer->shares) return TP_GPU_NOT_SHARED;
	if (same) return TP_GPU_TAKEN;
	if (peer->level < TP_GPU_SYS) {
		enum tp_gpu_distance distance = tp_gpu_distance(gpu, peer->bus_id);
		if (distance == TP_GPU_UNKNOWN) return TP_GPU_DISTANCE_UNKNOWN;
		if ((int)distance > peer->level) return TP_GPU_TOO_FAR;
	}
	return tp_gpu_reaches(gpu, peer->uuid, peer->bus_id, why, sizeof(why)) ? TP_GPU_TAKEN : TP_GPU_NO_ACCESS;
}

static ncclResult_t gather(struct tp_links *links) { return tp_boot_all_gather(links->boot, links->gpu->cards, sizeof(struct tp_gpu_card)); }

bool tp_gpu_links_reach(const struct tp_links *links, int from, int to)
{
	const struct tp_boot_peer *a = &links->boot->peers[from], *b = &links->boot->peers[to];
	const struct tp_gpu_card *cards = links->gpu->cards;
	return a->host == b->host && cards[from].refusal[b->local] == TP_GPU_TAKEN && cards[to].refusal[a->local] == TP_GPU_TAKEN;
}

static bool own_reaches(const struct tp_links *links, int local) { return tp_gpu_links_reach(links, links->boot->rank, links->boot->local_ranks[local]); }

static void count_refusals(struct tp_links *links)
{
	const struct tp_boot *boot = links->boot;
	struct tp_gpu_links *g = links->gpu;
	g->any_refused = g->host_refused = false;
	for (int r = 0; r < boot->nranks; r++)
		for (int l = 0; l < TP_GPU_LOCAL_MAX; l++) {
			if (g->cards[r].refusal[l] == TP_GPU_TAKEN) continue;
			g->any_refused = true;
			g->host_refused |= boot->peers[r].host == boot->host;
		}
}

static void fit_shape(struct tp_links *links, const struct tp_links_options *options)
{
	const struct tp_boot *boot = links->boot;
	size_t budget = (size_t)links->gpu->cards[0].arena_bytes;
	int largest = 1;
	for (int r = 0; r < boot->nranks; r++) largest = TP_MAX(largest, boot->peers[r].local + 1);
	if (links->gpu->any_refused) budget = TP_MIN(budget, PINNED_LIMIT);
	if (options->carries_large) budget = TP_MIN(budget, SMALL_LIMIT);
	tp_gpu_shape_fit(boot->nlocal, largest, options->nchannels, budget, options->region_bytes, &links->gpu->shape);
}

/* ---- does data get through? */

/* A word that only this pair of this communicator has. */
static uint64_t word_of(const struct tp_boot *boot, int from, int to)
{
	int pair[2] = { from, to };
	return tp_hash64(pair, sizeof(pair), boot->comm_hash) | 1;
}

static unsigned char *board_line(void *arena, int local) { return (unsigned char *)arena + (size_t)LINE * local; }

static ncclResult_t make_arena(struct tp_links *links)
{
	const struct tp_boot *boot = links->boot;
	struct tp_gpu_links *g = links->gpu;
	bool wanted = boot->nlocal == 1;
	for (int l = 0; l < boot->nlocal; l++) wanted |= l != boot->local && own_reaches(links, l);
	if (!wanted) return ncclSuccess;
	TP_TRY(tp_gpu_alloc(g->gpu, g->shape.bytes, true, "a communicator's links", &g->arena));
	uint64_t word = word_of(boot, boot->rank, boot->rank);
	return tp_gpu_copy(g->gpu, board_line(g->arena.ptr, boot->local), &word, sizeof(word));
}

/* Reads the peer's word and leaves ours there. */
static bool try_peer(const struct tp_links *links, int local)
{
	const struct tp_boot *boot = links->boot;
	const struct tp_gpu_links *g = links->gpu;
	int rank = boot->local_ranks[local];
	uint64_t seen = 0, word = word_of(boot, boot->rank, rank);
	return tp_gpu_copy(g->gpu, &seen, board_line(g->maps[local].ptr, local), sizeof(seen)) == ncclSuccess && seen == word_of(boot, rank, rank) &&
		tp_gpu_copy(g->gpu, board_line(g->maps[local].ptr, boot->local), &word, sizeof(word)) == ncclSuccess;
}

static ncclResult_t try_all(struct tp_links *links)
{
	const struct tp_boot *boot = links->boot;
	struct tp_gpu_links *g = links->gpu;
	struct tp_gpu_card *own = &g->cards[boot->rank];
	unsigned char board[LINE * TP_GPU_LOCAL_MAX] = { 0 };
	for (int l = 0; l < boot->nlocal; l++) {
		if (l == boot->local || !own_reaches(links, l)) continue;
		if (!g->maps[l].ptr) own->refusal[l] = TP_GPU_NOT_MAPPED;
		else if (!try_peer(links, l)) own->refusal[l] = TP_GPU_BAD_DATA;
	}
	TP_TRY(gather(links));
	if (g->arena.ptr) TP_TRY(tp_gpu_copy(g->gpu, board, g->arena.ptr, sizeof(board)));
	for (int l = 0; l < boot->nlocal; l++) {
		uint64_t word;
		if (l == boot->local || !own_reaches(links, l)) continue;
		memcpy(&word, board_line(board, l), sizeof(word));
		if (word != word_of(boot, boot->local_ranks[l], boot->rank)) own->refusal[l] = TP_GPU_BAD_DATA;
	}
	/* Nobody changes what another reads in this very gather: each looks at its own row and at others' of the one before. */
	return gather(links);
}

ncclResult_t tp_gpu_links_agree(struct tp_links *links, const struct tp_links_options *options)
{
	struct tp_boot *boot = links->boot;
	struct tp_gpu_links *g = links->gpu;
	bool wanted[TP_GPU_LOCAL_MAX] = { false };
	fill_card(options, links->shm_disabled, &g->cards[boot->rank]);
	TP_TRY(gather(links));
	TP_TRY(check_cards(links));
	for (int l = 0; l < boot->nlocal; l++)
		if (l != boot->local) g->cards[boot->rank].refusal[l] = (uint8_t)judge(links, boot->local_ranks[l]);
	TP_TRY(gather(links));
	count_refusals(links);
	fit_shape(links, options);
	TP_TRY(make_arena(links));
	for (int l = 0; l < boot->nlocal; l++) wanted[l] = l != boot->local && own_reaches(links, l);
	TP_TRY(tp_mem_exchange(boot, g->gpu, g->arena.ptr ? &g->arena : NULL, wanted, g->maps));
	TP_TRY(try_all(links));
	count_refusals(links);
	fit_shape(links, options);
	return ncclSuccess;
}
