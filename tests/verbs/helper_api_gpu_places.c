#include "verbs/helper_api_gpu_places.h"
#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>
#include "verbs/helper_api_gpu.h"

const struct pair_options place_patient = { .timeout = 20, .retry_cnt = 7, .rnr_retry = 7, .sge = 4, .inline_bytes = 128 };
uint8_t place_pattern[PLACE_BYTES], place_found[PLACE_BYTES];

struct place place_open(struct side *side, int device)
{
	struct place p = { .device = device };
	p.data = device < 0 ? aligned_alloc(4096, PLACE_BYTES) : gpu_alloc(device, PLACE_BYTES);
	p.mr = ibv_reg_mr(side->pd, p.data, PLACE_BYTES, SIDE_ACCESS);
	assert_non_null(p.mr);
	return p;
}

void place_close(struct place *p)
{
	assert_int_equal(ibv_dereg_mr(p->mr), 0);
	if (p->device < 0)
		free(p->data);
	else
		gpu_free(p->data);
}

void place_put(const struct place *p, uint32_t offset, const void *from, size_t bytes)
{
	if (p->device < 0)
		memcpy(p->data + offset, from, bytes);
	else if (bytes)
		gpu_put(p->data + offset, from, bytes);
}

void place_get(void *to, const struct place *p, uint32_t offset, size_t bytes)
{
	if (p->device < 0)
		memcpy(to, p->data + offset, bytes);
	else if (bytes)
		gpu_get(to, p->data + offset, bytes);
}

void place_make_pattern(uint32_t bytes, uint32_t seed)
{
	uint64_t x = seed * 0x9e3779b97f4a7c15u + 1;
	for (uint32_t i = 0; i < bytes; i += 8) {
		x = x * 6364136223846793005u + 1442695040888963407u;
		uint64_t word = x ^ x >> 32;
		memcpy(place_pattern + i, &word, 8);
	}
}

void place_prepare(const struct place *from, const struct place *to, uint32_t bytes, uint32_t seed)
{
	bytes += 512;
	place_make_pattern(bytes, seed);
	place_put(from, 0, place_pattern, bytes);
	memset(place_found, 0xee, bytes);
	place_put(to, 0, place_found, bytes);
}

void place_expect(const struct place *to, uint32_t at, uint32_t offset, uint32_t bytes)
{
	uint32_t first = at >= PLACE_SPARE ? at - PLACE_SPARE : 0;
	place_get(place_found, to, first, at - first + bytes + PLACE_SPARE);
	for (uint32_t i = first; i < at; i++)
		assert_int_equal(place_found[i - first], 0xee);
	assert_memory_equal(place_found + (at - first), place_pattern + offset, bytes);
	for (uint32_t i = 0; i < PLACE_SPARE; i++)
		assert_int_equal(place_found[at - first + bytes + i], 0xee);
}

int place_send(struct side *side, enum ibv_wr_opcode opcode, const struct place *local, uint32_t offset, uint32_t bytes,
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

void place_receive(struct side *side, const struct place *place, uint32_t offset, uint32_t bytes)
{
	struct ibv_sge sge = { (uintptr_t)place->data + offset, bytes, place->mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
	assert_int_equal(ibv_post_recv(side->qp, &wr, &bad), 0);
}

struct ibv_wc place_expect_ok(struct side *side)
{
	struct ibv_wc wc = next_wc(side->cq);
	assert_int_equal(wc.status, IBV_WC_SUCCESS);
	return wc;
}
