/* A CUDA driver without a GPU: a test-only libcuda.so.1. Device memory is host memory, kernels run in the emulator (emulator.h).
 *
 * What it keeps of the real one, because programs depend on it: order (streams, the legacy stream, events, graphs),
 * residency (a device has places for blocks; kernels that don't fit wait, and so deadlock where they do on a GPU), what captures
 * forbid, calls that wait for all kernels, or may (cuMemFree, cuIpcCloseMemHandle, lazy loading, …), sharing between processes (file descriptors, IPC), and errors.
 * Use of what was destroyed ends the program with a message.
 *
 * Work is a graph of tasks. A task runs on a worker thread once those before it are done; a stream is a chain of them. One lock
 * guards everything; workers run tasks without it. Nothing is taken down at exit: threads still use it.
 *
 * Settings, from the environment:
 *   FAKE_CUDA_DEVICES=n          devices (1); CUDA_VISIBLE_DEVICES applies
 *   FAKE_CUDA_SMS=n              multiprocessors of each (16)
 *   FAKE_CUDA_BLOCKS_PER_SM=n    blocks of 512 threads that one holds (2)
 *   FAKE_CUDA_CAPABILITY=n       compute capability (90)
 *   FAKE_CUDA_MEMORY_MB=n        memory of each, counted by process (2048)
 *   FAKE_CUDA_KINDS=n            devices are of n kinds (1), by their names: "Fake GPU 0", "Fake GPU 1", …
 *   FAKE_CUDA_PEER_GROUP=n       devices reach each other in groups of n (all); 1: none reaches another
 *   FAKE_CUDA_VMM=0              no virtual memory management;  FAKE_CUDA_IPC=0: no IPC handles
 *   FAKE_CUDA_UNMAP_WAITS=1      cuMemUnmap waits for the context's kernels, too, which it isn't known to do (and so must not be relied on)
 *   FAKE_CUDA_HOST_NODE_MS=n     host nodes of graphs run so late, as where the thread that runs them is busy with another
 *   FAKE_CUDA_DMABUF=1           DMA-BUFs, as far as their descriptors (which can be mapped, but hold zeros)
 *   FAKE_CUDA_APART=1            device memory lies elsewhere: whoever touches its addresses is killed, kernels too; copies do as ever
 *   FAKE_CUDA_BROKEN=e           cuInit returns error e
 *   FAKE_CUDA_VERSION=n          the driver is for CUDA n / 1000 (13000)
 *   FAKE_CUDA_FAIL=name:n:e,…    the n-th call of that function returns error e; "kernel": the n-th kernel fails as it runs
 *   FAKE_CUDA_TRACE=1            every call on stderr
 *   FAKE_CUDA_SEED=n             kernels' threads take turns at random (emulator.cpp)
 * and CUDA's own CUDA_VISIBLE_DEVICES, CUDA_MODULE_LOADING, CUDA_LAUNCH_BLOCKING. */
#ifndef TP_TESTS_CUDA_FAKE_H
#define TP_TESTS_CUDA_FAKE_H

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "gpu/driver.h"

#define FAKE_EXPORT __attribute__((visibility("default")))
#define FAKE_DECLARE(name, symbol, parameters) extern "C" FAKE_EXPORT CUresult symbol parameters;
TP_CUDA_FUNCTIONS(FAKE_DECLARE, FAKE_DECLARE)
extern "C" FAKE_EXPORT CUresult cuGetProcAddress(const char *symbol, void **out, int version, cuuint64_t flags);
extern "C" FAKE_EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **out, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status);
extern "C" FAKE_EXPORT CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes, CUstream stream);
/* perftest's. */
extern "C" FAKE_EXPORT CUresult cuMemAllocHost_v2(void **out, size_t bytes);
extern "C" FAKE_EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes);
extern "C" FAKE_EXPORT CUresult cuGraphGetEdges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *count);
extern "C" FAKE_EXPORT CUresult cuGraphInstantiate_v2(CUgraphExec *out, CUgraph graph, CUgraphNode *bad, char *log, size_t log_bytes);

namespace fake {

struct settings {
	int devices = 1, sms = 16, blocks_per_sm = 2, peer_group = 0, kinds = 1, host_node_ms = 0, capability = 90, broken = 0, version = 13000;
	size_t memory_bytes = (size_t)2048 << 20;
	bool vmm = true, unmap_waits = false, ipc = true, dma_buf = false, apart = false, trace = false, eager = false, launch_blocking = false;
	std::vector<int> visible;               /* ordinal to device of the machine */
};
extern settings set;
extern std::mutex &lock;
typedef std::unique_lock<std::mutex> guard;

[[noreturn]] void die(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Every call starts so: counts, injected errors, cuInit and fork. */
CUresult enter(const char *name);
CUresult injected(const char *name);
#define FAKE_ENTER(name) \
	fake::guard held(fake::lock); \
	if (CUresult refused_ = fake::enter(#name)) return refused_
#define FAKE_TRY(call) do { if (CUresult error_ = (call)) return error_; } while (0)

/* Tasks. */
struct task;
typedef std::shared_ptr<task> task_ref;
struct task {
	CUcontext context = nullptr;
	unsigned waits = 0;                     /* tasks before it that aren't done */
	bool done = false;
	double done_at = 0;                     /* milliseconds */
	int threads = 0;                        /* a kernel: places that it takes on its device; 0: none */
	std::function<void()> work;             /* empty: nothing to run */
	std::vector<task_ref> next;
	std::condition_variable changed;
};
/* context: NULL for work that belongs to none. */
task_ref add_task(CUcontext context, const std::vector<task_ref> &before, std::function<void()> work, int threads);
void finish_task(const task_ref &t);            /* for tasks without work that something else ends: see hold_task */
task_ref hold_task(CUcontext context);          /* not done until finish_task */
void wait_task(guard &held, const task_ref &t);
void wait_context(guard &held, CUcontext context);
double now_ms();

struct device {
	int number = 0;                         /* as the machine counts */
	int places = 0, used = 0;               /* threads */
	std::deque<task_ref> waiting;
	size_t allocated = 0;
	CUcontext primary = nullptr;
	int retained = 0;
};
extern std::vector<device> &devices;            /* by ordinal */
bool reaches(int ordinal, int peer);
int ordinal_of_number(int number);              /* -1: not visible */

/* Handles: of live objects, and of those destroyed, which are never freed so that no handle is used twice. */
enum kind { CONTEXT, STREAM, EVENT, MODULE, GRAPH, GRAPH_EXEC, OBJECT };
void handle_add(void *handle, kind what);
void handle_remove(void *handle, kind what);
bool handle_live(const void *handle, kind what);        /* false: never was one; dies where it was destroyed */

/* What a stream or a graph is to do. */
struct op {
	CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
	CUcontext context = nullptr;
	std::function<void()> work;
	int threads = 0;
	CUevent event = nullptr;                /* WAIT_EVENT, EVENT_RECORD nodes */
	CUDA_HOST_NODE_PARAMS host = { nullptr, nullptr };
	CUDA_KERNEL_NODE_PARAMS kernel = {};
};
/* Captured or enqueued; *out (or NULL): the task, if enqueued. */
CUresult submit(guard &held, CUstream stream, op what, task_ref *out);
CUresult find_stream(CUstream handle, CUstream *out);
task_ref enqueue(CUstream stream, const std::vector<task_ref> &before, std::function<void()> work, int threads);
CUstream make_stream(CUcontext context, unsigned flags, int priority);

/* Captures. */
struct capture {
	unsigned long long id;
	CUgraph graph;
	CUstreamCaptureMode mode;
	long thread;
	CUstream origin;
	bool invalid = false;
	std::vector<CUstream> streams;
};
extern std::vector<capture *> &captures;
CUresult unsafe();                              /* calls that a capture may forbid */
CUresult implicit(CUcontext context);           /* calls that the legacy stream orders with captures */
CUresult invalidate(capture *c, CUresult error);
CUresult capture_op(CUstream stream, op what);
CUresult capture_record(CUevent event, CUstream stream, unsigned flags);
CUresult capture_wait(CUstream stream, CUevent event, unsigned flags);
void capture_leave(CUstream stream);

CUresult current(CUcontext *out);               /* the calling thread's; its own sticky error */
void call_host(CUhostFn function, void *data);
bool called_from_host_function();
/* What there is of (memory, blocks, streams, events, graphs, objects that graphs hold, contexts), what there was (launches, kernels, copies, a kernel by its name),
 * what kernels prefer of shared memory (carveout least, carveout most, in percent), and of the calling thread: calls, those of a function by its name. */
long long count_of(const std::string &what);
extern std::map<std::string, unsigned long long> &counts;

/* Memory. */
enum memory_kind { PLAIN, HOST, REGISTERED, MANAGED, VMM, IPC };
struct block;                                   /* a VMM allocation: fake_vmm.cpp */
struct memory {
	uintptr_t base = 0;
	size_t bytes = 0;
	memory_kind kind = PLAIN;
	int ordinal = 0;
	CUcontext context = nullptr;
	unsigned long long id = 0;
	block *from = nullptr;                  /* VMM */
	size_t offset = 0;                      /* VMM: in from; PLAIN: in the arena */
	bool access = true;                     /* VMM: cuMemSetAccess came */
	uintptr_t shadow = 0;                   /* where the bytes are (FAKE_CUDA_APART); 0: at base */
	void *map = nullptr;                    /* IPC: what to unmap */
	size_t map_bytes = 0;
	int references = 1;                     /* IPC */
	std::string key;                        /* IPC: the handle */
};
memory *find_memory(uintptr_t ptr);             /* NULL: pageable host memory */
memory *add_memory(const memory &m);
void remove_memory(uintptr_t base);
CUresult check_range(CUdeviceptr ptr, size_t bytes, bool must_be_known);
bool in_device_space(uintptr_t ptr);
/* All bytes that devices and copies move go through these; without the lock. */
void copy_bytes(uintptr_t to, uintptr_t from, size_t bytes);
void fill_bytes(uintptr_t to, unsigned value, size_t width, size_t count);
uint32_t *word_at(uintptr_t ptr);
size_t count_memory();
size_t count_blocks();
size_t count_handles(kind what);
void arena_place(int ordinal, int *fd, uintptr_t *base);

}

struct CUctx_st {
	int ordinal;
	unsigned long long id;
	unsigned flags;
	bool primary;
	CUresult sticky = CUDA_SUCCESS;
	CUstream legacy = nullptr;
	std::set<CUstream> streams;             /* all, but the legacy one */
	std::set<fake::task_ref> pending;
	std::set<CUcontext> peers;
};
struct CUstream_st {
	CUcontext context;
	unsigned flags;
	int priority;
	unsigned long long id;
	fake::task_ref tail;
	fake::capture *capture = nullptr;
	std::vector<CUgraphNode> last;          /* captured: what the next operation depends on */
};
struct CUevent_st {
	CUcontext context;
	unsigned flags;
	fake::task_ref task;                    /* the last record; NULL: none */
	unsigned long long capture_id = 0;      /* the last record was captured: by this one, */
	std::vector<CUgraphNode> nodes;         /* after these */
};
struct CUgraphNode_st {
	CUgraph graph;
	fake::op what;
	std::vector<CUgraphNode> before;
};
struct CUuserObject_st { void *ptr; CUhostFn destroy; unsigned references; };
struct CUgraph_st {
	std::vector<std::unique_ptr<CUgraphNode_st>> nodes;
	std::map<CUuserObject, unsigned> objects;
};
struct CUgraphExec_st {
	struct step { fake::op what; std::vector<size_t> before; };
	std::vector<step> steps;                /* in an order that the dependencies allow */
	std::map<CUuserObject, unsigned> objects;
	fake::task_ref last;
};

namespace fake {
CUresult add_node(CUgraph graph, const CUgraphNode *before, size_t count, op what, CUgraphNode *out);
}

#endif
