/* mlx5's data direct: a second function of the card that sits beside the GPU, so that data needn't pass the root complex. It is reached through libmlx5, which
 * is opened at run time; what an older one lacks is a feature that isn't there. */
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include "net/ib/ib.h"

#define ACCESS_DATA_DIRECT 1            /* MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT */

static struct {
	bool (*is_supported)(struct ibv_device *device);
	int (*get_data_direct_sysfs_path)(struct ibv_context *context, char *out, size_t bytes);
	struct ibv_mr *(*reg_dmabuf_mr)(struct ibv_pd *pd, uint64_t offset, size_t bytes, uint64_t iova, int fd, int access, int mlx5_access);
} mlx5;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void open_library(void)
{
	void *library = dlopen("libmlx5.so.1", RTLD_NOW | RTLD_LOCAL), *at[3];

	if (!library) library = dlopen("libmlx5.so", RTLD_NOW | RTLD_LOCAL);
	if (!library) return;
	at[0] = dlvsym(library, "mlx5dv_is_supported", "MLX5_1.8");
	at[1] = dlvsym(library, "mlx5dv_get_data_direct_sysfs_path", "MLX5_1.25");
	at[2] = dlvsym(library, "mlx5dv_reg_dmabuf_mr", "MLX5_1.25");
	if (!at[0] || !at[1] || !at[2]) return;
	memcpy(&mlx5.is_supported, &at[0], sizeof(at[0]));
	memcpy(&mlx5.get_data_direct_sysfs_path, &at[1], sizeof(at[1]));
	memcpy(&mlx5.reg_dmabuf_mr, &at[2], sizeof(at[2]));
}

bool tp_ib_data_direct(struct tp_ib_context *context, char *pci_path, size_t bytes)
{
	char path[240] = "";

	pthread_once(&once, open_library);
	if (!mlx5.is_supported || !mlx5.is_supported(context->ibv->device)) return false;
	if (mlx5.get_data_direct_sysfs_path(context->ibv, path, sizeof(path)) != 0 || !path[0]) return false;
	return snprintf(pci_path, bytes, "/sys%s%s", path[0] == '/' ? "" : "/", path) < (int)bytes;
}

struct ibv_mr *tp_ib_data_direct_register(struct ibv_pd *pd, uint64_t offset, size_t bytes, uint64_t iova, int fd, int access)
{
	return mlx5.reg_dmabuf_mr(pd, offset, bytes, iova, fd, access, ACCESS_DATA_DIRECT);
}
