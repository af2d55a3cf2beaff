/* libnccl-net-telpher.so with GPU memory, as NCCL uses a NET plug-in that can: on the software card, and the driver without a GPU (tests/cuda), whose
 * device memory kills who touches it. */
#include <dlfcn.h>
#include <sched.h>
#include <stdio.h>
#include "gpu/driver.h"
#include "helper_export.h"

#define BYTES ((size_t)2 << 20)

#define MEMBER(name, symbol, parameters) CUresult (*name) parameters;
static struct { TP_CUDA_FUNCTIONS(MEMBER, MEMBER) } gpu;

static int start(void **state)
{
	CUcontext primary;

	(void)state;
	setenv("NCCL_SOCKET_IFNAME", "lo", 1);
	setenv("NCCL_IB_HCA", "telpher", 1);
	setenv("TELPHER_VERBS_HIDE_REAL", "1", 1);
	setenv("TELPHER_PLUGIN_NET", "IB", 1);
	setenv("TELPHER_CUDA_LIBRARY", FAKE_CUDA_LIBRARY, 1);
	setenv("FAKE_CUDA_APART", "1", 1);
	setenv("FAKE_CUDA_DMABUF", "1", 1);
	setenv("FAKE_CUDA_DEVICES", "1", 1);
	void *driver = dlopen(FAKE_CUDA_LIBRARY, RTLD_NOW);
	assert_non_null(driver);
#define FIND(name, symbol, parameters) *(void **)&gpu.name = dlsym(driver, #symbol);
	TP_CUDA_FUNCTIONS(FIND, FIND)
	assert_int_equal(gpu.Init(0), CUDA_SUCCESS);
	assert_int_equal(gpu.DevicePrimaryCtxRetain(&primary, 0), CUDA_SUCCESS);
	assert_int_equal(gpu.CtxSetCurrent(primary), CUDA_SUCCESS);
	return 0;
}

/* Whole pages, as a GPU's are; all that was allocated is freed at the end. */
static CUdeviceptr allocated[16];
static int nallocated;

static unsigned char *device_memory(void)
{
	CUdeviceptr *ptr = &allocated[nallocated++];

	assert_int_equal(gpu.MemAlloc(ptr, BYTES + 4096), CUDA_SUCCESS);
	return (unsigned char *)(uintptr_t)((*ptr + 4095) & ~(CUdeviceptr)4095);
}

static int free_memory(void **state)
{
	(void)state;
	while (nallocated > 0) gpu.MemFree(allocated[--nallocated]);
	return 0;
}

static ncclResult_t reg(void *comm, void *data, int type, void **mhandle)
{
	return export_version == 8 ? export_v8()->reg_mr(comm, data, BYTES, type, mhandle) : export_v11()->reg_mr(comm, data, BYTES, type, mhandle);
}

static ncclResult_t reg_dmabuf(void *comm, void *data, uint64_t offset, int fd, void **mhandle)
{
	return export_version == 8 ? export_v8()->reg_mr_dmabuf(comm, data, BYTES, TP_ABI_PTR_CUDA, offset, fd, mhandle)
		: export_v11()->reg_mr_dmabuf(comm, data, BYTES, TP_ABI_PTR_CUDA, offset, fd, mhandle);
}

static ncclResult_t iflush(void *comm, void *data, int bytes, void *mhandle, void **request)
{
	return export_version == 8 ? export_v8()->iflush(comm, 1, &data, &bytes, &mhandle, request) : export_v11()->iflush(comm, 1, &data, &bytes, &mhandle, request);
}

/* From GPU memory into GPU memory, flushed. */
static void move(struct export_pair *pair, unsigned char *from, unsigned char *to, void *send_memory, void *recv_memory, size_t bytes, uint32_t seed)
{
	unsigned char *host = malloc(bytes);
	void *at = to, *send = NULL, *receive = NULL, *flush = NULL;
	int tag = 5, done = 0, sent = 0, got = 0;
	size_t room = bytes;

	net_fill(host, bytes, seed);
	assert_int_equal(gpu.MemcpyHtoD((CUdeviceptr)(uintptr_t)from, host, bytes), CUDA_SUCCESS);
	while (!receive) assert_int_equal(export_irecv(pair->recv_comm, 1, &at, &room, &tag, &recv_memory, &receive), ncclSuccess);
	while (!sent || !done) {
		if (!send) assert_int_equal(export_isend(pair->send_comm, from, bytes, tag, send_memory, &send), ncclSuccess);
		if (send && !sent) assert_int_equal(export_test(send, &sent, NULL), ncclSuccess);
		if (!done) assert_int_equal(export_test(receive, &done, &got), ncclSuccess);
		sched_yield();
	}
	assert_int_equal(got, bytes);
	assert_int_equal(iflush(pair->recv_comm, to, (int)bytes, recv_memory, &flush), ncclSuccess);
	assert_non_null(flush);
	for (done = 0; !done; sched_yield()) assert_int_equal(export_test(flush, &done, NULL), ncclSuccess);
	memset(host, 0, bytes);
	assert_int_equal(gpu.MemcpyDtoH(host, (CUdeviceptr)(uintptr_t)to, bytes), CUDA_SUCCESS);
	net_check(host, bytes, seed);
	free(host);
}

static void gpu_memory_is_moved_by_its_address(void **state)
{
	static const int versions[] = { 8, 11 };

	(void)state;
	for (size_t v = 0; v < TP_ARRAY_LEN(versions); v++) {
		unsigned char *from = device_memory(), *to = device_memory();
		struct export_pair pair;
		void *send_memory, *recv_memory;

		export_open(versions[v]);
		export_pair_open(&pair, 4096);
		assert_int_equal(reg(pair.send_comm, from, TP_ABI_PTR_CUDA, &send_memory), ncclSuccess);
		assert_int_equal(reg(pair.recv_comm, to, TP_ABI_PTR_CUDA, &recv_memory), ncclSuccess);
		for (uint32_t i = 0; i < 5; i++) move(&pair, from, to, send_memory, recv_memory, i * 200000 + 17, i + 1);
		assert_int_equal(export_dereg(pair.send_comm, send_memory), ncclSuccess);
		assert_int_equal(export_dereg(pair.recv_comm, recv_memory), ncclSuccess);
		export_pair_close(&pair);
		export_close();
	}
}

static void gpu_memory_is_moved_by_a_dma_buf(void **state)
{
	static const int versions[] = { 8, 11 };

	(void)state;
	for (size_t v = 0; v < TP_ARRAY_LEN(versions); v++) {
		unsigned char *from = device_memory(), *to = device_memory();
		struct export_pair pair;
		void *send_memory, *recv_memory;
		int fds[2];

		export_open(versions[v]);
		export_pair_open(&pair, 4096);
		assert_int_equal(gpu.MemGetHandleForAddressRange(&fds[0], (CUdeviceptr)(uintptr_t)from, BYTES, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0), CUDA_SUCCESS);
		assert_int_equal(gpu.MemGetHandleForAddressRange(&fds[1], (CUdeviceptr)(uintptr_t)to, BYTES, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0), CUDA_SUCCESS);
		assert_int_equal(reg_dmabuf(pair.send_comm, from, 0, fds[0], &send_memory), ncclSuccess);
		assert_int_equal(reg_dmabuf(pair.recv_comm, to, 0, fds[1], &recv_memory), ncclSuccess);
		/* NCCL closes them at once. */
		close(fds[0]);
		close(fds[1]);
		for (uint32_t i = 0; i < 5; i++) move(&pair, from, to, send_memory, recv_memory, i * 200000 + 17, i + 11);
		assert_int_equal(export_dereg(pair.send_comm, send_memory), ncclSuccess);
		assert_int_equal(export_dereg(pair.recv_comm, recv_memory), ncclSuccess);
		export_pair_close(&pair);
		export_close();
	}
}

static void memory_of_an_unknown_kind_is_refused_with_words(void **state)
{
	struct export_pair pair;
	void *memory = NULL;

	(void)state;
	export_open(11);
	export_pair_open(&pair, 4096);
	assert_int_equal(reg(pair.send_comm, pair.from, 3, &memory), ncclInvalidArgument);
	assert_non_null(strstr(export_log(), "memory of type 3 can't be registered here, only host memory (1) and GPU memory (2)"));
	export_pair_close(&pair);
	export_close();
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_teardown(gpu_memory_is_moved_by_its_address, free_memory), cmocka_unit_test_teardown(gpu_memory_is_moved_by_a_dma_buf, free_memory),
		cmocka_unit_test(memory_of_an_unknown_kind_is_refused_with_words),
	};
	return cmocka_run_group_tests(tests, start, NULL);
}
