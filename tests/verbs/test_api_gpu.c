/* Memory of GPUs with the card: every operation, with device memory at either end or at both; what a region of it is; and that nothing of
 * it is touched by a processor (the driver here kills who does), nor waits for what the program has on its streams. */
#include "verbs/helper_api.h"
#include "verbs/helper_api_gpu.h"
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define BYTES ((uint32_t)2 << 20)
#define SPARE 64u

/* Memory of any kind, registered. */
struct place { uint8_t *data; struct ibv_mr *mr; int device; };         /* device -1: the host's */
static const int kinds[] = { -1, 0, 1 };

static struct place place_open(struct side *side, int device)
{
	struct place p = { .device = device };
	p.data = device < 0 ? aligned_alloc(4096, BYTES) : gpu_alloc(device, BYTES);
	p.mr = ibv_reg_mr(side->pd, p.data, BYTES, SIDE_ACCESS);
	assert_non_null(p.mr);
	return p;
}
static void place_close(struct place *p)
{
	assert_int_equal(ibv_dereg_mr(p->mr), 0);
	if (p->device < 0)
		free(p->data);
	else
		gpu_free(p->data);
}
static void put(const struct place *p, uint32_t offset, const void *from, size_t bytes)
{
	if (p->device < 0)
		memcpy(p->data + offset, from, bytes);
	else if (bytes)
		gpu_put(p->data + offset, from, bytes);
}
static void get(void *to, const struct place *p, uint32_t offset, size_t bytes)
{
	if (p->device < 0)
		memcpy(to, p->data + offset, bytes);
	else if (bytes)
		gpu_get(to, p->data + offset, bytes);
}

static uint8_t pattern[BYTES], found[BYTES];
static void make_pattern(uint32_t seed)
{
	uint64_t x = seed * 0x9e3779b97f4a7c15u + 1;
	for (uint32_t i = 0; i < BYTES; i++) {
		x = x * 6364136223846793005u + 1442695040888963407u;
		pattern[i] = (uint8_t)(x >> 56);
	}
}
/* A place that holds the pattern and another with something else in it. */
static void prepare(const struct place *from, const struct place *to, uint32_t seed)
{
	make_pattern(seed);
	put(from, 0, pattern, BYTES);
	memset(found, 0xee, BYTES);
	put(to, 0, found, BYTES);
}
/* bytes from the pattern's offset lie at to, and nothing else around them. */
static void expect_there(const struct place *to, uint32_t at, uint32_t offset, uint32_t bytes)
{
	uint32_t first = at >= SPARE ? at - SPARE : 0;
	get(found, to, first, at - first + bytes + SPARE);
	for (uint32_t i = first; i < at; i++)
		assert_int_equal(found[i - first], 0xee);
	assert_memory_equal(found + (at - first), pattern + offset, bytes);
	for (uint32_t i = 0; i < SPARE; i++)
		assert_int_equal(found[at - first + bytes + i], 0xee);
}

static int send_from(struct side *side, enum ibv_wr_opcode opcode, const struct place *local, uint32_t offset, uint32_t bytes,
	const struct place *remote, uint32_t at, unsigned flags)
{
	struct ibv_sge sge = { (uintptr_t)local->data + offset, bytes, local->mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = flags, .imm_data = htonl(bytes) }, *bad;
	if (remote) {
		wr.wr.rdma.remote_addr = (uintptr_t)remote->data + at;
		wr.wr.rdma.rkey = remote->mr->rkey;
	}
	return ibv_post_send(side->qp, &wr, &bad);
}
static void receive_into(struct side *side, const struct place *place, uint32_t offset, uint32_t bytes)
{
	struct ibv_sge sge = { (uintptr_t)place->data + offset, bytes, place->mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
	assert_int_equal(ibv_post_recv(side->qp, &wr, &bad), 0);
}
static struct ibv_wc expect_ok(struct side *side)
{
	struct ibv_wc wc = next_wc(side->cq);
	assert_int_equal(wc.status, IBV_WC_SUCCESS);
	return wc;
}

static const uint32_t sizes[] = { 1, 7, 8, 9, 4096, 8193, 70001, 1300007 };
#define EACH_SIZE for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++)
/* The kinds of both ends, but not host to host. */
static const struct pair_options patient = { .timeout = 20, .retry_cnt = 7, .rnr_retry = 7, .sge = 4, .inline_bytes = 128 };
static void with_all_kinds(void (*test)(struct pair *p, const struct place *a, const struct place *b))
{
	struct pair p;
	pair_open(&p, &patient);
	for (int i = 0; i < 3; i++)
		for (int k = 0; k < 3; k++) {
			if ((i == 0 && k == 0) || kinds[i] >= gpu_devices() || kinds[k] >= gpu_devices())
				continue;
			struct place a = place_open(&p.a, kinds[i]), b = place_open(&p.b, kinds[k]);
			test(&p, &a, &b);
			place_close(&a);
			place_close(&b);
		}
	pair_close(&p);
}

/* ---- operations ---- */

static void write_all(struct pair *p, const struct place *a, const struct place *b)
{
	EACH_SIZE {
		prepare(a, b, (uint32_t)s);
		assert_int_equal(send_from(&p->a, IBV_WR_RDMA_WRITE, a, 3, sizes[s], b, 101, 0), 0);
		expect_ok(&p->a);
		expect_there(b, 101, 3, sizes[s]);
	}
}
static void writes_of_any_size_between_any_memory(void **state)
{
	(void)state;
	with_all_kinds(write_all);
}

static void read_all(struct pair *p, const struct place *a, const struct place *b)
{
	EACH_SIZE {
		prepare(b, a, (uint32_t)s + 50);
		assert_int_equal(send_from(&p->a, IBV_WR_RDMA_READ, a, 77, sizes[s], b, 5, 0), 0);
		assert_int_equal(expect_ok(&p->a).byte_len, sizes[s]);
		expect_there(a, 77, 5, sizes[s]);
	}
}
static void reads_of_any_size_between_any_memory(void **state)
{
	(void)state;
	with_all_kinds(read_all);
}

static void send_all(struct pair *p, const struct place *a, const struct place *b)
{
	EACH_SIZE {
		prepare(a, b, (uint32_t)s + 100);
		receive_into(&p->b, b, 200, sizes[s]);
		assert_int_equal(send_from(&p->a, s % 2 ? IBV_WR_SEND : IBV_WR_SEND_WITH_IMM, a, 1, sizes[s], NULL, 0, 0), 0);
		expect_ok(&p->a);
		struct ibv_wc wc = expect_ok(&p->b);
		assert_int_equal(wc.byte_len, sizes[s]);
		expect_there(b, 200, 1, sizes[s]);
		receive_into(&p->b, b, 0, 0);
		assert_int_equal(send_from(&p->a, IBV_WR_RDMA_WRITE_WITH_IMM, a, 9, sizes[s], b, 201, 0), 0);
		expect_ok(&p->a);
		wc = expect_ok(&p->b);
		assert_int_equal(wc.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
		assert_int_equal(wc.imm_data, htonl(sizes[s]));
		get(found, b, 201, sizes[s]);
		assert_memory_equal(found, pattern + 9, sizes[s]);
	}
}
static void messages_and_immediates_between_any_memory(void **state)
{
	(void)state;
	with_all_kinds(send_all);
}

static void scatter_lists_may_mix_memory_of_all_kinds(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &patient);
	int last = gpu_devices() > 1 ? 1 : 0;
	struct place from[3] = { place_open(&p.a, 0), place_open(&p.a, -1), place_open(&p.a, last) };
	struct place to[3] = { place_open(&p.b, -1), place_open(&p.b, last), place_open(&p.b, 0) };
	const uint32_t out[3] = { 4097, 70000, 300001 }, in[3] = { 50003, 20000, 304095 };
	struct ibv_sge gather[3], scatter[3];
	make_pattern(7);
	for (uint32_t i = 0, at = 0; i < 3; at += out[i++]) {
		put(&from[i], 10, pattern + at, out[i]);
		gather[i] = (struct ibv_sge){ (uintptr_t)from[i].data + 10, out[i], from[i].mr->lkey };
		scatter[i] = (struct ibv_sge){ (uintptr_t)to[i].data + 6, in[i], to[i].mr->lkey };
	}
	struct ibv_recv_wr recv = { .sg_list = scatter, .num_sge = 3 }, *bad_recv;
	struct ibv_send_wr send = { .sg_list = gather, .num_sge = 3, .opcode = IBV_WR_SEND }, *bad;
	assert_int_equal(ibv_post_recv(p.b.qp, &recv, &bad_recv), 0);
	assert_int_equal(ibv_post_send(p.a.qp, &send, &bad), 0);
	expect_ok(&p.a);
	expect_ok(&p.b);
	for (uint32_t i = 0, at = 0; i < 3; at += in[i++]) {
		get(found, &to[i], 6, in[i]);
		assert_memory_equal(found, pattern + at, in[i]);
	}
	for (int i = 0; i < 3; i++) {
		place_close(&from[i]);
		place_close(&to[i]);
	}
	pair_close(&p);
}

static void atomic_all(struct pair *p, const struct place *a, const struct place *b)
{
	uint64_t word = 40, was;
	put(b, 64, &word, 8);
	for (int i = 0; i < 3; i++) {
		struct ibv_sge sge = { (uintptr_t)a->data + 8, 8, a->mr->lkey };
		struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = i < 2 ? IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_ATOMIC_CMP_AND_SWP, .wr.atomic =
			{ .remote_addr = (uintptr_t)b->data + 64, .rkey = b->mr->rkey, .compare_add = i < 2 ? 1 : 42, .swap = 1000 } }, *bad;
		assert_int_equal(ibv_post_send(p->a.qp, &wr, &bad), 0);
		expect_ok(&p->a);
		get(&was, a, 8, 8);
		assert_int_equal(was, 40 + i);
	}
	get(&word, b, 64, 8);
	assert_int_equal(word, 1000);
}
static void atomics_between_any_memory(void **state)
{
	(void)state;
	with_all_kinds(atomic_all);
}

static void data_are_posted_inline_from_device_memory(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &patient);
	struct place a = place_open(&p.a, 0), b = place_open(&p.b, 0);
	prepare(&a, &b, 3);
	assert_int_equal(send_from(&p.a, IBV_WR_RDMA_WRITE, &a, 33, 100, &b, 10, IBV_SEND_INLINE), 0);
	expect_ok(&p.a);
	expect_there(&b, 10, 33, 100);
	place_close(&a);
	place_close(&b);
	pair_close(&p);
}

static void datagrams_reach_device_memory_with_their_header(void **state)
{
	(void)state;
	struct pair_options options = patient;
	struct pair p;
	options.type = IBV_QPT_UD;
	pair_open(&p, &options);
	struct place a = place_open(&p.a, 0), b = place_open(&p.b, 0);
	struct ibv_ah_attr attr = own_address(p.context);
	struct ibv_ah *ah = ibv_create_ah(p.a.pd, &attr);
	struct ibv_sge sge = { (uintptr_t)a.data, 1000, a.mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .wr.ud = { ah, p.b.qp->qp_num, 0x1111 } }, *bad;
	prepare(&a, &b, 5);
	receive_into(&p.b, &b, 100, 1040);
	assert_int_equal(ibv_post_send(p.a.qp, &wr, &bad), 0);
	expect_ok(&p.a);
	assert_int_equal(expect_ok(&p.b).byte_len, 1040);
	get(found, &b, 140, 1000);
	assert_memory_equal(found, pattern, 1000);
	ibv_destroy_ah(ah);
	place_close(&a);
	place_close(&b);
	pair_close(&p);
}

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
		pair_open(&p, &patient);
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
	pair_open(&p, &patient);
	struct place host = place_open(&p.a, -1), other = place_open(&p.a, 0);
	uint8_t *two = gpu_map_two(0, 0);
	struct ibv_mr *mr = ibv_reg_mr(p.b.pd, two + 1000, 2 * GPU_BLOCK - 1000, SIDE_ACCESS);
	assert_non_null(mr);
	const struct place *sources[2] = { &host, &other };
	for (uint32_t i = 0; i < 2; i++) {
		struct place there = { two, mr, 0 };
		uint32_t at = (uint32_t)GPU_BLOCK - 600000 - i;
		make_pattern(20 + i);
		put(sources[i], 0, pattern, BYTES);
		assert_int_equal(send_from(&p.a, IBV_WR_RDMA_WRITE, sources[i], 1, 1200001, &there, at, 0), 0);
		expect_ok(&p.a);
		gpu_get(found, two + at, 1200001);
		assert_memory_equal(found, pattern + 1, 1200001);
		memset(found, 0, BYTES);
		put(sources[i], 0, found, BYTES);
		assert_int_equal(send_from(&p.a, IBV_WR_RDMA_READ, sources[i], 1, 1200001, &there, at, 0), 0);
		expect_ok(&p.a);
		get(found, sources[i], 1, 1200001);
		assert_memory_equal(found, pattern + 1, 1200001);
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
		pair_open(&p, &patient);
		struct place a = place_open(&p.a, i / 2 ? -1 : 0), b = place_open(&p.b, 0);
		struct place *gone = i / 2 ? &b : &a;
		uint8_t *again = NULL;
		gpu_free(gone->data);
		if (i % 2) {
			again = gpu_alloc(0, BYTES);
			gpu_set(again, 0x11, BYTES);
		}
		assert_int_equal(send_from(&p.a, IBV_WR_RDMA_WRITE, &a, 0, 5000, &b, 0, 0), 0);
		assert_int_equal(next_wc(p.a.cq).status, i / 2 ? IBV_WC_REM_ACCESS_ERR : IBV_WC_LOC_PROT_ERR);
		if (again) {
			gpu_get(found, again, BYTES);
			for (uint32_t k = 0; k < BYTES; k++)
				assert_int_equal(found[k], 0x11);
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
	pair_open(&p, &patient);
	struct place b = place_open(&p.b, 0);
	receive_into(&p.b, &b, 0, 1000);
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
	pair_open(&p, &patient);
	struct place a = place_open(&p.a, 0), b = place_open(&p.b, 0);
	struct ibv_mw *mw = ibv_alloc_mw(p.b.pd, IBV_MW_TYPE_1);
	struct ibv_mw_bind bind = { .send_flags = IBV_SEND_SIGNALED, .bind_info = { b.mr, (uintptr_t)b.data + 1000, 5000, IBV_ACCESS_REMOTE_WRITE } };
	prepare(&a, &b, 9);
	assert_int_equal(ibv_bind_mw(p.b.qp, mw, &bind), 0);
	expect_ok(&p.b);
	expect_write_to(&p, &a, (uintptr_t)b.data + 1500, 4000, mw->rkey, IBV_WC_SUCCESS);
	expect_there(&b, 1500, 0, 4000);
	assert_int_equal(ibv_dealloc_mw(mw), 0);
	/* To the host and back. */
	uint8_t *host = calloc(1, 8192);
	assert_int_equal(ibv_rereg_mr(b.mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, host, 8192, 0), 0);
	expect_write_to(&p, &a, (uintptr_t)host + 1, 4001, b.mr->rkey, IBV_WC_SUCCESS);
	assert_memory_equal(host + 1, pattern, 4001);
	assert_int_equal(ibv_rereg_mr(b.mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, b.data, BYTES, 0), 0);
	expect_write_to(&p, &a, (uintptr_t)b.data + 100000, 4002, b.mr->rkey, IBV_WC_SUCCESS);
	expect_there(&b, 100000, 0, 4002);
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
	pair_open(&p, &patient);
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

static void memory_of_a_context_that_the_program_made(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &patient);
	for (int i = 0; i < 2; i++) {
		CUcontext context, old;
		CUdeviceptr ptr;
		assert_int_equal(gpu.CtxCreate(&context, 0, 0), CUDA_SUCCESS);
		assert_int_equal(gpu.MemAlloc(&ptr, BYTES), CUDA_SUCCESS);
		struct place own = { (uint8_t *)(uintptr_t)ptr, ibv_reg_mr(p.b.pd, (void *)(uintptr_t)ptr, BYTES, SIDE_ACCESS), 0 };
		assert_non_null(own.mr);
		assert_int_equal(gpu.CtxPopCurrent(&old), CUDA_SUCCESS);
		struct place a = place_open(&p.a, 0);
		prepare(&a, &own, 30);
		assert_int_equal(send_from(&p.a, IBV_WR_RDMA_WRITE, &a, 5, 700001, &own, 9, 0), 0);
		expect_ok(&p.a);
		expect_there(&own, 9, 5, 700001);
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
	pair_open(&p, &patient);
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
	prepare(&a, &there, 40);
	assert_int_equal(send_from(&p.a, IBV_WR_RDMA_WRITE, &a, 0, 1000003, &there, 50, 0), 0);
	expect_ok(&p.a);
	expect_there(&there, 50, 0, 1000003);
	assert_int_equal(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_REMOTE_READ), IBV_REREG_MR_ERR_INPUT);
	assert_int_equal(ibv_dereg_mr(mr), 0);
	place_close(&a);
	gpu_unmap_two(two);
	pair_close(&p);
}

static void a_dma_buf_of_pages_is_mapped(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &patient);
	int fd = memfd_create("pages", MFD_CLOEXEC);
	assert_int_equal(ftruncate(fd, 100000), 0);
	uint8_t *view = mmap(NULL, 100000, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	struct ibv_mr *mr = ibv_reg_dmabuf_mr(p.b.pd, 5001, 80000, 0x10000, fd, SIDE_ACCESS);
	assert_non_null(mr);
	close(fd);
	struct place a = place_open(&p.a, 0);
	make_pattern(41);
	put(&a, 0, pattern, BYTES);
	expect_write_to(&p, &a, 0x10000 + 7, 70001, mr->rkey, IBV_WC_SUCCESS);
	assert_memory_equal(view + 5001 + 7, pattern, 70001);
	struct place b = place_open(&p.b, -1), mapped = { (uint8_t *)0x10000, mr, -1 };
	/* The local end as well, and atomics. */
	assert_int_equal(send_from(&p.b, IBV_WR_RDMA_WRITE, &mapped, 7, 60001, &a, 3, 0), 0);
	expect_ok(&p.b);
	get(found, &a, 3, 60001);
	assert_memory_equal(found, pattern, 60001);
	expect_write_to(&p, &a, 0x10000 + 80000 - 10, 11, mr->rkey, IBV_WC_REM_ACCESS_ERR);
	assert_int_equal(ibv_dereg_mr(mr), 0);
	munmap(view, 100000);
	place_close(&a);
	place_close(&b);
	pair_close(&p);
}

/* ---- the program's own streams ---- */

static void a_stream_that_waits_for_what_a_write_brings_is_not_waited_for(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &patient);
	struct place a = place_open(&p.a, -1), b = place_open(&p.b, 0);
	uint32_t go = 17;
	CUstream streams[2] = { CU_STREAM_LEGACY, NULL };
	assert_int_equal(gpu.StreamCreate(&streams[1], CU_STREAM_DEFAULT), CUDA_SUCCESS);
	gpu_set(b.data, 0, BYTES);
	put(&a, 0, &go, sizeof(go));
	for (int i = 0; i < 2; i++)
		assert_int_equal(gpu.StreamWaitValue32(streams[i], (CUdeviceptr)(uintptr_t)b.data + 64, go, CU_STREAM_WAIT_VALUE_EQ), CUDA_SUCCESS);
	/* Data first; then what ends the wait. */
	assert_int_equal(send_from(&p.a, IBV_WR_RDMA_WRITE, &a, 4, 1000000, &b, 128, 0), 0);
	expect_ok(&p.a);
	assert_int_equal(send_from(&p.a, IBV_WR_RDMA_WRITE, &a, 0, 4, &b, 64, 0), 0);
	expect_ok(&p.a);
	for (int i = 0; i < 2; i++)
		assert_int_equal(gpu.StreamSynchronize(streams[i]), CUDA_SUCCESS);
	assert_int_equal(gpu.StreamDestroy(streams[1]), CUDA_SUCCESS);
	place_close(&a);
	place_close(&b);
	pair_close(&p);
}

static void a_capture_is_not_disturbed(void **state)
{
	(void)state;
	struct pair p;
	CUstream stream;
	CUgraph graph;
	pair_open(&p, &patient);
	struct place a = place_open(&p.a, 0), b = place_open(&p.b, 0);
	uint8_t *more = gpu_alloc(gpu_devices() - 1, 4096);
	prepare(&a, &b, 60);
	assert_int_equal(gpu.StreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
	assert_int_equal(gpu.StreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
	assert_int_equal(send_from(&p.a, IBV_WR_RDMA_WRITE, &a, 0, 800000, &b, 100, 0), 0);
	expect_ok(&p.a);
	struct ibv_mr *mr = ibv_reg_mr(p.b.pd, more, 4096, SIDE_ACCESS);
	assert_non_null(mr);
	assert_int_equal(ibv_dereg_mr(mr), 0);
	assert_int_equal(gpu.StreamEndCapture(stream, &graph), CUDA_SUCCESS);
	expect_there(&b, 100, 0, 800000);
	assert_int_equal(gpu.GraphDestroy(graph), CUDA_SUCCESS);
	assert_int_equal(gpu.StreamDestroy(stream), CUDA_SUCCESS);
	gpu_free(more);
	place_close(&a);
	place_close(&b);
	pair_close(&p);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_capture_is_not_disturbed),       /* before the second device's first region: it is made within */
		cmocka_unit_test(writes_of_any_size_between_any_memory),
		cmocka_unit_test(reads_of_any_size_between_any_memory),
		cmocka_unit_test(messages_and_immediates_between_any_memory),
		cmocka_unit_test(scatter_lists_may_mix_memory_of_all_kinds),
		cmocka_unit_test(atomics_between_any_memory),
		cmocka_unit_test(data_are_posted_inline_from_device_memory),
		cmocka_unit_test(datagrams_reach_device_memory_with_their_header),
		cmocka_unit_test(a_region_of_device_memory_has_bounds_and_rights),
		cmocka_unit_test(a_region_may_lie_in_several_allocations),
		cmocka_unit_test(a_range_that_is_not_all_of_one_gpu_is_refused),
		cmocka_unit_test(memory_that_was_freed_is_an_error_at_either_end),
		cmocka_unit_test(a_message_into_freed_memory_ends_both_ends),
		cmocka_unit_test(windows_and_regions_made_anew_open_device_memory),
		cmocka_unit_test(host_memory_that_cuda_knows_is_the_hosts),
		cmocka_unit_test(memory_of_a_context_that_the_program_made),
		cmocka_unit_test(a_descriptor_that_is_no_dma_buf_is_refused_as_a_card_does),
		cmocka_unit_test(a_dma_buf_of_a_gpu_is_reached_by_its_address),
		cmocka_unit_test(a_dma_buf_of_pages_is_mapped),
		cmocka_unit_test(a_stream_that_waits_for_what_a_write_brings_is_not_waited_for),
	};
	alarm(110);
	gpu_start();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
