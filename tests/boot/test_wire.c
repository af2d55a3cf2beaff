/* Names and texts that come over the bootstrap's wire, from a peer that means harm. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <arpa/inet.h>
#include <string.h>
#include "boot/wire.h"

static const union tp_addr somewhere = { .v4 = { .sin_family = AF_INET, .sin_port = 0x1234, .sin_addr.s_addr = 0x0100007f } };

static void a_joiner_cannot_write_to_the_terminal(void **state)
{
	struct tp_wire_join join = { .rank = 0, .nranks = 1, .nids = 1, .timeout_ms = 1000 };

	(void)state;
	tp_wire_addr_put(&join.service, &somewhere);
	strcpy(join.host_name, "a\x1b[2J\nhost");
	assert_null(tp_wire_join_check(&join, sizeof(join)));
	assert_string_equal(join.host_name, "a?[2J?host");
}

static void a_failure_that_is_told_cannot_write_to_the_terminal(void **state)
{
	struct tp_wire_fail fail, out;

	(void)state;
	tp_wire_fail_make(&fail, ncclRemoteError, "gone\r\nNCCL WARN all is well\x1b[1A");
	assert_true(tp_wire_fail_read(&out, &fail, sizeof(fail)));
	assert_string_equal(out.text, "gone??NCCL WARN all is well?[1A");
}

static void a_table_with_such_a_name_is_refused(void **state)
{
	struct { struct tp_wire_table head; struct tp_wire_host host; struct tp_wire_peer peer; } __attribute__((packed)) table = { .head = { .nhosts = 1, .nranks = 1 } };

	(void)state;
	tp_wire_addr_put(&table.peer.service, &somewhere);
	strcpy(table.host.name, "a good host");
	assert_null(tp_wire_table_check(&table, sizeof(table), 1));
	strcpy(table.host.name, "a bad\x1b host");
	assert_string_equal(tp_wire_table_check(&table, sizeof(table), 1), "a table with a name that isn't text");
	memset(table.host.name, 'x', sizeof(table.host.name));
	assert_string_equal(tp_wire_table_check(&table, sizeof(table), 1), "a table with an endless name");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_joiner_cannot_write_to_the_terminal), cmocka_unit_test(a_failure_that_is_told_cannot_write_to_the_terminal),
		cmocka_unit_test(a_table_with_such_a_name_is_refused),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
