/* Network cards at GPU memory (GPUDirect RDMA): slots of GPU ranks that the card writes and reads where kernels do, without a copy to the host.
 *
 * Which device may, and whether what it wrote must be flushed, the topology says (tp_links_set_gdr). Whether it can is tried once for each device and
 * GPU of the process: by DMA-BUF where driver and card have it, else by the address, as nvidia-peermem allows. Pieces of device memory are
 * registered as a whole before links lie in them, so that what fails, fails while a link can still have its slots in pinned memory. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fork.h"
#include "link/net_link.h"

#define PIECE_BYTES ((size_t)8 << 20)
#define TRIAL_BYTES ((size_t)64 << 10)

static struct tp_param params[] = {
	{ .name = "NCCL_DMABUF_ENABLE", .kind = TP_PARAM_BOOL, .fallback = "1", .max = 1,
		.doc = "0: network cards reach GPU memory by nvidia-peermem alone, not by DMA-BUF" },
};
TP_PARAM_TABLE("link", params)

/* What was found out, for the life of the process. */
struct trial {
	struct trial *next;
	const struct tp_net_ops *ops;
	const struct tp_gpu *gpu;
	int dev;
	enum tp_net_memory way;     /* 0: none works */
	char why[200];
};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;        /* one trial at a time; CUDA is called with it, so nobody waits for it who only looks one up: the engine does */
TP_FORK_RENEW(lock)
static struct trial *_Atomic trials;                            /* none is ever taken out */

static const char *way_name(enum tp_net_memory way) { return way == TP_NET_DMABUF ? "DMABUF" : "nvidia-peermem"; }

static void widen(void **memory, size_t *bytes)
{
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)*memory / page * page, end = tp_align_up((uintptr_t)*memory + *bytes, page);

	*memory = (void *)begin;
	*bytes = end - begin;
}

void tp_net_gdr_show(void *memory, size_t bytes, uint64_t id, struct tp_net_shown *out) { *out = (struct tp_net_shown){ .memory = memory, .bytes = bytes, .id = id, .fds = { -1, -1 } }; }

static void close_bufs(struct tp_net_shown *shown)
{
	for (int i = 0; i < 2; i++) {
		if (shown->fds[i] >= 0) close(shown->fds[i]);
		shown->fds[i] = -1;
	}
	shown->closed = true;
}

/* Of it [memory, memory + bytes), as the device takes it. Whole pages, as DMA-BUFs are of. What was closed isn't made again: that would call CUDA where nobody
 * may. */
static ncclResult_t describe(const struct trial *t, enum tp_net_memory way, struct tp_net_shown *shown, void *memory, size_t bytes, struct tp_net_gpu_memory *out)
{
	struct tp_net_properties p;
	void *whole = shown->memory;
	size_t whole_bytes = shown->bytes;

	*out = (struct tp_net_gpu_memory){ .data = memory, .bytes = bytes, .kind = way, .fd = -1, .id = shown->id };
	if (way != TP_NET_DMABUF) return ncclSuccess;
	widen(&whole, &whole_bytes);
	widen(&out->data, &out->bytes);
	out->offset = (uintptr_t)out->data - (uintptr_t)whole;
	TP_TRY(t->ops->properties(t->dev, &p));
	int *fd = &shown->fds[p.data_direct];
	if (*fd < 0 && !shown->closed) TP_TRY((shown->beyond ? tp_gpu_try_dma_buf : tp_gpu_export_dma_buf)(t->gpu, whole, whole_bytes, p.data_direct, fd));
	out->fd = *fd;
	return ncclSuccess;
}

/* All of it stays registered with the device until it is dropped; where a transport can't, there is the DMA-BUF at least. */
static ncclResult_t hold(const struct trial *t, enum tp_net_memory way, struct tp_net_shown *shown, void **held)
{
	struct tp_net_gpu_memory memory;

	*held = NULL;
	TP_TRY(describe(t, way, shown, shown->memory, shown->bytes, &memory));
	return t->ops->hold_memory ? t->ops->hold_memory(t->dev, &memory, held) : ncclSuccess;
}

static ncclResult_t show_own(const struct tp_gpu_memory *memory, struct tp_net_shown *out)
{
	tp_net_gdr_show(memory->ptr, memory->bytes, 0, out);
	return tp_gpu_buffer_id(memory->ptr, &out->id);
}

static bool works(const struct trial *t, enum tp_net_memory way)
{
	struct tp_gpu_memory memory;
	struct tp_net_shown shown;
	void *held = NULL;

	if (tp_gpu_alloc(t->gpu, TRIAL_BYTES, false, "a trial of GPUDirect RDMA", &memory) != ncclSuccess) return false;
	ncclResult_t result = show_own(&memory, &shown);
	if (result == ncclSuccess) {
		result = hold(t, way, &shown, &held);
		close_bufs(&shown);
	}
	if (held) t->ops->drop_memory(held);
	tp_gpu_free(&memory);
	return result == ncclSuccess;
}

static void try_ways(struct trial *t)
{
	static const enum tp_net_memory ways[] = { TP_NET_DMABUF, TP_NET_CUDA };
	struct tp_net_properties p;
	bool any = false;

	if (t->ops->properties(t->dev, &p) != ncclSuccess) return;
	for (size_t i = 0; i < TP_ARRAY_LEN(ways) && !t->way; i++) {
		if (!(p.memory & ways[i]) || (ways[i] == TP_NET_DMABUF && !(t->gpu->dma_buf && tp_param_int(&params[0])))) continue;
		any = true;
		if (works(t, ways[i])) t->way = ways[i];
	}
	if (t->way) {
		TP_INFO(TP_INIT | TP_NET, "NET/%s : GPU Direct RDMA (%s%s) enabled for HCA %d '%s' and GPU %d (%s)", t->ops->name, way_name(t->way),
			p.software ? ", Telpher's software card" : p.data_direct ? ", data direct" : "", t->dev, p.name, t->gpu->ordinal, t->gpu->bus_id);
		return;
	}
	if (any) snprintf(t->why, sizeof(t->why), "%.64s can't register memory of GPU %d (see the log)", p.name, t->gpu->ordinal);
	else snprintf(t->why, sizeof(t->why), "%.128s", p.no_gpu_memory[0] ? p.no_gpu_memory : "the transport takes host memory");
	if (any)
		TP_WARN("NET/%s : %s (%s) can't register memory of GPU %d (%s), see above: what they exchange goes through host memory, which is slower. NCCL_NET_GDR_LEVEL=LOC asks for "
			"that", t->ops->name, p.name, p.pci_path[0] ? p.pci_path : "no PCI device", t->gpu->ordinal, t->gpu->bus_id);
}

static struct trial *find_trial(const struct tp_net_ops *ops, int dev, const struct tp_gpu *gpu)
{
	struct trial *t = atomic_load_explicit(&trials, memory_order_acquire);          /* pairs with tried */

	while (t && (t->ops != ops || t->dev != dev || t->gpu != gpu)) t = t->next;
	return t;
}

static const struct trial *tried(const struct tp_net_ops *ops, int dev, const struct tp_gpu *gpu)
{
	struct trial *t = find_trial(ops, dev, gpu);

	if (t) return t;
	pthread_mutex_lock(&lock);
	t = find_trial(ops, dev, gpu);
	if (!t && (t = tp_alloc(1, sizeof(*t), "a trial of GPUDirect RDMA"))) {
		*t = (struct trial){ .next = atomic_load_explicit(&trials, memory_order_relaxed), .ops = ops, .gpu = gpu, .dev = dev };
		try_ways(t);
		atomic_store_explicit(&trials, t, memory_order_release);        /* pairs with find_trial */
	}
	pthread_mutex_unlock(&lock);
	return t;
}

static void refuse(struct tp_links_gdr *dev, const char *why)
{
	dev->receive = dev->send = dev->flush = false;
	snprintf(dev->why, sizeof(dev->why), "%s", why);
}

/* Which devices can, of those that are wanted; where a connection may move to another device's port, which has the memory registered too, of all.
 * Of those one that can't. */
static ncclResult_t try_devices(const struct tp_net_links *nets, struct tp_links_gdr *devs, int ndevs, const struct trial **unable)
{
	bool any = false;

	*unable = NULL;
	for (int d = 0; d < ndevs; d++) any |= devs[d].receive || devs[d].send;
	for (int d = 0; d < ndevs && any; d++) {
		bool wanted = devs[d].receive || devs[d].send;
		if (!wanted && !nets->ops->spreads) continue;
		const struct trial *t = tried(nets->ops, d, nets->gpu);
		if (!t) return ncclSystemError;
		if (t->way) continue;
		if (wanted) refuse(&devs[d], t->why);
		*unable = t;
	}
	return ncclSuccess;
}

ncclResult_t tp_net_gdr_set(struct tp_net_links *nets, struct tp_links_gdr *devs, int ndevs)
{
	const struct trial *unable;
	int count = TP_MIN(ndevs, nets->ndevs);

	free(nets->gdr);
	nets->gdr = tp_alloc((size_t)TP_MAX(nets->ndevs, 1), sizeof(*nets->gdr), "which network devices reach GPU memory");
	if (!nets->gdr) return ncclSystemError;
	TP_TRY(try_devices(nets, devs, count, &unable));
	for (int d = 0; d < count; d++) {
		if (unable && nets->ops->spreads && (devs[d].receive || devs[d].send)) {
			char why[sizeof(devs[d].why)];
			snprintf(why, sizeof(why), "another device, which may stand in for it, can't: %.140s", unable->why);
			refuse(&devs[d], why);
		}
		nets->gdr[d] = devs[d];
	}
	return tp_net_loans_open(nets);
}

/* ---- the program's own memory */

const char *tp_net_gdr_why_not(const struct tp_net_links *nets)
{
	const char *why = "no network device was found to reach it";

	for (int d = 0; nets->gdr && d < nets->ndevs; d++) {
		if (nets->gdr[d].send) return NULL;
		if (nets->gdr[d].why[0]) why = nets->gdr[d].why;
	}
	return why;
}

static bool sends_by(const struct tp_net_links *nets, int dev)
{
	const struct tp_boot *boot = nets->boot;

	for (int r = 0; r < boot->nranks; r++)
		for (int c = 0; c < nets->nchannels && boot->peers[r].host != boot->host; c++)
			if (tp_net_links_device(nets, c, boot->rank, r) == dev) return true;
	return false;
}

bool tp_net_gdr_sends(const struct tp_net_links *nets)
{
	for (int d = 0; nets->gdr && d < nets->ndevs; d++)
		if (nets->gdr[d].send) return true;
	return false;
}

/* Where a connection may move to another device's port, it has memory registered there too. */
int tp_net_gdr_send_devices(const struct tp_net_links *nets, int *devs, int most)
{
	bool any = false;
	int n = 0;

	for (int d = 0; nets->gdr && d < nets->ndevs; d++) any |= nets->gdr[d].send && sends_by(nets, d);
	for (int d = 0; any && d < nets->ndevs && n < most; d++)
		if (nets->ops->spreads || (nets->gdr[d].send && sends_by(nets, d))) devs[n++] = d;
	return n;
}

ncclResult_t tp_net_gdr_hold(const struct tp_net_links *nets, const int *devs, int ndevs, struct tp_net_shown *shown)
{
	for (int d = 0; d < ndevs; d++) {
		const struct trial *t = tried(nets->ops, devs[d], nets->gpu);
		if (!t || !t->way) continue;
		TP_TRY(hold(t, t->way, shown, &shown->held[shown->nheld]));
		shown->nheld += shown->held[shown->nheld] != NULL;
	}
	/* Descriptors are few. */
	if (ndevs == shown->nheld && ndevs < TP_LINK_SEATS_MAX) close_bufs(shown);
	return ncclSuccess;
}

void tp_net_gdr_let_go(const struct tp_net_links *nets, struct tp_net_shown *shown)
{
	while (shown->nheld) nets->ops->drop_memory(shown->held[--shown->nheld]);
	close_bufs(shown);
}

bool tp_net_gdr_fits(const struct tp_net_shown *shown, const struct tp_gpu_pointer *p)
{
	void *memory = shown->memory;
	size_t bytes = shown->bytes;

	widen(&memory, &bytes);
	return (uintptr_t)memory >= (uintptr_t)p->base && (uintptr_t)memory + bytes <= (uintptr_t)p->base + p->bytes;
}

/* ---- device memory for slots */

/* Devices that a connection over dev may move to, and dev. */
static int stand_ins(const struct tp_net_links *nets, int dev, int *devs)
{
	int n = 0;
	for (int d = 0; d < nets->ndevs && n < TP_LINK_SEATS_MAX; d++)
		if (d == dev || nets->ops->spreads) devs[n++] = d;
	return n;
}

static ncclResult_t grow(struct tp_net_links *nets, int dev, size_t bytes)
{
	int devs[TP_LINK_SEATS_MAX];
	struct tp_net_far *piece = tp_alloc(1, sizeof(*piece), "device memory of network links");
	if (!piece) return ncclSystemError;
	ncclResult_t result = tp_gpu_alloc(nets->gpu, TP_MAX(bytes, PIECE_BYTES), false, "network links", &piece->memory);
	if (result != ncclSuccess) goto free_piece;
	result = show_own(&piece->memory, &piece->shown);
	if (result == ncclSuccess) result = tp_net_gdr_hold(nets, devs, stand_ins(nets, dev, devs), &piece->shown);
	if (result != ncclSuccess) goto free_memory;
	piece->dev = dev;
	piece->next = nets->far;
	nets->far = piece;
	return ncclSuccess;
free_memory:
	tp_net_gdr_let_go(nets, &piece->shown);
	tp_gpu_free(&piece->memory);
free_piece:
	free(piece);
	return result;
}

void tp_net_gdr_take(struct tp_link_net *end, size_t bytes)
{
	struct tp_net_links *nets = end->nets;
	const struct tp_links_gdr *dev = nets->gdr && end->dev < nets->ndevs ? &nets->gdr[end->dev] : NULL;

	if (!dev || !(end->sending ? dev->send : dev->receive)) return;
	const struct trial *t = tried(nets->ops, end->dev, nets->gpu);
	if (!t || !t->way) return;
	struct tp_net_far *piece = nets->far;
	while (piece && (piece->dev != end->dev || piece->memory.bytes - piece->used < bytes)) piece = piece->next;
	if (!piece && grow(nets, end->dev, bytes) != ncclSuccess) {
		TP_WARN("rank %d: %zu bytes of device memory for network links can't be had or registered with device %d (see above): from here on its links' slots are in host memory, which is "
			"slower", nets->boot->rank, TP_MAX(bytes, PIECE_BYTES), end->dev);
		end->far_refused = true;
		return;
	}
	if (!piece) piece = nets->far;
	end->far_slots = (unsigned char *)piece->memory.ptr + piece->used;
	end->far_bytes = bytes;
	end->far = &piece->shown;
	end->flushes = !end->sending && dev->flush;
	piece->used += bytes;
}

void tp_net_gdr_give_up(struct tp_link_net *end) { refuse(&end->nets->gdr[end->dev], "device memory couldn't be had or registered"); }

ncclResult_t tp_net_gdr_register_memory(const struct tp_link_net *end, struct tp_net_shown *shown, void *memory, size_t bytes, void **mhandle)
{
	const struct tp_net_ops *ops = end->nets->ops;
	const struct trial *t = tried(ops, end->dev, end->nets->gpu);
	struct tp_net_gpu_memory it;

	if (!t || !t->way) return TP_FAIL(ncclInternalError, "device %d doesn't reach memory of GPU %d", end->dev, end->nets->gpu->ordinal);
	TP_TRY(describe(t, t->way, shown, memory, bytes, &it));
	if (ops->reg_held) return ops->reg_held(end->comm, &it, mhandle);
	if (it.kind == TP_NET_DMABUF) return ops->reg_dmabuf(end->comm, it.data, it.bytes, it.offset, it.fd, mhandle);
	return ops->reg_memory(end->comm, it.data, it.bytes, TP_NET_CUDA, mhandle);
}

ncclResult_t tp_net_gdr_register(struct tp_link_net *end)
{
	void *unused = NULL;

	TP_TRY(tp_net_gdr_register_memory(end, end->far, end->far_slots, end->far_bytes, &end->mhandle));
	/* None yet: what flushes need is made now, not in a collective. */
	return end->flushes ? end->nets->ops->iflush(end->comm, 0, NULL, NULL, NULL, &unused) : ncclSuccess;
}

void tp_net_gdr_close(struct tp_net_links *nets)
{
	while (nets->far) {
		struct tp_net_far *piece = nets->far;
		nets->far = piece->next;
		tp_net_gdr_let_go(nets, &piece->shown);
		tp_gpu_free(&piece->memory);
		free(piece);
	}
	free(nets->gdr);
	nets->gdr = NULL;
}
