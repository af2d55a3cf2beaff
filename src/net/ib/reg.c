/* The registration cache, one a device: whole pages, counted, found in a treap ordered by allocation and address whose nodes know the highest
 * end below them, so that a range inside a registered one is found in logarithmic time. Memory of GPUs has its allocation's id, since a program frees it
 * without a word: what lies at the same address later isn't what was registered. What nobody holds any more is
 * deregistered at once: nobody would tell us if its pages went away. For the same reason a registration of which one holder has gone and a
 * part is still held isn't found any more. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
#include "net/ib/ib.h"

struct tp_ib_mr_node {
	uint64_t id;                            /* of the allocation; 0: the host's memory, or nobody says */
	uintptr_t start, end, highest;          /* highest end in this subtree */
	uint32_t priority;
	int holders;
	bool parts, unlisted;                   /* parts: some of them asked for less than all of it */
	struct ibv_mr *mr;
	struct tp_ib_mr_node *left, *right;
};

static void update(struct tp_ib_mr_node *n)
{
	n->highest = n->end;
	if (n->left) n->highest = TP_MAX(n->highest, n->left->highest);
	if (n->right) n->highest = TP_MAX(n->highest, n->right->highest);
}

static bool before(const struct tp_ib_mr_node *a, const struct tp_ib_mr_node *b)
{
	if (a->id != b->id) return a->id < b->id;
	return a->start != b->start ? a->start < b->start : (uintptr_t)a < (uintptr_t)b;
}

/* Everything before `at` goes to *low. */
static void split(struct tp_ib_mr_node *tree, const struct tp_ib_mr_node *at, struct tp_ib_mr_node **low, struct tp_ib_mr_node **high)
{
	if (!tree) {
		*low = *high = NULL;
	} else if (before(tree, at)) {
		split(tree->right, at, &tree->right, high);
		*low = tree;
		update(tree);
	} else {
		split(tree->left, at, low, &tree->left);
		*high = tree;
		update(tree);
	}
}

static struct tp_ib_mr_node *join(struct tp_ib_mr_node *low, struct tp_ib_mr_node *high)
{
	if (!low) return high;
	if (!high) return low;
	if (low->priority > high->priority) {
		low->right = join(low->right, high);
		update(low);
		return low;
	}
	high->left = join(low, high->left);
	update(high);
	return high;
}

static struct tp_ib_mr_node *without(struct tp_ib_mr_node *tree, const struct tp_ib_mr_node *node)
{
	if (tree == node) return join(tree->left, tree->right);
	if (before(node, tree)) tree->left = without(tree->left, node);
	else tree->right = without(tree->right, node);
	update(tree);
	return tree;
}

/* Of nodes of one allocation, one that covers [start, end): it begins at start or before, so only left parts that reach far enough matter. */
static struct tp_ib_mr_node *covering(struct tp_ib_mr_node *n, uintptr_t start, uintptr_t end)
{
	while (n && n->highest >= end) {
		if (n->start > start) {
			n = n->left;
			continue;
		}
		if (n->end >= end) return n;
		/* All to the left begin no later than this one: the first whose end is high enough will do. */
		if (n->left && n->left->highest >= end) {
			for (n = n->left; n->end < end;) n = n->left && n->left->highest >= end ? n->left : n->right;
			return n;
		}
		n = n->right;
	}
	return NULL;
}

static struct tp_ib_mr_node *find(struct tp_ib_cache *cache, uint64_t id, uintptr_t start, uintptr_t end)
{
	const struct tp_ib_mr_node first = { .id = id }, last = { .id = id, .start = UINTPTR_MAX };
	struct tp_ib_mr_node *low, *its, *high;

	split(cache->root, &first, &low, &its);
	split(its, &last, &its, &high);
	struct tp_ib_mr_node *found = covering(its, start, end);
	cache->root = join(join(low, its), high);
	return found;
}

/* The limit isn't asked about for who has it in the first user namespace, which can't be told from here. */
static const char *lifted(char text[200], int max_mr)
{
	enum { CAP_IPC_LOCK_BIT = 14 };
	unsigned long long capabilities = 0;
	char line[128];
	FILE *file = fopen("/proc/self/status", "re");

	text[0] = 0;
	while (file && fgets(line, sizeof(line), file))
		if (sscanf(line, "CapEff: %llx", &capabilities) == 1) break;
	if (file) fclose(file);
	if (capabilities >> CAP_IPC_LOCK_BIT & 1)
		snprintf(text, 200, ". But this process has CAP_IPC_LOCK, which lifts that limit except in a user namespace: it may be the card's registrations (max_mr %d) or memory itself", max_mr);
	return text;
}

const char *tp_ib_memlock_hint(int error, char *text, size_t bytes)
{
	struct rlimit limit = { 0 };

	if (error != ENOMEM) return "";
	getrlimit(RLIMIT_MEMLOCK, &limit);
	if (limit.rlim_cur != RLIM_INFINITY)
		snprintf(text, bytes, "; the card may have none left, or its memory can't be locked: this process may lock %llu bytes in all (RLIMIT_MEMLOCK; ulimit -l unlimited, "
			"LimitMEMLOCK=infinity, docker run --ulimit memlock=-1)", (unsigned long long)limit.rlim_cur);
	else snprintf(text, bytes, "; locked memory is unlimited here, so the card has none left, or it is memory itself or a cgroup's");
	return text;
}

ncclResult_t tp_ib_reg_failed(const struct tp_ib_context *context, size_t bytes, const char *what, int error)
{
	struct rlimit limit = { 0 };
	char text[200];

	getrlimit(RLIMIT_MEMLOCK, &limit);
	if (error == ENOMEM && limit.rlim_cur != RLIM_INFINITY)
		return TP_FAIL(ncclSystemError, "NET/IB : %s : Call to ibv_reg_mr failed: %s. %zu bytes (%s) must be locked in memory, and this process may lock %llu bytes in all "
			"(RLIMIT_MEMLOCK): raise it with ulimit -l unlimited, /etc/security/limits.conf (then log in again), LimitMEMLOCK=infinity in a systemd unit, or "
			"docker run --ulimit memlock=-1%s", context->name, strerror(error), bytes, what, (unsigned long long)limit.rlim_cur, lifted(text, context->attr.max_mr));
	if (error == ENOMEM)
		return TP_FAIL(ncclSystemError, "NET/IB : %s : Call to ibv_reg_mr failed: %s. %zu bytes (%s) can't be registered; locked memory is unlimited here, so it is the card's "
			"limit of registrations (max_mr %d), memory itself, or a cgroup's", context->name, strerror(error), bytes, what, context->attr.max_mr);
	return TP_FAIL(ncclSystemError, "NET/IB : %s : Call to ibv_reg_mr of %zu bytes (%s) failed: %s", context->name, bytes, what, strerror(error));
}

static ncclResult_t gpu_failed(const struct tp_ib_context *context, const struct tp_ib_source *source, size_t bytes, int error)
{
	bool dma_buf = source->kind == TP_NET_DMABUF;

	return TP_FAIL(ncclSystemError, "NET/IB : %s : Call to %s of %zu bytes of GPU memory failed: %s. %s", context->name, dma_buf ? "ibv_reg_dmabuf_mr" : "ibv_reg_mr", bytes,
		strerror(error), error == ENOMEM ? "The GPU's BAR1 (nvidia-smi -q -d MEMORY) or what may be locked (ulimit -l) may be used up" :
		dma_buf ? "NCCL_DMABUF_ENABLE=0 takes nvidia-peermem instead" : "Is nvidia_peermem loaded, and is it of this driver (modprobe nvidia_peermem; dmesg)?");
}

static struct ibv_mr *register_pages(struct tp_ib_context *context, const struct tp_ib_source *source, uintptr_t start, size_t bytes)
{
	const struct tp_verbs *v = context->verbs;
	int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

	errno = 0;
	if (source->kind == TP_NET_DMABUF) {
		if (context->relaxed) access = (int)((unsigned)access | IBV_ACCESS_RELAXED_ORDERING);
		if (context->data_direct) return tp_ib_data_direct_register(context->pd, source->offset, bytes, start, source->fd, access);
		return v->reg_dmabuf_mr(context->pd, source->offset, bytes, start, source->fd, access);
	}
	if (context->relaxed && v->reg_mr_iova2)
		return v->reg_mr_iova2(context->pd, (void *)start, bytes, start, (unsigned)access | IBV_ACCESS_RELAXED_ORDERING);
	return v->reg_mr(context->pd, (void *)start, bytes, access);
}

static ncclResult_t add(struct tp_ib_context *context, const struct tp_ib_source *source, uintptr_t start, uintptr_t end, struct tp_ib_mr_node **out)
{
	struct tp_ib_cache *cache = &context->cache;
	struct tp_ib_mr_node *node, *low, *high;

	if (source->kind == TP_NET_DMABUF && source->fd < 0)
		return TP_FAIL(ncclInternalError, "NET/IB : %s : %zu bytes of GPU memory at %p aren't registered here, and their DMA-BUF is closed", context->name, end - start, (void *)start);
	node = tp_alloc(1, sizeof(*node), "a registration");
	if (!node) return ncclSystemError;
	node->mr = register_pages(context, source, start, end - start);
	if (!node->mr) {
		int error = errno ? errno : ENOMEM;
		free(node);
		return source->kind == TP_NET_HOST ? tp_ib_reg_failed(context, end - start, "a buffer", error) : gpu_failed(context, source, end - start, error);
	}
	cache->seed = cache->seed * 1664525u + 1013904223u;
	node->id = source->id;
	node->start = start;
	node->end = end;
	node->priority = cache->seed;
	update(node);
	split(cache->root, node, &low, &high);
	/* The treap's order of priorities is kept by joining its three parts. */
	cache->root = join(join(low, node), high);
	cache->count++;
	*out = node;
	return ncclSuccess;
}

ncclResult_t tp_ib_reg_get(struct tp_ib_context *context, void *data, size_t bytes, struct tp_ib_mr_node **node, struct ibv_mr **mr)
{
	return tp_ib_reg_get_of(context, &(struct tp_ib_source){ .kind = TP_NET_HOST, .fd = -1 }, data, bytes, node, mr);
}

ncclResult_t tp_ib_reg_get_of(struct tp_ib_context *context, const struct tp_ib_source *source, void *data, size_t bytes, struct tp_ib_mr_node **node, struct ibv_mr **mr)
{
	struct tp_ib_cache *cache = &context->cache;
	struct tp_ib_mr_node *found;
	ncclResult_t result = ncclSuccess;
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	uintptr_t start = (uintptr_t)data / page * page, end = tp_align_up((uintptr_t)data + TP_MAX(bytes, (size_t)1), page);
	struct tp_ib_source whole = *source;

	/* The page's beginning must be in the DMA-BUF too. */
	whole.offset -= source->kind == TP_NET_DMABUF ? (uintptr_t)data - start : 0;
	if (whole.offset > source->offset)
		return TP_FAIL(ncclInvalidArgument, "NET/IB : a DMA-BUF whose byte %llu is at %p: that page begins before it", (unsigned long long)source->offset, data);
	pthread_mutex_lock(&cache->lock);
	found = find(cache, source->id, start, end);
	if (!found) result = add(context, &whole, start, end, &found);
	if (result == ncclSuccess) {
		found->holders++;
		found->parts |= found->start != start || found->end != end;
		*node = found;
		*mr = found->mr;
	}
	pthread_mutex_unlock(&cache->lock);
	return result;
}

ncclResult_t tp_ib_reg_put(struct tp_ib_context *context, struct tp_ib_mr_node *node)
{
	struct tp_ib_cache *cache = &context->cache;
	int error = 0;

	pthread_mutex_lock(&cache->lock);
	/* Those who hold a part don't keep the rest of the memory where it is: whoever registers that from now on has it looked up anew. (Where the allocation is known, it
	 * is the same memory as long as it is the same allocation.) */
	if (--node->holders == 0 || (node->parts && !node->id)) {
		if (!node->unlisted) cache->root = without(cache->root, node);
		node->unlisted = true;
	}
	if (node->holders == 0) {
		cache->count--;
		error = context->verbs->dereg_mr(node->mr);
		free(node);
	}
	pthread_mutex_unlock(&cache->lock);
	return error ? TP_FAIL(ncclSystemError, "NET/IB : %s : Call to ibv_dereg_mr failed: %s", context->name, strerror(error)) : ncclSuccess;
}

size_t tp_ib_reg_count(struct tp_ib_context *context)
{
	pthread_mutex_lock(&context->cache.lock);
	size_t count = context->cache.count;
	pthread_mutex_unlock(&context->cache.lock);
	return count;
}
