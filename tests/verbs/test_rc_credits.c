/* Credits of reliable connections: the code in acknowledgements, and what a sender makes of it. The QPs are connected by the wire, within
 * this process, so that both ends can be looked at. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <time.h>
#include "verbs/helper_halves.h"

static void each_code_stands_for_its_number(void **state)
{
	(void)state;
	static const uint32_t numbers[31] = { 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072,
		4096, 6144, 8192, 12288, 16384, 24576, 32768 };
	for (uint8_t code = 0; code < 31; code++) {
		assert_int_equal(tp_wire_credits(code), numbers[code]);
		assert_int_equal(tp_wire_credits(TP_SYN_ACK | code), numbers[code]);
		assert_int_equal(tp_wire_credits_code(numbers[code]), code);
		/* Never more than there are. */
		if (numbers[code])
			assert_int_equal(tp_wire_credits_code(numbers[code] - 1), code - 1);
	}
	assert_int_equal(tp_wire_credits(31), UINT32_MAX);
	assert_int_equal(tp_wire_credits_code(UINT32_MAX), 30);
}

/* Packets that were ever sent and aren't acknowledged; *waits: for a receive of the other side's. */
static int under_way(bool *waits, bool *limited)
{
	struct tp_qp *qp = (struct tp_qp *)a.qp;
	pthread_mutex_lock(&qp->lock);
	struct tp_rc *rc = tp_rc_of(qp);
	int packets = tp_psn_diff(rc->top, rc->una);
	*waits = rc->rnr_until_ns != 0;
	*limited = rc->limited;
	pthread_mutex_unlock(&qp->lock);
	return packets;
}

static void without_receives_only_one_send_goes_out(void **state)
{
	(void)state;
	bool waits = false, limited;
	struct ibv_wc wc;
	halves_open(&(struct halves_options){ 0 });
	half_receive(&b, 3);
	half_request(&a, &b, IBV_WR_SEND, 8, 1);
	half_complete(&a, 1);
	half_complete(&b, 1);
	assert_true(under_way(&waits, &limited) == 0 && limited);
	/* Two find a receive; of the others one asks. */
	half_request(&a, &b, IBV_WR_SEND_WITH_IMM, 8, 20);
	half_complete(&b, 2);
	half_complete(&a, 2);
	time_t until = time(NULL) + 30;
	for (waits = false; !waits && time(NULL) < until;) {
		assert_in_range(under_way(&waits, &limited), 0, 1);
		assert_int_equal(tp_cq_poll(a.cq, 1, &wc), 0);
	}
	assert_true(waits);
	half_receive(&b, 18);
	half_complete(&b, 18);
	half_complete(&a, 18);
	halves_close();
}

static void requests_that_take_no_receive_need_no_credit(void **state)
{
	(void)state;
	bool waits, limited;
	halves_open(&(struct halves_options){ 0 });
	half_receive(&b, 1);
	half_request(&a, &b, IBV_WR_SEND, 0, 1);
	half_complete(&a, 1);
	half_complete(&b, 1);
	half_request(&a, &b, IBV_WR_RDMA_WRITE, 3000, 20);
	half_request(&a, &b, IBV_WR_RDMA_READ, 3000, 20);
	half_complete(&a, 40);
	assert_true(under_way(&waits, &limited) == 0 && !waits && limited);
	/* They don't use up any either; a WRITE with an immediate does. */
	half_receive(&b, 20);
	half_request(&a, &b, IBV_WR_RDMA_WRITE_WITH_IMM, 3000, 20);
	half_complete(&a, 20);
	half_complete(&b, 20);
	halves_close();
}

static void receives_that_are_posted_again_are_told_of(void **state)
{
	(void)state;
	halves_open(&(struct halves_options){ 0 });
	half_receive(&b, 4);
	for (int i = 0; i < 200; i++) {
		half_request(&a, &b, IBV_WR_SEND, 2000, 1);
		half_complete(&b, 1);
		half_receive(&b, 1);
		half_complete(&a, 1);
	}
	struct tp_qp *qp = (struct tp_qp *)a.qp;
	struct tp_rc *rc = tp_rc_of(qp);
	pthread_mutex_lock(&qp->lock);
	bool limited = rc->limited;
	uint32_t begun = rc->takes_begun, ended = rc->takes_ended, most = rc->takes_most;
	pthread_mutex_unlock(&qp->lock);
	assert_true(limited && begun == 200 && ended == 200);
	assert_in_range(most, 203, 204);
	halves_close();
}

static void who_shares_a_receive_queue_gives_no_number(void **state)
{
	(void)state;
	bool waits, limited;
	halves_open(&(struct halves_options){ 0 });
	struct ibv_srq_init_attr attr = { .attr = { .max_wr = HALF_DEPTH, .max_sge = 1 } };
	struct ibv_srq *srq = tp_srq_create(halves_pd, &attr);
	assert_non_null(srq);
	halves_close();
	halves_open(&(struct halves_options){ .srq = srq });
	struct ibv_sge sge = { (uintptr_t)b.data, HALF_BYTES, b.mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
	assert_int_equal(tp_srq_post(srq, &wr, &bad), 0);
	half_request(&a, &b, IBV_WR_SEND, 8, 1);
	half_complete(&a, 1);
	half_complete(&b, 1);
	under_way(&waits, &limited);
	assert_false(limited);
	halves_close();
	assert_int_equal(tp_srq_destroy(srq), 0);
}

int main(int argc, char **argv)
{
	halves_prepare(argc ? argv[0] : "");
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(each_code_stands_for_its_number),
		cmocka_unit_test(without_receives_only_one_send_goes_out),
		cmocka_unit_test(requests_that_take_no_receive_need_no_credit),
		cmocka_unit_test(receives_that_are_posted_again_are_told_of),
		cmocka_unit_test(who_shares_a_receive_queue_gives_no_number),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
