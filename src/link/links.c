/* All links of one rank: which kind joins each pair, agreed once, and the ends in use, made when first asked for. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "link/internal.h"

enum { PARAM_SHM_DISABLE, PARAM_CMA };
static struct tp_param params[] = {
	[PARAM_SHM_DISABLE] = { .name = "NCCL_SHM_DISABLE", .kind = TP_PARAM_BOOL, .fallback = "0", .max = 1,
		.doc = "1: ranks of one host meet over the network, not in shared memory" },
	[PARAM_CMA] = { .name = "TELPHER_CMA", .kind = TP_PARAM_ENUM, .fallback = "auto", .choices = "auto|0|1",
		.doc = "large chunks straight from the sender's memory (process_vm_readv): where it works, never, or an error where it "
		"doesn't" },
};
TP_PARAM_TABLE("link", params)

enum cma_wish { CMA_AUTO, CMA_NEVER, CMA_DEMANDED };

/* What each rank brings to the agreement. */
struct wish { int32_t nchannels, shm_disabled, cma, allow_by_ref; };

static ncclResult_t agree(struct tp_links *links, const struct tp_links_options *options, bool *by_ref, bool *demanded)
{
	struct tp_boot *boot = links->boot;
	struct wish *wishes = tp_alloc(boot->nranks, sizeof(*wishes), "the ranks' link settings");
	if (!wishes) return ncclSystemError;
	wishes[boot->rank] = (struct wish){ options->nchannels, (int32_t)tp_param_int(&params[PARAM_SHM_DISABLE]),
		(int32_t)tp_param_int(&params[PARAM_CMA]), options->allow_by_ref };
	ncclResult_t result = tp_boot_all_gather(boot, wishes, sizeof(*wishes));
	*by_ref = true;
	*demanded = false;
	for (int r = 0; r < boot->nranks && result == ncclSuccess; r++) {
		if (wishes[r].nchannels != wishes[0].nchannels)
			result = TP_FAIL(ncclInvalidUsage, "rank 0 wants %d channels and rank %d (%s) wants %d: they must be equal",
				(int)wishes[0].nchannels, r, boot->peers[r].host_name, (int)wishes[r].nchannels);
		links->shm_disabled |= wishes[r].shm_disabled != 0;
		*by_ref &= wishes[r].allow_by_ref && wishes[r].cma != CMA_NEVER;
		*demanded |= wishes[r].cma == CMA_DEMANDED;
	}
	free(wishes);
	return result;
}

static int largest_host(const struct tp_boot *boot)
{
	int largest = 1;
	for (int r = 0; r < boot->nranks; r++) largest = TP_MAX(largest, boot->peers[r].local + 1);
	return largest;
}

static ncclResult_t create_nets(struct tp_links *links, const struct tp_links_options *options)
{
	struct tp_net_links_options net = { .net_name = options->net_name, .nchannels = options->nchannels, .gpu = options->gpu, .cross_nic = options->cross_nic };
	return tp_net_links_create(links->boot, &net, &links->nets);
}

static ncclResult_t create_for_gpus(struct tp_links *links, const struct tp_links_options *options)
{
	TP_TRY(tp_gpu_links_create(links, options));
	bool needed = links->boot->nhosts > 1 || (links->gpu->any_refused && links->shm_disabled);
	return needed ? create_nets(links, options) : ncclSuccess;
}

ncclResult_t tp_links_create(struct tp_boot *boot, const struct tp_links_options *options, struct tp_links **out)
{
	struct tp_links *links = tp_alloc(1, sizeof(*links), "links");
	if (!links) return ncclSystemError;
	links->boot = boot;
	links->nchannels = options->nchannels;
	pthread_mutex_init(&links->lock, NULL);
	ncclResult_t result = ncclSystemError;
	links->ends = tp_alloc(2 * (size_t)boot->nranks, sizeof(*links->ends), "the ends of links");
	if (!links->ends) goto destroy;
	if (options->gpu) {
		links->shm_disabled = tp_param_int(&params[PARAM_SHM_DISABLE]) != 0;
		result = create_for_gpus(links, options);
		if (result != ncclSuccess) goto destroy;
		*out = links;
		return ncclSuccess;
	}
	bool by_ref, demanded;
	result = agree(links, options, &by_ref, &demanded);
	if (result != ncclSuccess) goto destroy;
	result = tp_cma_agree(boot, by_ref && !links->shm_disabled, &links->cma);
	if (result != ncclSuccess) goto destroy;
	if (demanded && !links->cma.works) {
		result = TP_FAIL(ncclSystemError, "TELPHER_CMA=1 demands reading from the sender's memory, but %s", links->cma.why);
		goto destroy;
	}
	tp_shm_shape_fit(boot->nlocal, largest_host(boot), options->nchannels, &links->shape);
	if (boot->nlocal > 1 && !links->shm_disabled) {
		result = tp_boot_share(boot, links->shape.segment_bytes, "links", (void **)&links->segment);
		if (result != ncclSuccess) goto destroy;
	}
	if (boot->nhosts > 1 || (links->shm_disabled && boot->nranks > 1)) {
		result = create_nets(links, options);
		if (result != ncclSuccess) goto destroy;
	}
	*out = links;
	return ncclSuccess;
destroy:
	tp_links_destroy(links);
	return result;
}

ncclResult_t tp_links_register(struct tp_links *links, void *memory, size_t bytes, struct tp_net_buffer **out)
{
	*out = NULL;
	if (!links->nets) return ncclSuccess;
	if (links->gpu) return tp_net_loans_register(links->nets, &links->lock, memory, bytes, out);
	return tp_net_links_register(links->nets, memory, bytes, out);
}

void tp_links_deregister(struct tp_links *links, struct tp_net_buffer *buffer)
{
	if (!buffer) return;
	if (links->gpu) tp_net_loans_deregister(links->nets, &links->lock, buffer);
	else tp_net_links_deregister(links->nets, buffer);
}

uint64_t tp_links_loan_table(const struct tp_links *links) { return links->nets ? tp_net_loans_table(links->nets) : 0; }

void tp_links_settle(struct tp_links *links, bool (*lends)(void *arg), void *arg)
{
	if (links->gpu && links->nets) tp_net_loans_settle(links->nets, &links->lock, lends, arg);
}

void tp_links_retire(struct tp_links *links)
{
	tp_links_recall(links);
	if (links->gpu && links->nets) tp_net_loans_retire(links->nets, &links->lock);
}

bool tp_links_find_loan(struct tp_links *links, const void *memory, size_t bytes, struct tp_link_loan *range, uint32_t *index)
{
	return links->nets && tp_net_loans_find(links->nets, memory, bytes, range, index);
}

ncclResult_t tp_links_set_gdr(struct tp_links *links, struct tp_links_gdr *devs, int ndevs)
{
	return links->nets ? tp_net_gdr_set(links->nets, devs, ndevs) : ncclSuccess;
}

static bool is_local(const struct tp_links *links, int rank)
{
	return !links->shm_disabled && links->boot->peers[rank].host == links->boot->host;
}

static const char *log_via(const struct tp_links *links, int peer)
{
	const struct tp_boot_peer *peers = links->boot->peers;
	if (peers[peer].process_hash == peers[links->boot->rank].process_hash) return "SHM/direct/direct (same process)";
	return links->cma.works ? "SHM/direct/direct (CMA)" : "SHM/direct/direct";
}

static ncclResult_t open_end(struct tp_links *links, int channel, int lane_class, int from, int to, struct tp_link *link)
{
	const struct tp_boot *boot = links->boot;
	const struct tp_boot_peer *self = &boot->peers[boot->rank];
	int peer_rank = from == boot->rank ? to : from;
	const struct tp_boot_peer *peer = &boot->peers[peer_rank];
	/* Of GPU ranks only network links have ends on the host (see tp_links_get_device). */
	if (links->gpu || !is_local(links, peer_rank)) return tp_net_links_open(links->nets, links->gpu ? &links->lock : NULL, channel, lane_class, from, to, link);
	tp_shm_link_fill(&links->shape, links->segment,
		tp_shm_shape_place(&links->shape, channel, lane_class, boot->peers[from].local, boot->peers[to].local), link);
	link->same_process = peer->process_hash == self->process_hash;
	link->by_ref = links->cma.works;
	link->peer = peer_rank;
	link->peer_pid = peer->pid;
	link->peer_bell = &boot->bells[peer->local];
	if (from == boot->rank)
		TP_INFO(TP_INIT | TP_SHM, "Channel %02d/0 : %d[%d] -> %d[%d] via %s", channel, from, (int)self->device, to, (int)peer->device,
			log_via(links, peer_rank));
	return ncclSuccess;
}

ncclResult_t tp_links_get(struct tp_links *links, int channel, int lane_class, int from, int to, struct tp_link **out)
{
	const struct tp_boot *boot = links->boot;
	bool receiving = to == boot->rank;
	int peer = receiving ? from : to;
	if (from == to || (from != boot->rank && to != boot->rank) || peer < 0 || peer >= boot->nranks || channel < 0 ||
		channel >= links->nchannels || lane_class < 0 || lane_class >= TP_LINK_CLASSES)
		return TP_FAIL(ncclInternalError, "rank %d has no end of link (channel %d of %d, class %d) %d -> %d of %d ranks", boot->rank,
			channel, links->nchannels, lane_class, from, to, boot->nranks);
	struct tp_link ***ends = &links->ends[2 * (size_t)peer + receiving];
	if (!*ends) *ends = tp_alloc((size_t)links->nchannels * TP_LINK_CLASSES, sizeof(**ends), "the ends of links");
	if (!*ends) return ncclSystemError;
	struct tp_link **end = &(*ends)[channel * TP_LINK_CLASSES + lane_class];
	if (!*end) {
		struct tp_link *link = tp_alloc(1, sizeof(*link), "a link");
		if (!link) return ncclSystemError;
		ncclResult_t result = open_end(links, channel, lane_class, from, to, link);
		if (result != ncclSuccess) {
			free(link);
			return result;
		}
		*end = link;
	}
	*out = *end;
	return ncclSuccess;
}

/* Of host ranks whoever holds the run lock does all of it. */
static void lock(struct tp_links *links)
{
	if (links->gpu) pthread_mutex_lock(&links->lock);
}

static void unlock(struct tp_links *links)
{
	if (links->gpu) pthread_mutex_unlock(&links->lock);
}

void tp_links_recall(struct tp_links *links)
{
	if (!links->nets) return;
	lock(links);
	tp_net_links_recall(links->nets);
	unlock(links);
}

void tp_links_loans(struct tp_links *links, struct tp_links_loans *out)
{
	*out = (struct tp_links_loans){ 0 };
	if (!links->nets) return;
	lock(links);
	tp_net_loans_count(links->nets, out);
	unlock(links);
}

ncclResult_t tp_link_check(const struct tp_link *link)
{
	return link->kind == TP_LINK_NET ? tp_net_link_check(link) : ncclSuccess;
}

ncclResult_t tp_links_progress(struct tp_links *links, bool *moved)
{
	*moved = false;
	if (!links->nets) return ncclSuccess;
	lock(links);
	ncclResult_t result = tp_net_links_progress(links->nets, moved);
	unlock(links);
	return result;
}

bool tp_links_need_progress(const struct tp_links *links)
{
	struct tp_links *l = (struct tp_links *)(uintptr_t)links;
	if (!links->nets) return false;
	lock(l);
	bool need = tp_net_links_need_progress(links->nets);
	unlock(l);
	return need;
}

int tp_links_poll_fds(struct tp_links *links, int *fds, uint32_t *events, int max)
{
	if (!links->nets) return 0;
	lock(links);
	int n = tp_net_links_poll_fds(links->nets, fds, events, max);
	unlock(links);
	return n;
}

ncclResult_t tp_links_path(struct tp_links *links, int from, int to, struct tp_link_path *out)
{
	const struct tp_boot *boot = links->boot;
	if (from < 0 || to < 0 || from >= boot->nranks || to >= boot->nranks)
		return TP_FAIL(ncclInvalidArgument, "ranks %d and %d: a path is between two of %d ranks", from, to, boot->nranks);
	const struct tp_boot_peer *a = &boot->peers[from], *b = &boot->peers[to];
	if (from == to) {
		out->via = "SELF";
		snprintf(out->text, sizeof(out->text), "within the rank");
	} else if (a->host != b->host) {
		out->via = tp_net_links_via_of(links->nets, from, to);
		if (strcmp(a->host_name, b->host_name) == 0)
			snprintf(out->text, sizeof(out->text), "not SHM: NCCL_HOSTID (or a network namespace) makes different hosts of %.48s", a->host_name);
		else
			snprintf(out->text, sizeof(out->text), "not SHM: %.48s and %.48s are different hosts", a->host_name, b->host_name);
	} else if (links->gpu) {
		tp_gpu_links_path(links, from, to, out);
	} else if (links->shm_disabled) {
		out->via = tp_net_links_via_of(links->nets, from, to);
		snprintf(out->text, sizeof(out->text), "not SHM: NCCL_SHM_DISABLE=1 on some rank");
	} else if (links->cma.works) {
		out->via = "SHM/CMA";
		snprintf(out->text, sizeof(out->text), "%s", a->process_hash == b->process_hash
			? "one process: chunks are read where they lie" : "large chunks are read straight from the sender's memory");
	} else {
		out->via = "SHM";
		snprintf(out->text, sizeof(out->text), "large chunks are copied twice, not SHM/CMA: %.96s", links->cma.why);
	}
	return ncclSuccess;
}

size_t tp_links_inline_capacity(const struct tp_links *links, bool across)
{
	if (across && links->nets) return tp_net_links_capacity(links->nets);
	return links->gpu ? links->gpu->shape.capacity : links->shape.capacity;
}

const struct tp_net_ops *tp_links_net(const struct tp_links *links, int *dev)
{
	return links->nets ? tp_net_links_ops(links->nets, dev) : NULL;
}

bool tp_links_have_net(const struct tp_links *links) { return links->nets != NULL; }

bool tp_links_may_seat(const struct tp_links *links) { return links->nets && tp_net_links_may_seat(links->nets); }

ncclResult_t tp_links_seat(struct tp_links *links, const struct tp_link_seats *wanted) { return tp_net_links_seat(links->nets, wanted); }

const struct tp_link_seat *tp_links_seats(const struct tp_links *links, int rank, int *count)
{
	return links->nets ? tp_net_links_seats(links->nets, rank, count) : NULL;
}

bool tp_links_meet(const struct tp_links *links, int channel, int from, int to, const struct tp_link_seat **sender, const struct tp_link_seat **receiver)
{
	return links->nets && tp_net_links_meet(links->nets, channel, from, to, sender, receiver);
}

int tp_links_channels(const struct tp_links *links) { return links->nchannels; }

bool tp_links_by_ref(const struct tp_links *links) { return links->cma.works && !links->shm_disabled; }

void tp_links_destroy(struct tp_links *links)
{
	if (!links) return;
	/* What is still on loan here is of an operation that failed. */
	if (links->gpu) tp_links_recall(links);
	for (int i = 0; links->ends && i < 2 * links->boot->nranks; i++) {
		struct tp_link **ends = links->ends[i];
		for (int e = 0; ends && e < links->nchannels * TP_LINK_CLASSES; e++) {
			if (ends[e] && ends[e]->kind == TP_LINK_NET) tp_net_links_close(links->nets, ends[e]);
			free(ends[e]);
		}
		free(ends);
	}
	free(links->ends);
	if (links->nets) tp_net_links_destroy(links->nets);
	tp_gpu_links_destroy(links);
	pthread_mutex_destroy(&links->lock);
	free(links);
}
