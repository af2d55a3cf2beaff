/* What a region of a GPU's memory is to the card: bounds and rights, what may lie in it, its end; and DMA-BUFs. */
#include "verbs/helper_api_gpu_places.h"
#include "verbs/helper_api_gpu.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- regions ---- */

static void expect_write_to(struct pair *p, const struct place *from, uint64_t addr, uint32_t bytes, uint32_t rkey, enum ibv_wc_status status)
{
	struct ibv_sge sge = { (uintptr_t)from->data, bytes, from->mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .wr.rdma = { addr, rkey } }, *bad;
	assert_int_equal(ibv_post_send(p->a.qp, &wr, &bad), 0);
	assert_int_equal(next_wc(p->a.cq).status, status);
}

static void a_region_of_device_memory_has_bounds_and_rights(void **state)
{
	(void)state;
	for (int i = 0; i < 2; i++) {
		struct pair p;
		pair_open(&p, &place_patient);
		struct place a = place_open(&p.a, 0);
		uint8_t *data = gpu_alloc(0, 10000);
		struct ibv_mr *mr = ibv_reg_mr_iova(p.b.pd, data + 100, 1000, 0x7000, i ? IBV_ACCESS_REMOTE_READ : (int)SIDE_ACCESS);
		assert_non_null(mr);
		if (i == 0) {
			expect_write_to(&p, &a, 0x7000 + 990, 10, mr->rkey, IBV_WC_SUCCESS);
			expect_write_to(&p, &a, 0x7000 + 990, 11, mr->rkey, IBV_WC_REM_ACCESS_ERR);
		} else {
			expect_write_to(&p, &a, 0x7000, 10, mr->rkey, IBV_WC_REM_ACCESS_ERR);
		}
		assert_int_equal(ibv_dereg_mr(mr), 0);
		gpu_free(data);
		place_close(&a);
		pair_close(&p);
	}
}

static void a_region_may_lie_in_several_allocations(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &place_patient);
	struct place host = place_open(&p.a, -1), other = place_open(&p.a, 0);
	uint8_t *two = gpu_map_two(0, 0);
	struct ibv_mr *mr = ibv_reg_mr(p.b.pd, two + 1000, 2 * GPU_BLOCK - 1000, SIDE_ACCESS);
	assert_non_null(mr);
	const struct place *sources[2] = { &host, &other };
	for (uint32_t i = 0; i < 2; i++) {
		struct place there = { two, mr, 0 };
		uint32_t at = (uint32_t)GPU_BLOCK - 600000 - i;
		place_make_pattern(PLACE_BYTES, 20 + i);
		place_put(sources[i], 0, place_pattern, PLACE_BYTES);
		assert_int_equal(place_send(&p.a, IBV_WR_RDMA_WRITE, sources[i], 1, 1200001, &there, at, 0), 0);
		place_expect_ok(&p.a);
		gpu_get(place_found, two + at, 1200001);
		assert_memory_equal(place_found, place_pattern + 1, 1200001);
		memset(place_found, 0, PLACE_BYTES);
		place_put(sources[i], 0, place_found, PLACE_BYTES);
		assert_int_equal(place_send(&p.a, IBV_WR_RDMA_READ, sources[i], 1, 1200001, &there, at, 0), 0);
		place_expect_ok(&p.a);
		place_get(place_found, sources[i], 1, 1200001);
		assert_memory_equal(place_found, place_pattern + 1, 1200001);
	}
	assert_int_equal(ibv_dereg_mr(mr), 0);
	gpu_unmap_two(two);
	place_close(&host);
	place_close(&other);
	pair_close(&p);
}

static void a_range_that_is_not_all_of_one_gpu_is_refused(void **state)
{
	(void)state;
	struct ibv_context *context = open_first();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	uint8_t *data = gpu_alloc(0, 100000);
	assert_null(ibv_reg_mr(pd, data + 50000, (size_t)1 << 40, SIDE_ACCESS));
	assert_int_equal(errno, EFAULT);
	if (gpu_devices() > 1) {
		uint8_t *two = gpu_map_two(0, 1);
		assert_null(ibv_reg_mr(pd, two, 2 * GPU_BLOCK, SIDE_ACCESS));
		assert_int_equal(errno, EFAULT);
		gpu_unmap_two(two);
	}
	gpu_free(data);
	ibv_dealloc_pd(pd);
	ibv_close_device(context);
}

/* Freed, and what then has its addresses: neither is what was registered. */
static void memory_that_was_freed_is_an_error_at_either_end(void **state)
{
	(void)state;
	for (int i = 0; i < 4; i++) {
		struct pair p;
		pair_open(&p, &place_patient);
		struct place a = place_open(&p.a, i / 2 ? -1 : 0), b = place_open(&p.b, 0);
		struct place *gone = i / 2 ? &b : &a;
		uint8_t *again = NULL;
		gpu_free(gone->data);
		if (i % 2) {
			again = gpu_alloc(0, PLACE_BYTES);
			gpu_set(again, 0x11, PLACE_BYTES);
		}
		assert_int_equal(place_send(&p.a, IBV_WR_RDMA_WRITE, &a, 0, 5000, &b, 0, 0), 0);
		assert_int_equal(next_wc(p.a.cq).status, i / 2 ? IBV_WC_REM_ACCESS_ERR : IBV_WC_LOC_PROT_ERR);
		if (again) {
			gpu_get(place_found, again, PLACE_BYTES);
			for (uint32_t k = 0; k < PLACE_BYTES; k++)
				assert_int_equal(place_found[k], 0x11);
			gpu_free(again);
		}
		assert_int_equal(ibv_dereg_mr(gone->mr), 0);
		place_close(i / 2 ? &a : &b);
		pair_close(&p);
	}
}

static void a_message_into_freed_memory_ends_both_ends(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &place_patient);
	struct place b = place_open(&p.b, 0);
	place_receive(&p.b, &b, 0, 1000);
	gpu_free(b.data);
	assert_int_equal(post(&p.a, &(struct request){ .opcode = IBV_WR_SEND, .bytes = 900 }), 0);
	assert_int_equal(next_wc(p.a.cq).status, IBV_WC_REM_OP_ERR);
	assert_int_equal(next_wc(p.b.cq).status, IBV_WC_LOC_PROT_ERR);
	assert_int_equal(ibv_dereg_mr(b.mr), 0);
	pair_close(&p);
}

static void windows_and_regions_made_anew_open_device_memory(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &place_patient);
	struct place a = place_open(&p.a, 0), b = place_open(&p.b, 0);
	struct ibv_mw *mw = ibv_alloc_mw(p.b.pd, IBV_MW_TYPE_1);
	struct ibv_mw_bind bind = { .send_flags = IBV_SEND_SIGNALED, .bind_info = { b.mr, (uintptr_t)b.data + 1000, 5000, IBV_ACCESS_REMOTE_WRITE } };
	place_prepare(&a, &b, 110000, 9);
	assert_int_equal(ibv_bind_mw(p.b.qp, mw, &bind), 0);
	place_expect_ok(&p.b);
	expect_write_to(&p, &a, (uintptr_t)b.data + 1500, 4000, mw->rkey, IBV_WC_SUCCESS);
	place_expect(&b, 1500, 0, 4000);
	assert_int_equal(ibv_dealloc_mw(mw), 0);
	/* To the host and back. */
	uint8_t *host = calloc(1, 8192);
	assert_int_equal(ibv_rereg_mr(b.mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, host, 8192, 0), 0);
	expect_write_to(&p, &a, (uintptr_t)host + 1, 4001, b.mr->rkey, IBV_WC_SUCCESS);
	assert_memory_equal(host + 1, place_pattern, 4001);
	assert_int_equal(ibv_rereg_mr(b.mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, b.data, PLACE_BYTES, 0), 0);
	expect_write_to(&p, &a, (uintptr_t)b.data + 100000, 4002, b.mr->rkey, IBV_WC_SUCCESS);
	place_expect(&b, 100000, 0, 4002);
	free(host);
	place_close(&a);
	place_close(&b);
	pair_close(&p);
}

static void host_memory_that_cuda_knows_is_the_hosts(void **state)
{
	(void)state;
	struct pair p;
	void *pinned;
	CUdeviceptr managed;
	pair_open(&p, &place_patient);
	assert_int_equal(gpu.MemHostAlloc(&pinned, 8192, CU_MEMHOSTALLOC_PORTABLE), CUDA_SUCCESS);
	assert_int_equal(gpu.MemAllocManaged(&managed, 8192, CU_MEM_ATTACH_GLOBAL), CUDA_SUCCESS);
	memset(pinned, 0x31, 8192);
	memset((void *)(uintptr_t)managed, 0, 8192);
	struct place a = { pinned, ibv_reg_mr(p.a.pd, pinned, 8192, SIDE_ACCESS), -1 };
	struct place b = { (uint8_t *)(uintptr_t)managed, ibv_reg_mr(p.b.pd, (void *)(uintptr_t)managed, 8192, SIDE_ACCESS), -1 };
	assert_true(a.mr && b.mr);
	expect_write_to(&p, &a, (uintptr_t)b.data, 8000, b.mr->rkey, IBV_WC_SUCCESS);
	assert_memory_equal(b.data, a.data, 8000);
	ibv_dereg_mr(a.mr);
	ibv_dereg_mr(b.mr);
	gpu.MemFreeHost(pinned);
	gpu.MemFree(managed);
	pair_close(&p);
}

/* Stream-ordered memory lies side by side in what the pool maps. */
static void memory_of_a_pool(void **state)
{
	(void)state;
	struct pair p;
	CUdeviceptr ptr[2];
	CUstream stream;
	pair_open(&p, &place_patient);
	assert_int_equal(gpu.StreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
	for (int i = 0; i < 2; i++)
		assert_int_equal(gpu.MemAllocAsync(&ptr[i], PLACE_BYTES, stream), CUDA_SUCCESS);
	assert_int_equal(gpu.StreamSynchronize(stream), CUDA_SUCCESS);
	struct place a = { (uint8_t *)(uintptr_t)ptr[0], ibv_reg_mr(p.a.pd, (void *)(uintptr_t)ptr[0], PLACE_BYTES, SIDE_ACCESS), 0 };
	struct place b = { (uint8_t *)(uintptr_t)ptr[1], ibv_reg_mr(p.b.pd, (void *)(uintptr_t)(ptr[1] + 4096), PLACE_BYTES - 4096, SIDE_ACCESS), 0 };
	assert_true(a.mr && b.mr);
	place_prepare(&a, &b, 1510000, 33);
	assert_int_equal(place_send(&p.a, IBV_WR_RDMA_WRITE, &a, 5, 1500001, &b, 5000, 0), 0);
	place_expect_ok(&p.a);
	place_expect(&b, 5000, 5, 1500001);
	for (int i = 0; i < 2; i++)
		assert_int_equal(gpu.MemFreeAsync(ptr[i], stream), CUDA_SUCCESS);
	assert_int_equal(gpu.StreamSynchronize(stream), CUDA_SUCCESS);
	assert_int_equal(place_send(&p.a, IBV_WR_RDMA_WRITE, &a, 5, 15, &b, 5000, 0), 0);
	assert_int_equal(next_wc(p.a.cq).status, IBV_WC_LOC_PROT_ERR);
	ibv_dereg_mr(a.mr);
	ibv_dereg_mr(b.mr);
	assert_int_equal(gpu.StreamDestroy(stream), CUDA_SUCCESS);
	pair_close(&p);
}

static void memory_of_a_context_that_the_program_made(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &place_patient);
	for (int i = 0; i < 2; i++) {
		CUcontext context, old;
		CUdeviceptr ptr;
		assert_int_equal(gpu.CtxCreate(&context, 0, 0), CUDA_SUCCESS);
		assert_int_equal(gpu.MemAlloc(&ptr, PLACE_BYTES), CUDA_SUCCESS);
		struct place own = { (uint8_t *)(uintptr_t)ptr, ibv_reg_mr(p.b.pd, (void *)(uintptr_t)ptr, PLACE_BYTES, SIDE_ACCESS), 0 };
		assert_non_null(own.mr);
		assert_int_equal(gpu.CtxPopCurrent(&old), CUDA_SUCCESS);
		struct place a = place_open(&p.a, 0);
		place_prepare(&a, &own, 700001, 30);
		assert_int_equal(place_send(&p.a, IBV_WR_RDMA_WRITE, &a, 5, 700001, &own, 9, 0), 0);
		place_expect_ok(&p.a);
		place_expect(&own, 9, 5, 700001);
		place_close(&a);
		assert_int_equal(ibv_dereg_mr(own.mr), 0);
		assert_int_equal(gpu.CtxDestroy(context), CUDA_SUCCESS);
	}
	pair_close(&p);
}

/* ---- DMA-BUFs ---- */

static void a_descriptor_that_is_no_dma_buf_is_refused_as_a_card_does(void **state)
{
	(void)state;
	struct ibv_context *context = open_first();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	int ends[2];
	assert_null(ibv_reg_dmabuf_mr(pd, 0, 0, 0, -1, 0));
	assert_int_equal(errno, EBADF);
	assert_int_equal(pipe(ends), 0);
	assert_null(ibv_reg_dmabuf_mr(pd, 0, 4096, 0, ends[0], IBV_ACCESS_LOCAL_WRITE));
	assert_int_equal(errno, EINVAL);
	close(ends[0]);
	close(ends[1]);
	ibv_dealloc_pd(pd);
	ibv_close_device(context);
}

static void a_dma_buf_of_a_gpu_is_reached_by_its_address(void **state)
{
	(void)state;
	struct pair p;
	int fd;
	pair_open(&p, &place_patient);
	uint8_t *two = gpu_map_two(0, 0);
	CUresult error = gpu.MemGetHandleForAddressRange(&fd, (CUdeviceptr)(uintptr_t)two, 2 * GPU_BLOCK, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
	if (error != CUDA_SUCCESS) {
		print_message("this driver gives out no DMA-BUF: error %d\n", (int)error);
		gpu_unmap_two(two);
		pair_close(&p);
		skip();
	}
	assert_null(ibv_reg_dmabuf_mr(p.b.pd, 4096, 2 * GPU_BLOCK, (uintptr_t)two, fd, SIDE_ACCESS));
	assert_int_equal(errno, EINVAL);
	struct ibv_mr *mr = ibv_reg_dmabuf_mr(p.b.pd, 0, 2 * GPU_BLOCK, (uintptr_t)two, fd, SIDE_ACCESS);
	assert_non_null(mr);
	close(fd);
	struct place a = place_open(&p.a, -1), there = { two, mr, 0 };
	place_prepare(&a, &there, 1000003, 40);
	assert_int_equal(place_send(&p.a, IBV_WR_RDMA_WRITE, &a, 0, 1000003, &there, 50, 0), 0);
	place_expect_ok(&p.a);
	place_expect(&there, 50, 0, 1000003);
	assert_int_equal(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_REMOTE_READ), IBV_REREG_MR_ERR_INPUT);
	assert_int_equal(ibv_dereg_mr(mr), 0);
	place_close(&a);
	gpu_unmap_two(two);
	pair_close(&p);
}

/* One that begins a page, as large ones do by themselves. */
static CUdeviceptr alloc_at_page(size_t bytes, CUdeviceptr *pads, int *npads)
{
	CUdeviceptr got = 0;
	for (*npads = 0; *npads < 16; ++*npads) {
		assert_int_equal(gpu.MemAlloc(&got, bytes), CUDA_SUCCESS);
		if (got % 4096 == 0)
			break;
		assert_int_equal(gpu.MemFree(got), CUDA_SUCCESS);
		assert_int_equal(gpu.MemAlloc(&pads[*npads], 512), CUDA_SUCCESS);
	}
	assert_int_equal(got % 4096, 0);
	return got;
}

/* Its last page is its in part; devices take it as a whole. */
static void a_dma_buf_of_an_allocation_of_an_odd_size_is_registered(void **state)
{
	(void)state;
	struct pair p;
	int fd, npads;
	CUdeviceptr pads[16];
	pair_open(&p, &place_patient);
	const size_t bytes = 2 * GPU_BLOCK + 1, whole = 2 * GPU_BLOCK + 4096;
	CUdeviceptr odd = alloc_at_page(bytes, pads, &npads);
	for (int i = 0; i < npads; i++)
		assert_int_equal(gpu.MemFree(pads[i]), CUDA_SUCCESS);
	CUresult error = gpu.MemGetHandleForAddressRange(&fd, odd, whole, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
	if (error != CUDA_SUCCESS) {
		print_message("this driver gives out no DMA-BUF of %zu bytes: error %d\n", whole, (int)error);
		assert_int_equal(gpu.MemFree(odd), CUDA_SUCCESS);
		pair_close(&p);
		skip();
	}
	struct ibv_mr *mr = ibv_reg_dmabuf_mr(p.b.pd, 0, whole, odd, fd, SIDE_ACCESS);
	assert_non_null(mr);
	close(fd);
	struct place a = place_open(&p.a, -1), there = { (uint8_t *)(uintptr_t)odd + bytes - 1000512, mr, 0 };
	place_prepare(&a, &there, 1000000, 60);
	assert_int_equal(place_send(&p.a, IBV_WR_RDMA_WRITE, &a, 0, 1000000, &there, 400, 0), 0);
	place_expect_ok(&p.a);
	place_expect(&there, 400, 0, 1000000);
	expect_write_to(&p, &a, odd + bytes - 2, 2, mr->rkey, IBV_WC_SUCCESS);
	expect_write_to(&p, &a, odd + bytes - 1, 2, mr->rkey, IBV_WC_REM_ACCESS_ERR);
	place_close(&a);
	assert_int_equal(ibv_dereg_mr(mr), 0);
	assert_int_equal(gpu.MemFree(odd), CUDA_SUCCESS);
	pair_close(&p);
}

static void a_dma_buf_of_pages_is_mapped(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &place_patient);
	int fd = memfd_create("pages", MFD_CLOEXEC);
	assert_int_equal(ftruncate(fd, 100000), 0);
	uint8_t *view = mmap(NULL, 100000, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	struct ibv_mr *mr = ibv_reg_dmabuf_mr(p.b.pd, 5001, 80000, 0x10000, fd, SIDE_ACCESS);
	assert_non_null(mr);
	close(fd);
	struct place a = place_open(&p.a, 0);
	place_make_pattern(80000, 41);
	place_put(&a, 0, place_pattern, 80000);
	expect_write_to(&p, &a, 0x10000 + 7, 70001, mr->rkey, IBV_WC_SUCCESS);
	assert_memory_equal(view + 5001 + 7, place_pattern, 70001);
	struct place b = place_open(&p.b, -1), mapped = { (uint8_t *)0x10000, mr, -1 };
	/* The local end as well, and atomics. */
	assert_int_equal(place_send(&p.b, IBV_WR_RDMA_WRITE, &mapped, 7, 60001, &a, 3, 0), 0);
	place_expect_ok(&p.b);
	place_get(place_found, &a, 3, 60001);
	assert_memory_equal(place_found, place_pattern, 60001);
	expect_write_to(&p, &a, 0x10000 + 80000 - 10, 11, mr->rkey, IBV_WC_REM_ACCESS_ERR);
	assert_int_equal(ibv_dereg_mr(mr), 0);
	munmap(view, 100000);
	place_close(&a);
	place_close(&b);
	pair_close(&p);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_region_of_device_memory_has_bounds_and_rights),
		cmocka_unit_test(a_region_may_lie_in_several_allocations),
		cmocka_unit_test(a_range_that_is_not_all_of_one_gpu_is_refused),
		cmocka_unit_test(memory_that_was_freed_is_an_error_at_either_end),
		cmocka_unit_test(a_message_into_freed_memory_ends_both_ends),
		cmocka_unit_test(windows_and_regions_made_anew_open_device_memory),
		cmocka_unit_test(host_memory_that_cuda_knows_is_the_hosts),
		cmocka_unit_test(memory_of_a_pool),
		cmocka_unit_test(memory_of_a_context_that_the_program_made),
		cmocka_unit_test(a_descriptor_that_is_no_dma_buf_is_refused_as_a_card_does),
		cmocka_unit_test(a_dma_buf_of_a_gpu_is_reached_by_its_address),
		cmocka_unit_test(a_dma_buf_of_an_allocation_of_an_odd_size_is_registered),
		cmocka_unit_test(a_dma_buf_of_pages_is_mapped),
	};
	gpu_start();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
