/* How a card reaches GPU memory. NCCL's order and checks: a DMA-BUF, where the driver knows the call (asked with a descriptor that is none, it says EBADF,
 * and EOPNOTSUPP or EPROTONOSUPPORT where it doesn't know it); the address, where the kernel module that resolves those of GPUs is loaded. Telpher's
 * software card asks CUDA itself what an address is, and takes both or neither. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "net/ib/ib.h"

bool tp_ib_peermem_is_loaded(const char *root)
{
	static const char *const files[] = { "/sys/module/nvidia_peermem/version", "/sys/kernel/mm/memory_peers/nv_mem/version", "/sys/kernel/mm/memory_peers/nv_mem_nc/version" };
	char path[512];

	for (size_t i = 0; i < TP_ARRAY_LEN(files); i++)
		if (snprintf(path, sizeof(path), "%s%s", root, files[i]) < (int)sizeof(path) && access(path, F_OK) == 0) return true;
	return false;
}

/* 0: it knows DMA-BUFs. */
static int dma_buf_error(const struct tp_ib_context *context)
{
	if (!context->verbs->reg_dmabuf_mr) return ENOSYS;
	errno = 0;
	struct ibv_mr *mr = context->verbs->reg_dmabuf_mr(context->pd, 0, 0, 0, -1, 0);
	if (mr) {
		context->verbs->dereg_mr(mr);
		return EOPNOTSUPP;      /* whoever registers nothing registers anything */
	}
	return errno == EOPNOTSUPP || errno == EPROTONOSUPPORT ? errno : 0;
}

static void ask(struct tp_ib_context *context)
{
	struct tp_ib_params params;
	char pci_path[sizeof(context->pci_path)];
	int error = dma_buf_error(context);

	tp_ib_params_read(&params);
	if (!error) context->gpu_memory |= TP_NET_DMABUF;
	if (context->verbs->software ? !error : tp_ib_peermem_is_loaded("")) context->gpu_memory |= TP_NET_CUDA;
	if (!error && params.data_direct && !context->verbs->software && tp_ib_data_direct(context, pci_path, sizeof(pci_path))) {
		context->data_direct = true;
		memcpy(context->pci_path, pci_path, sizeof(pci_path));
		TP_INFO(TP_INIT | TP_NET, "NET/IB : %s reaches GPU memory by data direct, at %s (NCCL_IB_DATA_DIRECT)", context->name, pci_path);
	}
	if (!context->gpu_memory && context->verbs->software) snprintf(context->no_gpu_memory, sizeof(context->no_gpu_memory), "the software card takes no GPU memory (TELPHER_VERBS_GPU)");
	else if (!context->gpu_memory)
		snprintf(context->no_gpu_memory, sizeof(context->no_gpu_memory), "%.32s: nvidia_peermem isn't loaded, and %s: modprobe nvidia_peermem", context->name,
			error == ENOSYS ? "its library knows no DMA-BUF" : "its driver knows no DMA-BUF");
}

uint32_t tp_ib_gpu_memory(struct tp_ib_context *context)
{
	pthread_mutex_lock(&context->cache.lock);
	if (!context->gpu_asked) ask(context);
	context->gpu_asked = true;
	pthread_mutex_unlock(&context->cache.lock);
	return context->gpu_memory;
}

struct held { struct tp_ib_context *contexts[TP_IB_MAX_MERGED]; struct tp_ib_mr_node *nodes[TP_IB_MAX_MERGED]; int count; };

void tp_ib_drop_memory(void *handle)
{
	struct held *held = handle;

	for (int i = 0; i < held->count; i++) (void)tp_ib_reg_put(held->contexts[i], held->nodes[i]);
	free(held);
}

ncclResult_t tp_ib_hold_memory(int dev, const struct tp_net_gpu_memory *memory, void **out)
{
	const struct tp_ib_device *device = tp_ib_device(dev);
	const struct tp_ib_source source = { .kind = memory->kind, .fd = memory->fd, .offset = memory->offset, .id = memory->id };
	struct held *held;
	struct ibv_mr *mr;

	if (!device) return TP_FAIL(ncclInternalError, "NET/IB : there is no device %d", dev);
	held = tp_alloc(1, sizeof(*held), "a registration of GPU memory");
	if (!held) return ncclSystemError;
	/* Ports of one card share it: the cache counts. */
	for (int i = 0; i < device->nports; i++) {
		struct tp_ib_context *context = device->ports[i]->context;
		ncclResult_t result = tp_ib_reg_get_of(context, &source, memory->data, memory->bytes, &held->nodes[i], &mr);
		if (result != ncclSuccess) {
			tp_ib_drop_memory(held);
			return result;
		}
		held->contexts[held->count++] = context;
	}
	*out = held;
	return ncclSuccess;
}
