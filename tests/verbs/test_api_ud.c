/* Datagrams: the 40 bytes in front, Q_Keys, groups, answers. */
#include <errno.h>
#include <string.h>
#include "verbs/helper_api.h"

static const struct pair_options datagrams = { .type = IBV_QPT_UD };

static int send_to(struct side *side, struct ibv_ah *ah, uint32_t qpn, uint32_t qkey, uint32_t bytes)
{
	struct ibv_sge sge = { (uintptr_t)side->data, bytes, side->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 5, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_IMM, .imm_data = 99, .wr.ud = { ah, qpn, qkey } }, *bad;
	return ibv_post_send(side->qp, &wr, &bad);
}

static struct ibv_ah *make_ah(struct side *side)
{
	struct ibv_ah_attr attr = own_address(side->pd->context);
	struct ibv_ah *ah = ibv_create_ah(side->pd, &attr);
	assert_non_null(ah);
	return ah;
}

static void a_datagram_lands_behind_40_bytes(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &datagrams);
	struct ibv_ah *ah = make_ah(&p.a);
	post_recv(&p.b, 1, 0, 4096);
	memset(p.a.data, 0x5c, 500);
	assert_int_equal(send_to(&p.a, ah, p.b.qp->qp_num, 0x1111, 500), 0);
	assert_int_equal(next_wc(p.a.cq).status, IBV_WC_SUCCESS);
	struct ibv_wc wc = next_wc(p.b.cq);
	assert_int_equal(wc.byte_len, 540);
	assert_int_equal(wc.wc_flags, IBV_WC_GRH | IBV_WC_WITH_IMM);
	assert_int_equal(wc.imm_data, 99);
	assert_int_equal(wc.src_qp, p.a.qp->qp_num);
	assert_memory_equal(p.b.data + 40, p.a.data, 500);
	ibv_destroy_ah(ah);
	pair_close(&p);
}

static void the_sender_can_be_answered_from_the_completion(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &datagrams);
	struct ibv_ah *ah = make_ah(&p.a);
	post_recv(&p.b, 1, 0, 4096);
	send_to(&p.a, ah, p.b.qp->qp_num, 0x1111, 8);
	struct ibv_wc wc = next_wc(p.b.cq);
	struct ibv_ah *back = ibv_create_ah_from_wc(p.b.pd, &wc, (struct ibv_grh *)(void *)p.b.data, 1);
	assert_non_null(back);
	next_wc(p.a.cq);
	post_recv(&p.a, 2, 0, 4096);
	assert_int_equal(send_to(&p.b, back, wc.src_qp, 0x1111, 8), 0);
	assert_int_equal(next_wc(p.a.cq).wr_id, 2);
	ibv_destroy_ah(back);
	ibv_destroy_ah(ah);
	pair_close(&p);
}

static void a_wrong_qkey_is_dropped_in_silence(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &datagrams);
	struct ibv_ah *ah = make_ah(&p.a);
	post_recv(&p.b, 1, 0, 4096);
	send_to(&p.a, ah, p.b.qp->qp_num, 0x2222, 8);
	assert_int_equal(next_wc(p.a.cq).status, IBV_WC_SUCCESS);
	expect_none(p.b.cq);
	/* The high bit asks for the sender's own. */
	send_to(&p.a, ah, p.b.qp->qp_num, 0x80000000, 8);
	assert_int_equal(next_wc(p.b.cq).status, IBV_WC_SUCCESS);
	ibv_destroy_ah(ah);
	pair_close(&p);
}

static void nobody_there_and_no_receive_are_a_success_of_the_sender(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &datagrams);
	struct ibv_ah *ah = make_ah(&p.a);
	send_to(&p.a, ah, p.b.qp->qp_num, 0x1111, 8);
	assert_int_equal(next_wc(p.a.cq).status, IBV_WC_SUCCESS);
	send_to(&p.a, ah, p.b.qp->qp_num ^ 1, 0x1111, 8);
	assert_int_equal(next_wc(p.a.cq).status, IBV_WC_SUCCESS);
	expect_none(p.b.cq);
	ibv_destroy_ah(ah);
	pair_close(&p);
}

static void a_datagram_larger_than_the_mtu_is_a_length_error_and_sqe(void **state)
{
	(void)state;
	static const struct pair_options options = { .type = IBV_QPT_UD };
	struct pair p;
	pair_open(&p, &options);
	struct ibv_ah *ah = make_ah(&p.a);
	send_to(&p.a, ah, p.b.qp->qp_num, 0x1111, 4097);
	assert_int_equal(next_wc(p.a.cq).status, IBV_WC_LOC_LEN_ERR);
	assert_int_equal(state_of(p.a.qp), IBV_QPS_SQE);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS };
	assert_int_equal(ibv_modify_qp(p.a.qp, &attr, IBV_QP_STATE), 0);
	post_recv(&p.b, 1, 0, 4096);
	send_to(&p.a, ah, p.b.qp->qp_num, 0x1111, 8);
	assert_int_equal(next_wc(p.b.cq).status, IBV_WC_SUCCESS);
	ibv_destroy_ah(ah);
	pair_close(&p);
}

static void a_receive_without_room_for_the_40_bytes_is_a_length_error(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &datagrams);
	struct ibv_ah *ah = make_ah(&p.a);
	post_recv(&p.b, 1, 0, 500);
	send_to(&p.a, ah, p.b.qp->qp_num, 0x1111, 500);
	assert_int_equal(next_wc(p.b.cq).status, IBV_WC_LOC_LEN_ERR);
	ibv_destroy_ah(ah);
	pair_close(&p);
}

static void the_traffic_class_is_the_packets(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &datagrams);
	struct ibv_ah_attr attr = own_address(p.context);
	attr.grh.traffic_class = 26 << 2;
	struct ibv_ah *ah = ibv_create_ah(p.a.pd, &attr);
	assert_non_null(ah);
	post_recv(&p.b, 1, 0, 4096);
	send_to(&p.a, ah, p.b.qp->qp_num, 0x1111, 8);
	assert_int_equal(next_wc(p.b.cq).status, IBV_WC_SUCCESS);
	/* IPv4's header is in the second half of the space for the GRH, and begins with 4; IPv6's fills it. */
	if (p.b.data[20] >> 4 == 4)
		assert_int_equal(p.b.data[21], 26 << 2);
	else
		assert_int_equal((p.b.data[0] << 4 | p.b.data[1] >> 4) & 0xff, 26 << 2);
	next_wc(p.a.cq);
	ibv_destroy_ah(ah);
	pair_close(&p);
}

static void a_group_reaches_all_that_joined_until_they_leave(void **state)
{
	(void)state;
	struct pair p;
	union ibv_gid group = { .raw = { 0xff, 0x0e, [10] = 0xff, 0xff, 239, 1, 2, 3 } };
	pair_open(&p, &datagrams);
	struct ibv_ah_attr attr = own_address(p.context);
	attr.grh.dgid = group;
	struct ibv_ah *ah = ibv_create_ah(p.a.pd, &attr);
	assert_non_null(ah);
	assert_int_equal(ibv_attach_mcast(p.b.qp, &group, 0), 0);
	post_recv(&p.b, 1, 0, 4096);
	post_recv(&p.b, 2, 0, 4096);
	send_to(&p.a, ah, 0xffffff, 0x1111, 8);
	assert_int_equal(next_wc(p.b.cq).byte_len, 48);
	assert_int_equal(ibv_detach_mcast(p.b.qp, &group, 0), 0);
	assert_int_equal(ibv_detach_mcast(p.b.qp, &group, 0), EINVAL);
	send_to(&p.a, ah, 0xffffff, 0x1111, 8);
	next_wc(p.a.cq);
	next_wc(p.a.cq);
	expect_none(p.b.cq);
	ibv_destroy_ah(ah);
	pair_close(&p);
}

static void an_address_without_grh_or_gid_is_refused(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &datagrams);
	struct ibv_ah_attr attr = own_address(p.context);
	attr.is_global = 0;
	assert_null(ibv_create_ah(p.a.pd, &attr));
	assert_int_equal(errno, EINVAL);
	attr.is_global = 1;
	attr.grh.sgid_index = 200;
	assert_null(ibv_create_ah(p.a.pd, &attr));
	attr.grh.sgid_index = 0;
	attr.port_num = 3;
	assert_null(ibv_create_ah(p.a.pd, &attr));
	pair_close(&p);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_datagram_lands_behind_40_bytes),
		cmocka_unit_test(the_sender_can_be_answered_from_the_completion),
		cmocka_unit_test(a_wrong_qkey_is_dropped_in_silence),
		cmocka_unit_test(nobody_there_and_no_receive_are_a_success_of_the_sender),
		cmocka_unit_test(a_datagram_larger_than_the_mtu_is_a_length_error_and_sqe),
		cmocka_unit_test(a_receive_without_room_for_the_40_bytes_is_a_length_error),
		cmocka_unit_test(the_traffic_class_is_the_packets),
		cmocka_unit_test(a_group_reaches_all_that_joined_until_they_leave),
		cmocka_unit_test(an_address_without_grh_or_gid_is_refused),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
