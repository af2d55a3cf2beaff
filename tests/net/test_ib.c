/* The IB transport's data, both ends in one thread on the software card. */
#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <sched.h>
#include "helper_ib.h"
#include "sanitizers.h"

#define BYTES (4u << 20)

static int card(void **state)
{
	(void)state;
	ib_use_card(NULL);
	return 0;
}

static void sizes(void)
{
	static const size_t all[] = { 0, 1, 8, 127, 128, 129, 4096, 8191, 8192, 8193, 65537, 1u << 20, BYTES };
	struct ib_pair pair;

	ib_pair_open(&pair, BYTES);
	assert_int_equal(pair.who.from, net_hello.from);
	assert_int_equal(pair.who.channel, net_hello.channel);
	for (size_t i = 0; i < TP_ARRAY_LEN(all); i++) assert_int_equal(ib_exchange(&pair, 0, all[i], (int)i), ncclSuccess);
	for (int i = 0; i < 200; i++) assert_int_equal(ib_exchange(&pair, (size_t)i * 64, 1000, i), ncclSuccess);
	ib_pair_close(&pair);
}

static void messages_of_all_sizes_arrive(void **state)
{
	(void)state;
	sizes();
}

static void queue_pairs_take_turns(void **state)
{
	(void)state;
	net_set_environment("NCCL_IB_QPS_PER_CONNECTION=3", NULL);
	sizes();
}

static void queue_pairs_share_a_message(void **state)
{
	(void)state;
	net_set_environment("NCCL_IB_QPS_PER_CONNECTION=4", "NCCL_IB_SPLIT_DATA_ON_QPS=1", NULL);
	sizes();
}

static void data_that_may_overtake_is_followed_by_a_write_of_its_own(void **state)
{
	(void)state;
	net_set_environment("NCCL_IB_ADAPTIVE_ROUTING=1", "NCCL_IB_USE_INLINE=1", NULL);
	sizes();
}

static void many_are_outstanding_and_keep_their_order(void **state)
{
	struct ib_pair pair;
	void *sends[TP_NET_MAX_REQUESTS], *receives[TP_NET_MAX_REQUESTS], *more, *at;
	size_t got, bytes = 1000;
	int tag = 1;

	(void)state;
	net_set_environment("NCCL_IB_QPS_PER_CONNECTION=2", NULL);
	ib_pair_open(&pair, BYTES);
	for (int round = 0; round < 20; round++) {
		net_fill(pair.from, 1000 * TP_NET_MAX_REQUESTS, (uint32_t)round);
		for (size_t i = 0; i < TP_NET_MAX_REQUESTS; i++) assert_non_null(receives[i] = ib_recv(&pair, 1000 * i, 1000, 1));
		at = pair.to;
		assert_int_equal(tp_net_ib.irecv(pair.recv_comm, 1, &at, &bytes, &tag, &pair.recv_memory, &more), ncclSuccess);
		assert_null(more);
		for (size_t i = 0; i < TP_NET_MAX_REQUESTS; i++) assert_non_null(sends[i] = ib_send(&pair, 1000 * i, 1000 - i, 1));
		for (size_t i = 0; i < TP_NET_MAX_REQUESTS; i++) {
			assert_int_equal(ib_wait_both(sends[i], receives[i], &got), ncclSuccess);
			assert_int_equal(got, 1000 - i);
			assert_memory_equal(pair.from + 1000 * i, pair.to + 1000 * i, got);
		}
	}
	ib_pair_close(&pair);
}

static void parts_from_several_registrations_arrive_as_one_message(void **state)
{
	struct ib_pair pair;
	unsigned char *apart = malloc(100000);
	void *memory, *receive, *send = NULL;
	size_t got = 0;

	(void)state;
	ib_pair_open(&pair, 200000);
	net_fill(pair.from, 200, 1);
	net_fill(apart, 100000, 2);
	assert_int_equal(tp_net_ib.reg_memory(pair.send_comm, apart, 100000, TP_NET_HOST, &memory), ncclSuccess);
	for (int round = 0; round < 100; round++) {
		struct iovec parts[3] = { { pair.from, 12 }, { pair.from + 100, 8 }, { apart + round, (size_t)(90000 - round * 17) } };
		void *memories[3] = { pair.send_memory, pair.send_memory, memory };
		size_t whole = 20 + parts[2].iov_len;

		receive = ib_recv(&pair, 0, 200000, round);
		assert_non_null(receive);
		for (send = NULL; !send; sched_yield())
			assert_int_equal(tp_net_ib.isendv(pair.send_comm, parts, 3, round, memories, &send), ncclSuccess);
		assert_int_equal(ib_wait_both(send, receive, &got), ncclSuccess);
		assert_int_equal(got, whole);
		assert_memory_equal(pair.to, pair.from, 12);
		assert_memory_equal(pair.to + 12, pair.from + 100, 8);
		assert_memory_equal(pair.to + 20, apart + round, parts[2].iov_len);
	}
	assert_int_equal(tp_net_ib.dereg_memory(pair.send_comm, memory), ncclSuccess);
	ib_pair_close(&pair);
	free(apart);
}

static void a_group_of_receives_is_matched_by_tag(void **state)
{
	struct ib_pair pair;
	void *at[8], *memory[8], *receive, *sends[8];
	size_t room[8], got[8];
	int tags[8];
	bool done = false;

	(void)state;
	ib_pair_open(&pair, BYTES);
	net_fill(pair.from, 80000, 7);
	for (int round = 0; round < 50; round++) {
		for (int i = 0; i < 8; i++) {
			at[i] = pair.to + 10000 * i;
			room[i] = 10000;
			tags[i] = 100 + i;
			memory[i] = pair.recv_memory;
		}
		assert_int_equal(tp_net_ib.irecv(pair.recv_comm, 8, at, room, tags, memory, &receive), ncclSuccess);
		for (int i = 7; i >= 0; i--) assert_non_null(sends[i] = ib_send(&pair, (size_t)i * 10000, (size_t)(9000 + i), 100 + i));
		for (int i = 0; i < 8; i++)
			for (done = false; !done;) assert_int_equal(tp_net_ib.test(sends[i], &done, NULL), ncclSuccess);
		for (done = false; !done;) assert_int_equal(tp_net_ib.test(receive, &done, got), ncclSuccess);
		for (int i = 0; i < 8; i++) {
			assert_int_equal(got[i], 9000 + i);
			assert_memory_equal(pair.from + i * 10000, pair.to + i * 10000, got[i]);
		}
	}
	ib_pair_close(&pair);
}

static void a_message_may_be_smaller_than_its_receive_but_not_larger(void **state)
{
	struct ib_pair pair;
	void *receive, *send;
	size_t got;

	(void)state;
	ib_pair_open(&pair, BYTES);
	receive = ib_recv(&pair, 0, 1000, 1);
	send = ib_send(&pair, 0, 10, 1);
	assert_int_equal(ib_wait_both(send, receive, &got), ncclSuccess);
	assert_int_equal(got, 10);
	receive = ib_recv(&pair, 0, 1000, 1);
	assert_null(ib_send(&pair, 0, 1001, 1));
	assert_non_null(strstr(tp_log_last_error(), "1001 bytes"));
	assert_non_null(strstr(tp_log_last_error(), "at most 1000"));
	ib_pair_close(&pair);
}

static void a_wrong_tag_is_an_error_on_both_sides(void **state)
{
	struct ib_pair pair;
	void *receive;
	bool done = false;
	ncclResult_t result = ncclSuccess;

	(void)state;
	ib_pair_open(&pair, BYTES);
	receive = ib_recv(&pair, 0, 1000, 5);
	assert_null(ib_send(&pair, 0, 10, 6));
	assert_non_null(strstr(tp_log_last_error(), "tag 6"));
	while (result == ncclSuccess && !done) result = tp_net_ib.test(receive, &done, NULL);
	assert_int_equal(result, ncclRemoteError);
	assert_non_null(strstr(tp_log_last_error(), "tag 6"));
	ib_pair_close(&pair);
}

/* The peer writes entries as it likes: its count is no promise about ours. */
static void a_receiver_that_wants_too_many_messages_is_an_error(void **state)
{
	struct ib_pair pair;
	struct tp_ib_comm *comm;
	void *request;

	(void)state;
	ib_pair_open(&pair, BYTES);
	comm = pair.send_comm;
	comm->block->fifo[0][0].n = TP_NET_MAX_RECVS + 1;
	atomic_store(&comm->block->fifo[0][0].number, 1);
	assert_int_equal(tp_net_ib.isend(comm, pair.from, 10, 6, pair.send_memory, &request), ncclInternalError);
	assert_non_null(strstr(tp_log_last_error(), "the receiver wants 9 messages at once; 1 to 8 are possible"));
	ib_pair_close(&pair);
}

static void a_sender_that_leaves_is_seen_by_who_waits(void **state)
{
	struct ib_pair pair;
	void *receive;
	bool done = false;
	ncclResult_t result = ncclSuccess;

	(void)state;
	ib_pair_open(&pair, BYTES);
	receive = ib_recv(&pair, 0, 1000, 5);
	tp_net_ib.dereg_memory(pair.send_comm, pair.send_memory);
	tp_net_ib.close_send(pair.send_comm);
	pair.send_comm = NULL;
	while (result == ncclSuccess && !done) result = tp_net_ib.test(receive, &done, NULL);
	assert_int_equal(result, ncclRemoteError);
	assert_non_null(strstr(tp_log_last_error(), "rank 5 <- rank 3"));
	ib_pair_close(&pair);
}

static void what_was_sent_before_leaving_still_arrives(void **state)
{
	struct ib_pair pair;
	void *receive;
	bool done = false;
	size_t got = 0;

	(void)state;
	ib_pair_open(&pair, BYTES);
	receive = ib_recv(&pair, 0, BYTES, 5);
	assert_non_null(ib_send(&pair, 0, BYTES, 5));
	tp_net_ib.leaving(pair.send_comm);
	tp_net_ib.close_send(pair.send_comm);
	tp_net_ib.dereg_memory(pair.recv_comm, pair.send_memory);
	pair.send_comm = NULL;
	while (!done) assert_int_equal(tp_net_ib.test(receive, &done, &got), ncclSuccess);
	assert_int_equal(got, BYTES);
	ib_pair_close(&pair);
}

/* Its queue pair may go before the acknowledgement does. */
static void a_receiver_may_leave_when_it_has_all(void **state)
{
	(void)state;
	ib_receiver_leaves();
}

static void what_no_peer_of_ours_sends_is_called_that(void **state)
{
	struct ib_pair pair;
	ncclResult_t result = ncclSuccess;
	bool done = false;
	void *receive;

	(void)state;
	ib_pair_open(&pair, 4096);
	receive = ib_recv(&pair, 0, 4096, 1);
	assert_int_equal(send(((struct tp_ib_comm *)pair.send_comm)->control.fd, "GET / HTTP/1.1\r\n\r\n", 18, 0), 18);
	while (result == ncclSuccess && !done) result = tp_net_ib.test(receive, &done, NULL);
	assert_int_equal(result, ncclInternalError);
	assert_non_null(strstr(tp_log_last_error(), "not what a peer of ours sends"));
	ib_pair_close(&pair);
}

static void a_message_larger_than_its_receive_never_counts_as_received(void **state)
{
	struct ib_pair pair;
	bool done = false;
	void *receive;

	(void)state;
	ib_pair_open(&pair, 4096);
	receive = ib_recv(&pair, 0, 1000, 1);
	tp_ib_arrived(pair.recv_comm, ((struct tp_ib_comm *)pair.recv_comm)->used[0], 0, htonl(1001));
	assert_int_equal(tp_net_ib.test(receive, &done, NULL), ncclInvalidUsage);
	assert_false(done);
	ib_pair_close(&pair);
}

static void a_forked_child_that_closes_takes_nothing_from_its_parent(void **state)
{
	struct ib_pair pair;
	int status = 0;

	(void)state;
	if (SANITIZED) skip();
	ib_pair_open(&pair, 4096);
	assert_int_equal(ib_exchange(&pair, 0, 4096, 1), ncclSuccess);
	pid_t child = fork();
	if (child == 0) {
		tp_net_ib.close_send(pair.send_comm);
		tp_net_ib.close_recv(pair.recv_comm);
		_exit(0);
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_int_equal(status, 0);
	for (int i = 0; i < 100; i++) assert_int_equal(ib_exchange(&pair, 0, 4096, i), ncclSuccess);
	ib_pair_close(&pair);
}

/* A sender says every second which way it would rather take, and its peer's program may be elsewhere for any time. */
static void wishes_that_nobody_takes_do_not_fill_the_inbox(void **state)
{
	struct ib_pair pair;
	struct tp_ib_record want, last;
	struct tp_ib_comm *sender, *receiver;

	(void)state;
	ib_pair_open(&pair, 4096);
	sender = pair.send_comm;
	receiver = pair.recv_comm;
	tp_ib_record_start(&want, TP_IB_WANT);
	for (int i = 0; i < 3 * TP_IB_INBOX; i++) assert_int_equal(tp_ib_control_send(&sender->control, &want), 0);
	/* Answered behind all of these. */
	uint32_t before = atomic_load_explicit(&sender->control.pongs, memory_order_relaxed);
	tp_ib_record_start(&last, TP_IB_PING);
	assert_int_equal(tp_ib_control_send(&sender->control, &last), 0);
	while (atomic_load_explicit(&sender->control.pongs, memory_order_relaxed) == before && !atomic_load_explicit(&receiver->control.closed, memory_order_relaxed)) usleep(1000);
	assert_int_equal(atomic_load_explicit(&receiver->control.closed, memory_order_relaxed), 0);
	assert_int_equal(atomic_load_explicit(&receiver->control.waiting, memory_order_acquire), 1);
	for (int i = 0; i < 10; i++) assert_int_equal(ib_exchange(&pair, 0, 4096, i), ncclSuccess);
	ib_pair_close(&pair);
}

static void nothing_is_left_open(void **state)
{
	struct ib_pair pair;

	(void)state;
	ib_pair_open(&pair, 4096);
	ib_pair_close(&pair);
	int before = net_open_descriptors();
	for (int i = 0; i < 5; i++) {
		ib_pair_open(&pair, 4096);
		assert_int_equal(ib_exchange(&pair, 0, 4096, 1), ncclSuccess);
		ib_pair_close(&pair);
	}
	assert_int_equal(net_open_descriptors(), before);
	assert_int_equal(tp_ib_reg_count(tp_ib_port(0)->context), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup(messages_of_all_sizes_arrive, card),
		cmocka_unit_test_setup(queue_pairs_take_turns, card),
		cmocka_unit_test_setup(queue_pairs_share_a_message, card),
		cmocka_unit_test_setup(data_that_may_overtake_is_followed_by_a_write_of_its_own, card),
		cmocka_unit_test_setup(many_are_outstanding_and_keep_their_order, card),
		cmocka_unit_test_setup(parts_from_several_registrations_arrive_as_one_message, card),
		cmocka_unit_test_setup(a_group_of_receives_is_matched_by_tag, card),
		cmocka_unit_test_setup(a_message_may_be_smaller_than_its_receive_but_not_larger, card),
		cmocka_unit_test_setup(a_wrong_tag_is_an_error_on_both_sides, card),
		cmocka_unit_test_setup(a_receiver_that_wants_too_many_messages_is_an_error, card),
		cmocka_unit_test_setup(a_sender_that_leaves_is_seen_by_who_waits, card),
		cmocka_unit_test_setup(what_was_sent_before_leaving_still_arrives, card),
		cmocka_unit_test_setup(a_receiver_may_leave_when_it_has_all, card),
		cmocka_unit_test_setup(what_no_peer_of_ours_sends_is_called_that, card),
		cmocka_unit_test_setup(a_message_larger_than_its_receive_never_counts_as_received, card),
		cmocka_unit_test_setup(a_forked_child_that_closes_takes_nothing_from_its_parent, card),
		cmocka_unit_test_setup(wishes_that_nobody_takes_do_not_fill_the_inbox, card),
		cmocka_unit_test_setup(nothing_is_left_open, card),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
