/* Memory of GPUs with the card: every operation, with device memory at either end or at both; and that nothing of it is touched by a
 * processor (the driver here kills who does), nor waits for what the program has on its streams. */
#include "verbs/helper_api_gpu_places.h"
#include "verbs/helper_api_gpu.h"
#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const int kinds[] = { -1, 0, 1 };
static const uint32_t sizes[] = { 1, 7, 8, 9, 4096, 8193, 70001, 1300007 };
#define EACH_SIZE for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++)
/* The kinds of both ends, but not host to host. */
static void with_all_kinds(void (*test)(struct pair *p, const struct place *a, const struct place *b))
{
	struct pair p;
	pair_open(&p, &place_patient);
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
		place_prepare(a, b, sizes[s], (uint32_t)s);
		assert_int_equal(place_send(&p->a, IBV_WR_RDMA_WRITE, a, 3, sizes[s], b, 101, 0), 0);
		place_expect_ok(&p->a);
		place_expect(b, 101, 3, sizes[s]);
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
		place_prepare(b, a, sizes[s], (uint32_t)s + 50);
		assert_int_equal(place_send(&p->a, IBV_WR_RDMA_READ, a, 77, sizes[s], b, 5, 0), 0);
		assert_int_equal(place_expect_ok(&p->a).byte_len, sizes[s]);
		place_expect(a, 77, 5, sizes[s]);
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
		place_prepare(a, b, sizes[s], (uint32_t)s + 100);
		place_receive(&p->b, b, 200, sizes[s]);
		assert_int_equal(place_send(&p->a, s % 2 ? IBV_WR_SEND : IBV_WR_SEND_WITH_IMM, a, 1, sizes[s], NULL, 0, 0), 0);
		place_expect_ok(&p->a);
		struct ibv_wc wc = place_expect_ok(&p->b);
		assert_int_equal(wc.byte_len, sizes[s]);
		place_expect(b, 200, 1, sizes[s]);
		place_receive(&p->b, b, 0, 0);
		assert_int_equal(place_send(&p->a, IBV_WR_RDMA_WRITE_WITH_IMM, a, 9, sizes[s], b, 201, 0), 0);
		place_expect_ok(&p->a);
		wc = place_expect_ok(&p->b);
		assert_int_equal(wc.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
		assert_int_equal(wc.imm_data, htonl(sizes[s]));
		place_get(place_found, b, 201, sizes[s]);
		assert_memory_equal(place_found, place_pattern + 9, sizes[s]);
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
	pair_open(&p, &place_patient);
	int last = gpu_devices() > 1 ? 1 : 0;
	struct place from[3] = { place_open(&p.a, 0), place_open(&p.a, -1), place_open(&p.a, last) };
	struct place to[3] = { place_open(&p.b, -1), place_open(&p.b, last), place_open(&p.b, 0) };
	const uint32_t out[3] = { 4097, 70000, 300001 }, in[3] = { 50003, 20000, 304095 };
	struct ibv_sge gather[3], scatter[3];
	place_make_pattern(400000, 7);
	for (uint32_t i = 0, at = 0; i < 3; at += out[i++]) {
		place_put(&from[i], 10, place_pattern + at, out[i]);
		gather[i] = (struct ibv_sge){ (uintptr_t)from[i].data + 10, out[i], from[i].mr->lkey };
		scatter[i] = (struct ibv_sge){ (uintptr_t)to[i].data + 6, in[i], to[i].mr->lkey };
	}
	struct ibv_recv_wr recv = { .sg_list = scatter, .num_sge = 3 }, *bad_recv;
	struct ibv_send_wr send = { .sg_list = gather, .num_sge = 3, .opcode = IBV_WR_SEND }, *bad;
	assert_int_equal(ibv_post_recv(p.b.qp, &recv, &bad_recv), 0);
	assert_int_equal(ibv_post_send(p.a.qp, &send, &bad), 0);
	place_expect_ok(&p.a);
	place_expect_ok(&p.b);
	for (uint32_t i = 0, at = 0; i < 3; at += in[i++]) {
		place_get(place_found, &to[i], 6, in[i]);
		assert_memory_equal(place_found, place_pattern + at, in[i]);
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
	place_put(b, 64, &word, 8);
	for (int i = 0; i < 3; i++) {
		struct ibv_sge sge = { (uintptr_t)a->data + 8, 8, a->mr->lkey };
		struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = i < 2 ? IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_ATOMIC_CMP_AND_SWP, .wr.atomic =
			{ .remote_addr = (uintptr_t)b->data + 64, .rkey = b->mr->rkey, .compare_add = i < 2 ? 1 : 42, .swap = 1000 } }, *bad;
		assert_int_equal(ibv_post_send(p->a.qp, &wr, &bad), 0);
		place_expect_ok(&p->a);
		place_get(&was, a, 8, 8);
		assert_int_equal(was, 40 + i);
	}
	place_get(&word, b, 64, 8);
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
	pair_open(&p, &place_patient);
	struct place a = place_open(&p.a, 0), b = place_open(&p.b, 0);
	place_prepare(&a, &b, 100, 3);
	assert_int_equal(place_send(&p.a, IBV_WR_RDMA_WRITE, &a, 33, 100, &b, 10, IBV_SEND_INLINE), 0);
	place_expect_ok(&p.a);
	place_expect(&b, 10, 33, 100);
	place_close(&a);
	place_close(&b);
	pair_close(&p);
}

static void datagrams_reach_device_memory_with_their_header(void **state)
{
	(void)state;
	struct pair_options options = place_patient;
	struct pair p;
	options.type = IBV_QPT_UD;
	pair_open(&p, &options);
	struct place a = place_open(&p.a, 0), b = place_open(&p.b, 0);
	struct ibv_ah_attr attr = own_address(p.context);
	struct ibv_ah *ah = ibv_create_ah(p.a.pd, &attr);
	struct ibv_sge sge = { (uintptr_t)a.data, 1000, a.mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .wr.ud = { ah, p.b.qp->qp_num, 0x1111 } }, *bad;
	place_prepare(&a, &b, 1000, 5);
	place_receive(&p.b, &b, 100, 1040);
	assert_int_equal(ibv_post_send(p.a.qp, &wr, &bad), 0);
	place_expect_ok(&p.a);
	assert_int_equal(place_expect_ok(&p.b).byte_len, 1040);
	place_get(place_found, &b, 140, 1000);
	assert_memory_equal(place_found, place_pattern, 1000);
	ibv_destroy_ah(ah);
	place_close(&a);
	place_close(&b);
	pair_close(&p);
}

/* ---- the program's own streams ---- */

static void a_stream_that_waits_for_what_a_write_brings_is_not_waited_for(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &place_patient);
	struct place a = place_open(&p.a, -1), b = place_open(&p.b, 0);
	uint32_t go = 17;
	CUstream streams[2] = { CU_STREAM_LEGACY, NULL };
	assert_int_equal(gpu.StreamCreate(&streams[1], CU_STREAM_DEFAULT), CUDA_SUCCESS);
	gpu_set(b.data, 0, PLACE_BYTES);
	place_put(&a, 0, &go, sizeof(go));
	for (int i = 0; i < 2; i++)
		assert_int_equal(gpu.StreamWaitValue32(streams[i], (CUdeviceptr)(uintptr_t)b.data + 64, go, CU_STREAM_WAIT_VALUE_EQ), CUDA_SUCCESS);
	/* Data first; then what ends the wait. */
	assert_int_equal(place_send(&p.a, IBV_WR_RDMA_WRITE, &a, 4, 1000000, &b, 128, 0), 0);
	place_expect_ok(&p.a);
	assert_int_equal(place_send(&p.a, IBV_WR_RDMA_WRITE, &a, 0, 4, &b, 64, 0), 0);
	place_expect_ok(&p.a);
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
	pair_open(&p, &place_patient);
	struct place a = place_open(&p.a, 0), b = place_open(&p.b, 0);
	uint8_t *more = gpu_alloc(gpu_devices() - 1, 4096);
	place_prepare(&a, &b, 800000, 60);
	assert_int_equal(gpu.StreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
	assert_int_equal(gpu.StreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
	assert_int_equal(place_send(&p.a, IBV_WR_RDMA_WRITE, &a, 0, 800000, &b, 100, 0), 0);
	place_expect_ok(&p.a);
	struct ibv_mr *mr = ibv_reg_mr(p.b.pd, more, 4096, SIDE_ACCESS);
	assert_non_null(mr);
	assert_int_equal(ibv_dereg_mr(mr), 0);
	assert_int_equal(gpu.StreamEndCapture(stream, &graph), CUDA_SUCCESS);
	place_expect(&b, 100, 0, 800000);
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
		cmocka_unit_test(a_stream_that_waits_for_what_a_write_brings_is_not_waited_for),
	};
	gpu_start();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
