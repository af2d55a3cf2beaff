/* Devices, contexts, memory, exports and pointers. Each test is a process of its own: the driver reads its settings once. */
#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#include "gpu/fake_driver.h"
#include "gpu/gpu.h"

/* In a child: a check that fails ends it with its line. */
#define must(condition) do { \
	if (!(condition)) { \
		fprintf(stderr, "%s:%d: %s is false; last error: %s\n", __FILE__, __LINE__, #condition, tp_log_last_error()); \
		_exit(1); \
	} \
} while (0)

static void in_child(int devices, void (*body)(void))
{
	int status;
	pid_t pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		use_fake_driver(devices);
		body();
		_exit(0);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_true(WIFEXITED(status));
	assert_int_equal(WEXITSTATUS(status), 0);
}

static struct tp_gpu *gpu_number(int ordinal)
{
	struct tp_gpu *gpu = NULL;
	bool has = false;
	must(tp_gpu_open(&has) == ncclSuccess && has);
	must(tp_gpu_of_ordinal(ordinal, &gpu) == ncclSuccess);
	return gpu;
}

static CUcontext current(void)
{
	CUcontext context = (CUcontext)&context;
	must(tp_cuda->CtxGetCurrent(&context) == CUDA_SUCCESS);
	return context;
}

/* ---- opening */

static void body_no_library(void)
{
	bool has = true;
	setenv("TELPHER_CUDA_LIBRARY", "libcuda-that-is-not-there.so.1", 1);
	tp_param_reload();
	must(tp_gpu_open(&has) == ncclSystemError);
	must(strstr(tp_log_last_error(), "libcuda-that-is-not-there") && strstr(tp_log_last_error(), "TELPHER_DEVICE=host"));
}
static void a_library_that_is_named_and_missing_is_an_error(void **state) { (void)state; in_child(1, body_no_library); }

static void body_other_library(void)
{
	bool has = true;
	setenv("TELPHER_CUDA_LIBRARY", "libm.so.6", 1);
	tp_param_reload();
	must(tp_gpu_open(&has) == ncclSystemError && strstr(tp_log_last_error(), "has no function cuInit"));
}
static void a_library_without_the_functions_is_named(void **state) { (void)state; in_child(1, body_other_library); }

static void body_broken(void)
{
	bool has = true;
	must(tp_gpu_open(&has) == ncclSystemError);
	must(strstr(tp_log_last_error(), "fabricmanager") && strstr(tp_log_last_error(), "802"));
	must(tp_gpu_open(&has) == ncclSystemError);
}
static void a_driver_that_does_not_work_says_what_to_do(void **state)
{
	(void)state;
	setenv("FAKE_CUDA_BROKEN", "802", 1);
	in_child(1, body_broken);
	unsetenv("FAKE_CUDA_BROKEN");
}

static void body_old(void)
{
	bool has = true;
	must(tp_gpu_open(&has) == ncclSystemError);
	must(strstr(tp_log_last_error(), "is for CUDA 12.3") && strstr(tp_log_last_error(), "12.4 is the oldest") && strstr(tp_log_last_error(), "TELPHER_DEVICE=host"));
}
static void body_old_enough(void)
{
	bool has = false;
	must(tp_gpu_open(&has) == ncclSuccess && has);
}
static void a_driver_that_is_too_old_says_which_is_needed(void **state)
{
	(void)state;
	setenv("FAKE_CUDA_VERSION", "12030", 1);
	in_child(1, body_old);
	setenv("FAKE_CUDA_VERSION", "12040", 1);
	in_child(1, body_old_enough);
	unsetenv("FAKE_CUDA_VERSION");
}

static void body_no_device(void)
{
	bool has = true;
	must(tp_gpu_open(&has) == ncclSuccess && !has && !tp_cuda);
}
static void no_device_is_no_gpu_and_no_error(void **state)
{
	(void)state;
	setenv("FAKE_CUDA_BROKEN", "100", 1);
	in_child(1, body_no_device);
	unsetenv("FAKE_CUDA_BROKEN");
}

/* ---- devices and contexts */

static void body_devices(void)
{
	int count;
	struct tp_gpu *two = gpu_number(1), *again, *one;
	must(tp_gpu_count(&count) == ncclSuccess && count == 3);
	must(two->ordinal == 1 && two->name[0] && two->bus_id[0] && two->bus > 0 && two->sms > 0 && two->memory_bytes > 0 && two->major >= 8);
	must(two->vmm && two->ipc);
	must(!current());
	must(tp_gpu_of_ordinal(1, &again) == ncclSuccess && again == two);
	must(tp_gpu_of_ordinal(3, &again) == ncclInvalidArgument && strstr(tp_log_last_error(), "no GPU 3"));
	must(tp_gpu_current(&one) == ncclSuccess && one->ordinal == 0 && !current());
	must(memcmp(one->uuid, two->uuid, 16) != 0);
	must(tp_cuda->CtxSetCurrent(two->context) == CUDA_SUCCESS);
	must(tp_gpu_current(&again) == ncclSuccess && again == two);
}
static void devices_are_described_once_a_context(void **state) { (void)state; in_child(3, body_devices); }

static void body_own_context(void)
{
	struct tp_gpu *primary = gpu_number(0), *own, *next;
	CUcontext context;
	must(tp_cuda->CtxCreate(&context, 0, primary->device) == CUDA_SUCCESS);
	must(tp_gpu_current(&own) == ncclSuccess && own != primary && own->context == context && own->ordinal == 0);
	must(tp_cuda->CtxDestroy(context) == CUDA_SUCCESS);
	must(tp_cuda->CtxCreate(&context, 0, primary->device) == CUDA_SUCCESS);
	must(tp_gpu_current(&next) == ncclSuccess && next != own);
}
static void a_context_of_the_program_is_taken_as_it_is(void **state) { (void)state; in_child(1, body_own_context); }

static void body_enter(void)
{
	struct tp_gpu *one = gpu_number(0), *two = gpu_number(1);
	bool first, second, third;
	must(tp_gpu_enter(one, &first) == ncclSuccess && first && current() == one->context);
	must(tp_gpu_enter(one, &second) == ncclSuccess && !second);
	must(tp_gpu_enter(two, &third) == ncclSuccess && third && current() == two->context);
	tp_gpu_leave(third);
	tp_gpu_leave(second);
	must(current() == one->context);
	tp_gpu_leave(first);
	must(!current());
}
static void entering_a_context_is_undone(void **state) { (void)state; in_child(2, body_enter); }

static void body_error(void)
{
	struct tp_gpu *gpu = gpu_number(0);
	must(tp_gpu_fail("f.c", 1, "f", gpu, "MemAlloc(&ptr, 3)", CUDA_ERROR_OUT_OF_MEMORY) == ncclUnhandledCudaError);
	const char *text = tp_log_last_error();
	must(strstr(text, "cuMemAlloc on device 0") && strstr(text, "CUDA_ERROR_OUT_OF_MEMORY (2)") && strstr(text, gpu->bus_id));
}
static void an_error_names_call_device_and_reason(void **state) { (void)state; in_child(1, body_error); }

/* ---- memory */

static void check_zeros_and_copies(struct tp_gpu *gpu, struct tp_gpu_memory *m, size_t bytes)
{
	unsigned char *text = malloc(bytes), *back = malloc(bytes);
	must(tp_gpu_copy(gpu, back, m->ptr, bytes) == ncclSuccess);
	for (size_t i = 0; i < bytes; i++) must(back[i] == 0);
	for (size_t i = 0; i < bytes; i++) text[i] = (unsigned char)(i * 7);
	must(tp_gpu_copy(gpu, m->ptr, text, bytes) == ncclSuccess);
	must(tp_gpu_copy(gpu, back, m->ptr, bytes) == ncclSuccess && memcmp(text, back, bytes) == 0);
	free(text);
	free(back);
}

static void body_memory(void)
{
	struct tp_gpu *gpu = gpu_number(1);
	struct tp_gpu_memory m = { 0 };
	struct tp_gpu_pointer p;
	must(tp_gpu_alloc(gpu, 100000, true, "a test", &m) == ncclSuccess);
	must(m.kind == (gpu->vmm ? TP_GPU_VMM : TP_GPU_PLAIN) && m.bytes == 100000 && m.mapped >= m.bytes);
	must(tp_gpu_pointer((char *)m.ptr + 5, &p) == ncclSuccess && p.device && p.ordinal == 1 && p.base == m.ptr && p.bytes >= 100000 && p.buffer_id);
	check_zeros_and_copies(gpu, &m, 100000);
	void *before = m.ptr;
	uint64_t id = p.buffer_id, next_id;
	tp_gpu_free(&m);
	must(!m.ptr);
	tp_gpu_free(&m);
	must(tp_gpu_alloc(gpu, 100000, true, "a test", &m) == ncclSuccess);
	must(tp_gpu_buffer_id(m.ptr, &next_id) == ncclSuccess && next_id != id);
	(void)before;
	tp_gpu_free(&m);
	must(!current());
}
static void device_memory_is_zeroed_copied_and_freed(void **state) { (void)state; in_child(2, body_memory); }
static void plain_device_memory_too(void **state)
{
	(void)state;
	setenv("NCCL_CUMEM_ENABLE", "0", 1);
	in_child(2, body_memory);
	unsetenv("NCCL_CUMEM_ENABLE");
}

static void body_too_much(void)
{
	struct tp_gpu *gpu = gpu_number(0);
	struct tp_gpu_memory m;
	must(tp_gpu_alloc(gpu, (size_t)1 << 45, true, "far too much", &m) == ncclUnhandledCudaError);
	must(strstr(tp_log_last_error(), "far too much") && strstr(tp_log_last_error(), "MiB are free"));
}
static void memory_that_is_not_there_is_said_with_what_is(void **state) { (void)state; in_child(1, body_too_much); }

static void body_host_memory(void)
{
	struct tp_gpu *one = gpu_number(0), *two = gpu_number(1);
	struct tp_gpu_memory m, first, second;
	struct tp_gpu_pointer p;
	size_t bytes = 65536;
	must(tp_gpu_alloc_host(one, bytes, "a test", &m) == ncclSuccess && m.host && m.ptr);
	must(tp_gpu_pointer(m.host, &p) == ncclSuccess && !p.device && p.pinned);
	check_zeros_and_copies(one, &m, 1000);
	tp_gpu_free(&m);
	char *shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	must(tp_gpu_pointer(shared, &p) == ncclSuccess && !p.device && !p.pinned && p.buffer_id == 0);
	must(tp_gpu_register_host(one, shared, bytes, "a test", &first) == ncclSuccess);
	must(tp_gpu_register_host(two, shared, bytes, "a test", &second) == ncclSuccess);
	tp_gpu_free(&first);
	must(tp_gpu_pointer(shared, &p) == ncclSuccess && p.pinned);
	tp_gpu_free(&second);
	must(tp_gpu_pointer(shared, &p) == ncclSuccess && !p.pinned);
}
static void host_memory_is_pinned_once_and_counted(void **state) { (void)state; in_child(2, body_host_memory); }

static void body_captured(void)
{
	struct tp_gpu *gpu = gpu_number(0);
	struct tp_gpu_memory m;
	CUstream stream;
	CUgraph graph;
	int outer, inner;
	bool pushed;
	must(tp_gpu_enter(gpu, &pushed) == ncclSuccess);
	must(tp_cuda->StreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
	must(tp_cuda->StreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS);
	must(tp_gpu_alloc(gpu, 4096, false, "a test", &m) == ncclSuccess);
	check_zeros_and_copies(gpu, &m, 4096);
	tp_gpu_free(&m);
	must(tp_gpu_alloc_host(gpu, 4096, "a test", &m) == ncclSuccess);
	tp_gpu_free(&m);
	tp_gpu_relax(&outer);
	tp_gpu_relax(&inner);
	tp_gpu_unrelax(inner);
	must(inner == CU_STREAM_CAPTURE_MODE_RELAXED && outer == CU_STREAM_CAPTURE_MODE_GLOBAL);
	tp_gpu_unrelax(outer);
	must(tp_cuda->StreamEndCapture(stream, &graph) == CUDA_SUCCESS);
}
static void memory_comes_and_goes_while_the_thread_captures(void **state) { (void)state; in_child(1, body_captured); }

/* ---- peers */

static void body_reach(void)
{
	struct tp_gpu *one = gpu_number(0), *two = gpu_number(1), *three = gpu_number(2);
	char why[128];
	must(tp_gpu_reaches(one, one->uuid, one->bus_id, why, sizeof(why)));
	must(tp_gpu_reaches(one, two->uuid, two->bus_id, why, sizeof(why)));
	must(!tp_gpu_reaches(one, three->uuid, three->bus_id, why, sizeof(why)) && strstr(why, "no peer access to device 2"));
	uint8_t hidden[16] = { 9, 9 };
	must(tp_gpu_reaches(one, hidden, "0000:fe:00.0", why, sizeof(why)));
}
static void who_reaches_whom_is_asked_of_cuda(void **state)
{
	(void)state;
	setenv("FAKE_CUDA_PEER_GROUP", "2", 1);
	in_child(3, body_reach);
	unsetenv("FAKE_CUDA_PEER_GROUP");
}

static void body_map_again(void)
{
	struct tp_gpu *one = gpu_number(0), *two = gpu_number(1);
	struct tp_gpu_memory m, again = { 0 };
	uint64_t word = 77, seen = 0;
	must(tp_gpu_alloc(one, 4096, true, "a test", &m) == ncclSuccess);
	must(tp_gpu_map_again(two, &m, &again) == ncclSuccess);
	void *there = again.ptr ? again.ptr : m.ptr;
	must(tp_gpu_copy(two, there, &word, sizeof(word)) == ncclSuccess);
	must(tp_gpu_copy(one, &seen, m.ptr, sizeof(seen)) == ncclSuccess && seen == 77);
	if (!again.ptr) return;
	/* It lives on with the second mapping. */
	tp_gpu_free(&m);
	seen = 0;
	must(tp_gpu_copy(two, &seen, again.ptr, sizeof(seen)) == ncclSuccess && seen == 77);
	tp_gpu_free(&again);
}
static void another_device_of_the_process_maps_memory(void **state) { (void)state; in_child(2, body_map_again); }
static void another_device_of_the_process_reaches_plain_memory(void **state)
{
	(void)state;
	setenv("NCCL_CUMEM_ENABLE", "0", 1);
	in_child(2, body_map_again);
	unsetenv("NCCL_CUMEM_ENABLE");
}

/* Two processes and a socket between them: what one exports the other imports, writes, and the first sees. */
static void exporter(int sock)
{
	struct tp_gpu *gpu = gpu_number(0);
	struct tp_gpu_memory m;
	struct tp_gpu_export record;
	int fd;
	uint64_t word = 1234, seen = 0;
	char byte;
	must(tp_gpu_alloc(gpu, 8192, true, "a test", &m) == ncclSuccess);
	must(tp_gpu_copy(gpu, m.ptr, &word, sizeof(word)) == ncclSuccess);
	must(tp_gpu_export(&m, &record, &fd) == ncclSuccess && (fd >= 0) == gpu->vmm && record.pid == getpid());
	must(write(sock, &record, sizeof(record)) == (ssize_t)sizeof(record));
	if (fd >= 0) {
		must(tp_unix_send_fd(sock, fd, NULL, 0) == ncclSuccess);
		close(fd);
	}
	must(read(sock, &byte, 1) == 1);
	must(tp_gpu_copy(gpu, &seen, (char *)m.ptr + 4096, sizeof(seen)) == ncclSuccess && seen == 4321);
	tp_gpu_free(&m);
	_exit(0);
}

static void importer(int sock)
{
	struct tp_gpu *gpu = gpu_number(1);
	struct tp_gpu_memory m;
	struct tp_gpu_export record;
	int fd = -1;
	uint64_t word = 4321, seen = 0;
	must(read(sock, &record, sizeof(record)) == (ssize_t)sizeof(record));
	if (gpu->vmm) must(tp_unix_recv_fd(sock, &fd, NULL, 0, 0) == ncclSuccess);
	struct tp_gpu_export bad = record;
	bad.version++;
	must(tp_gpu_import(gpu, &bad, fd, &m) == ncclInvalidArgument);
	must(tp_gpu_import(gpu, &record, fd, &m) == ncclSuccess);
	if (fd >= 0) close(fd);
	must(tp_gpu_copy(gpu, &seen, m.ptr, sizeof(seen)) == ncclSuccess && seen == 1234);
	must(tp_gpu_copy(gpu, (char *)m.ptr + 4096, &word, sizeof(word)) == ncclSuccess);
	must(write(sock, "x", 1) == 1);
	tp_gpu_free(&m);
}

static void body_share(void)
{
	int sockets[2], status;
	must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0);
	pid_t pid = fork();
	if (pid == 0) exporter(sockets[0]);
	importer(sockets[1]);
	must(waitpid(pid, &status, 0) == pid && status == 0);
}
static void memory_is_shared_between_processes_by_descriptor(void **state) { (void)state; in_child(2, body_share); }
static void memory_is_shared_between_processes_by_ipc(void **state)
{
	(void)state;
	setenv("NCCL_CUMEM_ENABLE", "0", 1);
	in_child(2, body_share);
	unsetenv("NCCL_CUMEM_ENABLE");
}

static void body_nothing_shares(void)
{
	struct tp_gpu *gpu = gpu_number(0);
	struct tp_gpu_memory m;
	struct tp_gpu_export record;
	int fd;
	must(!gpu->vmm && !gpu->ipc);
	must(tp_gpu_alloc(gpu, 8192, true, "a test", &m) == ncclSuccess);
	must(tp_gpu_export(&m, &record, &fd) == ncclUnhandledCudaError);
	tp_gpu_free(&m);
}
static void a_machine_that_shares_nothing_is_found_out(void **state)
{
	(void)state;
	setenv("FAKE_CUDA_VMM", "0", 1);
	setenv("FAKE_CUDA_IPC", "0", 1);
	in_child(1, body_nothing_shares);
	unsetenv("FAKE_CUDA_VMM");
	unsetenv("FAKE_CUDA_IPC");
}

static void body_path(void)
{
	struct tp_gpu *gpu = gpu_number(0);
	char text[16];
	setenv("TELPHER_NVML_LIBRARY", "libnvml-that-is-not-there.so", 1);
	tp_param_reload();
	tp_gpu_path_name(gpu, gpu->bus_id, text, sizeof(text));
	must(strcmp(text, "LOC") == 0);
	tp_gpu_path_name(gpu, "0000:fe:00.0", text, sizeof(text));
	must(text[0] == 0 && tp_gpu_distance(gpu, "0000:fe:00.0") == TP_GPU_UNKNOWN && tp_gpu_distance(gpu, gpu->bus_id) == TP_GPU_LOC);
}
static void without_nvml_paths_have_no_name(void **state) { (void)state; in_child(1, body_path); }

static void body_nvml(void)
{
	static const struct { const char *a, *b, *text; enum tp_gpu_distance distance; } pairs[] = {
		{ "0000:01:00.0", "0000:02:00.0", "NV2", TP_GPU_NVL },
		{ "0000:02:00.0", "0000:01:00.0", "NV2", TP_GPU_NVL },
		{ "0000:01:00.0", "0000:03:00.0", "NV12", TP_GPU_NVL },
		{ "0000:02:00.0", "0000:03:00.0", "PXB", TP_GPU_PXB },
		{ "0000:01:00.0", "0000:04:00.0", "PHB", TP_GPU_PHB },
		{ "0000:01:00.0", "0000:05:00.0", "", TP_GPU_UNKNOWN },
	};
	struct tp_gpu *gpu = gpu_number(0), *other = gpu_number(1);
	char text[16], why[128];
	setenv("TELPHER_NVML_LIBRARY", FAKE_NVML_LIBRARY, 1);
	tp_param_reload();
	for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++) {
		tp_gpu_bus_path_name(pairs[i].a, pairs[i].b, text, sizeof(text));
		must(strcmp(text, pairs[i].text) == 0);
		strcpy(gpu->bus_id, pairs[i].a);
		must(tp_gpu_distance(gpu, pairs[i].b) == pairs[i].distance);
	}
	/* Devices that CUDA_VISIBLE_DEVICES hides are NVML's to judge. */
	uint8_t hidden[16] = { 9, 9 };
	strcpy(other->bus_id, "0000:03:00.0");
	must(tp_gpu_reaches(other, hidden, "0000:02:00.0", why, sizeof(why)));
	must(!tp_gpu_reaches(other, hidden, "0000:04:00.0", why, sizeof(why)) && strstr(why, "NVML says"));
}
static void nvml_knows_links_and_bridges(void **state) { (void)state; in_child(2, body_nvml); }

/* Each question takes a millisecond in a virtual machine. */
static void body_nvml_once(void)
{
	struct tp_gpu *gpu = gpu_number(0);
	char text[16];
	setenv("TELPHER_NVML_LIBRARY", FAKE_NVML_LIBRARY, 1);
	tp_param_reload();
	int (*questions)(void);
	*(void **)&questions = dlsym(dlopen(FAKE_NVML_LIBRARY, RTLD_NOW), "fakeNvmlQuestions");
	must(questions && questions() == 0);
	strcpy(gpu->bus_id, "0000:03:00.0");
	tp_gpu_ask_nvml(gpu);
	/* 18 states; of its 12 links, all to switches, the first two are asked where they lead. */
	must(questions() == 18 + 2);
	tp_gpu_bus_path_name("0000:01:00.0", "0000:03:00.0", text, sizeof(text));
	int both = questions();
	for (int i = 0; i < 3; i++) tp_gpu_bus_path_name("0000:03:00.0", "0000:01:00.0", text, sizeof(text));
	must(both > 20 && questions() == both);
}
static void nvml_is_asked_once_about_a_device(void **state) { (void)state; in_child(1, body_nvml_once); }

static void levels_are_names_or_the_old_numbers(void **state)
{
	(void)state;
	static const struct { const char *text; int level; enum tp_gpu_distance distance; } levels[] = {
		{ "LOC", 0, TP_GPU_LOC }, { "nvl", 1, TP_GPU_NVL }, { "NVB", 2, TP_GPU_NVL }, { "C2C", 3, TP_GPU_NVL }, { "PIX", 4, TP_GPU_PIX }, { "PXB", 5, TP_GPU_PXB },
		{ "P2C", 6, TP_GPU_PXB }, { "PXN", 7, TP_GPU_PXB }, { "PHB", 8, TP_GPU_PHB }, { "SYS", 9, TP_GPU_SYS }, { "0", 0, TP_GPU_LOC }, { "1", 4, TP_GPU_PIX },
		{ "4", 9, TP_GPU_SYS }, { "6", 9, TP_GPU_SYS }, { "far", -1, TP_GPU_UNKNOWN }, { "", -1, TP_GPU_UNKNOWN }, { "-1", -1, TP_GPU_UNKNOWN }, { "1x", -1, TP_GPU_UNKNOWN },
	};
	for (size_t i = 0; i < sizeof(levels) / sizeof(levels[0]); i++) {
		assert_int_equal(tp_gpu_level_parse(levels[i].text), levels[i].level);
		assert_int_equal(tp_gpu_level_distance(levels[i].level), levels[i].distance);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_library_that_is_named_and_missing_is_an_error),
		cmocka_unit_test(a_library_without_the_functions_is_named),
		cmocka_unit_test(a_driver_that_does_not_work_says_what_to_do),
		cmocka_unit_test(a_driver_that_is_too_old_says_which_is_needed),
		cmocka_unit_test(no_device_is_no_gpu_and_no_error),
		cmocka_unit_test(devices_are_described_once_a_context),
		cmocka_unit_test(a_context_of_the_program_is_taken_as_it_is),
		cmocka_unit_test(entering_a_context_is_undone),
		cmocka_unit_test(an_error_names_call_device_and_reason),
		cmocka_unit_test(device_memory_is_zeroed_copied_and_freed),
		cmocka_unit_test(plain_device_memory_too),
		cmocka_unit_test(memory_that_is_not_there_is_said_with_what_is),
		cmocka_unit_test(host_memory_is_pinned_once_and_counted),
		cmocka_unit_test(memory_comes_and_goes_while_the_thread_captures),
		cmocka_unit_test(who_reaches_whom_is_asked_of_cuda),
		cmocka_unit_test(another_device_of_the_process_maps_memory),
		cmocka_unit_test(another_device_of_the_process_reaches_plain_memory),
		cmocka_unit_test(memory_is_shared_between_processes_by_descriptor),
		cmocka_unit_test(memory_is_shared_between_processes_by_ipc),
		cmocka_unit_test(a_machine_that_shares_nothing_is_found_out),
		cmocka_unit_test(without_nvml_paths_have_no_name),
		cmocka_unit_test(nvml_knows_links_and_bridges),
		cmocka_unit_test(nvml_is_asked_once_about_a_device),
		cmocka_unit_test(levels_are_names_or_the_old_numbers),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
