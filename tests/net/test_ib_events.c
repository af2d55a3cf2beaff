/* What a card reports of itself, told at once by the thread that watches, and what connections make of it: a network namespace with two interfaces,
 * a port of the software card on each. Needs root and ip (skipped otherwise). */
#include <stdio.h>
#include "helper_ib.h"
#include "net/helper_namespaces.h"

#define BYTES (1u << 20)

static int two_ports(void **state)
{
	(void)state;
	net_log_capture();
	ib_use_card(NULL);
	assert_int_equal(tp_net_ib.init(), ncclSuccess);
	assert_int_equal(tp_ib_port_count(), 2);
	return 0;
}

static int forget(void **state)
{
	(void)state;
	tp_ib_forget_devices();
	net_log_end();
	return 0;
}

static void wait_for_words(const char *words)
{
	for (uint64_t until = tp_clock_ms() + 60000; tp_clock_ms() < until; usleep(20000)) {
		char *text = net_log_text();
		bool said = strstr(text, words) != NULL;
		free(text);
		if (said) return;
	}
	fail_msg("nobody says '%s'", words);
}

static void an_address_that_comes_is_told(void **state)
{
	struct ib_pair pair;

	(void)state;
	ib_pair_open(&pair, BYTES);
	for (int i = 0; i < 5; i++) assert_int_equal(ib_exchange(&pair, 0, 1000, i), ncclSuccess);
	assert_true(shell("ip addr add 10.196.0.9/24 dev tp0"));
	wait_for_words("NET/IB : telpher0:1 : Got async event: GID table change; connections that exist keep the address they have");
	for (int i = 0; i < 5; i++) assert_int_equal(ib_exchange(&pair, 0, 1000, i), ncclSuccess);
	assert_true(shell("ip addr del 10.196.0.9/24 dev tp0"));
	ib_pair_close(&pair);
}

/* Of the only port. */
static void an_address_that_goes_is_the_cause_of_what_fails(void **state)
{
	struct ib_pair pair;
	ncclResult_t result = ncclSuccess;

	(void)state;
	tp_ib_forget_devices();
	net_set_environment("NCCL_IB_HCA=telpher0", "TELPHER_IB_PATH_TIMEOUT=1000", "TELPHER_VERBS_CARRIER=wire", NULL);
	ib_pair_open(&pair, BYTES);
	assert_int_equal(ib_exchange(&pair, 0, 1000, 1), ncclSuccess);
	assert_true(shell("ip addr del 10.196.0.1/24 dev tp0"));
	for (int i = 0; i < 100000 && result == ncclSuccess; i++) result = ib_exchange(&pair, 0, 1000, i);
	assert_int_equal(result, ncclRemoteError);
	print_message("%s\n", tp_log_last_error());
	assert_non_null(strstr(tp_log_last_error(), "telpher0:1 no longer has GID 0 ::ffff:10.196.0.1: its interface's address has changed or is gone"));
	assert_true(shell("ip addr add 10.196.0.1/24 dev tp0"));
	ib_pair_close(&pair);
}

static void a_port_that_dies_and_lives_is_told(void **state)
{
	(void)state;
	assert_true(shell("ip link set tp1 down"));
	wait_for_words("NCCL WARN NET/IB : telpher1:1 : port has gone DOWN: look at its cable and the switch");
	assert_true(shell("ip link set tp1 up"));
	wait_for_words("NET/IB : telpher1:1 : port is ACTIVE again");
}

/* The card has no such event of its own: from now on each is taken for it. */
static const struct tp_verbs *real;
static _Atomic int fatal_now;
static int get_as_fatal(struct ibv_context *context, struct ibv_async_event *event)
{
	int result = real->get_async_event(context, event);

	if (result != 0 || !fatal_now) return result;
	real->ack_async_event(event);
	*event = (struct ibv_async_event){ .event_type = IBV_EVENT_DEVICE_FATAL };
	return 0;
}
static void ack(struct ibv_async_event *event)
{
	if (!fatal_now) real->ack_async_event(event);
}

static void a_card_that_fails_is_told_and_left(void **state)
{
	static struct tp_verbs broken;
	struct tp_ib_context *context = tp_ib_port(0)->context;
	struct ib_pair pair;

	(void)state;
	/* While nobody watches. */
	tp_ib_watch_stop();
	real = context->verbs;
	broken = *real;
	broken.get_async_event = get_as_fatal;
	broken.ack_async_event = ack;
	context->verbs = &broken;
	assert_int_equal(tp_net_ib.init(), ncclSuccess);
	ib_pair_open(&pair, BYTES);
	for (int i = 0; i < 5; i++) assert_int_equal(ib_exchange(&pair, 0, 1000, i), ncclSuccess);
	assert_int_equal(((struct tp_ib_comm *)pair.send_comm)->active, 0);
	fatal_now = 1;
	assert_true(shell("ip addr add 10.196.0.9/24 dev tp0"));
	wait_for_words("NCCL WARN NET/IB : telpher0 : Got async fatal event: local catastrophic error; the card has failed: look at the kernel log (dmesg)");
	for (int i = 0; ((struct tp_ib_comm *)pair.send_comm)->active == 0; i++) assert_int_equal(ib_exchange(&pair, 0, 1000, i), ncclSuccess);
	wait_for_words("device telpher0 has failed: look at the kernel log (dmesg)");
	for (int i = 0; i < 20; i++) assert_int_equal(ib_exchange(&pair, 0, 1000, i), ncclSuccess);
	assert_true(shell("ip addr del 10.196.0.9/24 dev tp0"));
	ib_pair_close(&pair);
	tp_ib_watch_stop();
	context->verbs = real;
}

/* Asked not to: it stays where it is. */
static void a_card_that_fails_may_be_kept(void **state)
{
	struct ib_pair pair;
	struct tp_ib_context *context;

	(void)state;
	tp_ib_forget_devices();
	net_set_environment("NCCL_IB_RETURN_ASYNC_EVENTS=0", NULL);
	ib_pair_open(&pair, BYTES);
	context = tp_ib_port(0)->context;
	atomic_store(&context->fatal, IBV_EVENT_DEVICE_FATAL + 1);
	for (int i = 0; i < 200; i++) assert_int_equal(ib_exchange(&pair, 0, 1000, i), ncclSuccess);
	assert_int_equal(((struct tp_ib_comm *)pair.send_comm)->active, 0);
	ib_pair_close(&pair);
}

static void a_port_that_lives_again_may_be_left_alone(void **state)
{
	struct ib_pair pair;
	struct tp_ib_comm *comm;

	(void)state;
	tp_ib_forget_devices();
	net_set_environment("NCCL_IB_RESILIENCY_PORT_RECOVERY=0", NULL);
	ib_pair_open(&pair, BYTES);
	comm = pair.send_comm;
	assert_true(shell("ip link set tp0 down"));
	for (int i = 0; comm->active == 0; i++) assert_int_equal(ib_exchange(&pair, 0, 1000, i), ncclSuccess);
	assert_true(shell("ip link set tp0 up"));
	wait_for_words("NET/IB : telpher0:1 : port is ACTIVE again");
	for (uint64_t until = tp_clock_ms() + 1500; tp_clock_ms() < until;) assert_int_equal(ib_exchange(&pair, 0, 1000, 7), ncclSuccess);
	assert_int_equal(comm->active, 1);
	assert_int_equal(comm->switches, 1);
	ib_pair_close(&pair);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(an_address_that_comes_is_told, two_ports, forget),
		cmocka_unit_test_setup_teardown(an_address_that_goes_is_the_cause_of_what_fails, two_ports, forget),
		cmocka_unit_test_setup_teardown(a_port_that_dies_and_lives_is_told, two_ports, forget),
		cmocka_unit_test_setup_teardown(a_card_that_fails_is_told_and_left, two_ports, forget),
		cmocka_unit_test_setup_teardown(a_card_that_fails_may_be_kept, two_ports, forget),
		cmocka_unit_test_setup_teardown(a_port_that_lives_again_may_be_left_alone, two_ports, forget),
	};

	setenv("TELPHER_VERBS_DEVICES", "2", 1);
	setenv("TELPHER_VERBS_IFNAME", "tp0,tp1", 1);
	setenv("TELPHER_VERBS_GIDS", "all", 1);
	if (!namespaces_enter_own(196)) {
		fprintf(stderr, "skipped: needs root, ip and network namespaces\n");
		return 77;
	}
	return cmocka_run_group_tests(tests, NULL, NULL);
}
