/* Settings, errors, devices, and how a program finds the functions. */
#include "fake.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <unordered_map>

namespace fake {

settings set;
std::mutex &lock = *new std::mutex;
std::vector<device> &devices = *new std::vector<device>;

namespace {

struct injection { std::string name; int countdown; CUresult error; };
std::vector<injection> &injections()
{
	static std::vector<injection> *all = new std::vector<injection>;
	return *all;
}
std::unordered_map<const void *, std::pair<kind, bool>> &handles()
{
	static auto *all = new std::unordered_map<const void *, std::pair<kind, bool>>;
	return *all;
}
bool initialised, forked;
const char *const kind_names[] = { "context", "stream", "event", "module", "graph", "executable graph", "user object" };

long number(const char *name, long otherwise)
{
	const char *text = getenv(name);
	return text && *text ? strtol(text, nullptr, 10) : otherwise;
}

void read_injections()
{
	const char *text = getenv("FAKE_CUDA_FAIL");
	for (std::string rest = text ? text : ""; !rest.empty();) {
		size_t comma = rest.find(',');
		std::string one = rest.substr(0, comma);
		rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
		size_t first = one.find(':'), second = one.find(':', first + 1);
		if (first == std::string::npos || second == std::string::npos) die("FAKE_CUDA_FAIL: \"%s\" is not name:n:error", one.c_str());
		injections().push_back({ one.substr(0, first), atoi(one.c_str() + first + 1), (CUresult)atoi(one.c_str() + second + 1) });
	}
}

void read_visible()
{
	const char *text = getenv("CUDA_VISIBLE_DEVICES");
	if (!text) {
		for (int i = 0; i < set.devices; i++) set.visible.push_back(i);
		return;
	}
	for (char *end; *text; text = *end == ',' ? end + 1 : end) {
		long i = strtol(text, &end, 10);
		if (end == text || i < 0 || i >= set.devices) break;
		set.visible.push_back((int)i);
	}
}

void in_child() { forked = true; }

CUresult initialise()
{
	set.devices = (int)number("FAKE_CUDA_DEVICES", 1);
	set.sms = (int)number("FAKE_CUDA_SMS", 16);
	set.blocks_per_sm = (int)number("FAKE_CUDA_BLOCKS_PER_SM", 2);
	set.memory_bytes = (size_t)number("FAKE_CUDA_MEMORY_MB", 2048) << 20;
	set.peer_group = (int)number("FAKE_CUDA_PEER_GROUP", 0);
	set.kinds = (int)number("FAKE_CUDA_KINDS", 1);
	set.host_node_ms = (int)number("FAKE_CUDA_HOST_NODE_MS", 0);
	set.vmm = number("FAKE_CUDA_VMM", 1) != 0;
	set.ipc = number("FAKE_CUDA_IPC", 1) != 0;
	set.dma_buf = number("FAKE_CUDA_DMABUF", 0) != 0;
	set.unmap_waits = number("FAKE_CUDA_UNMAP_WAITS", 0) != 0;
	set.apart = number("FAKE_CUDA_APART", 0) != 0;
	set.capability = (int)number("FAKE_CUDA_CAPABILITY", 90);
	set.broken = (int)number("FAKE_CUDA_BROKEN", 0);
	set.version = (int)number("FAKE_CUDA_VERSION", 13000);
	set.trace = number("FAKE_CUDA_TRACE", 0) != 0;
	set.launch_blocking = number("CUDA_LAUNCH_BLOCKING", 0) != 0;
	const char *loading = getenv("CUDA_MODULE_LOADING");
	set.eager = loading && strcmp(loading, "EAGER") == 0;
	read_injections();
	read_visible();
	if (set.broken) return (CUresult)set.broken;
	if (set.visible.empty()) return CUDA_ERROR_NO_DEVICE;
	for (int i : set.visible) {
		device d;
		d.number = i;
		d.places = set.sms * set.blocks_per_sm * 512;
		devices.push_back(d);
	}
	pthread_atfork(nullptr, nullptr, in_child);
	return CUDA_SUCCESS;
}

}

void die(const char *format, ...)
{
	va_list list;
	fflush(stdout);
	fputs("fake CUDA driver: ", stderr);
	va_start(list, format);
	vfprintf(stderr, format, list);
	va_end(list);
	fputc('\n', stderr);
	abort();
}

CUresult injected(const char *name)
{
	for (injection &i : injections())
		if (i.name == name && --i.countdown == 0) return i.error;
	return CUDA_SUCCESS;
}

namespace {
typedef std::unordered_map<std::string, long long> calls_by_name;
thread_local calls_by_name *own_calls;          /* of this thread; never freed, for threads call as they end */
std::vector<calls_by_name *> &all_calls = *new std::vector<calls_by_name *>;
long long calls_of_thread(const std::string &name)
{
	long long all = 0;
	if (!own_calls) return 0;
	for (const auto &c : *own_calls)
		if (name == "calls" || c.first == name) all += c.second;
	return all;
}
}

CUresult enter(const char *name)
{
	if (!own_calls) {
		own_calls = new calls_by_name;
		all_calls.push_back(own_calls);
	}
	++(*own_calls)[name];
	if (set.trace) fprintf(stderr, "fake CUDA driver: [%d:%d] %s\n", getpid(), gettid(), name);
	if (forked || !initialised) return CUDA_ERROR_NOT_INITIALIZED;
	if (called_from_host_function()) return CUDA_ERROR_NOT_PERMITTED;
	return injected(name);
}

bool reaches(int ordinal, int peer)
{
	int a = devices[(size_t)ordinal].number, b = devices[(size_t)peer].number;
	return a == b || set.peer_group == 0 || a / set.peer_group == b / set.peer_group;
}

int ordinal_of_number(int machine_number)
{
	for (size_t i = 0; i < devices.size(); i++)
		if (devices[i].number == machine_number) return (int)i;
	return -1;
}

size_t count_handles(kind what)
{
	size_t n = 0;
	for (auto &h : handles()) n += h.second.first == what && h.second.second;
	return n;
}

/* For tests: what is alive, and what was done. -1: there is no such count. */
long long count_of(const std::string &what)
{
	if (what == "memory") return (long long)count_memory();
	if (what == "blocks") return (long long)count_blocks();
	if (what == "streams") return (long long)count_handles(STREAM);
	if (what == "events") return (long long)count_handles(EVENT);
	if (what == "graphs") return (long long)(count_handles(GRAPH) + count_handles(GRAPH_EXEC));
	if (what == "objects") return (long long)count_handles(OBJECT);
	if (what == "calls" || what.compare(0, 2, "cu") == 0) return calls_of_thread(what);
	if (what == "contexts") return (long long)count_handles(CONTEXT);
	if (what == "carveout least" || what == "carveout most") return counts.count(what) ? (long long)counts[what] : -1;
	if (what == "launches" || what == "kernels" || what == "copies") return (long long)counts[what];
	auto found = counts.find(what);             /* of a kernel, by its name */
	return found == counts.end() ? -1 : (long long)found->second;
}

void handle_add(void *handle, kind what) { handles()[handle] = { what, true }; }
void handle_remove(void *handle, kind what) { handles()[handle] = { what, false }; }
bool handle_live(const void *handle, kind what)
{
	auto found = handles().find(handle);
	if (found == handles().end() || found->second.first != what) return false;
	if (!found->second.second) die("use of a %s that was destroyed (%p)", kind_names[what], handle);
	return true;
}

}

using namespace fake;

CUresult cuInit(unsigned int flags)
{
	guard held(fake::lock);
	if (forked) return CUDA_ERROR_NOT_INITIALIZED;
	if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
	if (initialised) return injected("cuInit");
	CUresult result = initialise();
	if (result != CUDA_SUCCESS) {
		devices.clear();
		set.visible.clear();
		return result;
	}
	initialised = true;
	return injected("cuInit");
}

CUresult cuDriverGetVersion(int *version)
{
	*version = set.version;
	return CUDA_SUCCESS;
}

#define FAKE_ERRORS(f) \
	f(CUDA_SUCCESS, "no error") f(CUDA_ERROR_INVALID_VALUE, "invalid argument") f(CUDA_ERROR_OUT_OF_MEMORY, "out of memory") \
	f(CUDA_ERROR_NOT_INITIALIZED, "initialization error") f(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected") \
	f(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal") f(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid") \
	f(CUDA_ERROR_INVALID_CONTEXT, "invalid device context") f(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "peer access is not supported") \
	f(CUDA_ERROR_OPERATING_SYSTEM, "OS call failed") f(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle") \
	f(CUDA_ERROR_ILLEGAL_STATE, "operation not permitted in this state") f(CUDA_ERROR_NOT_FOUND, "named symbol not found") \
	f(CUDA_ERROR_NOT_READY, "device not ready") f(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered") \
	f(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch") f(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure") \
	f(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is already enabled") f(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed") \
	f(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped") \
	f(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region") \
	f(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, "too many blocks in cooperative launch") f(CUDA_ERROR_NOT_SUPPORTED, "operation not supported") \
	f(CUDA_ERROR_NOT_PERMITTED, "operation not permitted") f(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "system has unsupported display driver") \
	f(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing") \
	f(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture") \
	f(CUDA_ERROR_STREAM_CAPTURE_MERGE, "operation would result in a merge of separate capture sequences") \
	f(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began") \
	f(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work") \
	f(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream") \
	f(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "operation would make the legacy stream depend on a capturing blocking stream") \
	f(CUDA_ERROR_CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing stream") \
	f(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "attempt to terminate a thread-local capture sequence from another thread") \
	f(CUDA_ERROR_UNKNOWN, "unknown error")

CUresult cuGetErrorName(CUresult error, const char **out)
{
	switch ((int)error) {
#define CASE(name, text) case name: *out = #name; return CUDA_SUCCESS;
	FAKE_ERRORS(CASE)
#undef CASE
	default: *out = nullptr; return CUDA_ERROR_INVALID_VALUE;
	}
}

CUresult cuGetErrorString(CUresult error, const char **out)
{
	switch ((int)error) {
#define CASE(name, text) case name: *out = text; return CUDA_SUCCESS;
	FAKE_ERRORS(CASE)
#undef CASE
	default: *out = nullptr; return CUDA_ERROR_INVALID_VALUE;
	}
}

/* Devices. */
#define FAKE_DEVICE(d) if ((d) < 0 || (size_t)(d) >= fake::devices.size()) return CUDA_ERROR_INVALID_DEVICE

CUresult cuDeviceGet(CUdevice *out, int ordinal)
{
	FAKE_ENTER(cuDeviceGet);
	FAKE_DEVICE(ordinal);
	*out = ordinal;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *out)
{
	FAKE_ENTER(cuDeviceGetCount);
	*out = (int)fake::devices.size();
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int bytes, CUdevice device)
{
	FAKE_ENTER(cuDeviceGetName);
	FAKE_DEVICE(device);
	if (set.kinds > 1) snprintf(name, (size_t)bytes, "Fake GPU %d", device % set.kinds);
	else snprintf(name, (size_t)bytes, "Fake GPU");
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *out, CUdevice device)
{
	FAKE_ENTER(cuDeviceGetUuid_v2);
	FAKE_DEVICE(device);
	memcpy(out->bytes, "telpher fake gpu", 16);
	out->bytes[15] = (char)fake::devices[(size_t)device].number;
	return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *out, CUdevice device)
{
	FAKE_ENTER(cuDeviceTotalMem_v2);
	FAKE_DEVICE(device);
	*out = set.memory_bytes;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *out, CUdevice_attribute attribute, CUdevice device)
{
	FAKE_ENTER(cuDeviceGetAttribute);
	FAKE_DEVICE(device);
	switch (attribute) {
	case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *out = 1024; break;
	case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *out = 32; break;
	case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *out = 1000000; break;
	case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *out = set.sms; break;
	case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *out = 0x10 + fake::devices[(size_t)device].number; break;
	case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *out = 4 << 20; break;
	case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *out = 512 * set.blocks_per_sm; break;
	case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: *out = 32; break;
	case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: *out = 2; break;
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *out = set.capability / 10; break;
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *out = set.capability % 10; break;
	case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *out = 233472; break;
	case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *out = 65536; break;
	case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *out = 232448; break;
	case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: *out = 1024; break;
	case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY: case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS: case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
	case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY: case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH: case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: case CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT:
	case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
	case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS: *out = 1; break;
	case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
		*out = set.vmm; break;
	case CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED: *out = set.dma_buf; break;
	default: *out = 0; break;               /* PCI domain and device, RDMA, fabric, clusters, MPS, … */
	}
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetByPCIBusId(CUdevice *out, const char *bus_id)
{
	FAKE_ENTER(cuDeviceGetByPCIBusId);
	unsigned domain = 0, bus, slot;
	if (sscanf(bus_id, "%x:%x:%x", &domain, &bus, &slot) != 3 && (domain = 0, sscanf(bus_id, "%x:%x", &bus, &slot) != 2)) return CUDA_ERROR_INVALID_VALUE;
	int ordinal = domain == 0 && bus >= 0x10 ? ordinal_of_number((int)bus - 0x10) : -1;
	if (ordinal < 0) return CUDA_ERROR_INVALID_DEVICE;
	*out = ordinal;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *bus_id, int bytes, CUdevice device)
{
	FAKE_ENTER(cuDeviceGetPCIBusId);
	FAKE_DEVICE(device);
	snprintf(bus_id, (size_t)bytes, "0000:%02X:00.0", 0x10 + fake::devices[(size_t)device].number);
	return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *out, CUdevice device, CUdevice peer)
{
	FAKE_ENTER(cuDeviceCanAccessPeer);
	FAKE_DEVICE(device);
	FAKE_DEVICE(peer);
	*out = device != peer && reaches(device, peer);
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetP2PAttribute(int *out, CUdevice_P2PAttribute attribute, CUdevice from, CUdevice to)
{
	FAKE_ENTER(cuDeviceGetP2PAttribute);
	FAKE_DEVICE(from);
	FAKE_DEVICE(to);
	if (from == to) return CUDA_ERROR_INVALID_DEVICE;
	*out = attribute == CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK ? 0 : reaches(from, to);
	return CUDA_SUCCESS;
}

/* How a program finds the functions. */
namespace {

struct exported { const char *symbol; void *function; };
const exported exports[] = {
#define ENTRY(name, symbol, parameters) { #symbol, reinterpret_cast<void *>(symbol) },
	TP_CUDA_FUNCTIONS(ENTRY, ENTRY)
	ENTRY(, cuGetProcAddress, )
	ENTRY(, cuGetProcAddress_v2, )
	ENTRY(, cuMemcpyPeerAsync, )
	ENTRY(, cuMemAllocHost_v2, )
	ENTRY(, cuMemcpyDtoD_v2, )
	ENTRY(, cuGraphGetEdges, )
	ENTRY(, cuGraphInstantiate_v2, )
#undef ENTRY
};

void *find_export(const std::string &symbol)
{
	for (const exported &e : exports)
		if (symbol == e.symbol) return e.function;
	return nullptr;
}

}

/* The plain name stands for its newest form that the asked version has; v3 came with 12.3. */
CUresult cuGetProcAddress_v2(const char *symbol, void **out, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status)
{
	(void)flags;
	void *found = nullptr;
	std::string name = symbol;
	if (version >= 12030) found = find_export(name + "_v3");
	if (!found && name != "cuGetProcAddress") found = find_export(name + "_v2");
	if (!found) found = find_export(version >= 12000 && name == "cuGetProcAddress" ? "cuGetProcAddress_v2" : name);
	*out = found;
	if (status) *status = found ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
	return found || status ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuGetProcAddress(const char *symbol, void **out, int version, cuuint64_t flags)
{
	return cuGetProcAddress_v2(symbol, out, version, flags, nullptr);
}
