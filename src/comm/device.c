/* What the ranks of this process are: TELPHER_DEVICE, and whether the machine has GPUs that work. A driver that is there and
 * doesn't work is an error, so that nobody gets host ranks by accident. */
#include "comm/gpu.h"

enum { DEVICE_HOST, DEVICE_CUDA, DEVICE_AUTO };
static struct tp_param params[] = {
	{ .name = "TELPHER_DEVICE", .kind = TP_PARAM_ENUM, .fallback = "auto", .choices = "host|cuda|auto",
		.doc = "what ranks are: processes with host memory, GPUs, or GPUs where the machine has any; equal on all ranks" },
};
TP_PARAM_TABLE("comm", params)

ncclResult_t tp_device_kind(enum tp_device_kind *out)
{
	int64_t wanted = tp_param_int(&params[0]);
	bool has_gpu = false;
	if (wanted != DEVICE_HOST) TP_TRY(tp_gpu_open(&has_gpu));
	if (wanted == DEVICE_CUDA && !has_gpu)
		return TP_FAIL(ncclInvalidUsage, "TELPHER_DEVICE=cuda, but this machine has no GPU and driver (or CUDA_VISIBLE_DEVICES hides them); "
			"TELPHER_DEVICE=host runs on host memory");
	if (has_gpu && !tp_cuda_kernels_built())
		return TP_FAIL(ncclInvalidUsage, "this machine has GPUs, and GPU ranks are not in this build: nvcc wasn't there when it was made; "
			"TELPHER_DEVICE=host runs on host memory");
	*out = has_gpu ? TP_DEVICE_CUDA : TP_DEVICE_HOST;
	return ncclSuccess;
}
