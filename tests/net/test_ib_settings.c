/* What NCCL_IB_* makes of queue pairs and registrations: libibverbs' calls are looked at on their way to the card. InfiniBand, which the card isn't, is a port
 * that says so and queue pairs that are only said to have moved. */
#include <stdio.h>
#include "helper_ib.h"

enum { MOVES = 64 };
static const struct tp_verbs *real;
static struct tp_verbs watched;
static struct { struct ibv_qp_attr attr; int mask; } moves[MOVES];
static int nmoves, registered_flags;
static bool by_iova2, infiniband, of_acceptor;

static int modify(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	if (nmoves < MOVES) {
		moves[nmoves].attr = *attr;
		moves[nmoves++].mask = mask;
	}
	return infiniband && (mask & IBV_QP_AV || attr->qp_state == IBV_QPS_RTS) ? 0 : real->modify_qp(qp, attr, mask);
}

static struct ibv_mr *reg(struct ibv_pd *pd, void *addr, size_t bytes, int access)
{
	by_iova2 = false;
	registered_flags = access;
	return real->reg_mr(pd, addr, bytes, access);
}

static struct ibv_mr *reg_iova2(struct ibv_pd *pd, void *addr, size_t bytes, uint64_t iova, unsigned access)
{
	by_iova2 = true;
	registered_flags = (int)access;
	return real->reg_mr_iova2(pd, addr, bytes, iova, access);
}

/* Two subnets, by who asks: GID 0 is the port's own, GID 1 has its forwarding LID (0x1200 or 0x3400). */
static void make_gid(int index, uint8_t raw[16])
{
	const uint8_t own[16] = { 0xfe, 0xc0, 0, 0, 0, 0, 0, of_acceptor ? 2 : 1, [15] = 9 }, flid[16] = { 0xfe, 0xc0, 0, 0, of_acceptor ? 0x34 : 0x12, 0, 0, 1, [15] = 9 };
	memcpy(raw, index ? flid : own, 16);
}

static int gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *out)
{
	if (!infiniband) return real->query_gid(context, port, index, out);
	make_gid(index, out->raw);
	return 0;
}

static ssize_t gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t most, uint32_t flags, size_t bytes)
{
	if (!infiniband) return real->query_gid_table(context, entries, most, flags, bytes);
	for (int i = 0; i < 2; i++) {
		entries[i] = (struct ibv_gid_entry){ .gid_index = (uint32_t)i, .port_num = 1, .gid_type = IBV_GID_TYPE_IB };
		make_gid(i, entries[i].gid.raw);
	}
	return 2;
}

static int card(void **state)
{
	(void)state;
	ib_use_card(NULL);
	infiniband = of_acceptor = false;
	nmoves = 0;
	return 0;
}

/* After the variables are set. */
static void watch_card(void)
{
	assert_int_equal(tp_net_ib.init(), ncclSuccess);
	real = tp_ib_port(0)->context->verbs;
	watched = *real;
	watched.modify_qp = modify;
	watched.reg_mr = reg;
	watched.reg_mr_iova2 = reg_iova2;
	watched.query_gid = gid;
	watched.query_gid_table = gid_table;
	tp_ib_port(0)->context->verbs = &watched;
}

static int unwatch(void **state)
{
	(void)state;
	tp_ib_port(0)->context->verbs = real;
	tp_ib_forget_devices();
	return 0;
}

static int count_classes(int traffic_class)
{
	int n = 0;

	for (int i = 0; i < nmoves; i++) n += moves[i].mask & IBV_QP_AV && moves[i].attr.ah_attr.grh.traffic_class == traffic_class;
	return n;
}

static void data_and_control_messages_have_their_classes(void **state)
{
	struct ib_pair pair;

	(void)state;
	net_set_environment("NCCL_IB_TC=104", "NCCL_IB_FIFO_TC=8", "NCCL_IB_SL=3", "NCCL_IB_TIMEOUT=18", "NCCL_IB_RETRY_CNT=5", NULL);
	watch_card();
	ib_pair_open(&pair, 4096);
	assert_int_equal(count_classes(104), 1);
	assert_int_equal(count_classes(8), 1);
	int addressed = 0, sending = 0;
	for (int i = 0; i < nmoves; i++) {
		const struct ibv_qp_attr *a = &moves[i].attr;
		if (moves[i].mask & IBV_QP_AV) {
			addressed++;
			assert_int_equal(a->ah_attr.sl, 3);
			assert_int_equal(a->ah_attr.is_global, 1);
			assert_int_equal(a->path_mtu, tp_ib_port(0)->attr.active_mtu);
		}
		if (moves[i].mask & IBV_QP_TIMEOUT) {
			sending++;
			assert_int_equal(a->timeout, 18);
			assert_int_equal(a->retry_cnt, 5);
			assert_int_equal(a->rnr_retry, 7);
		}
		if (moves[i].mask & IBV_QP_PKEY_INDEX) assert_int_equal(a->pkey_index, 0);
	}
	assert_int_equal(addressed, 2);
	assert_int_equal(sending, 2);
	assert_int_equal(ib_exchange(&pair, 0, 1000, 1), ncclSuccess);
	ib_pair_close(&pair);
}

static void control_messages_go_with_the_data_unless_it_is_said(void **state)
{
	struct ib_pair pair;

	(void)state;
	net_set_environment("NCCL_IB_TC=96", NULL);
	watch_card();
	ib_pair_open(&pair, 4096);
	assert_int_equal(count_classes(96), 2);
	ib_pair_close(&pair);
}

static void relaxed_ordering_is_used_where_it_may(void **state)
{
	static const struct { const char *setting; bool relaxed; } cases[] = { { "NCCL_IB_PCI_RELAXED_ORDERING=0", false }, { "NCCL_IB_PCI_RELAXED_ORDERING=1", true },
		{ "NCCL_IB_PCI_RELAXED_ORDERING=2", true } };
	static unsigned char memory[8192];

	for (size_t i = 0; i < TP_ARRAY_LEN(cases); i++) {
		struct ib_pair pair;
		void *handle = NULL;
		card(state);
		net_set_environment(cases[i].setting, NULL);
		watch_card();
		ib_pair_open(&pair, 4096);
		assert_int_equal(tp_net_ib.reg_memory(pair.send_comm, memory, sizeof(memory), TP_NET_HOST, &handle), ncclSuccess);
		assert_int_equal(by_iova2, cases[i].relaxed);
		assert_int_equal(((unsigned)registered_flags & IBV_ACCESS_RELAXED_ORDERING) != 0, cases[i].relaxed);
		assert_int_equal(tp_net_ib.dereg_memory(pair.send_comm, handle), ncclSuccess);
		ib_pair_close(&pair);
		unwatch(state);
	}
	card(state);
	watch_card();
}

/* On InfiniBand: in one subnet by LID alone, to another one by GID and, where a port has one, its forwarding LID. */
static void connect_over_infiniband(bool two_subnets)
{
	unsigned char handle[TP_NET_HANDLE_BYTES];
	void *listener, *connecting = NULL, *comm = NULL, *accepted = NULL;
	struct tp_ib_port *port = tp_ib_port(0);
	struct tp_net_hello who;

	infiniband = true;
	port->attr.link_layer = IBV_LINK_LAYER_INFINIBAND;
	port->attr.gid_tbl_len = 2;
	assert_int_equal(tp_net_ib.listen(0, handle, &listener), ncclSuccess);
	while (!comm || !accepted) {
		of_acceptor = false;
		port->attr.lid = 11;
		if (!comm) assert_int_equal(tp_net_ib.connect(0, handle, &net_hello, &connecting, &comm), ncclSuccess);
		of_acceptor = two_subnets;
		port->attr.lid = 22;
		if (!accepted) assert_int_equal(tp_net_ib.accept(listener, &net_hello, &who, &accepted), ncclSuccess);
	}
	assert_int_equal(tp_net_ib.close_send(comm), ncclSuccess);
	assert_int_equal(tp_net_ib.close_recv(accepted), ncclSuccess);
	assert_int_equal(tp_net_ib.close_listen(listener), ncclSuccess);
	port->attr.link_layer = IBV_LINK_LAYER_ETHERNET;
}

static void infiniband_goes_by_lid_in_a_subnet(void **state)
{
	int seen = 0;

	(void)state;
	watch_card();
	connect_over_infiniband(false);
	for (int i = 0; i < nmoves; i++) {
		if (!(moves[i].mask & IBV_QP_AV)) continue;
		assert_int_equal(moves[i].attr.ah_attr.is_global, 0);
		assert_true(moves[i].attr.ah_attr.dlid == 11 || moves[i].attr.ah_attr.dlid == 22);
		seen |= moves[i].attr.ah_attr.dlid == 11 ? 1 : 2;
	}
	assert_int_equal(seen, 3);
}

static void infiniband_goes_by_gid_and_forwarding_lid_between_subnets(void **state)
{
	int seen = 0;

	(void)state;
	net_set_environment("NCCL_IB_ROUTABLE_FLID_GID_INDEX=1", NULL);
	watch_card();
	connect_over_infiniband(true);
	for (int i = 0; i < nmoves; i++) {
		const struct ibv_ah_attr *ah = &moves[i].attr.ah_attr;
		if (!(moves[i].mask & IBV_QP_AV)) continue;
		assert_int_equal(ah->is_global, 1);
		/* The connector's way leads to the acceptor, and the other way round. */
		assert_int_equal(ah->dlid, ah->grh.dgid.raw[7] == 2 ? 0x3400 : 0x1200);
		seen |= ah->grh.dgid.raw[7] == 2 ? 1 : 2;
	}
	assert_int_equal(seen, 3);
}

/* Requests of data as they are posted. */
static int (*real_post)(struct ibv_qp *, struct ibv_send_wr *, struct ibv_send_wr **);
static int nwrites, nempty, nwhole;
static int post(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	for (const struct ibv_send_wr *w = wr; w; w = w->next) {
		uint32_t bytes = 0;
		for (int i = 0; i < w->num_sge; i++) bytes += w->sg_list[i].length;
		nwrites += w->opcode == IBV_WR_RDMA_WRITE && w->next && bytes > 1000;
		nempty += w->opcode == IBV_WR_RDMA_WRITE_WITH_IMM && bytes == 0;
		nwhole += w->opcode == IBV_WR_RDMA_WRITE_WITH_IMM && bytes > 0;
	}
	return real_post(qp, wr, bad);
}

static void data_above_the_threshold_is_followed_by_a_write_of_its_own(void **state)
{
	static const struct { const char *adaptive; size_t bytes; int writes, empty, whole; } cases[] = { { "NCCL_IB_ADAPTIVE_ROUTING=1", 4096, 0, 0, 1 },
		{ "NCCL_IB_ADAPTIVE_ROUTING=1", 4097, 1, 1, 0 }, { "NCCL_IB_ADAPTIVE_ROUTING=0", 4097, 0, 0, 1 }, { "NCCL_IB_ADAPTIVE_ROUTING=-2", 4097, 0, 0, 1 } };
	struct ib_pair pair;

	(void)state;
	watch_card();
	struct ibv_context *ibv = tp_ib_port(0)->context->ibv;
	real_post = ibv->ops.post_send;
	for (size_t i = 0; i < TP_ARRAY_LEN(cases); i++) {
		net_set_environment(cases[i].adaptive, "NCCL_IB_AR_THRESHOLD=4096", NULL);
		ib_pair_open(&pair, 8192);
		nwrites = nempty = nwhole = 0;
		ibv->ops.post_send = post;
		assert_int_equal(ib_exchange(&pair, 0, cases[i].bytes, 1), ncclSuccess);
		ibv->ops.post_send = real_post;
		assert_int_equal(nwrites, cases[i].writes);
		assert_int_equal(nempty, cases[i].empty);
		assert_int_equal(nwhole, cases[i].whole);
		ib_pair_close(&pair);
	}
	unsetenv("NCCL_IB_AR_THRESHOLD");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(data_and_control_messages_have_their_classes, card, unwatch),
		cmocka_unit_test_setup_teardown(control_messages_go_with_the_data_unless_it_is_said, card, unwatch),
		cmocka_unit_test_setup_teardown(relaxed_ordering_is_used_where_it_may, card, unwatch),
		cmocka_unit_test_setup_teardown(data_above_the_threshold_is_followed_by_a_write_of_its_own, card, unwatch),
		cmocka_unit_test_setup_teardown(infiniband_goes_by_lid_in_a_subnet, card, unwatch),
		cmocka_unit_test_setup_teardown(infiniband_goes_by_gid_and_forwarding_lid_between_subnets, card, unwatch),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
