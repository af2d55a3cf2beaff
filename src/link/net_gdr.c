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
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
TP_FORK_RENEW(lock)
static struct trial *trials;

static const char *way_name(enum tp_net_memory way) { return way == TP_NET_DMABUF ? "DMABUF" : "nvidia-peermem"; }

/* The memory stays registered with the device until it is dropped. */
static ncclResult_t hold(const struct tp_net_ops *ops, int dev, const struct tp_gpu *gpu, enum tp_net_memory way, void *ptr, size_t bytes, void **held)
{
	struct tp_net_properties p;
	int fd = -1;

	*held = NULL;
	if (!ops->hold_memory) return ncclSuccess;
	TP_TRY(ops->properties(dev, &p));
	if (way == TP_NET_DMABUF) TP_TRY(tp_gpu_export_dma_buf(gpu, ptr, bytes, p.data_direct, &fd));
	ncclResult_t result = ops->hold_memory(dev, ptr, bytes, fd, held);
	if (fd >= 0) close(fd);
	return result;
}

static void widen(void **memory, size_t *bytes)
{
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)*memory / page * page, end = tp_align_up((uintptr_t)*memory + *bytes, page);

	*memory = (void *)begin;
	*bytes = end - begin;
}

static bool works(const struct trial *t, enum tp_net_memory way)
{
	struct tp_gpu_memory memory;
	void *held;

	if (tp_gpu_alloc(t->gpu, TRIAL_BYTES, false, "a trial of GPUDirect RDMA", &memory) != ncclSuccess) return false;
	ncclResult_t result = hold(t->ops, t->dev, t->gpu, way, memory.ptr, memory.bytes, &held);
	if (result == ncclSuccess && held) t->ops->drop_memory(held);
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

static const struct trial *tried(const struct tp_net_ops *ops, int dev, const struct tp_gpu *gpu)
{
	pthread_mutex_lock(&lock);
	struct trial *t = trials;
	while (t && (t->ops != ops || t->dev != dev || t->gpu != gpu)) t = t->next;
	if (!t && (t = tp_alloc(1, sizeof(*t), "a trial of GPUDirect RDMA"))) {
		*t = (struct trial){ .next = trials, .ops = ops, .gpu = gpu, .dev = dev };
		try_ways(t);
		trials = t;
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
	return ncclSuccess;
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

int tp_net_gdr_send_devices(const struct tp_net_links *nets, int *devs, int most)
{
	int n = 0;

	for (int d = 0; nets->gdr && d < nets->ndevs && n < most; d++)
		if (nets->gdr[d].send && sends_by(nets, d)) devs[n++] = d;
	return n;
}

ncclResult_t tp_net_gdr_hold(const struct tp_net_links *nets, int dev, void *memory, size_t bytes, void **held)
{
	const struct trial *t = tried(nets->ops, dev, nets->gpu);

	*held = NULL;
	if (!t || !t->way) return ncclSuccess;
	if (t->way == TP_NET_DMABUF) widen(&memory, &bytes);
	return hold(nets->ops, dev, nets->gpu, t->way, memory, bytes, held);
}

/* ---- device memory for slots */

static ncclResult_t grow(struct tp_net_links *nets, int dev, enum tp_net_memory way, size_t bytes)
{
	struct tp_net_far *piece = tp_alloc(1, sizeof(*piece), "device memory of network links");
	if (!piece) return ncclSystemError;
	ncclResult_t result = tp_gpu_alloc(nets->gpu, TP_MAX(bytes, PIECE_BYTES), false, "network links", &piece->memory);
	if (result != ncclSuccess) goto free_piece;
	result = hold(nets->ops, dev, nets->gpu, way, piece->memory.ptr, piece->memory.bytes, &piece->held);
	if (result != ncclSuccess) goto free_memory;
	piece->dev = dev;
	piece->next = nets->far;
	nets->far = piece;
	return ncclSuccess;
free_memory:
	tp_gpu_free(&piece->memory);
free_piece:
	free(piece);
	return result;
}

void tp_net_gdr_take(struct tp_link_net *end, size_t bytes)
{
	struct tp_net_links *nets = end->nets;
	struct tp_links_gdr *dev = nets->gdr && end->dev < nets->ndevs ? &nets->gdr[end->dev] : NULL;

	if (!dev || !(end->sending ? dev->send : dev->receive)) return;
	const struct trial *t = tried(nets->ops, end->dev, nets->gpu);
	if (!t || !t->way) return;
	struct tp_net_far *piece = nets->far;
	while (piece && (piece->dev != end->dev || piece->memory.bytes - piece->used < bytes)) piece = piece->next;
	if (!piece && grow(nets, end->dev, t->way, bytes) != ncclSuccess) {
		TP_WARN("rank %d: %zu bytes of device memory for network links can't be had or registered with device %d (see above): from here on its links' slots are in host memory, which is "
			"slower", nets->boot->rank, TP_MAX(bytes, PIECE_BYTES), end->dev);
		refuse(dev, "device memory couldn't be had or registered");
		return;
	}
	if (!piece) piece = nets->far;
	end->far_slots = (unsigned char *)piece->memory.ptr + piece->used;
	end->far_bytes = bytes;
	end->flushes = !end->sending && dev->flush;
	piece->used += bytes;
}

/* Whole pages, as DMA-BUFs are of. */
ncclResult_t tp_net_gdr_register_memory(const struct tp_link_net *end, void *memory, size_t bytes, void **mhandle)
{
	const struct tp_net_links *nets = end->nets;
	const struct tp_net_ops *ops = nets->ops;
	const struct trial *t = tried(ops, end->dev, nets->gpu);
	struct tp_net_properties p;
	int fd;

	if (!t || t->way != TP_NET_DMABUF) return ops->reg_memory(end->comm, memory, bytes, TP_NET_CUDA, mhandle);
	widen(&memory, &bytes);
	TP_TRY(ops->properties(end->dev, &p));
	TP_TRY(tp_gpu_export_dma_buf(nets->gpu, memory, bytes, p.data_direct, &fd));
	ncclResult_t result = ops->reg_dmabuf(end->comm, memory, bytes, 0, fd, mhandle);
	close(fd);
	return result;
}

ncclResult_t tp_net_gdr_register(struct tp_link_net *end)
{
	void *unused = NULL;

	TP_TRY(tp_net_gdr_register_memory(end, end->far_slots, end->far_bytes, &end->mhandle));
	/* None yet: what flushes need is made now, not in a collective. */
	return end->flushes ? end->nets->ops->iflush(end->comm, 0, NULL, NULL, NULL, &unused) : ncclSuccess;
}

void tp_net_gdr_close(struct tp_net_links *nets)
{
	while (nets->far) {
		struct tp_net_far *piece = nets->far;
		nets->far = piece->next;
		if (piece->held) nets->ops->drop_memory(piece->held);
		tp_gpu_free(&piece->memory);
		free(piece);
	}
	free(nets->gdr);
	nets->gdr = NULL;
}
