/* Faults of the wire: what a rule says, and that a seed gives the same faults again. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <arpa/inet.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>
#include "verbs/wire_fault.h"

static union tp_addr addr_of(const char *text)
{
	union tp_addr addr = { .v4 = { .sin_family = AF_INET, .sin_port = htons(4791) } };
	assert_int_equal(inet_pton(AF_INET, text, &addr.v4.sin_addr), 1);
	return addr;
}

static int strike(uint32_t bytes, uint8_t tos, const char *to, bool out, uint8_t *data)
{
	union tp_addr a = addr_of("10.0.0.1"), b = addr_of(to);
	struct tp_fault_packet packet = { .from = &a, .to = &b, .tos = tos, .data = data, .bytes = bytes, .out = out };
	return tp_fault_packet(&packet, NULL, 0, NULL);
}

static void what_can_not_be_read_is_refused_and_changes_nothing(void **state)
{
	(void)state;
	const char *const wrong[] = { "drop", "drop=2", "drop=-1", "drop=x", "loss=0.1", "delay=0.1", "delay=0.1:5", "dscp=64:0.1", "dscp=26", "mtu=0",
		"side=up", "unroute=host", "dead=1", "seed=", "drop=0.1,what" };
	assert_int_equal(tp_fault_wire_set("dead"), 0);
	for (size_t i = 0; i < TP_ARRAY_LEN(wrong); i++)
		assert_int_equal(tp_fault_wire_set(wrong[i]), EINVAL);
	assert_true(tp_fault_wire());
	assert_int_equal(strike(100, 0, "10.0.0.2", true, (uint8_t[100]){ 0 }), 0);
	assert_int_equal(tp_fault_wire_set("none"), 0);
	assert_false(tp_fault_wire());
}

static void a_seed_gives_the_same_faults_again(void **state)
{
	(void)state;
	int first[500];
	for (int run = 0; run < 2; run++) {
		int lost = 0, doubled = 0;
		assert_int_equal(tp_fault_wire_set("drop=0.2,duplicate=0.1,corrupt=0.1,seed=42"), 0);
		for (int i = 0; i < 500; i++) {
			uint8_t data[64] = { 0 };
			int copies = strike(sizeof(data), 0, "10.0.0.2", true, data), damage = 0;
			for (size_t k = 0; k < sizeof(data); k++)
				damage += data[k] != 0;
			lost += copies == 0;
			doubled += copies == 2;
			if (run == 0)
				first[i] = copies * 10 + damage;
			else
				assert_int_equal(first[i], copies * 10 + damage);
		}
		assert_in_range(lost, 50, 150);
		assert_in_range(doubled, 15, 80);
	}
	tp_fault_wire_set(NULL);
}

static void rules_strike_only_what_they_name(void **state)
{
	(void)state;
	uint8_t data[1600] = { 0 };
	assert_int_equal(tp_fault_wire_set("mtu=1500"), 0);
	assert_int_equal(strike(1472, 0, "10.0.0.2", true, data), 1);
	assert_int_equal(strike(1476, 0, "10.0.0.2", true, data), 0);
	assert_int_equal(tp_fault_wire_set("dscp=26:1"), 0);
	assert_int_equal(strike(64, 26 << 2, "10.0.0.2", true, data), 0);
	assert_int_equal(strike(64, 0, "10.0.0.2", true, data), 1);
	assert_int_equal(tp_fault_wire_set("unroute=10.0.0.3"), 0);
	assert_int_equal(strike(64, 0, "10.0.0.3", true, data), 0);
	assert_int_equal(strike(64, 0, "10.0.0.2", true, data), 1);
	assert_int_equal(tp_fault_wire_set("dead,side=in"), 0);
	assert_int_equal(strike(64, 0, "10.0.0.2", true, data), 1);
	assert_int_equal(strike(64, 0, "10.0.0.2", false, data), 0);
	assert_int_equal(tp_fault_wire_set("slow=50us"), 0);
	assert_int_equal(tp_fault_slow_ns(), 50000);
	tp_fault_wire_set("");
	assert_int_equal(tp_fault_slow_ns(), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(what_can_not_be_read_is_refused_and_changes_nothing),
		cmocka_unit_test(a_seed_gives_the_same_faults_again),
		cmocka_unit_test(rules_strike_only_what_they_name),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
