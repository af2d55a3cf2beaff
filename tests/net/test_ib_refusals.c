/* What a card or the kernel refuses while a connection is made, and what a connection's end by the card itself is called: calls of libibverbs that
 * fail as they do in the field, and a peer that packets don't reach. */
#include <errno.h>
#include <stdio.h>
#include <sys/resource.h>
#include "helper_ib.h"
#include "net/helper_namespaces.h"

static struct tp_verbs broken;
static int modify_error, modify_left, modify_calls;

static struct ibv_cq *no_cq(struct ibv_context *context, int entries, void *cq_context, struct ibv_comp_channel *channel, int vector)
{
	(void)context, (void)entries, (void)cq_context, (void)channel, (void)vector;
	errno = ENOMEM;
	return NULL;
}

static struct ibv_qp *no_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init)
{
	(void)pd, (void)init;
	errno = ENOMEM;
	return NULL;
}

static const struct tp_verbs *real;
static int modify(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	if (!(mask & IBV_QP_AV)) return real->modify_qp(qp, attr, mask);
	modify_calls++;
	if (modify_left == 0) return real->modify_qp(qp, attr, mask);
	modify_left -= modify_left > 0;
	return modify_error;
}

static int card(void **state)
{
	(void)state;
	ib_use_card(NULL);
	assert_int_equal(tp_net_ib.init(), ncclSuccess);
	real = tp_ib_port(0)->context->verbs;
	broken = *real;
	modify_calls = 0;
	return 0;
}

static int mend(void **state)
{
	(void)state;
	tp_ib_port(0)->context->verbs = real;
	tp_ib_forget_devices();
	return 0;
}

/* A connection of which either end fails. */
static ncclResult_t connect_in_vain(void)
{
	unsigned char handle[TP_NET_HANDLE_BYTES];
	void *listener, *state = NULL, *comm = NULL, *accepted = NULL;
	struct tp_net_hello who;
	ncclResult_t result = ncclSuccess;

	assert_int_equal(tp_net_ib.listen(0, handle, &listener), ncclSuccess);
	while (result == ncclSuccess && !comm) {
		result = tp_net_ib.connect(0, handle, &net_hello, &state, &comm);
		if (result == ncclSuccess && !comm) result = tp_net_ib.accept(listener, &net_hello, &who, &accepted);
	}
	assert_null(comm);
	tp_net_ib.cancel_connect(state);
	assert_int_equal(tp_net_ib.close_listen(listener), ncclSuccess);
	return result;
}

static void says(const char *words)
{
	if (!strstr(tp_log_last_error(), words)) fail_msg("no '%s' in: %s", words, tp_log_last_error());
}

static void want_of_memory_names_the_limit(void **state)
{
	struct rlimit old, small = { 8u << 20, 8u << 20 };
	char words[80];

	(void)state;
	assert_int_equal(getrlimit(RLIMIT_MEMLOCK, &old), 0);
	small.rlim_max = old.rlim_max;
	if (old.rlim_max != RLIM_INFINITY && old.rlim_max < small.rlim_cur) small.rlim_cur = old.rlim_max;
	assert_int_equal(setrlimit(RLIMIT_MEMLOCK, &small), 0);
	snprintf(words, sizeof(words), "this process may lock %llu bytes", (unsigned long long)small.rlim_cur);
	for (int which = 0; which < 2; which++) {
		broken = *real;
		if (which) broken.create_qp = no_qp;
		else broken.create_cq = no_cq;
		tp_ib_port(0)->context->verbs = &broken;
		assert_int_equal(connect_in_vain(), ncclSystemError);
		says(which ? "telpher0:1 : Call to ibv_create_qp" : "telpher0:1 : Call to ibv_create_cq");
		says("Cannot allocate memory");
		says(words);
		says("ulimit -l unlimited");
	}
	assert_int_equal(setrlimit(RLIMIT_MEMLOCK, &old), 0);
}

/* The kernel finds no neighbour: it is asked again as often as said, and then both addresses are named. */
static void a_neighbour_that_nobody_finds(void **state)
{
	(void)state;
	net_set_environment("NCCL_IB_MQP_RETRY_CNT=3", "NCCL_IB_MQP_RETRY_SLEEP_MSEC=1", NULL);
	broken.modify_qp = modify;
	modify_error = ETIMEDOUT;
	modify_left = -1;
	tp_ib_port(0)->context->verbs = &broken;
	connect_in_vain();
	says("Call to ibv_modify_qp failed with 110 Connection timed out, on dev telpher0:1, next state RTR, local GID index 0, local GID ::ffff:");
	says("remote GID ::ffff:");
	says("the kernel could not resolve the remote address");
	says("NCCL_IB_GID_INDEX");
	assert_int_equal(modify_calls % 4, 0);
	assert_true(modify_calls >= 4);
}

static void a_neighbour_that_is_found_in_time(void **state)
{
	struct ib_pair pair;

	(void)state;
	net_set_environment("NCCL_IB_MQP_RETRY_CNT=3", "NCCL_IB_MQP_RETRY_SLEEP_MSEC=1", NULL);
	broken.modify_qp = modify;
	modify_error = ETIMEDOUT;
	modify_left = 3;
	tp_ib_port(0)->context->verbs = &broken;
	ib_pair_open(&pair, 4096);
	assert_int_equal(ib_exchange(&pair, 0, 1000, 1), ncclSuccess);
	ib_pair_close(&pair);
}

/* The card gives up before the life signs do. */
static void a_peer_that_does_not_answer(void **state)
{
	struct ib_pair pair;
	ncclResult_t result = ncclSuccess;

	(void)state;
	tp_ib_forget_devices();
	net_set_environment("NCCL_IB_TIMEOUT=8", "NCCL_IB_RETRY_CNT=1", "TELPHER_IB_PATH_TIMEOUT=60000", NULL);
	assert_int_equal(tp_net_ib.init(), ncclSuccess);
	ib_pair_open(&pair, 4096);
	assert_int_equal(ib_exchange(&pair, 0, 1000, 1), ncclSuccess);
	assert_true(shell("env LD_PRELOAD= %s verbs fault -p %d drop=1,seed=1", TELPHER, (int)getpid()));
	for (int i = 0; i < 1000 && result == ncclSuccess; i++) result = ib_exchange(&pair, 0, 1000, i);
	assert_int_equal(result, ncclRemoteError);
	says("status=IBV_WC_RETRY_EXC_ERR(12) opcode=RDMA_WRITE");
	says("vendor_err=");
	says("the other side does not answer");
	says("NCCL_IB_GID_INDEX");
	says("NCCL_IB_TC");
	says("rank ");
	says("telpher0:1, GID 0 ::ffff:");
	says(", QP ");
	assert_true(shell("env LD_PRELOAD= %s verbs fault -p %d none", TELPHER, (int)getpid()));
	ib_pair_close(&pair);
	real = tp_ib_port(0)->context->verbs;
}

static bool no_gid;
static ssize_t gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t most, uint32_t flags, size_t bytes)
{
	return no_gid ? 0 : real->query_gid_table(context, entries, most, flags, bytes);
}

/* The acceptor's only port has no address. */
static void an_end_without_an_address(void **state)
{
	unsigned char handle[TP_NET_HANDLE_BYTES];
	void *listener, *connecting = NULL, *comm = NULL, *accepted = NULL;
	struct tp_net_hello who;
	ncclResult_t result = ncclSuccess;

	(void)state;
	broken.query_gid_table = gid_table;
	tp_ib_port(0)->context->verbs = &broken;
	assert_int_equal(tp_net_ib.listen(0, handle, &listener), ncclSuccess);
	while (result == ncclSuccess) {
		no_gid = false;
		result = tp_net_ib.connect(0, handle, &net_hello, &connecting, &comm);
		no_gid = true;
		if (result == ncclSuccess) result = tp_net_ib.accept(listener, &net_hello, &who, &accepted);
	}
	no_gid = false;
	assert_null(comm);
	says("telpher0:1 : no GID of RoCE v2 with an address that isn't link-local; the port has: none. Give its network interface an address");
	tp_net_ib.cancel_connect(connecting);
	assert_int_equal(tp_net_ib.close_listen(listener), ncclSuccess);
}

/* One end's ports are InfiniBand, the other's Ethernet: it is one port here, which is what it is asked for. */
static void ends_that_have_nothing_in_common(void **state)
{
	unsigned char handle[TP_NET_HANDLE_BYTES];
	void *listener, *connecting = NULL, *comm = NULL, *accepted = NULL;
	struct tp_ib_port *port = tp_ib_port(0);
	struct tp_net_hello who;
	ncclResult_t result = ncclSuccess;

	(void)state;
	assert_int_equal(tp_net_ib.listen(0, handle, &listener), ncclSuccess);
	while (result == ncclSuccess) {
		port->attr.link_layer = IBV_LINK_LAYER_ETHERNET;
		result = tp_net_ib.connect(0, handle, &net_hello, &connecting, &comm);
		port->attr.link_layer = IBV_LINK_LAYER_INFINIBAND;
		if (result == ncclSuccess) result = tp_net_ib.accept(listener, &net_hello, &who, &accepted);
	}
	port->attr.link_layer = IBV_LINK_LAYER_ETHERNET;
	assert_null(comm);
	assert_int_equal(result, ncclInvalidUsage);
	says("rank 3 -> rank 5: the ports of ");
	says(" (telpher0:1 IB 100 Gb/s) and those of ");
	says(" (telpher0:1 RoCE 100 Gb/s) have no pair in common: InfiniBand and RoCE don't meet");
	tp_net_ib.cancel_connect(connecting);
	assert_int_equal(tp_net_ib.close_listen(listener), ncclSuccess);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(want_of_memory_names_the_limit, card, mend),
		cmocka_unit_test_setup_teardown(a_neighbour_that_nobody_finds, card, mend),
		cmocka_unit_test_setup_teardown(a_neighbour_that_is_found_in_time, card, mend),
		cmocka_unit_test_setup_teardown(an_end_without_an_address, card, mend),
		cmocka_unit_test_setup_teardown(ends_that_have_nothing_in_common, card, mend),
		cmocka_unit_test_setup_teardown(a_peer_that_does_not_answer, card, mend),
	};

	setenv("TELPHER_VERBS_CARRIER", "wire", 1);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
