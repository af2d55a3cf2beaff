/* The words of the handshake, as pure functions. */
#include <arpa/inet.h>
#include "helper_net.h"
#include "net/socket_hello.h"

static void a_whole_hello_is_done_and_each_beginning_is_more(void **state)
{
	struct tp_wire_hello hello = { .nsockets = 1 };

	(void)state;
	tp_wire_fill_prefix(&hello.prefix, TP_WIRE_HELLO, sizeof(hello), TP_WIRE_OK);
	for (size_t n = 1; n < sizeof(hello); n++) assert_int_equal(tp_wire_check(&hello, n, TP_WIRE_HELLO, sizeof(hello)), TP_WIRE_MORE);
	assert_int_equal(tp_wire_check(&hello, sizeof(hello), TP_WIRE_HELLO, sizeof(hello)), TP_WIRE_DONE);
}

static void any_wrong_byte_of_the_magic_is_a_stranger_at_once(void **state)
{
	struct tp_wire_hello hello = { .nsockets = 1 };

	(void)state;
	for (size_t i = 0; i < sizeof(hello.prefix.magic); i++) {
		tp_wire_fill_prefix(&hello.prefix, TP_WIRE_HELLO, sizeof(hello), TP_WIRE_OK);
		hello.prefix.magic[i] ^= 0x20;
		assert_int_equal(tp_wire_check(&hello, i + 1, TP_WIRE_HELLO, sizeof(hello)), TP_WIRE_STRANGER);
	}
}

static void type_version_and_length_are_told_apart(void **state)
{
	struct tp_wire_hello hello = { .nsockets = 1 };

	(void)state;
	tp_wire_fill_prefix(&hello.prefix, TP_WIRE_PROOF, sizeof(hello), TP_WIRE_OK);
	assert_int_equal(tp_wire_check(&hello, sizeof(hello), TP_WIRE_HELLO, sizeof(hello)), TP_WIRE_STRANGER);
	tp_wire_fill_prefix(&hello.prefix, TP_WIRE_HELLO, sizeof(hello) + 1, TP_WIRE_OK);
	assert_int_equal(tp_wire_check(&hello, sizeof(hello), TP_WIRE_HELLO, sizeof(hello)), TP_WIRE_STRANGER);
	tp_wire_fill_prefix(&hello.prefix, TP_WIRE_HELLO, sizeof(hello) + 1, TP_WIRE_OK);
	hello.prefix.version++;
	assert_int_equal(tp_wire_check(&hello, sizeof(hello.prefix), TP_WIRE_HELLO, sizeof(hello)), TP_WIRE_OTHER_VERSION);
}

static void contradictory_hellos_are_refused(void **state)
{
	struct tp_wire_hello good = { .nsockets = 9, .nthreads = 4, .socket = 8, .from = 0, .to = 1 }, bad;

	(void)state;
	assert_null(tp_wire_check_hello(&good));
	bad = good, bad.nsockets = 0;
	assert_non_null(tp_wire_check_hello(&bad));
	bad = good, bad.nsockets = 66, bad.nthreads = 0;
	assert_non_null(tp_wire_check_hello(&bad));
	bad = good, bad.socket = 9;
	assert_non_null(tp_wire_check_hello(&bad));
	bad = good, bad.nthreads = 3;
	assert_non_null(tp_wire_check_hello(&bad));
	bad = good, bad.nthreads = 17;
	assert_non_null(tp_wire_check_hello(&bad));
	bad = good, bad.nsockets = 1, bad.socket = 0, bad.nthreads = 1;
	assert_non_null(tp_wire_check_hello(&bad));
	bad = good, bad.from = -1;
	assert_non_null(tp_wire_check_hello(&bad));
}

static void proofs_depend_on_direction_nonces_hello_and_secret(void **state)
{
	struct tp_wire_hello hello = { .nsockets = 1 };
	uint8_t secret[TP_SECRET_BYTES] = { 1 }, nonce[TP_WIRE_NONCE_BYTES] = { 2 }, macs[5][TP_SECRET_BYTES];

	(void)state;
	tp_wire_mac(secret, true, &hello, nonce, macs[0]);
	tp_wire_mac(secret, false, &hello, nonce, macs[1]);
	nonce[0]++;
	tp_wire_mac(secret, true, &hello, nonce, macs[2]);
	hello.nonce[0]++;
	tp_wire_mac(secret, true, &hello, nonce, macs[3]);
	secret[0]++;
	tp_wire_mac(secret, true, &hello, nonce, macs[4]);
	for (int a = 0; a < 5; a++)
		for (int b = 0; b < a; b++) assert_false(tp_secret_equal(macs[a], macs[b]));
}

static void a_handle_survives_the_journey(void **state)
{
	unsigned char handle[TP_NET_HANDLE_BYTES];
	union tp_addr in, out;
	uint64_t id = 0;

	(void)state;
	for (int v6 = 0; v6 < 2; v6++) {
		memset(&in, 0, sizeof(in));
		if (v6) in.v6 = (struct sockaddr_in6){ .sin6_family = AF_INET6, .sin6_port = htons(4444), .sin6_addr = IN6ADDR_LOOPBACK_INIT };
		else in.v4 = (struct sockaddr_in){ .sin_family = AF_INET, .sin_port = htons(5555), .sin_addr.s_addr = htonl(0xc0000202) };
		tp_wire_write_handle(&in, 99, handle);
		assert_int_equal(tp_wire_read_handle(handle, &out, &id), ncclSuccess);
		assert_memory_equal(&in, &out, sizeof(in));
		assert_int_equal(id, 99);
	}
}

static void a_handle_that_is_none_is_refused(void **state)
{
	unsigned char handle[TP_NET_HANDLE_BYTES] = { 0 };
	union tp_addr addr = { .v4 = { .sin_family = AF_INET, .sin_port = htons(1) } }, out;
	uint64_t id;

	(void)state;
	assert_int_equal(tp_wire_read_handle(handle, &out, &id), ncclInternalError);
	tp_wire_write_handle(&addr, 1, handle);
	handle[8]++;
	assert_int_equal(tp_wire_read_handle(handle, &out, &id), ncclInvalidUsage);
	handle[8]--;
	handle[10] = 5;
	assert_int_equal(tp_wire_read_handle(handle, &out, &id), ncclInternalError);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_whole_hello_is_done_and_each_beginning_is_more),
		cmocka_unit_test(any_wrong_byte_of_the_magic_is_a_stranger_at_once),
		cmocka_unit_test(type_version_and_length_are_told_apart),
		cmocka_unit_test(contradictory_hellos_are_refused),
		cmocka_unit_test(proofs_depend_on_direction_nonces_hello_and_secret),
		cmocka_unit_test(a_handle_survives_the_journey),
		cmocka_unit_test(a_handle_that_is_none_is_refused),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
