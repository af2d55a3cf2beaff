/* What the ranks of this process are: TELPHER_DEVICE, and whether the machine has a GPU driver that works. A driver that
 * is there and doesn't work is an error, so that nobody gets host ranks by accident. */
#include <dlfcn.h>
#include <unistd.h>

#include "comm/internal.h"

enum { DEVICE_HOST, DEVICE_CUDA, DEVICE_AUTO };
static struct tp_param params[] = {
	{ .name = "TELPHER_DEVICE", .kind = TP_PARAM_ENUM, .fallback = "auto", .choices = "host|cuda|auto",
		.doc = "what ranks are: processes with host memory, GPUs, or GPUs where the machine has a driver; equal on all ranks" },
};
TP_PARAM_TABLE("comm", params)

#define CUDA_NO_DEVICE 100

/* driver: a file that only a loaded kernel driver makes. */
ncclResult_t tp_device_probe(const char *driver, const char *library, bool *works)
{
	*works = false;
	if (access(driver, F_OK) != 0) return ncclSuccess;
	void *cuda = dlopen(library, RTLD_NOW | RTLD_LOCAL);
	if (!cuda)
		return TP_FAIL(ncclSystemError, "this machine has a GPU driver (%s), but its library can't be opened: %s. Repair it, or set "
			"TELPHER_DEVICE=host to use host memory", driver, dlerror());
	int (*init)(unsigned int), (*count_devices)(int *);
	*(void **)&init = dlsym(cuda, "cuInit");
	*(void **)&count_devices = dlsym(cuda, "cuDeviceGetCount");
	int count = 0, error = init && count_devices ? init(0) : -1;
	if (!error) error = count_devices(&count);
	dlclose(cuda);
	if (error == CUDA_NO_DEVICE) return ncclSuccess;
	if (error)
		return TP_FAIL(ncclSystemError, "this machine has a GPU driver (%s), but it doesn't work: cuInit gives %d. Repair it, or set "
			"TELPHER_DEVICE=host to use host memory", driver, error);
	*works = count > 0;
	return ncclSuccess;
}

static pthread_once_t probed = PTHREAD_ONCE_INIT;
static ncclResult_t probe_result;
static bool has_gpu;
static void probe(void) { probe_result = tp_device_probe("/proc/driver/nvidia/version", "libcuda.so.1", &has_gpu); }

ncclResult_t tp_device_kind(enum tp_device_kind *out)
{
	int64_t wanted = tp_param_int(&params[0]);
	if (wanted == DEVICE_CUDA)
		return TP_FAIL(ncclInvalidUsage, "TELPHER_DEVICE=cuda, but GPU ranks are not in this build; TELPHER_DEVICE=host runs on host memory");
	if (wanted == DEVICE_AUTO) {
		pthread_once(&probed, probe);
		TP_TRY(probe_result);
		if (has_gpu)
			return TP_FAIL(ncclInvalidUsage, "this machine has GPUs, and GPU ranks are not in this build; TELPHER_DEVICE=host runs on host "
				"memory");
	}
	*out = TP_DEVICE_HOST;
	return ncclSuccess;
}
