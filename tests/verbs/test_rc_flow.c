/* What a sender of the wire puts into one receiving socket while nobody reads there, and what it does when nobody answers. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <linux/sock_diag.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include "verbs/helper_halves.h"
#include "verbs/wire_fault.h"

/* Nobody of this process takes packets in meanwhile. */
static struct tp_endpoint *endpoint_of(struct half *half) { return half_rc(half)->endpoint; }
static void stop_reading(void) { pthread_mutex_lock(&endpoint_of(&a)->receive_lock); }
static void read_again(void) { pthread_mutex_unlock(&endpoint_of(&a)->receive_lock); }

static bool is_paced(void)
{
	struct tp_qp *qp = half_qp(&a);
	pthread_mutex_lock(&qp->lock);
	bool paced = half_rc(&a)->paced;
	pthread_mutex_unlock(&qp->lock);
	return paced;
}

/* An unreliable connection that has been quiet for a while: what it sends then is one window, and a packet more after each vain wait. */
static void an_unreliable_sender_does_not_flood_a_peer_that_does_not_read(void **state)
{
	(void)state;
	halves_open(&(struct halves_options){ .type = IBV_QPT_UC });
	half_receive(&b, 2);
	poll(NULL, 0, 50);
	stop_reading();
	half_request(&a, &b, IBV_WR_SEND, HALF_BYTES, 1);
	/* Reading again before it takes the peer for one that never says a word; else, on a busy machine, nothing is promised. */
	struct tp_qp *qp = half_qp(&a);
	bool paced = false, waited = false;
	for (time_t until = time(NULL) + 30; !waited && time(NULL) < until; poll(NULL, 0, 1)) {
		pthread_mutex_lock(&qp->lock);
		uint32_t vain = half_rc(&a)->paced_vain, sent = half_rc(&a)->next;
		paced = half_rc(&a)->paced;
		waited = !paced || vain >= 2;
		if (waited)
			read_again();
		pthread_mutex_unlock(&qp->lock);
		if (paced && waited)
			assert_in_range(sent, 1, TP_UC_WINDOW_BYTES / 1024 + vain);
		paced = paced && vain < 5;
	}
	assert_true(waited);
	half_complete(&a, 1);
	/* All of it arrives, as nothing was lost. */
	if (paced)
		half_complete(&b, 1);
	halves_close();
}

/* Somebody else's card says nothing. It is waited for a while, once, and not by each connection anew. */
static void who_never_says_what_arrived_is_waited_for_once(void **state)
{
	(void)state;
	struct ibv_wc wc;
	halves_open(&(struct halves_options){ .type = IBV_QPT_UC });
	struct tp_flow *flow = half_rc(&a)->flow;
	stop_reading();
	half_request(&a, &b, IBV_WR_SEND, HALF_BYTES, 2);
	time_t until = time(NULL) + 30;
	for (int done = 0; done < 2 && time(NULL) < until;)
		done += tp_cq_poll(a.cq, 1, &wc);
	assert_false(is_paced());
	assert_true(atomic_load(&flow->uc_mute));
	read_again();
	halves_close();
	halves_open(&(struct halves_options){ .type = IBV_QPT_UC });
	half_request(&a, &b, IBV_WR_SEND, 8, 1);
	half_complete(&a, 1);
	assert_false(is_paced());
	/* Until a word comes. */
	half_receive(&b, HALF_DEPTH);
	for (until = time(NULL) + 30; !is_paced() && time(NULL) < until;) {
		half_request(&a, &b, IBV_WR_SEND, 16384, 1);
		half_complete(&a, 1);
		if (tp_cq_poll(b.cq, 1, &wc) > 0)
			half_receive(&b, 1);
	}
	assert_true(is_paced() && !atomic_load(&flow->uc_mute));
	halves_close();
}

static uint32_t drops_of(int fd)
{
	uint32_t info[SK_MEMINFO_VARS];
	socklen_t length = sizeof(info);
	assert_int_equal(getsockopt(fd, SOL_SOCKET, SO_MEMINFO, info, &length), 0);
	return info[SK_MEMINFO_DROPS];
}

/* As where a process gets no processor for long: all that is sent, once and again, finds room in its socket, though that is small. */
static void many_connections_do_not_overrun_the_socket_of_a_peer_that_does_not_read(void **state)
{
	(void)state;
	enum { COUNT = 16 };
	struct half from[COUNT], to[COUNT];
	const struct halves_options options = { 0 };
	halves_open_device();
	for (int i = 0; i < COUNT; i++) {
		half_open(&from[i], &options, NULL);
		half_open(&to[i], &options, NULL);
		half_connect(&from[i], &to[i], &options);
		half_connect(&to[i], &from[i], &options);
	}
	struct tp_endpoint *endpoint = endpoint_of(&from[0]);
	uint32_t budget = endpoint->budget, before = drops_of(endpoint->receive_fd);
	int bytes = 0, small = 53248;      /* the kernel doubles it */
	socklen_t length = sizeof(bytes);
	assert_int_equal(getsockopt(endpoint->receive_fd, SOL_SOCKET, SO_RCVBUF, &bytes, &length), 0);
	setsockopt(endpoint->receive_fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof(small));
	endpoint->budget = (uint32_t)small;
	pthread_mutex_lock(&endpoint->receive_lock);
	uint64_t start_ns = tp_clock_ns();
	for (int i = 0; i < COUNT; i++)
		half_request(&from[i], &to[i], IBV_WR_RDMA_WRITE, 4096, 1);
	poll(NULL, 0, 40);
	/* After 64 ms each asks for itself: a busy machine may make it that long. */
	bool in_time = tp_clock_ns() - start_ns < 60000000;
	uint32_t after = drops_of(endpoint->receive_fd);
	pthread_mutex_unlock(&endpoint->receive_lock);
	if (in_time)
		assert_int_equal(after, before);
	for (int i = 0; i < COUNT; i++)
		half_complete(&from[i], 1);
	bytes /= 2;
	setsockopt(endpoint->receive_fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof(bytes));
	endpoint->budget = budget;
	for (int i = 0; i < COUNT; i++) {
		half_close(&from[i]);
		half_close(&to[i]);
	}
}

/* Else connections that have nothing to do would take the room of others. */
static void what_is_acknowledged_is_not_under_way(void **state)
{
	(void)state;
	halves_open(&(struct halves_options){ 0 });
	half_request(&a, &b, IBV_WR_RDMA_WRITE, 65536, 4);
	half_complete(&a, 4);
	struct tp_qp *qp = half_qp(&a);
	pthread_mutex_lock(&qp->lock);
	int64_t bytes = half_rc(&a)->flow_bytes;
	pthread_mutex_unlock(&qp->lock);
	assert_int_equal(bytes, 0);
	halves_close();
}

/* As if so many packets had come and gone since. */
static void skip_numbers(uint32_t count)
{
	pthread_mutex_lock(&half_qp(&a)->lock);
	struct tp_rc *rc = half_rc(&a);
	uint32_t *const numbers[] = { &rc->una, &rc->next, &rc->top, &rc->seen, &half_qp(&a)->send_psn };
	for (size_t i = 0; i < TP_ARRAY_LEN(numbers); i++)
		*numbers[i] = tp_psn_add(*numbers[i], count);
	pthread_mutex_unlock(&half_qp(&a)->lock);
	pthread_mutex_lock(&half_qp(&b)->lock);
	half_qp(&b)->recv_psn = tp_psn_add(half_qp(&b)->recv_psn, count);
	pthread_mutex_unlock(&half_qp(&b)->lock);
}

/* READs bring no acknowledgements: the last one may be as old as numbers can tell, and older. */
static void an_acknowledgement_from_long_ago_acknowledges_nothing(void **state)
{
	(void)state;
	halves_open(&(struct halves_options){ 0 });
	for (int i = 1; i < 6; i++) {
		b.data[0] = (uint8_t)i;
		half_request(&a, &b, IBV_WR_RDMA_READ, 8, 1);
		half_complete(&a, 1);
		assert_int_equal(a.data[0], i);
		skip_numbers(0x600000);
	}
	a.data[0] = 77;
	half_request(&a, &b, IBV_WR_RDMA_WRITE, 8, 1);
	half_complete(&a, 1);
	assert_int_equal(b.data[0], 77);
	halves_close();
}

/* Packets that a switch has marked: the receiver says so, and the sender takes half of its window. */
static void a_congested_network_halves_the_window(void **state)
{
	(void)state;
	enum { MARKED = 3 };
	halves_open(&(struct halves_options){ 0 });
	struct tp_qp *qp = half_qp(&a);
	uint64_t handled = atomic_load(&qp->port->counters[TP_CNT_RP_CNP_HANDLED]), sent = atomic_load(&qp->port->counters[TP_CNT_NP_CNP_SENT]);
	pthread_mutex_lock(&qp->lock);
	uint32_t before = half_rc(&a)->window;
	half_rc(&a)->route.tos |= MARKED;
	pthread_mutex_unlock(&qp->lock);
	uint64_t asked = atomic_load(&qp->port->counters[TP_CNT_ROCE_ADP_RETRANS]);
	half_request(&a, &b, IBV_WR_RDMA_WRITE, 64, 1);
	half_complete(&a, 1);
	pthread_mutex_lock(&qp->lock);
	uint32_t after = half_rc(&a)->window;
	pthread_mutex_unlock(&qp->lock);
	/* The word comes before the acknowledgement, which lets it grow by at most one. On a busy machine it is asked for again, and halved again. */
	bool once = atomic_load(&qp->port->counters[TP_CNT_ROCE_ADP_RETRANS]) == asked;
	assert_in_range(after, once ? before / 2 : TP_RC_WINDOW_MIN, before / 2 + 1);
	assert_true(atomic_load(&qp->port->counters[TP_CNT_RP_CNP_HANDLED]) > handled && atomic_load(&qp->port->counters[TP_CNT_NP_CNP_SENT]) > sent);
	halves_close();
}

/* Nor what an unreliable connection sent long ago: nobody was asked about its last packets. */
static void what_was_sent_unreliably_is_not_under_way_for_long(void **state)
{
	(void)state;
	halves_open(&(struct halves_options){ .type = IBV_QPT_UC });
	half_request(&a, &b, IBV_WR_RDMA_WRITE, 4096, 1);
	half_complete(&a, 1);
	int64_t bytes = 1;
	for (time_t until = time(NULL) + 30; bytes && time(NULL) < until; poll(NULL, 0, 1)) {
		pthread_mutex_lock(&half_qp(&a)->lock);
		bytes = half_rc(&a)->flow_bytes;
		pthread_mutex_unlock(&half_qp(&a)->lock);
	}
	assert_int_equal(bytes, 0);
	halves_close();
}

/* ---- the last acknowledgement ---- */

static void wait_for_probe(void)
{
	struct tp_qp *qp = half_qp(&a);
	uint32_t probes = 0;
	for (time_t until = time(NULL) + 30; !probes && time(NULL) < until; poll(NULL, 0, 1)) {
		pthread_mutex_lock(&qp->lock);
		probes = half_rc(&a)->probes;
		pthread_mutex_unlock(&qp->lock);
	}
	assert_true(probes > 0);
}

/* b takes a message in, and its acknowledgement is lost. */
static void lose_the_last_acknowledgement(void)
{
	halves_open(&(struct halves_options){ 0 });
	half_receive(&b, 1);
	pthread_mutex_lock(&endpoint_of(&a)->receive_lock);
	half_request(&a, &b, IBV_WR_SEND, 8, 1);
	assert_int_equal(tp_fault_wire_set("dead"), 0);
	pthread_mutex_unlock(&endpoint_of(&a)->receive_lock);
	half_complete(&b, 1);
}

static void a_repeat_is_answered_when_its_queue_pair_is_gone(void **state)
{
	(void)state;
	lose_the_last_acknowledgement();
	assert_int_equal(tp_qp_destroy(b.qp), 0);
	b.qp = NULL;
	wait_for_probe();
	assert_int_equal(tp_fault_wire_set("none"), 0);
	half_complete(&a, 1);
	/* But nothing new. */
	half_request(&a, &b, IBV_WR_RDMA_WRITE, 8, 1);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	poll(NULL, 0, 20);
	assert_int_equal(tp_qp_modify(a.qp, &attr, IBV_QP_STATE), 0);
	assert_int_equal(half_status(&a), IBV_WC_WR_FLUSH_ERR);
	halves_close();
}

static void repeat_is_answered_in(enum ibv_qp_state qp_state)
{
	struct ibv_qp_attr attr = { .qp_state = qp_state };
	lose_the_last_acknowledgement();
	assert_int_equal(tp_qp_modify(b.qp, &attr, IBV_QP_STATE), 0);
	wait_for_probe();
	assert_int_equal(tp_fault_wire_set("none"), 0);
	half_complete(&a, 1);
	halves_close();
}

static void a_repeat_is_answered_after_reset(void **state)
{
	(void)state;
	repeat_is_answered_in(IBV_QPS_RESET);
}

static void a_repeat_is_answered_in_the_error_state(void **state)
{
	(void)state;
	repeat_is_answered_in(IBV_QPS_ERR);
}

/* The NAK too, else the request would end by a timeout. */
static void a_refusal_is_repeated_when_its_queue_pair_is_gone(void **state)
{
	(void)state;
	halves_open(&(struct halves_options){ 0 });
	b.mr->rkey ^= 0x10;
	pthread_mutex_lock(&endpoint_of(&a)->receive_lock);
	half_request(&a, &b, IBV_WR_RDMA_WRITE, 8, 1);
	assert_int_equal(tp_fault_wire_set("dead"), 0);
	pthread_mutex_unlock(&endpoint_of(&a)->receive_lock);
	for (time_t until = time(NULL) + 30; atomic_load(&half_qp(&b)->state) != IBV_QPS_ERR && time(NULL) < until;)
		poll(NULL, 0, 1);
	b.mr->rkey ^= 0x10;
	assert_int_equal(tp_qp_destroy(b.qp), 0);
	b.qp = NULL;
	wait_for_probe();
	assert_int_equal(tp_fault_wire_set("none"), 0);
	assert_int_equal(half_status(&a), IBV_WC_REM_ACCESS_ERR);
	halves_close();
}

/* What was asked for before a queue pair is destroyed has its answer, however long that is. */
static void a_read_that_was_taken_in_is_answered_when_its_queue_pair_is_destroyed(void **state)
{
	(void)state;
	halves_open(&(struct halves_options){ 0 });
	memset(b.data, 0x5a, HALF_BYTES);
	half_request(&a, &b, IBV_WR_RDMA_READ, 32768, 4);
	/* All four requests have been looked at by b, perhaps answered in part. */
	for (time_t until = time(NULL) + 30; time(NULL) < until; poll(NULL, 0, 1)) {
		pthread_mutex_lock(&half_qp(&b)->lock);
		bool taken = half_qp(&b)->recv_psn == 128;
		pthread_mutex_unlock(&half_qp(&b)->lock);
		if (taken)
			break;
	}
	assert_int_equal(tp_qp_destroy(b.qp), 0);
	b.qp = NULL;
	half_complete(&a, 4);
	assert_memory_equal(a.data, b.data, 32768);
	halves_close();
}

/* Whose READ is done may write where it read, though a request that came twice is still being answered: what that reads is dropped. (The thread
 * sanitizer looks on.) */
/* Who got no processor in time gives its peer, on a busy machine too, more time than the queue pair says. */
static void who_was_late_to_ask_waits_longer_for_the_answer(void **state)
{
	(void)state;
	enum { LATE_MS = 20, FACTOR = 16 };
	halves_open(&(struct halves_options){ .timeout = 1 });
	assert_int_equal(tp_fault_wire_set("dead"), 0);
	pthread_mutex_lock(&half_qp(&a)->lock);
	half_rc(&a)->late_ns = LATE_MS * 1000000ull;
	pthread_mutex_unlock(&half_qp(&a)->lock);
	uint64_t began_ms = tp_clock_ms();
	half_request(&a, &b, IBV_WR_RDMA_WRITE, 8, 1);
	assert_int_equal(half_status(&a), IBV_WC_RETRY_EXC_ERR);
	assert_true(tp_clock_ms() - began_ms >= LATE_MS * FACTOR);
	assert_int_equal(tp_fault_wire_set("none"), 0);
	halves_close();
}

static void who_has_what_it_read_may_write_there(void **state)
{
	(void)state;
	halves_open(&(struct halves_options){ 0 });
	assert_int_equal(tp_fault_wire_set("duplicate=1"), 0);
	for (int i = 0; i < 20; i++) {
		memset(b.data, i, 4096);
		half_request(&a, &b, IBV_WR_RDMA_READ, 4096, 1);
		half_complete(&a, 1);
		assert_int_equal(a.data[4095], i);
	}
	assert_int_equal(tp_fault_wire_set("none"), 0);
	halves_close();
}

int main(int argc, char **argv)
{
	halves_prepare(argc ? argv[0] : "");
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(an_unreliable_sender_does_not_flood_a_peer_that_does_not_read),
		cmocka_unit_test(who_never_says_what_arrived_is_waited_for_once),
		cmocka_unit_test(many_connections_do_not_overrun_the_socket_of_a_peer_that_does_not_read),
		cmocka_unit_test(what_is_acknowledged_is_not_under_way),
		cmocka_unit_test(an_acknowledgement_from_long_ago_acknowledges_nothing),
		cmocka_unit_test(a_congested_network_halves_the_window),
		cmocka_unit_test(what_was_sent_unreliably_is_not_under_way_for_long),
		cmocka_unit_test(a_repeat_is_answered_when_its_queue_pair_is_gone),
		cmocka_unit_test(a_repeat_is_answered_after_reset),
		cmocka_unit_test(a_repeat_is_answered_in_the_error_state),
		cmocka_unit_test(a_refusal_is_repeated_when_its_queue_pair_is_gone),
		cmocka_unit_test(who_has_what_it_read_may_write_there),
		cmocka_unit_test(who_was_late_to_ask_waits_longer_for_the_answer),
		cmocka_unit_test(a_read_that_was_taken_in_is_answered_when_its_queue_pair_is_destroyed),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
