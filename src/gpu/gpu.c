/* The driver and its devices. The library is opened once and never closed: other parts of the program use it too. */
#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gpu/internal.h"

enum { PARAM_LIBRARY, PARAM_CUMEM };
static struct tp_param params[] = {
	[PARAM_LIBRARY] = { .name = "TELPHER_CUDA_LIBRARY", .kind = TP_PARAM_STRING, .fallback = "libcuda.so.1",
		.doc = "CUDA's driver library; set: it must be there and work" },
	[PARAM_CUMEM] = { .name = "NCCL_CUMEM_ENABLE", .kind = TP_PARAM_INT, .fallback = "-2", .min = -2, .max = 1,
		.doc = "0: GPU memory is shared by CUDA IPC, not by virtual memory management; else wherever the latter works" },
};
TP_PARAM_TABLE("gpu", params)

/* Arguments of a kernel of more than 4 KB (groups of many sends and receives have up to 30) want CUDA 12.1, R530; kernels compressed for size, as ours
 * are (kernels.cmake), 12.4, R550. Both on all GPUs that we have kernels for. */
#define OLDEST_DRIVER 12040

const struct tp_cuda *tp_cuda;
static struct tp_cuda table;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;   /* what follows, and the opening */
static enum { UNOPENED, WITHOUT, WITH } opened;
static struct tp_gpu_inside *gpus;
static int device_count, driver_version;
TP_FORK_RENEW(lock)

bool tp_gpu_vmm_allowed(void) { return tp_param_int(&params[PARAM_CUMEM]) != 0; }

static const char *error_name(CUresult error)
{
	const char *name = NULL;
	return table.GetErrorName && table.GetErrorName(error, &name) == CUDA_SUCCESS && name ? name : "unknown error";
}

/* What a user can do about it; "" where the driver's text says all. */
static const char *advice(CUresult error)
{
	switch (error) {
	case CUDA_ERROR_NOT_INITIALIZED: return ". A forked child can't use the CUDA that its parent has started: start processes anew (spawn)";
	case CUDA_ERROR_SYSTEM_NOT_READY: return ". The machine's NVSwitches aren't set up: is nvidia-fabricmanager running?";
	case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: return ". The kernel's driver and the library are of different versions: restart or reinstall the driver";
	case CUDA_ERROR_STUB_LIBRARY: return ". The library is a stub for linking: take the folder \"stubs\" out of LD_LIBRARY_PATH";
	case CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE: return ". CUDA's compatibility libraries don't support this device: use the driver's own libcuda.so.1";
	case CUDA_ERROR_ILLEGAL_ADDRESS: case CUDA_ERROR_LAUNCH_FAILED:
		return ". A kernel that ran before, of the program or of ours, may be the cause: CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer finds it";
	default: return "";
	}
}

_Thread_local int tp_gpu_rank_now __attribute__((tls_model("initial-exec"))) = -1;

ncclResult_t tp_gpu_fail(const char *file, int line, const char *function, const struct tp_gpu *gpu, const char *call, CUresult error)
{
	const char *text = NULL;
	char where[128] = "", who[32] = "";
	if (!table.GetErrorString || table.GetErrorString(error, &text) != CUDA_SUCCESS || !text) text = "no description";
	if (gpu) snprintf(where, sizeof(where), " on device %d (%.60s, %s)", gpu->ordinal, gpu->name, gpu->bus_id);
	if (tp_gpu_rank_now >= 0) snprintf(who, sizeof(who), "rank %d: ", tp_gpu_rank_now);
	return tp_log_fail(ncclUnhandledCudaError, file, line, function, "%sCUDA call cu%.*s%s: %s (%d), %s%s", who, (int)strcspn(call, "("), call, where,
		error_name(error), (int)error, text, advice(error));
}

void tp_gpu_complain(const struct tp_gpu *gpu, const char *call, CUresult error)
{
	/* A process that ends may have lost its driver before its last communicator. */
	if (error == CUDA_SUCCESS || error == CUDA_ERROR_DEINITIALIZED || error == CUDA_ERROR_CONTEXT_IS_DESTROYED) return;
	TP_WARN("CUDA call cu%s on device %d: %s (%d)", call, gpu ? gpu->ordinal : -1, error_name(error), (int)error);
}

/* ---- opening */

struct symbol { const char *name, *symbol; size_t offset; bool must; };
#define MUST(name, symbol, parameters) { #name, #symbol, offsetof(struct tp_cuda, name), true },
#define MAY(name, symbol, parameters) { #name, #symbol, offsetof(struct tp_cuda, name), false },
static const struct symbol symbols[] = { TP_CUDA_FUNCTIONS(MUST, MAY) };

/* A library that a program has preloaded over the driver (a tracer) is asked like the driver. */
static ncclResult_t find_functions(void *library, const char *path)
{
	for (size_t i = 0; i < TP_ARRAY_LEN(symbols); i++) {
		void *function = dlsym(library, symbols[i].symbol);
		if (!function && symbols[i].must)
			return TP_FAIL(ncclSystemError, "%s has no function %s: it is older than CUDA %d.%d, or no driver library", path, symbols[i].symbol,
				OLDEST_DRIVER / 1000, OLDEST_DRIVER % 1000 / 10);
		memcpy((char *)&table + symbols[i].offset, &function, sizeof(function));
	}
	return ncclSuccess;
}

/* Files that only a loaded kernel driver makes (the latter: under Windows). */
static const char *kernel_driver(void)
{
	static const char *const files[] = { "/proc/driver/nvidia/version", "/dev/dxg" };
	for (size_t i = 0; i < TP_ARRAY_LEN(files); i++)
		if (access(files[i], F_OK) == 0) return files[i];
	return NULL;
}

static ncclResult_t start(void *library, const char *path, const char *driver, bool named)
{
	TP_TRY(find_functions(library, path));
	CUresult error = table.Init(0);
	if (error == CUDA_SUCCESS) error = table.DeviceGetCount(&device_count);
	/* Containers without a GPU have the library all the same. */
	if (error == CUDA_ERROR_NO_DEVICE || (error != CUDA_SUCCESS && !driver && !named)) return ncclSuccess;
	if (error == CUDA_SUCCESS) error = table.DriverGetVersion(&driver_version);
	if (error != CUDA_SUCCESS)
		return TP_FAIL(ncclSystemError, "this machine has a GPU driver (%s), but it doesn't work: cuInit of %s gives %s (%d)%s. Repair it, or set "
			"TELPHER_DEVICE=host to use host memory", driver ? driver : path, path, error_name(error), (int)error, advice(error));
	if (driver_version < OLDEST_DRIVER)
		return TP_FAIL(ncclSystemError, "the GPU driver (%s) is for CUDA %d.%d; %d.%d is the oldest that serves. Update it, or set TELPHER_DEVICE=host to "
			"use host memory", path, driver_version / 1000, driver_version % 1000 / 10, OLDEST_DRIVER / 1000, OLDEST_DRIVER % 1000 / 10);
	if (device_count > 0) opened = WITH;
	return ncclSuccess;
}

static ncclResult_t open_locked(void)
{
	const char *path = tp_param_string(&params[PARAM_LIBRARY]), *driver = kernel_driver();
	bool named = tp_param_is_set(&params[PARAM_LIBRARY]);
	void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!library && !driver && !named) {
		opened = WITHOUT;
		return ncclSuccess;
	}
	if (!library)
		return TP_FAIL(ncclSystemError, "%s%s can't be opened: %s. Repair it, or set TELPHER_DEVICE=host to use host memory",
			driver ? "this machine has a GPU driver, but its library " : "TELPHER_CUDA_LIBRARY=", path, dlerror());
	TP_TRY(start(library, path, driver, named));
	if (opened == WITH) {
		TP_INFO(TP_INIT, "cudaDriverVersion %d", driver_version);
		tp_cuda = &table;
	} else {
		opened = WITHOUT;
	}
	return ncclSuccess;
}

ncclResult_t tp_gpu_open(bool *has)
{
	pthread_mutex_lock(&lock);
	/* What failed is tried, and said, again: the caller may have repaired it. */
	ncclResult_t result = opened == UNOPENED ? open_locked() : ncclSuccess;
	if (result == ncclSuccess) *has = opened == WITH;
	pthread_mutex_unlock(&lock);
	return result;
}

/* ---- devices */

static int attribute(CUdevice device, CUdevice_attribute which)
{
	int value = 0;
	/* An attribute that the driver is too old for is a feature that isn't there. */
	return table.DeviceGetAttribute(&value, which, device) == CUDA_SUCCESS ? value : 0;
}

static int compare_names(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* NVML numbers devices by their bus address, and so does the kernel's folder; asking NVML would cost more than all the rest. */
static int machine_number(const char *bus_id)
{
	char *names[256];
	int count = 0, found = -1;
	DIR *dir = opendir("/proc/driver/nvidia/gpus");
	struct dirent *entry;
	while (dir && (entry = readdir(dir)) && count < (int)TP_ARRAY_LEN(names))
		if (entry->d_name[0] != '.' && (names[count] = strdup(entry->d_name))) count++;
	if (dir) closedir(dir);
	if (count) qsort(names, (size_t)count, sizeof(names[0]), compare_names);
	for (int i = 0; i < count; i++) {
		if (strcasecmp(names[i], bus_id) == 0) found = i;
		free(names[i]);
	}
	return found;
}

static ncclResult_t describe(struct tp_gpu *gpu)
{
	CUuuid uuid;
	CUdevice device;
	unsigned int domain = 0, bus = 0, slot = 0;
	for (gpu->ordinal = 0; gpu->ordinal < device_count - 1; gpu->ordinal++)
		if (table.DeviceGet(&device, gpu->ordinal) == CUDA_SUCCESS && device == gpu->device) break;
	TP_CUDA_TRY(gpu, DeviceGetName(gpu->name, sizeof(gpu->name), gpu->device));
	TP_CUDA_TRY(gpu, DeviceGetUuid(&uuid, gpu->device));
	memcpy(gpu->uuid, uuid.bytes, sizeof(gpu->uuid));
	TP_CUDA_TRY(gpu, DeviceGetPCIBusId(gpu->bus_id, sizeof(gpu->bus_id), gpu->device));
	for (char *c = gpu->bus_id; *c; c++)
		if (*c >= 'A' && *c <= 'F') *c = (char)(*c - 'A' + 'a');
	/* As NCCL logs it: domain, bus and device with the function, as one number. */
	if (sscanf(gpu->bus_id, "%x:%x:%x", &domain, &bus, &slot) == 3) gpu->bus = (int64_t)domain << 20 | bus << 12 | slot << 4;
	TP_CUDA_TRY(gpu, DeviceTotalMem(&gpu->memory_bytes, gpu->device));
	gpu->nvml = machine_number(gpu->bus_id);
	gpu->major = attribute(gpu->device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
	gpu->minor = attribute(gpu->device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
	gpu->sms = attribute(gpu->device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
	gpu->driver_version = driver_version;
	gpu->mps = attribute(gpu->device, CU_DEVICE_ATTRIBUTE_MPS_ENABLED) != 0;
	gpu->rdma = attribute(gpu->device, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED) != 0;
	gpu->dma_buf = table.MemGetHandleForAddressRange && attribute(gpu->device, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED);
	return ncclSuccess;
}

/* Does an allocation of the kind that we would share give a descriptor? Containers and old kernels may refuse what the
 * attributes promise. */
static bool vmm_works(const struct tp_gpu *gpu)
{
	CUmemAllocationProp properties;
	CUmemGenericAllocationHandle handle;
	size_t unit;
	int fd = -1;
	if (!tp_gpu_vmm_allowed() || !attribute(gpu->device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) ||
		!attribute(gpu->device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)) return false;
	tp_gpu_properties(gpu, &properties);
	if (table.MemGetAllocationGranularity(&unit, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM) != CUDA_SUCCESS || !unit) return false;
	if (table.MemCreate(&handle, unit, &properties, 0) != CUDA_SUCCESS) return false;
	bool works = table.MemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) == CUDA_SUCCESS && fd >= 0;
	if (works) close(fd);
	table.MemRelease(handle);
	return works;
}

static bool ipc_works(void)
{
	CUdeviceptr ptr;
	CUipcMemHandle handle;
	if (table.MemAlloc(&ptr, 4096) != CUDA_SUCCESS) return false;
	bool works = table.IpcGetMemHandle(&handle, ptr) == CUDA_SUCCESS;
	table.MemFree(ptr);
	return works;
}

/* Our own stream, for uploads and the like. Streams share queues, of which a GPU has so many (CUDA_DEVICE_MAX_CONNECTIONS), and in the program's own some kernel may
 * wait for the very rank that uploads: so it has a priority of its own where there are more than two, for the least is the program's and the greatest that of
 * executors' copies. */
static CUresult create_stream(CUstream *out)
{
	int least, greatest;
	CUresult error = table.CtxGetStreamPriorityRange(&least, &greatest);
	return error != CUDA_SUCCESS ? error : table.StreamCreateWithPriority(out, CU_STREAM_NON_BLOCKING, greatest < least - 1 ? greatest + 1 : greatest);
}

/* gpu's context is current. */
static ncclResult_t probe(struct tp_gpu_inside *inside)
{
	int mode;
	tp_gpu_relax(&mode);
	inside->gpu.vmm = vmm_works(&inside->gpu);
	inside->gpu.ipc = ipc_works();
	CUresult error = create_stream(&inside->stream);
	tp_gpu_unrelax(mode);
	if (error != CUDA_SUCCESS) return tp_gpu_fail(__FILE__, __LINE__, __func__, &inside->gpu, "StreamCreateWithPriority", error);
	return ncclSuccess;
}

/* lock is held, context is current. */
static ncclResult_t add_gpu(CUcontext context, unsigned long long id, struct tp_gpu **out)
{
	struct tp_gpu_inside *inside = tp_alloc(1, sizeof(*inside), "a GPU");
	if (!inside) return ncclSystemError;
	struct tp_gpu *gpu = &inside->gpu;
	gpu->context = context;
	inside->context_id = id;
	CUresult error = table.CtxGetDevice(&gpu->device);
	ncclResult_t result = error == CUDA_SUCCESS ? ncclSuccess : tp_gpu_fail(__FILE__, __LINE__, __func__, NULL, "CtxGetDevice", error);
	if (result == ncclSuccess) result = describe(gpu);
	if (result == ncclSuccess) result = probe(inside);
	if (result != ncclSuccess) {
		free(inside);
		return result;
	}
	inside->next = gpus;
	gpus = inside;
	TP_INFO(TP_INIT, "GPU %d: %s, %s, sm_%d%d, %d SMs, %zu MiB; memory is shared by %s%s", gpu->ordinal, gpu->name, gpu->bus_id, gpu->major, gpu->minor,
		gpu->sms, gpu->memory_bytes >> 20, gpu->vmm ? "CUMEM" : gpu->ipc ? "IPC" : "nothing: other processes can't reach it", gpu->mps ? "; MPS" : "");
	*out = gpu;
	return ncclSuccess;
}

static ncclResult_t gpu_of_context(CUcontext context, struct tp_gpu **out)
{
	unsigned long long id;
	TP_CUDA_TRY(NULL, CtxGetId(context, &id));
	pthread_mutex_lock(&lock);
	struct tp_gpu_inside *known = gpus;
	while (known && (known->gpu.context != context || known->context_id != id)) known = known->next;
	ncclResult_t result = ncclSuccess;
	if (known) *out = &known->gpu;
	else result = add_gpu(context, id, out);
	pthread_mutex_unlock(&lock);
	return result;
}

CUstream tp_gpu_stream(const struct tp_gpu *gpu) { return ((const struct tp_gpu_inside *)gpu)->stream; }

ncclResult_t tp_gpu_current(struct tp_gpu **out)
{
	CUcontext context = NULL;
	TP_CUDA_TRY(NULL, CtxGetCurrent(&context));
	return context ? gpu_of_context(context, out) : tp_gpu_of_ordinal(0, out);
}

ncclResult_t tp_gpu_count(int *out)
{
	*out = device_count;
	return ncclSuccess;
}

ncclResult_t tp_gpu_of_ordinal(int ordinal, struct tp_gpu **out)
{
	CUdevice device;
	CUcontext context;
	struct tp_gpu *gpu = NULL;
	if (ordinal < 0 || ordinal >= device_count)
		return TP_FAIL(ncclInvalidArgument, "there is no GPU %d: this process sees %d (0 to %d)", ordinal, device_count, device_count - 1);
	TP_CUDA_TRY(NULL, DeviceGet(&device, ordinal));
	/* Kept for the process's life: the runtime shares it, and nobody may take it away under a communicator. */
	TP_CUDA_TRY(NULL, DevicePrimaryCtxRetain(&context, device));
	TP_CUDA_TRY(NULL, CtxPushCurrent(context));
	ncclResult_t result = gpu_of_context(context, &gpu);
	tp_gpu_leave(true);
	if (result == ncclSuccess) *out = gpu;
	return result;
}

ncclResult_t tp_gpu_enter(const struct tp_gpu *gpu, bool *pushed)
{
	CUcontext current = NULL;
	TP_CUDA_TRY(gpu, CtxGetCurrent(&current));
	if (current != gpu->context) TP_CUDA_TRY(gpu, CtxPushCurrent(gpu->context));
	*pushed = current != gpu->context;
	return ncclSuccess;
}

void tp_gpu_leave(bool pushed)
{
	CUcontext context;
	if (pushed) tp_gpu_complain(NULL, "CtxPopCurrent", table.CtxPopCurrent(&context));
}

void tp_gpu_relax(int *mode)
{
	CUstreamCaptureMode relaxed = CU_STREAM_CAPTURE_MODE_RELAXED;
	*mode = table.ThreadExchangeStreamCaptureMode(&relaxed) == CUDA_SUCCESS ? (int)relaxed : (int)CU_STREAM_CAPTURE_MODE_RELAXED;
}

void tp_gpu_unrelax(int mode)
{
	CUstreamCaptureMode before = (CUstreamCaptureMode)mode;
	tp_gpu_complain(NULL, "ThreadExchangeStreamCaptureMode", table.ThreadExchangeStreamCaptureMode(&before));
}
