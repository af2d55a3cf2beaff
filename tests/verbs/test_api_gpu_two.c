/* Memory of GPUs between two processes, each with the driver to itself; and what is said where it can't be had. */
#include "verbs/helper_api_two.h"
#include "verbs/helper_api_gpu.h"
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PLACE (3u << 20)

/* The host's buffer, kept while the GPU's stands in its place for the helper. */
struct kept { uint8_t *data; struct ibv_mr *mr; };

static int use_gpu(struct end *end, struct kept *kept)
{
	*kept = (struct kept){ end->data, end->mr };
	uint8_t *data = gpu_alloc(0, PLACE);
	struct ibv_mr *mr = ibv_reg_mr(end->pd, data, PLACE, SIDE_ACCESS);
	CHECK(mr);
	end->data = data;
	end->mr = mr;
	end->own.addr = (uintptr_t)data;
	end->own.rkey = mr->rkey;
	return 0;
}
static int use_host(struct end *end, const struct kept *kept)
{
	CHECK(ibv_dereg_mr(end->mr) == 0);
	gpu_free(end->data);
	end->data = kept->data;
	end->mr = kept->mr;
	return 0;
}

static uint8_t pattern[PLACE], found[PLACE];
static void make_pattern(uint32_t seed)
{
	uint64_t x = seed * 0x9e3779b97f4a7c15u + 1;
	for (uint32_t i = 0; i < PLACE; i++) {
		x = x * 6364136223846793005u + 1442695040888963407u;
		pattern[i] = (uint8_t)(x >> 56);
	}
}
static void put(const struct end *end, bool on_gpu, const void *from, size_t bytes)
{
	if (on_gpu)
		gpu_put(end->data, from, bytes);
	else
		memcpy(end->data, from, bytes);
}
static bool holds(const struct end *end, bool on_gpu, uint32_t at, const void *wanted, size_t bytes)
{
	if (on_gpu)
		gpu_get(found, end->data + at, bytes);
	else
		memcpy(found, end->data + at, bytes);
	return memcmp(found, wanted, bytes) == 0;
}

/* ---- every operation ---- */

static const uint32_t sizes[] = { 1, 8, 8192, 8193, 300001, 2500003 };
#define EACH_SIZE for (uint32_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++)

static int asks(struct end *end, bool on_gpu)
{
	struct kept kept = { NULL, NULL };
	gpu_start();
	CHECK(end_open(end, NULL) == 0);
	if (on_gpu)
		CHECK(use_gpu(end, &kept) == 0);
	CHECK(end_meet(end) == 0);
	EACH_SIZE {
		make_pattern(s);
		put(end, on_gpu, pattern, sizes[s]);
		CHECK(end_do(end, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = sizes[s], .remote_offset = 5 }) == 0);
		memset(found, 0, sizes[s]);
		put(end, on_gpu, found, sizes[s]);
		CHECK(end_do(end, &(struct request){ .opcode = IBV_WR_RDMA_READ, .bytes = sizes[s], .remote_offset = 5 }) == 0);
		CHECK(holds(end, on_gpu, 0, pattern, sizes[s]));
		CHECK(end_do(end, &(struct request){ .opcode = IBV_WR_SEND, .bytes = sizes[s] }) == 0);
		CHECK(end_do(end, &(struct request){ .opcode = IBV_WR_RDMA_WRITE_WITH_IMM, .bytes = sizes[s], .remote_offset = 9, .imm = htonl(s) }) == 0);
		CHECK(end_meet(end) == 0);
	}
	CHECK(end_do(end, &(struct request){ .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .bytes = 8, .remote_offset = 64, .compare_add = 1 }) == 0);
	CHECK(end_meet(end) == 0);
	if (on_gpu)
		CHECK(use_host(end, &kept) == 0);
	return end_close(end);
}
static int answers(struct end *end, bool on_gpu)
{
	struct kept kept = { NULL, NULL };
	struct ibv_wc wc;
	uint64_t word = 41;
	gpu_start();
	CHECK(end_open(end, NULL) == 0);
	if (on_gpu)
		CHECK(use_gpu(end, &kept) == 0);
	EACH_SIZE {
		CHECK(end_recv(end, 1, 0, 2600000) == 0);
		CHECK(end_recv(end, 2, 0, 0) == 0);
		if (s == 0)
			CHECK(end_meet(end) == 0);
		CHECK(end_wait(end, &wc) == 0 && wc.status == IBV_WC_SUCCESS && wc.byte_len == sizes[s]);
		make_pattern(s);
		CHECK(end_wait(end, &wc) == 0 && wc.status == IBV_WC_SUCCESS && wc.imm_data == htonl(s));
		CHECK(holds(end, on_gpu, 0, pattern, sizes[s] < 5 ? sizes[s] : 5));
		CHECK(holds(end, on_gpu, 9, pattern, sizes[s]));
		if (s + 1 == sizeof(sizes) / sizeof(sizes[0])) {
			if (on_gpu)
				gpu_put(end->data + 64, &word, 8);
			else
				memcpy(end->data + 64, &word, 8);
		}
		CHECK(end_meet(end) == 0);
	}
	CHECK(end_meet(end) == 0);
	word = 42;
	CHECK(holds(end, on_gpu, 64, &word, 8));
	if (on_gpu)
		CHECK(use_host(end, &kept) == 0);
	return end_close(end);
}
static int asks_host(struct end *end) { return asks(end, false); }
static int asks_gpu(struct end *end) { return asks(end, true); }
static int answers_host(struct end *end) { return answers(end, false); }
static int answers_gpu(struct end *end) { return answers(end, true); }

static void all_operations_between_processes_with_a_gpu_at_either_end(void **state)
{
	(void)state;
	static struct outcome outcome;
	for (int i = 1; i < 4; i++) {
		run_two(&outcome, i & 1 ? asks_gpu : asks_host, i & 2 ? answers_gpu : answers_host);
		assert_true(outcome.a_ok && outcome.b_ok);
		assert_non_null(strstr(outcome.log, "carried by path"));
	}
}

/* ---- errors ---- */

static int meets(struct end *end)
{
	struct kept kept = { NULL, NULL };
	gpu_start();
	CHECK(end_open(end, NULL) == 0);
	CHECK(use_gpu(end, &kept) == 0);
	CHECK(end_meet(end) == 0);
	CHECK(end_meet(end) == 0);
	CHECK(use_host(end, &kept) == 0);
	return end_close(end);
}

/* The GPU is lost: the first copy from it fails. */
static int loses_its_gpu(struct end *end)
{
	struct kept kept = { NULL, NULL };
	struct ibv_wc wc;
	setenv("FAKE_CUDA_FAIL", "cuMemcpyDtoHAsync_v2:1:719", 1);
	gpu_start();
	CHECK(end_open(end, NULL) == 0);
	CHECK(use_gpu(end, &kept) == 0);
	CHECK(end_meet(end) == 0);
	CHECK(end_post(end, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 20000 }) == 0);
	CHECK(end_wait(end, &wc) == 0 && wc.status == IBV_WC_LOC_PROT_ERR);
	CHECK(end_meet(end) == 0);
	CHECK(use_host(end, &kept) == 0);
	return end_close(end);
}
static void a_gpu_that_fails_ends_the_request_and_its_error_is_named(void **state)
{
	(void)state;
	static struct outcome outcome;
	run_two(&outcome, loses_its_gpu, meets);
	assert_true(outcome.a_ok && outcome.b_ok);
	assert_non_null(strstr(outcome.log, "20000 bytes of GPU memory at"));
	assert_non_null(strstr(outcome.log, "MemcpyDtoHAsync: CUDA_ERROR_LAUNCH_FAILED (719)"));
}

static int loses_it_when_written_to(struct end *end)
{
	setenv("FAKE_CUDA_FAIL", "cuMemcpyHtoDAsync_v2:1:719", 1);
	return meets(end);
}
static int writes_to_it(struct end *end)
{
	struct ibv_wc wc;
	CHECK(end_open(end, NULL) == 0);
	CHECK(end_meet(end) == 0);
	CHECK(end_post(end, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 20000 }) == 0);
	CHECK(end_wait(end, &wc) == 0 && wc.status == IBV_WC_REM_ACCESS_ERR);
	CHECK(end_meet(end) == 0);
	return end_close(end);
}
static void a_remote_gpu_that_fails_is_a_remote_access_error(void **state)
{
	(void)state;
	static struct outcome outcome;
	run_two(&outcome, writes_to_it, loses_it_when_written_to);
	assert_true(outcome.a_ok && outcome.b_ok);
	assert_non_null(strstr(outcome.log, "MemcpyHtoDAsync: CUDA_ERROR_LAUNCH_FAILED (719)"));
}

static int has_no_lane(struct end *end)
{
	setenv("FAKE_CUDA_FAIL", "cuMemHostAlloc:3:2,cuStreamCreate:2:999", 1);
	gpu_start();
	CHECK(end_open(end, NULL) == 0);
	uint8_t *data = gpu_alloc(0, 4096);
	CHECK(!ibv_reg_mr(end->pd, data, 4096, SIDE_ACCESS) && errno);
	CHECK(!ibv_reg_mr(end->pd, data, 4096, SIDE_ACCESS) && errno == ENOMEM);
	struct ibv_mr *mr = ibv_reg_mr(end->pd, data, 4096, SIDE_ACCESS);
	CHECK(mr);
	CHECK(ibv_dereg_mr(mr) == 0);
	gpu_free(data);
	return end_close(end);
}
static int waits(struct end *end)
{
	CHECK(end_open(end, NULL) == 0);
	return end_close(end);
}
static void a_registration_that_cuda_refuses_can_be_tried_again(void **state)
{
	(void)state;
	static struct outcome outcome;
	run_two(&outcome, has_no_lane, waits);
	assert_true(outcome.a_ok && outcome.b_ok);
	assert_non_null(strstr(outcome.log, "StreamCreate: CUDA_ERROR_UNKNOWN (999)"));
	assert_non_null(strstr(outcome.log, "MemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY (2)"));
}

/* ---- where there is none, or none is wanted ---- */

static int refuses(struct end *end)
{
	gpu_start();
	CHECK(end_open(end, NULL) == 0);
	uint8_t *data = gpu_alloc(0, 4096);
	CHECK(!ibv_reg_mr(end->pd, data, 4096, SIDE_ACCESS) && errno == EFAULT);
	CHECK(!ibv_reg_dmabuf_mr(end->pd, 0, 4096, 0, -1, 0) && errno == EOPNOTSUPP);
	gpu_free(data);
	return end_close(end);
}
static int has_no_cuda(struct end *end)
{
	CHECK(end_open(end, NULL) == 0);
	CHECK(!ibv_reg_dmabuf_mr(end->pd, 0, 4096, 0, -1, 0) && errno == EBADF);
	return end_close(end);
}
static void a_card_without_gpudirect_refuses_both_ways_of_registering(void **state)
{
	(void)state;
	static struct outcome outcome;
	run_two(&outcome, has_no_cuda, has_no_cuda);
	assert_true(outcome.a_ok && outcome.b_ok);
	setenv("TELPHER_VERBS_GPU", "0", 1);
	run_two(&outcome, refuses, waits);
	unsetenv("TELPHER_VERBS_GPU");
	assert_true(outcome.a_ok && outcome.b_ok);
	assert_non_null(strstr(outcome.log, "TELPHER_VERBS_GPU=0"));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(all_operations_between_processes_with_a_gpu_at_either_end),
		cmocka_unit_test(a_gpu_that_fails_ends_the_request_and_its_error_is_named),
		cmocka_unit_test(a_remote_gpu_that_fails_is_a_remote_access_error),
		cmocka_unit_test(a_registration_that_cuda_refuses_can_be_tried_again),
		cmocka_unit_test(a_card_without_gpudirect_refuses_both_ways_of_registering),
	};
	/* Errors are put in by that driver alone. */
	return cmocka_run_group_tests(tests, NULL, NULL);
}
