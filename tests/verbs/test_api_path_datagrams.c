/* Datagrams between two processes of one machine: by the short way where it is taken, never by a promise. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>
#include "verbs/helper_api_two.h"

enum { QKEY = 0x1234, SLOT = 2048, WR = 512 };

static int open_ud(struct end *end)
{
	int count;
	struct ibv_device **list = ibv_get_device_list(&count);
	CHECK(list && count >= 1);
	end->context = ibv_open_device(list[0]);
	CHECK(end->context);
	ibv_free_device_list(list);
	end->pd = ibv_alloc_pd(end->context);
	end->channel = ibv_create_comp_channel(end->context);
	end->cq = ibv_create_cq(end->context, 2 * WR, NULL, end->channel, 0);
	CHECK(end->pd && end->channel && end->cq);
	struct ibv_qp_init_attr init = { .send_cq = end->cq, .recv_cq = end->cq, .qp_type = IBV_QPT_UD, .sq_sig_all = 1,
		.cap = { .max_send_wr = WR, .max_recv_wr = WR, .max_send_sge = 4, .max_recv_sge = 4 } };
	end->qp = ibv_create_qp(end->pd, &init);
	end->data = calloc(1, END_BYTES);
	CHECK(end->qp && end->data);
	end->mr = ibv_reg_mr(end->pd, end->data, END_BYTES, SIDE_ACCESS);
	CHECK(end->mr);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY };
	CHECK(ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0);
	attr.qp_state = IBV_QPS_RTR;
	CHECK(ibv_modify_qp(end->qp, &attr, IBV_QP_STATE) == 0);
	attr.qp_state = IBV_QPS_RTS;
	CHECK(ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0);
	end->own = (struct end_info){ .qpn = end->qp->qp_num, .pid = getpid() };
	CHECK(ibv_query_gid(end->context, 1, 0, &end->own.gid) == 0);
	return end_meet(end);
}

static struct ibv_ah *make_ah(struct end *end, const union ibv_gid *to)
{
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = *to, .hop_limit = 64 } };
	return ibv_create_ah(end->pd, &attr);
}

/* The id is in the immediate and in the payload, which lies behind the receives: each that may be outstanding in a place of its own. */
static int send_datagram(struct end *end, struct ibv_ah *ah, uint32_t qkey, uint32_t id, uint32_t bytes)
{
	uint8_t *from = end->data + END_BYTES / 2 + id % WR * 4096;
	memset(from, (int)id, bytes);
	struct ibv_sge sge = { (uintptr_t)from, bytes, end->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_IMM, .imm_data = id,
		.wr.ud = { ah, end->peer.qpn, qkey } }, *bad;
	return ibv_post_send(end->qp, &wr, &bad);
}

static int send_and_wait(struct end *end, struct ibv_ah *ah, uint32_t qkey, uint32_t id, uint32_t bytes)
{
	struct ibv_wc wc;
	CHECK(send_datagram(end, ah, qkey, id, bytes) == 0);
	CHECK(end_wait(end, &wc) == 0);
	CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_SEND && wc.wr_id == id);
	return 0;
}

static int post_receives(struct end *end, int from, int count)
{
	for (int i = from; i < from + count; i++)
		CHECK(end_recv(end, (uint64_t)i, (uint32_t)i * SLOT, SLOT) == 0);
	return 0;
}

/* ---- what a datagram brings ---- */

static const uint32_t sizes[] = { 0, 1, 8, 63, 64, 65, 500, 1024 };
enum { SIZES = sizeof(sizes) / sizeof(sizes[0]) };

static int asks(struct end *end)
{
	struct ibv_wc wc;
	CHECK(open_ud(end) == 0);
	struct ibv_ah *ah = make_ah(end, &end->peer.gid);
	CHECK(ah && post_receives(end, 0, 1) == 0);
	CHECK(end_meet(end) == 0);
	CHECK(send_and_wait(end, ah, QKEY + 1, 99, 8) == 0);       /* of another's Q_Key: dropped */
	for (uint32_t i = 0; i < SIZES; i++)
		CHECK(send_and_wait(end, ah, QKEY, i, sizes[i]) == 0);
	CHECK(send_and_wait(end, ah, QKEY, 98, 8) == 0);           /* no receive is left: dropped */
	CHECK(end_wait(end, &wc) == 0);                            /* the answer */
	CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV && wc.src_qp == end->peer.qpn && wc.byte_len == 43);
	CHECK(end_meet(end) == 0);
	CHECK(ibv_destroy_ah(ah) == 0);
	return end_close(end);
}

static int answers(struct end *end)
{
	struct ibv_wc wc;
	CHECK(open_ud(end) == 0);
	CHECK(post_receives(end, 0, SIZES) == 0);
	CHECK(end_meet(end) == 0);
	for (uint32_t i = 0; i < SIZES; i++) {
		CHECK(end_wait(end, &wc) == 0);
		CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == i && wc.imm_data == i && wc.src_qp == end->peer.qpn);
		CHECK(wc.wc_flags == (IBV_WC_GRH | IBV_WC_WITH_IMM) && wc.byte_len == 40 + sizes[i]);
		for (uint32_t k = 0; k < sizes[i]; k++)
			CHECK(end->data[i * SLOT + 40 + k] == (uint8_t)i);
	}
	/* The header in front says who sent it. */
	struct ibv_ah *ah = ibv_create_ah_from_wc(end->pd, &wc, (struct ibv_grh *)(void *)(end->data + (SIZES - 1) * SLOT), 1);
	CHECK(ah && send_and_wait(end, ah, QKEY, 7, 3) == 0);
	CHECK(end_meet(end) == 0);
	CHECK(ibv_poll_cq(end->cq, 1, &wc) == 0);
	CHECK(ibv_destroy_ah(ah) == 0);
	return end_close(end);
}

static void datagrams_bring_what_was_sent_and_who_sent_it(void **state)
{
	(void)state;
	static struct outcome outcome;
	run_two(&outcome, asks, answers);
	assert_true(outcome.a_ok && outcome.b_ok);
	assert_non_null(strstr(outcome.log, "are carried by path (a process of this machine and user)"));
	assert_null(strstr(outcome.log, "are carried by wire"));
}

static int asks_undumpable(struct end *end)
{
	CHECK(prctl(PR_SET_DUMPABLE, 0) == 0);
	return asks(end);
}

static void a_process_that_is_not_dumpable_is_reached_by_the_wire(void **state)
{
	(void)state;
	static struct outcome outcome;
	run_two(&outcome, asks_undumpable, answers);
	assert_true(outcome.a_ok && outcome.b_ok);
	assert_non_null(strstr(outcome.log, "are carried by wire (one of the two processes isn't dumpable"));
	assert_null(strstr(outcome.log, "are carried by path"));
}

/* ---- more than the ring holds ---- */

enum { ROUNDS = 6, BURST = 500 };

static int floods(struct end *end)
{
	struct ibv_wc wc;
	CHECK(open_ud(end) == 0);
	struct ibv_ah *ah = make_ah(end, &end->peer.gid);
	CHECK(ah != NULL);
	for (int round = 0; round < ROUNDS; round++) {
		CHECK(end_meet(end) == 0);
		for (uint32_t i = 0; i < BURST; i++)
			CHECK(send_datagram(end, ah, QKEY, i, 1024) == 0);
		for (uint32_t i = 0; i < BURST; i++)
			CHECK(end_wait(end, &wc) == 0 && wc.status == IBV_WC_SUCCESS && wc.wr_id == i);
		CHECK(end_meet(end) == 0);
	}
	CHECK(ibv_destroy_ah(ah) == 0);
	return end_close(end);
}

static int drinks(struct end *end)
{
	struct ibv_wc wc;
	CHECK(open_ud(end) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		CHECK(post_receives(end, 0, BURST) == 0);
		CHECK(end_meet(end) == 0);
		for (uint32_t i = 0; i < BURST; i++)
			CHECK(end_wait(end, &wc) == 0 && wc.status == IBV_WC_SUCCESS && wc.imm_data == i);
		CHECK(end_meet(end) == 0);
	}
	return end_close(end);
}

static void a_burst_larger_than_the_ring_loses_none(void **state)
{
	(void)state;
	static struct outcome outcome;
	run_two(&outcome, floods, drinks);
	assert_true(outcome.a_ok && outcome.b_ok);
}

/* On the wire nothing is promised, but a burst neither overruns the socket nor the receives of a peer like us. */
static int floods_by_wire(struct end *end)
{
	setenv("TELPHER_VERBS_CARRIER", "wire", 1);
	return floods(end);
}

static int drinks_by_wire(struct end *end)
{
	struct ibv_wc wc;
	uint32_t received = 0;
	setenv("TELPHER_VERBS_CARRIER", "wire", 1);
	CHECK(open_ud(end) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		int taken = 0;
		if (round == 0)
			CHECK(post_receives(end, 0, BURST) == 0);
		CHECK(end_meet(end) == 0);
		CHECK(end_meet(end) == 0);
		for (int quiet = 0; taken < BURST && quiet < 100; quiet++) {
			for (int got; taken < BURST && (got = ibv_poll_cq(end->cq, 1, &wc)) == 1; taken++, quiet = 0)
				CHECK(wc.status == IBV_WC_SUCCESS && end_recv(end, wc.wr_id, (uint32_t)wc.wr_id * SLOT, SLOT) == 0);
			usleep(2000);
		}
		received += (uint32_t)taken;
	}
	CHECK(received > ROUNDS * BURST * 9 / 10);
	return end_close(end);
}

static void a_burst_by_the_wire_is_paced(void **state)
{
	(void)state;
	static struct outcome outcome;
	run_two(&outcome, floods_by_wire, drinks_by_wire);
	assert_true(outcome.a_ok && outcome.b_ok);
}

/* ---- a peer that stops, or dies ---- */

/* Within 10 s, as /proc shows it. */
static bool stops_soon(pid_t pid)
{
	char path[64], text[256];
	snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
	for (int i = 0; i < 10000; i++, usleep(1000)) {
		FILE *file = fopen(path, "r");
		size_t bytes = file ? fread(text, 1, sizeof(text) - 1, file) : 0;
		if (file)
			fclose(file);
		text[bytes] = 0;
		const char *end = strrchr(text, ')');
		if (end && end[1] == ' ' && end[2] == 'T')
			return true;
	}
	return false;
}

static int sends_to_one_that_stops(struct end *end)
{
	struct ibv_wc wc;
	CHECK(open_ud(end) == 0);
	struct ibv_ah *ah = make_ah(end, &end->peer.gid);
	CHECK(end_meet(end) == 0);          /* there are receives */
	CHECK(ah && send_and_wait(end, ah, QKEY, 1, 8) == 0);
	CHECK(end_meet(end) == 0);
	CHECK(stops_soon(end->peer.pid));
	for (uint32_t i = 0; i < BURST; i++)
		CHECK(send_datagram(end, ah, QKEY, i, 1024) == 0);
	for (uint32_t i = 0; i < BURST; i++)
		CHECK(end_wait(end, &wc) == 0 && wc.status == IBV_WC_SUCCESS && wc.wr_id == i);
	CHECK(kill(end->peer.pid, SIGCONT) == 0);
	CHECK(end_meet(end) == 0);
	CHECK(send_and_wait(end, ah, QKEY, 0x7777, 8) == 0);
	CHECK(end_meet(end) == 0);
	CHECK(ibv_destroy_ah(ah) == 0);
	return end_close(end);
}

static int stops(struct end *end)
{
	struct ibv_wc wc = { 0 };
	uint32_t received = 0;
	CHECK(open_ud(end) == 0);
	CHECK(post_receives(end, 0, BURST + 2) == 0);
	CHECK(end_meet(end) == 0);
	CHECK(end_wait(end, &wc) == 0 && wc.imm_data == 1);
	CHECK(end_meet(end) == 0);
	raise(SIGSTOP);
	CHECK(end_meet(end) == 0);
	for (; wc.imm_data != 0x7777; received++)
		CHECK(end_wait(end, &wc) == 0 && wc.status == IBV_WC_SUCCESS);
	CHECK(received > 50 && received < BURST);
	CHECK(end_meet(end) == 0);
	return end_close(end);
}

static void nobody_waits_for_a_process_that_has_stopped(void **state)
{
	(void)state;
	static struct outcome outcome;
	run_two(&outcome, sends_to_one_that_stops, stops);
	assert_true(outcome.a_ok && outcome.b_ok);
}

static int sends_to_one_that_dies(struct end *end)
{
	CHECK(open_ud(end) == 0);
	struct ibv_ah *ah = make_ah(end, &end->peer.gid);
	CHECK(ah && send_and_wait(end, ah, QKEY, 1, 8) == 0);
	CHECK(write(end->to_peer, "x", 1) == 1);
	for (uint32_t i = 0; i < 2000; i++)
		CHECK(send_and_wait(end, ah, QKEY, i, 1000) == 0);
	CHECK(ibv_destroy_ah(ah) == 0);
	return end_close(end);
}

static int dies(struct end *end)
{
	char byte;
	struct ibv_wc wc;
	CHECK(open_ud(end) == 0);
	CHECK(post_receives(end, 0, 100) == 0);
	CHECK(read(end->to_peer, &byte, 1) == 1);
	for (int i = 0; i < 10; i++)
		CHECK(end_wait(end, &wc) == 0);
	kill(getpid(), SIGKILL);
	return 0;
}

static void datagrams_to_a_process_that_died_are_lost_and_no_error(void **state)
{
	(void)state;
	static struct outcome outcome;
	run_two_killed(&outcome, sends_to_one_that_dies, dies);
	assert_true(outcome.a_ok && outcome.b_ok);
}

/* ---- groups ---- */

static const union ibv_gid group = { .raw = { 0xff, 0x0e, [10] = 0xff, 0xff, 239, 7, 8, 9 } };

static int sends_to_a_group(struct end *end)
{
	struct ibv_wc wc;
	CHECK(open_ud(end) == 0);
	struct ibv_ah *ah = make_ah(end, &end->peer.gid), *all = make_ah(end, &group);
	CHECK(ah && all && post_receives(end, 0, 20) == 0);
	CHECK(ibv_attach_mcast(end->qp, &group, 0) == 0);
	CHECK(end_meet(end) == 0);
	CHECK(send_and_wait(end, ah, QKEY, 1, 8) == 0);
	CHECK(end_meet(end) == 0);          /* datagrams of two ways keep no order */
	end->peer.qpn = 0xffffff;
	for (uint32_t i = 10; i < 14; i++) {
		CHECK(send_datagram(end, all, QKEY, i, 8) == 0);
		for (int k = 0; k < 2; k++) {       /* it is a member itself; each copy comes once */
			CHECK(end_wait(end, &wc) == 0 && wc.status == IBV_WC_SUCCESS);
			CHECK(wc.opcode == IBV_WC_SEND || wc.imm_data == i);
		}
	}
	CHECK(end_meet(end) == 0);
	CHECK(ibv_poll_cq(end->cq, 1, &wc) == 0);
	CHECK(ibv_detach_mcast(end->qp, &group, 0) == 0 && ibv_destroy_ah(ah) == 0 && ibv_destroy_ah(all) == 0);
	return end_close(end);
}

static int is_a_member(struct end *end)
{
	struct ibv_wc wc;
	CHECK(open_ud(end) == 0);
	CHECK(post_receives(end, 0, 20) == 0);
	CHECK(ibv_attach_mcast(end->qp, &group, 0) == 0);
	CHECK(end_meet(end) == 0);
	CHECK(end_wait(end, &wc) == 0 && wc.imm_data == 1);
	CHECK(end_meet(end) == 0);
	for (uint32_t i = 10; i < 14; i++)
		CHECK(end_wait(end, &wc) == 0 && wc.status == IBV_WC_SUCCESS && wc.imm_data == i);
	CHECK(end_meet(end) == 0);
	CHECK(ibv_poll_cq(end->cq, 1, &wc) == 0);
	CHECK(ibv_detach_mcast(end->qp, &group, 0) == 0);
	return end_close(end);
}

static void each_member_of_a_group_gets_one_copy(void **state)
{
	(void)state;
	static struct outcome outcome;
	run_two(&outcome, sends_to_a_group, is_a_member);
	assert_true(outcome.a_ok && outcome.b_ok);
}

int main(void)
{
	setenv("TELPHER_VERBS_HIDE_REAL", "1", 1);
	unsetenv("TELPHER_VERBS_CARRIER");
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(datagrams_bring_what_was_sent_and_who_sent_it),
		cmocka_unit_test(a_process_that_is_not_dumpable_is_reached_by_the_wire),
		cmocka_unit_test(a_burst_larger_than_the_ring_loses_none),
		cmocka_unit_test(a_burst_by_the_wire_is_paced),
		cmocka_unit_test(nobody_waits_for_a_process_that_has_stopped),
		cmocka_unit_test(datagrams_to_a_process_that_died_are_lost_and_no_error),
		cmocka_unit_test(each_member_of_a_group_gets_one_copy),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
