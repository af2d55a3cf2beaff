/* Reliable connections: every operation, and the cause of every completion status. */
#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "verbs/helper_api.h"

static void fill(struct side *side, uint32_t offset, uint32_t bytes)
{
	for (uint32_t i = 0; i < bytes; i++)
		side->data[offset + i] = (uint8_t)(i * 7 + 3);
}
static void expect_same(const struct pair *pair, uint32_t from, uint32_t to, uint32_t bytes)
{
	assert_memory_equal(pair->a.data + from, pair->b.data + to, bytes);
}

static void a_send_lands_in_the_receive_and_completes_on_both_sides(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, NULL);
	fill(&p.a, 0, 5000);
	assert_int_equal(post_recv(&p.b, 7, 100, 6000), 0);
	assert_int_equal(post(&p.a, &(struct request){ .opcode = IBV_WR_SEND, .id = 5, .bytes = 5000 }), 0);
	struct ibv_wc sent = next_wc(p.a.cq), got = next_wc(p.b.cq);
	assert_int_equal(sent.status, IBV_WC_SUCCESS);
	assert_int_equal(sent.opcode, IBV_WC_SEND);
	assert_int_equal(sent.wr_id, 5);
	assert_int_equal(got.status, IBV_WC_SUCCESS);
	assert_int_equal(got.opcode, IBV_WC_RECV);
	assert_int_equal(got.wr_id, 7);
	assert_int_equal(got.byte_len, 5000);
	assert_int_equal(got.qp_num, p.b.qp->qp_num);
	assert_int_equal(got.src_qp, p.a.qp->qp_num);
	expect_same(&p, 0, 100, 5000);
	assert_int_equal(p.b.data[5100], 0xbb);
	pair_close(&p);
}

static void a_send_with_immediate_carries_it(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, NULL);
	post_recv(&p.b, 1, 0, 64);
	post(&p.a, &(struct request){ .opcode = IBV_WR_SEND_WITH_IMM, .bytes = 64, .imm = htonl(0xdeadbeef) });
	struct ibv_wc got = next_wc(p.b.cq);
	assert_int_equal(got.wc_flags, IBV_WC_WITH_IMM);
	assert_int_equal(ntohl(got.imm_data), 0xdeadbeef);
	pair_close(&p);
}

static void an_empty_message_takes_a_receive(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, NULL);
	post_recv(&p.b, 1, 0, 64);
	post(&p.a, &(struct request){ .opcode = IBV_WR_SEND, .bytes = 0 });
	assert_int_equal(next_wc(p.a.cq).status, IBV_WC_SUCCESS);
	assert_int_equal(next_wc(p.b.cq).byte_len, 0);
	pair_close(&p);
}

static void a_write_lands_without_the_other_side(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, NULL);
	fill(&p.a, 64, 30001);
	post(&p.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .offset = 64, .bytes = 30001, .remote = &p.b, .remote_offset = 3 });
	assert_int_equal(next_wc(p.a.cq).status, IBV_WC_SUCCESS);
	expect_same(&p, 64, 3, 30001);
	assert_int_equal(p.b.data[2], 0xbb);
	assert_int_equal(p.b.data[30004], 0xbb);
	expect_none(p.b.cq);
	pair_close(&p);
}

static void a_write_with_immediate_also_takes_a_receive(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, NULL);
	fill(&p.a, 0, 128);
	post_recv(&p.b, 9, 60000, 0);
	post(&p.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE_WITH_IMM, .bytes = 128, .remote = &p.b, .imm = 42 });
	struct ibv_wc got = next_wc(p.b.cq);
	assert_int_equal(got.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
	assert_int_equal(got.imm_data, 42);
	assert_int_equal(got.byte_len, 128);
	assert_int_equal(got.wr_id, 9);
	expect_same(&p, 0, 0, 128);
	pair_close(&p);
}

static void a_read_fetches(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, NULL);
	fill(&p.b, 5, 10000);
	post(&p.a, &(struct request){ .opcode = IBV_WR_RDMA_READ, .offset = 1, .bytes = 10000, .remote = &p.b, .remote_offset = 5 });
	struct ibv_wc wc = next_wc(p.a.cq);
	assert_int_equal(wc.status, IBV_WC_SUCCESS);
	assert_int_equal(wc.opcode, IBV_WC_RDMA_READ);
	assert_int_equal(wc.byte_len, 10000);
	expect_same(&p, 1, 5, 10000);
	pair_close(&p);
}

static uint64_t word(const struct side *side, uint32_t offset)
{
	uint64_t value;
	memcpy(&value, side->data + offset, 8);
	return value;
}
static void set_word(struct side *side, uint32_t offset, uint64_t value) { memcpy(side->data + offset, &value, 8); }

static void atomics_change_the_target_and_bring_the_old_value(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, NULL);
	set_word(&p.b, 64, 40);
	post(&p.a, &(struct request){ .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .bytes = 8, .remote = &p.b, .remote_offset = 64, .compare_add = 2 });
	assert_int_equal(next_wc(p.a.cq).opcode, IBV_WC_FETCH_ADD);
	assert_int_equal(word(&p.a, 0), 40);
	assert_int_equal(word(&p.b, 64), 42);
	post(&p.a, &(struct request){ .opcode = IBV_WR_ATOMIC_CMP_AND_SWP, .bytes = 8, .remote = &p.b, .remote_offset = 64, .compare_add = 1, .swap = 9 });
	assert_int_equal(next_wc(p.a.cq).opcode, IBV_WC_COMP_SWAP);
	assert_int_equal(word(&p.a, 0), 42);
	assert_int_equal(word(&p.b, 64), 42);
	post(&p.a, &(struct request){ .opcode = IBV_WR_ATOMIC_CMP_AND_SWP, .bytes = 8, .remote = &p.b, .remote_offset = 64, .compare_add = 42, .swap = 9 });
	assert_int_equal(next_wc(p.a.cq).status, IBV_WC_SUCCESS);
	assert_int_equal(word(&p.b, 64), 9);
	pair_close(&p);
}

/* a's request ends with status, a goes to ERR, what was posted after it is flushed. */
static void expect_failure(struct pair *p, const struct request *request, enum ibv_wc_status status)
{
	assert_int_equal(post(&p->a, request), 0);
	struct ibv_wc wc = next_wc(p->a.cq);
	assert_int_equal(wc.status, status);
	assert_int_equal(wc.wr_id, request->id);
	assert_int_equal(state_of(p->a.qp), IBV_QPS_ERR);
	assert_int_equal(post(&p->a, &(struct request){ .opcode = IBV_WR_SEND, .id = 77, .bytes = 1 }), 0);
	wc = next_wc(p->a.cq);
	assert_int_equal(wc.status, IBV_WC_WR_FLUSH_ERR);
	assert_int_equal(wc.wr_id, 77);
}

static void a_fenced_request_takes_along_what_was_fetched_before_it(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &(struct pair_options){ .timeout = 20, .retry_cnt = 7 });
	for (int round = 0; round < 20; round++) {
		memset(p.b.data, round + 1, 8192);
		assert_int_equal(post(&p.a, &(struct request){ .opcode = IBV_WR_RDMA_READ, .bytes = 8192, .remote = &p.b }), 0);
		assert_int_equal(post(&p.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 8192, .remote = &p.b, .remote_offset = 32768,
			.flags = IBV_SEND_FENCE }), 0);
		assert_int_equal(next_wc(p.a.cq).opcode, IBV_WC_RDMA_READ);
		assert_int_equal(next_wc(p.a.cq).status, IBV_WC_SUCCESS);
		assert_memory_equal(p.b.data + 32768, p.b.data, 8192);
	}
	pair_close(&p);
}

static void a_wrong_rkey_is_a_remote_access_error_and_ends_the_target_too(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, NULL);
	post_recv(&p.b, 3, 0, 64);
	expect_failure(&p, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .id = 4, .bytes = 8, .remote = &p.b, .rkey = p.b.mr->rkey ^ 0x100 },
		IBV_WC_REM_ACCESS_ERR);
	assert_int_equal(state_of(p.b.qp), IBV_QPS_ERR);
	assert_int_equal(next_wc(p.b.cq).status, IBV_WC_WR_FLUSH_ERR);
	struct ibv_async_event event = next_event(p.context);
	while (event.event_type == IBV_EVENT_COMM_EST)
		event = next_event(p.context);
	assert_int_equal(event.event_type, IBV_EVENT_QP_ACCESS_ERR);
	assert_ptr_equal(event.element.qp, p.b.qp);
	pair_close(&p);
}

static void a_write_past_the_end_of_the_region_is_a_remote_access_error(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, NULL);
	expect_failure(&p, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 16, .remote = &p.b, .remote_offset = SIDE_BYTES - 15 },
		IBV_WC_REM_ACCESS_ERR);
	assert_int_equal(p.b.data[SIDE_BYTES - 1], 0xbb);
	pair_close(&p);
}

static void a_region_of_another_domain_is_a_remote_access_error(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, NULL);
	expect_failure(&p, &(struct request){ .opcode = IBV_WR_RDMA_READ, .bytes = 16, .remote = &p.a }, IBV_WC_REM_ACCESS_ERR);
	pair_close(&p);
}

static void a_queue_pair_without_the_right_refuses_the_request(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &(struct pair_options){ .access = IBV_ACCESS_REMOTE_READ });
	expect_failure(&p, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 16, .remote = &p.b }, IBV_WC_REM_INV_REQ_ERR);
	pair_close(&p);
}

static void no_resources_for_reads_refuse_the_request(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &(struct pair_options){ .no_atomics = true });
	expect_failure(&p, &(struct request){ .opcode = IBV_WR_RDMA_READ, .bytes = 16, .remote = &p.b }, IBV_WC_REM_INV_REQ_ERR);
	pair_close(&p);
}

static void a_misaligned_atomic_is_an_invalid_request(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, NULL);
	expect_failure(&p, &(struct request){ .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .bytes = 8, .remote = &p.b, .remote_offset = 4 },
		IBV_WC_REM_INV_REQ_ERR);
	pair_close(&p);
}

static void a_wrong_lkey_is_a_local_protection_error(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, NULL);
	post_recv(&p.b, 1, 0, 64);
	expect_failure(&p, &(struct request){ .opcode = IBV_WR_SEND, .bytes = 8, .lkey = p.a.mr->lkey + 1 }, IBV_WC_LOC_PROT_ERR);
	assert_int_equal(state_of(p.b.qp), IBV_QPS_RTS);
	pair_close(&p);
}

static void a_message_longer_than_the_receive_fails_on_both_sides(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, NULL);
	post_recv(&p.b, 1, 0, 64);
	expect_failure(&p, &(struct request){ .opcode = IBV_WR_SEND, .bytes = 65 }, IBV_WC_REM_INV_REQ_ERR);
	assert_int_equal(next_wc(p.b.cq).status, IBV_WC_LOC_LEN_ERR);
	assert_int_equal(state_of(p.b.qp), IBV_QPS_ERR);
	pair_close(&p);
}

static void a_receive_with_a_wrong_key_fails_on_both_sides(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, NULL);
	struct ibv_sge sge = { .addr = (uintptr_t)p.b.data, .length = 64, .lkey = p.a.mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = 2, .sg_list = &sge, .num_sge = 1 }, *bad;
	assert_int_equal(ibv_post_recv(p.b.qp, &wr, &bad), 0);
	expect_failure(&p, &(struct request){ .opcode = IBV_WR_SEND, .bytes = 8 }, IBV_WC_REM_OP_ERR);
	assert_int_equal(next_wc(p.b.cq).status, IBV_WC_LOC_PROT_ERR);
	pair_close(&p);
}

static void a_missing_receive_ends_with_13_after_rnr_retry(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &(struct pair_options){ .rnr_retry = 3 });
	expect_failure(&p, &(struct request){ .opcode = IBV_WR_SEND, .bytes = 8 }, IBV_WC_RNR_RETRY_EXC_ERR);
	assert_int_equal(state_of(p.b.qp), IBV_QPS_RTS);
	pair_close(&p);
}

static void rnr_retry_7_waits_until_a_receive_comes(void **state)
{
	(void)state;
	struct pair p;
	/* By packets somebody must answer in time, however busy the machine is. */
	const char *carrier = getenv("TELPHER_VERBS_CARRIER");
	pair_open(&p, &(struct pair_options){ .rnr_retry = 7, .timeout = carrier && !strcmp(carrier, "wire") ? 18 : 1 });
	post(&p.a, &(struct request){ .opcode = IBV_WR_SEND, .bytes = 8 });
	for (int i = 0; i < 20000; i++)
		expect_none(p.a.cq);
	post_recv(&p.b, 1, 0, 64);
	assert_int_equal(next_wc(p.a.cq).status, IBV_WC_SUCCESS);
	assert_int_equal(next_wc(p.b.cq).status, IBV_WC_SUCCESS);
	pair_close(&p);
}

static void a_peer_that_is_gone_ends_with_12(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, NULL);
	to_error(p.b.qp);
	expect_failure(&p, &(struct request){ .opcode = IBV_WR_SEND, .bytes = 8 }, IBV_WC_RETRY_EXC_ERR);
	pair_close(&p);
}

static void a_peer_that_expects_another_psn_ends_with_12(void **state)
{
	(void)state;
	static const struct pair_options options;
	struct pair p;
	pair_open(&p, &(struct pair_options){ .unconnected = true });
	to_init(p.a.qp, 0);
	to_init(p.b.qp, 0);
	to_rtr(p.a.qp, p.b.qp->qp_num, 0, &options);
	to_rtr(p.b.qp, p.a.qp->qp_num, 55, &options);
	to_rts(p.a.qp, 56, &options);
	post_recv(&p.b, 1, 0, 64);
	expect_failure(&p, &(struct request){ .opcode = IBV_WR_SEND, .bytes = 8 }, IBV_WC_RETRY_EXC_ERR);
	pair_close(&p);
}

static void a_queue_pair_can_be_used_again_after_reset(void **state)
{
	(void)state;
	static const struct pair_options options;
	struct pair p;
	pair_open(&p, NULL);
	expect_failure(&p, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 8, .remote = &p.b, .rkey = 1 }, IBV_WC_REM_ACCESS_ERR);
	struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };
	struct side *sides[] = { &p.a, &p.b };
	for (int i = 0; i < 2; i++) {
		assert_int_equal(ibv_modify_qp(sides[i]->qp, &reset, IBV_QP_STATE), 0);
		assert_int_equal(to_init(sides[i]->qp, IBV_ACCESS_REMOTE_WRITE), 0);
		assert_int_equal(to_rtr(sides[i]->qp, sides[!i]->qp->qp_num, 5, &options), 0);
		assert_int_equal(to_rts(sides[i]->qp, 5, &options), 0);
	}
	post(&p.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 8, .remote = &p.b });
	assert_int_equal(next_wc(p.a.cq).status, IBV_WC_SUCCESS);
	pair_close(&p);
}

static void a_write_across_several_segments_keeps_their_order(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &(struct pair_options){ .sge = 3 });
	fill(&p.a, 0, 3000);
	struct ibv_sge sge[3] = { { (uintptr_t)p.a.data, 1000, p.a.mr->lkey }, { (uintptr_t)p.a.data + 1000, 0, p.a.mr->lkey },
		{ (uintptr_t)p.a.data + 1000, 2000, p.a.mr->lkey } };
	struct ibv_send_wr wr = { .sg_list = sge, .num_sge = 3, .opcode = IBV_WR_RDMA_WRITE, .wr.rdma = { (uintptr_t)p.b.data, p.b.mr->rkey } }, *bad;
	assert_int_equal(ibv_post_send(p.a.qp, &wr, &bad), 0);
	assert_int_equal(next_wc(p.a.cq).status, IBV_WC_SUCCESS);
	expect_same(&p, 0, 0, 3000);
	pair_close(&p);
}

static void inline_data_may_be_overwritten_as_soon_as_it_is_posted(void **state)
{
	(void)state;
	struct pair p;
	char text[32] = "first";
	pair_open(&p, &(struct pair_options){ .inline_bytes = 32, .rnr_retry = 7 });
	struct ibv_sge sge = { (uintptr_t)text, sizeof(text), 0 };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_INLINE }, *bad;
	assert_int_equal(ibv_post_send(p.a.qp, &wr, &bad), 0);
	strcpy(text, "second");
	post_recv(&p.b, 1, 0, 64);
	assert_int_equal(next_wc(p.b.cq).byte_len, 32);
	assert_string_equal((char *)p.b.data, "first");
	pair_close(&p);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_send_lands_in_the_receive_and_completes_on_both_sides),
		cmocka_unit_test(a_send_with_immediate_carries_it),
		cmocka_unit_test(an_empty_message_takes_a_receive),
		cmocka_unit_test(a_write_lands_without_the_other_side),
		cmocka_unit_test(a_write_with_immediate_also_takes_a_receive),
		cmocka_unit_test(a_read_fetches),
		cmocka_unit_test(atomics_change_the_target_and_bring_the_old_value),
		cmocka_unit_test(a_fenced_request_takes_along_what_was_fetched_before_it),
		cmocka_unit_test(a_wrong_rkey_is_a_remote_access_error_and_ends_the_target_too),
		cmocka_unit_test(a_write_past_the_end_of_the_region_is_a_remote_access_error),
		cmocka_unit_test(a_region_of_another_domain_is_a_remote_access_error),
		cmocka_unit_test(a_queue_pair_without_the_right_refuses_the_request),
		cmocka_unit_test(no_resources_for_reads_refuse_the_request),
		cmocka_unit_test(a_misaligned_atomic_is_an_invalid_request),
		cmocka_unit_test(a_wrong_lkey_is_a_local_protection_error),
		cmocka_unit_test(a_message_longer_than_the_receive_fails_on_both_sides),
		cmocka_unit_test(a_receive_with_a_wrong_key_fails_on_both_sides),
		cmocka_unit_test(a_missing_receive_ends_with_13_after_rnr_retry),
		cmocka_unit_test(rnr_retry_7_waits_until_a_receive_comes),
		cmocka_unit_test(a_peer_that_is_gone_ends_with_12),
		cmocka_unit_test(a_peer_that_expects_another_psn_ends_with_12),
		cmocka_unit_test(a_queue_pair_can_be_used_again_after_reset),
		cmocka_unit_test(a_write_across_several_segments_keeps_their_order),
		cmocka_unit_test(inline_data_may_be_overwritten_as_soon_as_it_is_posted),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
