/* The fake driver does what a driver does: order, residency, captures, sharing, refusals. Each in a process of its own. */
#include "cuda/helper_gpu.h"
#include "cuda/kernels_test.h"

#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>

static CUmodule module;
static CUcontext context;

static CUfunction function(const char *name)
{
	CUfunction f;
	CUDA_OK(ModuleGetFunction(&f, module, name));
	return f;
}

/* Loads all kernels: later, that would wait for those that run. */
static void start(void)
{
	static const char *const names[] = { "tp_test_add", "tp_test_wait", "tp_test_store", "tp_test_meet" };
	context = gpu_context(0);
	CUDA_OK(ModuleLoadData(&module, "any"));
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) CUDA_OK(FuncLoad(function(names[i])));
}

static void launch(const char *name, int blocks, CUstream stream, CUdeviceptr memory, uint32_t count, uint32_t value)
{
	struct test_args args = { memory, count, value };
	void *parameters[] = { &args };
	CUDA_OK(LaunchKernel(function(name), (unsigned)blocks, 1, 1, 512, 1, 1, 0, stream, parameters, NULL));
}

static CUstream stream_new(unsigned flags)
{
	CUstream s;
	CUDA_OK(StreamCreate(&s, flags));
	return s;
}

static CUevent event_new(void)
{
	CUevent e;
	CUDA_OK(EventCreate(&e, CU_EVENT_DISABLE_TIMING));
	return e;
}

static CUdeviceptr words(size_t n)
{
	CUdeviceptr p;
	CUstream s = stream_new(CU_STREAM_NON_BLOCKING);
	CUDA_OK(MemAlloc(&p, n * 4));
	CUDA_OK(MemsetD8Async(p, 0, n * 4, s));
	CUDA_OK(StreamSynchronize(s));
	CUDA_OK(StreamDestroy(s));
	return p;
}

static uint32_t word(CUdeviceptr p)
{
	uint32_t value;
	CUDA_OK(MemcpyDtoH(&value, p, 4));
	return value;
}

/* Lets a tp_test_wait kernel go, on a stream of its own. */
static void let_go(CUdeviceptr flag, uint32_t value)
{
	CUstream s = stream_new(CU_STREAM_NON_BLOCKING);
	CUDA_OK(MemsetD32Async(flag, value, 1, s));
	CUDA_OK(StreamSynchronize(s));
}

static void order(void)
{
	start();
	CUstream a = stream_new(CU_STREAM_NON_BLOCKING), b = stream_new(CU_STREAM_NON_BLOCKING);
	CUdeviceptr p = words(1000), flag = words(1);
	CUevent e = event_new();
	launch("tp_test_wait", 1, a, flag, 0, 1);
	launch("tp_test_add", 3, a, p, 1000, 5);
	CUDA_OK(EventRecord(e, a));
	CUDA_OK(StreamWaitEvent(b, e, 0));
	launch("tp_test_add", 2, b, p, 1000, 2);
	CUDA_IS(StreamQuery(a), CUDA_ERROR_NOT_READY);
	CUDA_IS(StreamQuery(b), CUDA_ERROR_NOT_READY);
	CUDA_IS(EventQuery(e), CUDA_ERROR_NOT_READY);
	CHECK(word(p) == 0);            /* the legacy stream doesn't wait for non-blocking ones */
	let_go(flag, 1);
	CUDA_OK(StreamSynchronize(b));
	CUDA_OK(EventQuery(e));
	CHECK(word(p) == 7 && word(p + 999 * 4) == 7);
}

static void legacy(void)
{
	start();
	CUstream blocking = stream_new(CU_STREAM_DEFAULT), other = stream_new(CU_STREAM_DEFAULT), own = stream_new(CU_STREAM_NON_BLOCKING);
	CUdeviceptr p = words(4), flag = words(1);
	launch("tp_test_wait", 1, blocking, flag, 0, 1);
	launch("tp_test_add", 1, NULL, p, 1, 1);
	launch("tp_test_add", 1, other, p + 4, 1, 1);
	launch("tp_test_add", 1, own, p + 8, 1, 1);
	CUDA_OK(StreamSynchronize(own));
	CUDA_IS(StreamQuery(NULL), CUDA_ERROR_NOT_READY);
	CUDA_IS(StreamQuery(other), CUDA_ERROR_NOT_READY);
	let_go(flag, 1);
	CUDA_OK(CtxSynchronize());
	CHECK(word(p) == 1 && word(p + 4) == 1 && word(p + 8) == 1);
}

/* 16 SMs of 2 blocks: 32 fit. */
static void fitting_kernels_meet(void)
{
	start();
	CUdeviceptr p = words(2);
	for (int i = 0; i < 4; i++) launch("tp_test_meet", 8, stream_new(CU_STREAM_NON_BLOCKING), p, 32, 0);
	CUDA_OK(CtxSynchronize());
	CHECK(word(p) == 32 && word(p + 4) == 32);
}

/* Lazy loading: the first launch of a function waits for the kernels that run. */
static void lazy(void)
{
	context = gpu_context(0);
	CUDA_OK(ModuleLoadData(&module, "any"));
	CUdeviceptr flag = words(1);
	launch("tp_test_wait", 1, stream_new(CU_STREAM_NON_BLOCKING), flag, 0, 1);
	launch("tp_test_store", 1, stream_new(CU_STREAM_NON_BLOCKING), flag, 0, 1);
	CUDA_OK(CtxSynchronize());
}

static void too_many_kernels_wait(void)
{
	start();
	CUdeviceptr p = words(2);
	CUstream last = NULL;
	for (int i = 0; i < 5; i++) launch("tp_test_meet", 8, last = stream_new(CU_STREAM_NON_BLOCKING), p, 40, 0);
	for (int i = 0; i < 200; i++) {
		CUDA_IS(StreamQuery(last), CUDA_ERROR_NOT_READY);
		struct timespec pause = { 0, 1000000 };
		nanosleep(&pause, NULL);
	}
	_exit(0);
}

/* A grid beyond the device runs in waves. */
static void waves(void)
{
	start();
	CUdeviceptr p = words(5000);
	launch("tp_test_add", 100, NULL, p, 5000, 1);
	CHECK(word(p) == 1 && word(p + 4999 * 4) == 1);
}

static void graphs(void)
{
	start();
	CUstream a = stream_new(CU_STREAM_NON_BLOCKING), b = stream_new(CU_STREAM_NON_BLOCKING);
	CUdeviceptr p = words(3);
	CUevent fork = event_new(), join = event_new();
	CUgraph graph;
	CUgraphExec exec;
	CUDA_OK(StreamBeginCapture(a, CU_STREAM_CAPTURE_MODE_GLOBAL));
	launch("tp_test_add", 1, a, p, 1, 1);
	CUDA_OK(EventRecord(fork, a));
	CUDA_OK(StreamWaitEvent(b, fork, 0));
	/* Both at once, or they would wait for ever. */
	launch("tp_test_meet", 1, b, p + 4, 2, 0);
	launch("tp_test_meet", 1, a, p + 4, 2, 0);
	CUDA_OK(EventRecord(join, b));
	CUDA_OK(StreamWaitEvent(a, join, 0));
	CUDA_OK(MemsetD32Async(p + 4, 0, 1, a));
	CUDA_OK(StreamEndCapture(a, &graph));
	CHECK(word(p) == 0);
	CUDA_OK(GraphInstantiate(&exec, graph, 0));
	CUDA_OK(GraphDestroy(graph));
	for (int i = 0; i < 10; i++) {
		CUDA_OK(GraphLaunch(exec, a));
		launch("tp_test_add", 1, a, p, 1, 1);
	}
	CUDA_OK(StreamSynchronize(a));
	CHECK(word(p) == 20);
	CUDA_OK(GraphExecDestroy(exec));
}

static CUdeviceptr host_count;
static void count_up(void *data)
{
	(void)data;
	__atomic_fetch_add(&host_count, 1, __ATOMIC_RELAXED);
}

/* A graph's record node, then another graph's wait node: ordered by their launches. */
static void external_events(void)
{
	start();
	CUstream a = stream_new(CU_STREAM_NON_BLOCKING), b = stream_new(CU_STREAM_NON_BLOCKING);
	CUdeviceptr flag = words(1), p = words(1);
	CUevent e = event_new();
	CUgraph graph;
	CUgraphExec first, second;
	CUDA_OK(StreamBeginCapture(a, CU_STREAM_CAPTURE_MODE_RELAXED));
	launch("tp_test_wait", 1, a, flag, 0, 1);
	CUDA_OK(EventRecordWithFlags(e, a, CU_EVENT_RECORD_EXTERNAL));
	CUDA_OK(StreamEndCapture(a, &graph));
	CUDA_OK(GraphInstantiate(&first, graph, 0));
	CUDA_OK(StreamBeginCapture(b, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
	CUDA_OK(StreamWaitEvent(b, e, CU_EVENT_WAIT_EXTERNAL));
	launch("tp_test_add", 1, b, p, 1, 1);
	CUDA_OK(LaunchHostFunc(b, count_up, NULL));
	CUDA_OK(StreamEndCapture(b, &graph));
	CUDA_OK(GraphInstantiate(&second, graph, 0));
	CUDA_OK(GraphLaunch(first, a));
	CUDA_OK(GraphLaunch(second, b));
	CUDA_IS(StreamQuery(b), CUDA_ERROR_NOT_READY);
	CUDA_IS(EventQuery(e), CUDA_ERROR_NOT_READY);
	CHECK(word(p) == 0);
	let_go(flag, 1);
	CUDA_OK(StreamSynchronize(b));
	CHECK(word(p) == 1 && __atomic_load_n(&host_count, __ATOMIC_RELAXED) == 1);
	CUDA_IS(StreamWaitEvent(a, e, CU_EVENT_WAIT_EXTERNAL), CUDA_ERROR_INVALID_VALUE);
}

/* Nodes added by hand between a stream's last operation and its next, as a library does in a capture. */
static void capture_info(void)
{
	start();
	CUstream a = stream_new(CU_STREAM_NON_BLOCKING);
	CUdeviceptr p = words(1);
	CUstreamCaptureStatus status;
	const CUgraphNode *before;
	CUgraphNode node;
	CUgraph graph, ended;
	CUgraphExec exec;
	cuuint64_t id;
	size_t n;
	CUDA_OK(StreamGetCaptureInfo(a, &status, NULL, NULL, NULL, NULL));
	CHECK(status == CU_STREAM_CAPTURE_STATUS_NONE);
	CUDA_OK(StreamBeginCapture(a, CU_STREAM_CAPTURE_MODE_GLOBAL));
	launch("tp_test_add", 1, a, p, 1, 1);
	CUDA_OK(StreamGetCaptureInfo(a, &status, &id, &graph, &before, &n));
	CHECK(status == CU_STREAM_CAPTURE_STATUS_ACTIVE && n == 1 && id != 0);
	CUDA_HOST_NODE_PARAMS host = { count_up, NULL };
	CUDA_OK(GraphAddHostNode(&node, graph, before, n, &host));
	CUDA_OK(StreamUpdateCaptureDependencies(a, &node, 1, CU_STREAM_SET_CAPTURE_DEPENDENCIES));
	launch("tp_test_add", 1, a, p, 1, 1);
	CUDA_OK(StreamEndCapture(a, &ended));
	CHECK(ended == graph);
	CUDA_OK(GraphGetNodes(graph, NULL, &n));
	CHECK(n == 3);
	CUDA_OK(GraphInstantiate(&exec, graph, 0));
	CUDA_OK(GraphLaunch(exec, a));
	CUDA_OK(StreamSynchronize(a));
	CHECK(word(p) == 2 && __atomic_load_n(&host_count, __ATOMIC_RELAXED) == 1);
}

static void destroyed(void *flag) { __atomic_store_n((int *)flag, 1, __ATOMIC_RELEASE); }

/* While a graph lives, and while a launch of it runs. */
static void user_objects(void)
{
	start();
	static int gone;
	CUstream a = stream_new(CU_STREAM_NON_BLOCKING);
	CUdeviceptr flag = words(1);
	for (int launches = 0; launches < 3; launches++) {
		CUgraph graph;
		CUgraphExec exec;
		CUuserObject object;
		gone = 0;
		CUDA_OK(StreamBeginCapture(a, CU_STREAM_CAPTURE_MODE_GLOBAL));
		launch("tp_test_wait", 1, a, flag, 0, (uint32_t)launches);
		CUDA_OK(StreamEndCapture(a, &graph));
		CUDA_OK(UserObjectCreate(&object, &gone, destroyed, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
		CUDA_OK(GraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE));
		CUDA_OK(GraphInstantiate(&exec, graph, 0));
		CUDA_OK(GraphDestroy(graph));
		CHECK(gpu_count("objects") == 1);
		for (int i = 0; i < launches; i++) CUDA_OK(GraphLaunch(exec, a));
		CUDA_OK(GraphExecDestroy(exec));
		CHECK(gpu_count("objects") == !!launches);
		let_go(flag, (uint32_t)launches);
		while (!__atomic_load_n(&gone, __ATOMIC_ACQUIRE)) usleep(100);
		CHECK(gpu_count("objects") == 0);
	}
}

static void captures_forbid(void)
{
	start();
	CUstream a = stream_new(CU_STREAM_NON_BLOCKING), b = stream_new(CU_STREAM_NON_BLOCKING), blocking = stream_new(CU_STREAM_DEFAULT);
	CUdeviceptr p = words(1), q;
	CUgraph graph;
	CUevent e = event_new(), outside = event_new();
	CUstreamCaptureMode mode;
	/* Allocation, in global mode; what a thread in relaxed mode may do. */
	CUDA_OK(StreamBeginCapture(a, CU_STREAM_CAPTURE_MODE_GLOBAL));
	mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	CUDA_OK(ThreadExchangeStreamCaptureMode(&mode));
	CHECK(mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
	CUDA_OK(MemAlloc(&q, 4));
	CUDA_OK(ThreadExchangeStreamCaptureMode(&mode));
	CUDA_OK(StreamEndCapture(a, &graph));
	CUDA_OK(StreamBeginCapture(a, CU_STREAM_CAPTURE_MODE_GLOBAL));
	CUDA_IS(MemAlloc(&q, 4), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	CUDA_IS(StreamEndCapture(a, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
	/* Waiting for what is captured. */
	CUDA_OK(StreamBeginCapture(a, CU_STREAM_CAPTURE_MODE_RELAXED));
	CUDA_OK(EventRecord(e, a));
	CUDA_IS(EventQuery(e), CUDA_ERROR_CAPTURED_EVENT);
	CUDA_IS(StreamSynchronize(a), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	CUDA_IS(StreamEndCapture(a, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
	/* An event from outside. */
	CUDA_OK(EventRecord(outside, b));
	CUDA_OK(StreamBeginCapture(a, CU_STREAM_CAPTURE_MODE_RELAXED));
	CUDA_IS(StreamWaitEvent(a, outside, 0), CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
	CUDA_IS(StreamEndCapture(a, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
	/* A fork that doesn't come back. */
	CUDA_OK(StreamBeginCapture(a, CU_STREAM_CAPTURE_MODE_RELAXED));
	CUDA_OK(EventRecord(e, a));
	CUDA_OK(StreamWaitEvent(b, e, 0));
	launch("tp_test_add", 1, b, p, 1, 1);
	CUDA_IS(StreamEndCapture(b, &graph), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
	CUDA_IS(StreamEndCapture(a, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
	CUDA_OK(StreamBeginCapture(a, CU_STREAM_CAPTURE_MODE_RELAXED));
	CUDA_OK(EventRecord(e, a));
	CUDA_OK(StreamWaitEvent(b, e, 0));
	launch("tp_test_add", 1, b, p, 1, 1);
	CUDA_IS(StreamEndCapture(a, &graph), CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
	/* The legacy stream beside a capturing blocking one. */
	CUDA_IS(StreamBeginCapture(NULL, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	CUDA_OK(StreamBeginCapture(blocking, CU_STREAM_CAPTURE_MODE_RELAXED));
	CUDA_IS(MemsetD8Async(p, 0, 4, NULL), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
	CUDA_IS(StreamEndCapture(blocking, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
	/* The streams are as before. */
	launch("tp_test_add", 1, a, p, 1, 1);
	CUDA_OK(StreamSynchronize(a));
	CHECK(word(p) == 1);
}

static void pointers(void)
{
	context = gpu_context(1);
	CUdeviceptr p, again;
	unsigned long long id, other;
	int ordinal, host_word = 0;
	unsigned type;
	void *pinned;
	CUDA_OK(MemAlloc(&p, 1000));
	CUDA_OK(PointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, p + 999));
	CUDA_OK(PointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p));
	CUDA_OK(PointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, p));
	CHECK(ordinal == 1 && type == CU_MEMORYTYPE_DEVICE);
	CUDA_IS(PointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)(uintptr_t)&host_word), CUDA_ERROR_INVALID_VALUE);
	CUDA_OK(MemFree(p));
	CUDA_OK(MemAlloc(&again, 1000));
	CUDA_OK(PointerGetAttribute(&other, CU_POINTER_ATTRIBUTE_BUFFER_ID, again));
	CHECK(again == p && other != id);
	CUDA_OK(MemHostAlloc(&pinned, 100, 0));
	CUDA_OK(PointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)(uintptr_t)pinned));
	CHECK(type == CU_MEMORYTYPE_HOST);
	CUDA_OK(MemFreeHost(pinned));
	CUDA_IS(MemAlloc(&p, (size_t)1 << 40), CUDA_ERROR_OUT_OF_MEMORY);
	CUDA_OK(MemFree(again));
	CHECK(gpu_count("memory") == 0);
}

static CUmemGenericAllocationHandle make_block(CUdeviceptr *p, size_t bytes)
{
	CUmemAllocationProp properties = { .type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
		.location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	CUmemAccessDesc access = { { CU_MEM_LOCATION_TYPE_DEVICE, 0 }, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemGenericAllocationHandle handle;
	CUDA_OK(MemCreate(&handle, bytes, &properties, 0));
	CUDA_OK(MemAddressReserve(p, bytes, 0, 0, 0));
	CUDA_OK(MemMap(*p, bytes, 0, handle, 0));
	CUDA_OK(MemSetAccess(*p, bytes, &access, 1));
	return handle;
}

static void unmap_block(CUdeviceptr p, size_t bytes, CUmemGenericAllocationHandle handle)
{
	CUDA_OK(MemUnmap(p, bytes));
	CUDA_OK(MemAddressFree(p, bytes));
	CUDA_OK(MemRelease(handle));
	CHECK(gpu_count("memory") == 0 && gpu_count("blocks") == 0);
}

static void send_fd(int socket, int fd)
{
	char byte = 0, control[CMSG_SPACE(sizeof(int))] = { 0 };
	struct iovec part = { &byte, 1 };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control) };
	struct cmsghdr *c = CMSG_FIRSTHDR(&message);
	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(c), &fd, sizeof(int));
	CHECK(sendmsg(socket, &message, 0) == 1);
}

static int receive_fd(int socket)
{
	char byte, control[CMSG_SPACE(sizeof(int))];
	struct iovec part = { &byte, 1 };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control) };
	int fd;
	CHECK(recvmsg(socket, &message, 0) == 1);
	memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(int));
	return fd;
}

/* Two processes: the child stores into the parent's memory. */
static void shared_by_descriptor(void)
{
	int pair[2], status;
	size_t bytes = 2 << 20;
	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
	pid_t pid = fork();
	CUdeviceptr p;
	if (pid == 0) {
		CUmemGenericAllocationHandle handle;
		CUmemAccessDesc access = { { CU_MEM_LOCATION_TYPE_DEVICE, 0 }, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
		int fd = receive_fd(pair[1]);
		start();
		CUDA_OK(MemImportFromShareableHandle(&handle, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
		close(fd);
		CUDA_OK(MemAddressReserve(&p, bytes, 0, 0, 0));
		CUDA_OK(MemMap(p, bytes, 0, handle, 0));
		CUDA_OK(MemSetAccess(p, bytes, &access, 1));
		launch("tp_test_store", 1, NULL, p, 0, 77);
		CUDA_OK(CtxSynchronize());
		unmap_block(p, bytes, handle);
		_exit(0);
	}
	start();
	CUmemGenericAllocationHandle handle = make_block(&p, bytes);
	int fd;
	CUDA_OK(MemsetD8(p, 0, bytes));
	CUDA_OK(CtxSynchronize());
	launch("tp_test_wait", 1, NULL, p, 0, 77);
	CUDA_OK(MemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	send_fd(pair[0], fd);
	close(fd);
	CUDA_OK(CtxSynchronize());
	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
	unmap_block(p, bytes, handle);
}

static void shared_by_ipc(void)
{
	int pair[2], status;
	CUipcMemHandle handle;
	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
	pid_t pid = fork();
	CUdeviceptr p, q;
	if (pid == 0) {
		CHECK(read(pair[1], &handle, sizeof(handle)) == sizeof(handle));
		start();
		CUDA_OK(IpcOpenMemHandle(&p, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
		CUDA_OK(IpcOpenMemHandle(&q, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
		CHECK(p == q);
		launch("tp_test_store", 1, NULL, p, 0, 77);
		CUDA_OK(CtxSynchronize());
		CUDA_OK(IpcCloseMemHandle(p));
		CUDA_OK(IpcCloseMemHandle(p));
		CUDA_IS(IpcCloseMemHandle(p), CUDA_ERROR_INVALID_VALUE);
		_exit(0);
	}
	start();
	words(3);
	p = words(3);
	launch("tp_test_wait", 1, NULL, p, 0, 77);
	CUDA_OK(IpcGetMemHandle(&handle, p));
	CUDA_IS(IpcOpenMemHandle(&q, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS), CUDA_ERROR_INVALID_CONTEXT);
	CHECK(write(pair[0], &handle, sizeof(handle)) == sizeof(handle));
	CUDA_OK(CtxSynchronize());
	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

static void peers(void)
{
	int can;
	CUcontext other = gpu_context(2);
	context = gpu_context(0);
	CUDA_OK(DeviceCanAccessPeer(&can, 0, 1));
	CHECK(can);
	CUDA_OK(DeviceCanAccessPeer(&can, 0, 2));
	CHECK(!can);
	CUDA_IS(CtxEnablePeerAccess(other, 0), CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
}

static void injected_errors(void)
{
	CUdeviceptr p;
	start();
	CUDA_OK(MemAlloc(&p, 4));
	CUDA_IS(MemAlloc(&p, 4), CUDA_ERROR_OUT_OF_MEMORY);
	CUDA_OK(MemAlloc(&p, 4));
	/* The first kernel fails as it runs: that spoils the context. */
	launch("tp_test_add", 1, NULL, p, 1, 1);
	CUDA_IS(CtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
	CUDA_IS(MemAlloc(&p, 4), CUDA_ERROR_ILLEGAL_ADDRESS);
}

static void broken(void) { _exit(gpu_open() ? 1 : 0); }

static void after_fork(void)
{
	int n, status;
	CHECK(gpu_open());
	pid_t pid = fork();
	if (pid == 0) _exit(cuda.DeviceGetCount(&n) == CUDA_ERROR_NOT_INITIALIZED ? 0 : 1);
	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

static void use_destroyed_stream(void)
{
	start();
	CUstream s = stream_new(CU_STREAM_NON_BLOCKING);
	CUDA_OK(StreamDestroy(s));
	cuda.StreamQuery(s);
}

static void free_while_copied(void)
{
	start();
	CUstream s = stream_new(CU_STREAM_NON_BLOCKING);
	CUdeviceptr flag = words(1), p;
	CUmemGenericAllocationHandle handle = make_block(&p, 2 << 20);
	launch("tp_test_wait", 1, s, flag, 0, 1);
	CUDA_OK(MemsetD8Async(p, 0, 100, s));
	CUDA_OK(MemUnmap(p, 2 << 20));
	CUDA_OK(MemRelease(handle));
	let_go(flag, 1);
	CUDA_OK(StreamSynchronize(s));
}

static void good(void (*body)(void), const char *first, const char *second)
{
	const char *const env[] = { first ? first : second, first ? second : NULL, NULL };
	assert_true(gpu_in_child(body, env));
}

static void streams_and_events_order(void **state) { (void)state; good(order, NULL, NULL); }
static void legacy_stream_waits_for_blocking_ones(void **state) { (void)state; good(legacy, NULL, NULL); }
static void kernels_that_fit_run_at_once(void **state) { (void)state; good(fitting_kernels_meet, NULL, NULL); }
static void kernels_that_dont_fit_wait(void **state) { (void)state; good(too_many_kernels_wait, NULL, NULL); }
static void large_grids_run_in_waves(void **state) { (void)state; good(waves, NULL, NULL); }
static void captured_graphs_replay(void **state) { (void)state; good(graphs, NULL, NULL); }
static void external_events_go_by_launches(void **state) { (void)state; good(external_events, NULL, NULL); }
static void nodes_can_be_added_in_a_capture(void **state) { (void)state; good(capture_info, NULL, NULL); }
static void user_objects_live_as_long_as_graphs_and_launches(void **state) { (void)state; good(user_objects, NULL, NULL); }
static void captures_refuse_what_they_cant_hold(void **state) { (void)state; good(captures_forbid, NULL, NULL); }
static void pointers_are_known(void **state) { (void)state; good(pointers, "FAKE_CUDA_DEVICES=2", NULL); }
static void descriptors_share_memory(void **state) { (void)state; good(shared_by_descriptor, NULL, NULL); }
static void ipc_handles_share_memory(void **state) { (void)state; good(shared_by_ipc, NULL, NULL); }
static void peers_reach_each_other_in_groups(void **state) { (void)state; good(peers, "FAKE_CUDA_DEVICES=4", "FAKE_CUDA_PEER_GROUP=2"); }
static void errors_can_be_asked_for(void **state) { (void)state; good(injected_errors, "FAKE_CUDA_FAIL=cuMemAlloc_v2:2:2,kernel:1:700", NULL); }
static void a_broken_driver_can_be_asked_for(void **state) { (void)state; good(broken, "FAKE_CUDA_BROKEN=803", NULL); }
static void a_forked_child_has_no_driver(void **state) { (void)state; good(after_fork, NULL, NULL); }

static void misuse_ends_the_program(void **state)
{
	(void)state;
	assert_true(gpu_child_fails(use_destroyed_stream, NULL));
	assert_true(gpu_child_fails(free_while_copied, NULL));
}

static void lazy_loading_waits_for_kernels(void **state)
{
	(void)state;
	good(lazy, "CUDA_MODULE_LOADING=EAGER", NULL);
	const char *const lazily[] = { "CUDA_MODULE_LOADING=LAZY", "SECONDS=1", NULL };
	assert_true(gpu_child_fails(lazy, lazily));
}

int main(void)
{
	if (!gpu_fake_here()) return 77;
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(streams_and_events_order), cmocka_unit_test(legacy_stream_waits_for_blocking_ones),
		cmocka_unit_test(kernels_that_fit_run_at_once), cmocka_unit_test(kernels_that_dont_fit_wait),
		cmocka_unit_test(large_grids_run_in_waves), cmocka_unit_test(captured_graphs_replay),
		cmocka_unit_test(external_events_go_by_launches), cmocka_unit_test(nodes_can_be_added_in_a_capture),
		cmocka_unit_test(user_objects_live_as_long_as_graphs_and_launches), cmocka_unit_test(captures_refuse_what_they_cant_hold),
		cmocka_unit_test(pointers_are_known), cmocka_unit_test(descriptors_share_memory), cmocka_unit_test(ipc_handles_share_memory),
		cmocka_unit_test(peers_reach_each_other_in_groups), cmocka_unit_test(errors_can_be_asked_for),
		cmocka_unit_test(a_broken_driver_can_be_asked_for), cmocka_unit_test(a_forked_child_has_no_driver),
		cmocka_unit_test(misuse_ends_the_program), cmocka_unit_test(lazy_loading_waits_for_kernels),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
