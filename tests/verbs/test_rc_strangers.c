/* What somebody may send who isn't a connection's peer, or says its peer's address without knowing what is under way. The QPs are connected
 * by the wire, within this process, and packets are handed in as if they had come. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "verbs/helper_halves.h"
#include "verbs/wire_fault.h"

static const char *const stranger = "127.99.1.7";

static const uint8_t forged[8] = { 0x66, 0x66, 0x66, 0x66, 0x66, 0x66, 0x66, 0x66 };
static struct tp_packet write_to_b(uint32_t psn)
{
	return (struct tp_packet){ .opcode = TP_OP_WRITE_ONLY, .pkey = TP_CARD_PKEY, .qpn = b.qp->qp_num, .psn = psn, .addr = (uintptr_t)b.data,
		.rkey = b.mr->rkey, .length = sizeof(forged), .payload = forged, .bytes = sizeof(forged) };
}
static struct tp_packet refusal_for_a(uint32_t psn)
{
	return (struct tp_packet){ .opcode = TP_OP_ACK, .pkey = TP_CARD_PKEY, .qpn = a.qp->qp_num, .psn = psn,
		.syndrome = TP_SYN_NAK | TP_NAK_REMOTE_ACCESS };
}

static int open_ipv4(void)
{
	halves_open(&(struct halves_options){ 0 });
	if (half_rc(&a)->route.to.sa.sa_family == AF_INET)
		return 1;
	halves_close();
	return 0;
}

static void both_go_on(void)
{
	assert_int_equal(atomic_load(&half_qp(&a)->state), IBV_QPS_RTS);
	assert_int_equal(atomic_load(&half_qp(&b)->state), IBV_QPS_RTS);
	half_request(&a, &b, IBV_WR_RDMA_WRITE, 4096, 2);
	half_complete(&a, 2);
}

static void a_packet_that_does_not_come_from_the_peer_changes_nothing(void **state)
{
	(void)state;
	if (!open_ipv4())
		skip();
	uint32_t psn = half_qp(&b)->recv_psn;
	struct tp_packet packet = write_to_b(psn);
	half_arrives(&b, stranger, &packet, false);
	half_arrives(&b, NULL, &packet, true);
	assert_int_equal(b.data[0], 0);
	assert_int_equal(half_qp(&b)->recv_psn, psn);
	/* The same from the peer would have been taken. */
	half_arrives(&b, NULL, &packet, false);
	assert_memory_equal(b.data, forged, sizeof(forged));
	assert_int_equal(half_qp(&b)->recv_psn, tp_psn_add(psn, 1));
	halves_close();
}

static void a_refusal_counts_only_from_the_peer_and_for_what_is_under_way(void **state)
{
	(void)state;
	struct ibv_wc wc;
	if (!open_ipv4())
		skip();
	assert_int_equal(tp_fault_wire_set("dead"), 0);
	half_request(&a, &b, IBV_WR_RDMA_WRITE, 8, 1);
	uint32_t una = half_rc(&a)->una;
	struct tp_packet right = refusal_for_a(una), early = refusal_for_a(tp_psn_add(una, 1)), far = refusal_for_a(tp_psn_add(una, 0x400000)),
		late = refusal_for_a(tp_psn_add(una, TP_WIRE_PSN_MASK - 1));
	half_arrives(&a, stranger, &right, false);
	half_arrives(&a, NULL, &early, false);
	half_arrives(&a, NULL, &far, false);
	half_arrives(&a, NULL, &late, false);
	assert_int_equal(tp_cq_poll(a.cq, 1, &wc), 0);
	assert_int_equal(tp_fault_wire_set("none"), 0);
	half_complete(&a, 1);
	both_go_on();
	/* The peer's own ends it. */
	assert_int_equal(tp_fault_wire_set("dead"), 0);
	half_request(&a, &b, IBV_WR_RDMA_WRITE, 8, 1);
	right = refusal_for_a(half_rc(&a)->una);
	half_arrives(&a, NULL, &right, false);
	assert_int_equal(half_status(&a), IBV_WC_REM_ACCESS_ERR);
	assert_int_equal(tp_fault_wire_set("none"), 0);
	halves_close();
}

/* Whoever guesses a number far from what is expected gets no place in memory, and no connection ends of it. */
static void what_is_far_from_its_turn_is_not_kept(void **state)
{
	(void)state;
	if (!open_ipv4())
		skip();
	uint32_t psn = half_qp(&b)->recv_psn;
	static const uint32_t distances[] = { 2000, 0x10000, 0x7fffff, 0x800000, 0xffff00 };
	for (size_t i = 0; i < TP_ARRAY_LEN(distances); i++) {
		struct tp_packet packet = write_to_b(tp_psn_add(psn, distances[i]));
		half_arrives(&b, NULL, &packet, false);
		assert_false(tp_early_any(half_rc(&b)->early));
	}
	assert_int_equal(b.data[0], 0);
	assert_int_equal(half_qp(&b)->recv_psn, psn);
	both_go_on();
	halves_close();
}

int main(int argc, char **argv)
{
	halves_prepare(argc ? argv[0] : "");
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_packet_that_does_not_come_from_the_peer_changes_nothing),
		cmocka_unit_test(a_refusal_counts_only_from_the_peer_and_for_what_is_under_way),
		cmocka_unit_test(what_is_far_from_its_turn_is_not_kept),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
