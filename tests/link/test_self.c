/* Rings between two lanes of one rank. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <cmocka.h>

#include "link/link.h"

static void chunks_come_out_in_order_and_whole(void **state)
{
	(void)state;
	struct tp_link a, b;
	assert_int_equal(tp_link_self_create(100, 4, 3, &a, &b), ncclSuccess);
	assert_int_equal(a.peer, 3);
	for (int round = 0; round < 50; round++) {
		int n = 0;
		for (struct tp_slot *slot; (slot = tp_link_claim(&a)); n++) {
			memset(slot->data, round + n, 100);
			tp_link_publish(&a, slot);
		}
		assert_int_equal(n, 4);
		for (int i = 0; i < 4; i++) {
			struct tp_slot *slot = tp_link_peek(&b);
			for (int k = 0; k < 100; k++) assert_int_equal(slot->data[k], (unsigned char)(round + i));
			tp_link_release(&b);
		}
	}
	tp_link_self_destroy(&a);
	assert_null(a.head);
}

static void a_ring_of_no_data_carries_order(void **state)
{
	(void)state;
	struct tp_link a, b;
	assert_int_equal(tp_link_self_create(0, 8, 0, &a, &b), ncclSuccess);
	assert_null(tp_link_peek(&b));
	tp_link_publish(&a, tp_link_claim(&a));
	assert_non_null(tp_link_peek(&b));
	tp_link_release(&b);
	assert_true(tp_link_drained(&a));
	tp_link_self_destroy(&a);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(chunks_come_out_in_order_and_whole),
		cmocka_unit_test(a_ring_of_no_data_carries_order),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
