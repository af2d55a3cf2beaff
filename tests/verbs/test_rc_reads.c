/* READs of which a part is lost. The QPs are connected by the wire, within this process; while the port is dead the test itself says what
 * comes back. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <time.h>
#include "verbs/helper_halves.h"
#include "verbs/wire_fault.h"

enum { MTU = 1024, BYTES = 256 << 10, WIDE = 512 };

/* A READ is under way, as many pieces as the other side takes; nothing has come back. Returns the first number. */
static uint32_t open_and_read(uint32_t *sent)
{
	halves_open(&(struct halves_options){ 0 });
	for (uint32_t i = 0; i < BYTES; i++)
		b.data[i] = (uint8_t)(i * 7 + i / MTU);
	assert_int_equal(tp_fault_wire_set("dead"), 0);
	pthread_mutex_lock(&half_qp(&a)->lock);
	half_rc(&a)->window = WIDE;
	half_rc(&a)->rtt_ns = 300000000;    /* a loss is repaired once, and the window shrinks once, however long packets take to come here */
	pthread_mutex_unlock(&half_qp(&a)->lock);
	half_request(&a, &b, IBV_WR_RDMA_READ, BYTES, 1);
	uint32_t first = 0;
	*sent = 0;
	/* Sending runs on the thread whose call it is, or on ours soon after. */
	for (time_t until = time(NULL) + 30; *sent == 0 && time(NULL) < until; nanosleep(&(struct timespec){ .tv_nsec = 100000 }, NULL)) {
		pthread_mutex_lock(&half_qp(&a)->lock);
		first = half_rc(&a)->una;
		*sent = (uint32_t)tp_psn_diff(half_rc(&a)->next, first);
		pthread_mutex_unlock(&half_qp(&a)->lock);
	}
	assert_in_range(*sent, 2, BYTES / MTU - 1);
	return first;
}

static void comes(uint32_t first, uint32_t index)
{
	struct tp_packet packet = { .opcode = TP_OP_READ_MIDDLE, .pkey = TP_CARD_PKEY, .qpn = a.qp->qp_num, .psn = tp_psn_add(first, index),
		.keeps = true, .payload = b.data + index * MTU, .bytes = MTU };
	half_arrives(&a, NULL, &packet, false);
}

static void the_rest_comes_and_is_right(void)
{
	/* What has been asked for so far counts as served. */
	pthread_mutex_lock(&half_qp(&a)->lock);
	uint32_t asked = half_rc(&a)->top;
	pthread_mutex_unlock(&half_qp(&a)->lock);
	pthread_mutex_lock(&half_qp(&b)->lock);
	half_qp(&b)->recv_psn = asked;
	pthread_mutex_unlock(&half_qp(&b)->lock);
	assert_int_equal(tp_fault_wire_set("none"), 0);
	half_complete(&a, 1);
	assert_memory_equal(a.data, b.data, BYTES);
	halves_close();
}

/* The other side has done what was asked of it: a packet that was lost on its way back keeps nobody from asking for more. */
static void what_follows_is_asked_for_while_a_lost_packet_is_awaited(void **state)
{
	(void)state;
	uint32_t sent, first = open_and_read(&sent);
	for (uint32_t i = 1; i < sent; i++)
		comes(first, i);
	/* Asking runs on the thread whose call it is, or on ours soon after. */
	int32_t asked = 0;
	uint32_t una = first;
	for (time_t until = time(NULL) + 30; una == first && asked <= (int32_t)sent && time(NULL) < until;) {
		pthread_mutex_lock(&half_qp(&a)->lock);
		una = half_rc(&a)->una;
		asked = tp_psn_diff(half_rc(&a)->top, first);
		pthread_mutex_unlock(&half_qp(&a)->lock);
		/* Who waits for the lock gets it only while nobody has it. */
		nanosleep(&(struct timespec){ .tv_nsec = 100000 }, NULL);
	}
	assert_int_equal(una, first);
	assert_true(asked > (int32_t)sent);
	the_rest_comes_and_is_right();
}

static void the_next_loss_is_repaired_as_soon_as_the_one_before(void **state)
{
	(void)state;
	enum { SECOND = 20 };
	uint32_t sent, first = open_and_read(&sent);
	for (uint32_t i = 1; i < sent; i++)
		if (i != SECOND)
			comes(first, i);
	comes(first, 0);
	pthread_mutex_lock(&half_qp(&a)->lock);
	uint32_t una = half_rc(&a)->una, back_psn = half_rc(&a)->back_psn;
	pthread_mutex_unlock(&half_qp(&a)->lock);
	assert_int_equal(una, tp_psn_add(first, SECOND));
	assert_int_equal(back_psn, tp_psn_add(first, SECOND));
	the_rest_comes_and_is_right();
}

int main(int argc, char **argv)
{
	halves_prepare(argc ? argv[0] : "");
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(what_follows_is_asked_for_while_a_lost_packet_is_awaited),
		cmocka_unit_test(the_next_loss_is_repaired_as_soon_as_the_one_before),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
