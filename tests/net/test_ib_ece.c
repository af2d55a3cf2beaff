/* What two cards agree on beyond the standard (enhanced connection establishment): the software card has nothing of it, so its
 * two functions are replaced by those of a card that has. */
#include <errno.h>
#include "helper_ib.h"

#define VENDOR 0x2c9u
#define QPS 3

static struct tp_verbs fake;
static const struct tp_verbs *real;
static struct { struct ibv_qp *qp; uint32_t options; } given[64];
static int ngiven, queries, set_result;

static int query_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
	queries++;
	*ece = (struct ibv_ece){ .vendor_id = VENDOR, .options = 0xf0 };
	for (int i = 0; i < ngiven; i++)
		if (given[i].qp == qp) ece->options = given[i].options;
	return 0;
}

/* This card's other half knows fewer of them. */
static int set_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
	assert_int_equal(qp->state, IBV_QPS_INIT);
	assert_int_equal(ece->vendor_id, VENDOR);
	assert_int_equal(ece->comp_mask, 0);
	if (set_result) return set_result;
	given[ngiven].qp = qp;
	given[ngiven++].options = ece->options & 0x3c;
	return 0;
}

static int card(void **state)
{
	(void)state;
	ib_use_card(NULL);
	net_set_environment("NCCL_IB_QPS_PER_CONNECTION=3", "NCCL_IB_HCA==telpher0:1", NULL);
	assert_int_equal(tp_net_ib.init(), ncclSuccess);
	real = tp_ib_port(0)->context->verbs;
	fake = *real;
	fake.query_ece = query_ece;
	fake.set_ece = set_ece;
	ngiven = queries = set_result = 0;
	tp_ib_port(0)->context->verbs = &fake;
	return 0;
}

static int card_is_itself(void **state)
{
	(void)state;
	tp_ib_port(0)->context->verbs = real;
	return 0;
}

static void meet(uint32_t vendor, uint32_t options)
{
	struct ib_pair pair;

	ib_pair_open(&pair, 1u << 20);
	const struct tp_ib_comm *ends[] = { pair.send_comm, pair.recv_comm };
	for (int i = 0; i < 2; i++) {
		assert_int_equal(ends[i]->paths[0].ece.vendor_id, vendor);
		assert_int_equal(ends[i]->paths[0].ece.options, options);
	}
	for (int i = 0; i < 10; i++) assert_int_equal(ib_exchange(&pair, 0, 1u << 20, i), ncclSuccess);
	ib_pair_close(&pair);
}

static void both_use_what_both_can(void **state)
{
	(void)state;
	meet(VENDOR, 0x30);
	/* Every queue pair of both ends was told. */
	assert_int_equal(ngiven, 2 * QPS);
}

static void a_card_that_refuses_connects_without(void **state)
{
	(void)state;
	set_result = EOPNOTSUPP;
	meet(0, 0);
	assert_int_equal(ngiven, 0);
}

static void a_card_that_has_nothing_is_not_asked_again(void **state)
{
	(void)state;
	fake.query_ece = real->query_ece;
	meet(0, 0);
	assert_int_equal(ngiven, 0);
}

static void a_library_that_does_not_know_it_connects_without(void **state)
{
	(void)state;
	fake.query_ece = NULL;
	meet(0, 0);
	fake.query_ece = query_ece;
	fake.set_ece = NULL;
	meet(0, 0);
	assert_int_equal(queries, 0);
}

static void it_can_be_switched_off(void **state)
{
	(void)state;
	net_set_environment("NCCL_IB_ECE_ENABLE=0", NULL);
	meet(0, 0);
	assert_int_equal(queries, 0);
}

/* With two ports that are two devices. */
static int two_ports(void **state)
{
	card(state);
	card_is_itself(state);
	net_set_environment("NCCL_IB_HCA=telpher0", "NCCL_NET_MERGE_LEVEL=LOC", NULL);
	tp_ib_forget_devices();
	assert_int_equal(tp_net_ib.init(), ncclSuccess);
	tp_ib_port(0)->context->verbs = &fake;
	return 0;
}

static void a_path_that_is_revived_keeps_it(void **state)
{
	struct ib_pair pair;
	struct tp_ib_comm *sender;

	(void)state;
	ib_pair_open(&pair, 1u << 20);
	sender = pair.send_comm;
	assert_int_equal(sender->npaths, 2);
	int before = ngiven;
	tp_ib_path_failed(sender, &sender->paths[0], "it is broken by a test");
	while (sender->paths[0].state != TP_IB_PATH_LIVE) assert_int_equal(ib_exchange(&pair, 0, 1000, 1), ncclSuccess);
	assert_int_equal(sender->paths[0].ece.options, 0x30);
	assert_true(ngiven >= before + 2 * QPS);
	ib_pair_close(&pair);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(both_use_what_both_can, card, card_is_itself),
		cmocka_unit_test_setup_teardown(a_card_that_refuses_connects_without, card, card_is_itself),
		cmocka_unit_test_setup_teardown(a_card_that_has_nothing_is_not_asked_again, card, card_is_itself),
		cmocka_unit_test_setup_teardown(a_library_that_does_not_know_it_connects_without, card, card_is_itself),
		cmocka_unit_test_setup_teardown(it_can_be_switched_off, card, card_is_itself),
		cmocka_unit_test_setup_teardown(a_path_that_is_revived_keeps_it, two_ports, card_is_itself),
	};

	setenv("TELPHER_VERBS_PORTS", "2", 1);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
