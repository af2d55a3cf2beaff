/* Net links between ranks of one process that stand for hosts of their own. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <dirent.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include "link/net_link.h"

enum { RANKS = 3 };

static struct {
	struct tp_boot boots[RANKS];
	struct tp_boot_peer peers[RANKS];
	_Atomic uint32_t abort[RANKS];
	struct tp_net_links *nets[RANKS];
	unsigned char handles[RANKS][TP_NET_HANDLE_BYTES];
} world;

static int open_descriptors(void)
{
	DIR *dir = opendir("/proc/self/fd");
	int n = 0;

	while (readdir(dir)) n++;
	closedir(dir);
	return n;
}

static int make_world(void **state)
{
	struct tp_net_links_options options = { .net_name = "socket", .nchannels = 4 };

	(void)state;
	memset(&world, 0, sizeof(world));
	setenv("NCCL_SOCKET_IFNAME", "lo", 1);
	setenv("TELPHER_NET_CHUNK", "64K", 1);
	tp_param_reload();
	for (int r = 0; r < RANKS; r++) {
		world.peers[r] = (struct tp_boot_peer){ .rank = r, .host = r, .pid = getpid(), .host_name = "here", .device = r };
		world.boots[r] = (struct tp_boot){ .rank = r, .nranks = RANKS, .host = r, .nhosts = RANKS, .nlocal = 1, .peers = world.peers, .comm_hash = 77,
			.secret = "a secret of the communicator", .abort = &world.abort[r] };
		assert_int_equal(tp_net_links_listen(&world.boots[r], &options, world.handles[r], &world.nets[r]), ncclSuccess);
	}
	for (int r = 0; r < RANKS; r++) memcpy(world.nets[r]->handles, world.handles, sizeof(world.handles));
	return 0;
}

static int end_world(void **state)
{
	(void)state;
	for (int r = 0; r < RANKS; r++) tp_net_links_destroy(world.nets[r]);
	return 0;
}

static void progress_all(void)
{
	for (int r = 0; r < RANKS; r++) {
		bool moved = false;
		if (world.nets[r]) assert_int_equal(tp_net_links_progress(world.nets[r], &moved), ncclSuccess);
	}
	sched_yield();
}

static void open_link(int channel, int lane_class, int from, int to, struct tp_link *sender, struct tp_link *receiver)
{
	memset(sender, 0, sizeof(*sender));
	memset(receiver, 0, sizeof(*receiver));
	assert_int_equal(tp_net_links_open(world.nets[from], NULL, channel, lane_class, from, to, sender), ncclSuccess);
	assert_int_equal(tp_net_links_open(world.nets[to], NULL, channel, lane_class, from, to, receiver), ncclSuccess);
}

static bool try_send(struct tp_link *l, const void *data, uint32_t bytes, uint32_t tag)
{
	struct tp_slot *slot = tp_link_claim(l);

	if (!slot) return false;
	slot->bytes = bytes;
	slot->tag = tag;
	slot->kind = TP_SLOT_INLINE;
	memcpy(slot->data, data, bytes);
	tp_link_publish(l, slot);
	return true;
}

static struct tp_slot *wait_chunk(struct tp_link *l)
{
	struct tp_slot *slot;

	while (!(slot = tp_link_peek(l))) progress_all();
	return slot;
}

/* Without rank 1, whose links may have been closed under it. */
static const char *wait_chunk_of_two(struct tp_link *l)
{
	struct tp_slot *slot;
	bool moved = false;

	while (!(slot = tp_link_peek(l))) {
		assert_int_equal(tp_net_links_progress(world.nets[0], &moved), ncclSuccess);
		assert_int_equal(tp_net_links_progress(world.nets[2], &moved), ncclSuccess);
		sched_yield();
	}
	return (const char *)slot->data;
}

static void chunks_arrive_in_order_with_their_tags(void **state)
{
	static struct tp_link s, r;
	unsigned char data[65536];
	uint32_t sent = 0;

	(void)state;
	open_link(1, 2, 0, 1, &s, &r);
	assert_int_equal(s.kind, TP_LINK_NET);
	assert_int_equal(s.peer, 1);
	assert_int_equal(r.peer, 0);
	assert_int_equal(s.capacity, 65536);
	for (uint32_t got = 0; got < 500;) {
		struct tp_slot *slot;
		memset(data, (int)(sent & 0xff), sizeof(data));
		if (sent < 500 && try_send(&s, data, sent * 7919 % 65537, sent ^ 0xabcd)) sent++;
		progress_all();
		if (!(slot = tp_link_peek(&r))) continue;
		assert_int_equal(slot->bytes, got * 7919 % 65537);
		assert_int_equal(slot->tag, got ^ 0xabcd);
		assert_int_equal(slot->kind, TP_SLOT_INLINE);
		for (uint32_t i = 0; i < slot->bytes; i++) assert_int_equal(slot->data[i], got & 0xff);
		tp_link_release(&r);
		got++;
	}
	while (!tp_link_drained(&s)) progress_all();
	assert_true(tp_net_link_is_ready(&s) && tp_net_link_is_ready(&r));
	assert_false(tp_net_links_need_progress(world.nets[0]));
}

/* A chunk of `first` and what memory holds, published; false: the link takes no loan. */
static bool try_lend(struct tp_link *l, const void *memory, uint32_t bytes, const char *first, uint32_t tag)
{
	struct tp_slot *slot = tp_link_claim(l);
	struct tp_slot_lent *lent = (struct tp_slot_lent *)slot->data;
	void *grant;

	if (!tp_link_lend(l, memory, bytes, &grant)) return false;
	*lent = (struct tp_slot_lent){ .addr = (uintptr_t)memory, .grant = grant, .first_bytes = (uint32_t)strlen(first) };
	memcpy(lent->first, first, strlen(first));
	slot->bytes = (uint32_t)strlen(first) + bytes;
	slot->tag = tag;
	slot->kind = TP_SLOT_LENT;
	tp_link_publish(l, slot);
	return true;
}

static void memory_on_loan_is_sent_from_where_it_lies(void **state)
{
	static struct tp_link s, r;
	unsigned char *data = malloc(60000);
	struct tp_slot *slot;

	(void)state;
	open_link(0, 0, 2, 1, &s, &r);
	assert_false(try_lend(&s, data, 60000, "", 1));         /* not connected: nobody knows yet what it takes */
	while (!tp_net_link_is_ready(&s) || !tp_net_link_is_ready(&r)) progress_all();
	for (int i = 0; i < 60000; i++) data[i] = (unsigned char)(i * 13);
	for (uint32_t round = 0; round < 40; round++) {
		const char *first = round % 3 ? "in front" : "";
		assert_true(try_lend(&s, data, 60000 - round, first, round));
		slot = wait_chunk(&r);
		assert_int_equal(slot->kind, TP_SLOT_INLINE);
		assert_int_equal(slot->tag, round);
		assert_int_equal(slot->bytes, 60000 - round + strlen(first));
		assert_memory_equal(slot->data, first, strlen(first));
		assert_memory_equal(slot->data + strlen(first), data, 60000 - round);
		tp_link_release(&r);
	}
	while (!tp_link_drained(&s)) progress_all();
	free(data);
}

static void what_was_lent_is_nobody_s_after_a_recall(void **state)
{
	static struct tp_link s, r, other, other_end;
	size_t bytes = 65536;
	void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	bool moved = false;

	(void)state;
	open_link(0, 0, 2, 1, &s, &r);
	open_link(0, 0, 2, 0, &other, &other_end);
	while (!tp_net_link_is_ready(&s) || !tp_net_link_is_ready(&r) || !tp_net_link_is_ready(&other)) progress_all();
	while (tp_link_claim(&s)) assert_true(try_lend(&s, data, (uint32_t)bytes, "", 7));
	assert_int_equal(tp_net_links_progress(world.nets[2], &moved), ncclSuccess);
	tp_net_links_recall(world.nets[2]);
	munmap(data, bytes);
	/* Others go on; the receiver sees an end, sooner or later, and no more of it than what was sent. */
	assert_true(try_send(&other, "still here", 11, 3));
	assert_string_equal(wait_chunk_of_two(&other_end), "still here");
	assert_false(tp_net_links_need_progress(world.nets[2]));
	tp_link_release(&other_end);
}

static void a_full_ring_holds_the_sender_back(void **state)
{
	static struct tp_link s, r;
	uint32_t sent = 0, got = 0;

	(void)state;
	open_link(0, 0, 0, 1, &s, &r);
	while (!tp_net_link_is_ready(&s) || !tp_net_link_is_ready(&r)) progress_all();
	/* As many as fit in both rings and what the network buffers; the receiver takes none. */
	static unsigned char chunk[65536];
	for (int idle = 0; idle < 2000; idle++) {
		if (try_send(&s, chunk, sizeof(chunk), sent)) sent++, idle = 0;
		progress_all();
	}
	assert_true(sent >= r.mask + 1);
	assert_true(s.next - s.head_seen == s.mask + 1);
	while (got < sent) {
		assert_int_equal(wait_chunk(&r)->tag, got++);
		tp_link_release(&r);
	}
	while (!tp_link_drained(&s)) progress_all();
}

static void a_sender_may_come_before_its_receiver_asks(void **state)
{
	static struct tp_link s0, s1, r0, r1;

	(void)state;
	memset(&s0, 0, sizeof(s0));
	memset(&s1, 0, sizeof(s1));
	memset(&r0, 0, sizeof(r0));
	memset(&r1, 0, sizeof(r1));
	assert_int_equal(tp_net_links_open(world.nets[0], NULL, 3, 1, 0, 2, &s0), ncclSuccess);
	assert_int_equal(tp_net_links_open(world.nets[1], NULL, 3, 1, 1, 2, &s1), ncclSuccess);
	assert_true(try_send(&s0, "zero", 5, 1));
	assert_true(try_send(&s1, "one", 4, 2));
	/* Rank 2 asks for one: the other is kept. */
	assert_int_equal(tp_net_links_open(world.nets[2], NULL, 3, 1, 1, 2, &r1), ncclSuccess);
	assert_string_equal((char *)wait_chunk(&r1)->data, "one");
	assert_int_equal(tp_net_links_open(world.nets[2], NULL, 3, 1, 0, 2, &r0), ncclSuccess);
	assert_string_equal((char *)wait_chunk(&r0)->data, "zero");
}

static void all_pairs_and_channels_at_once(void **state)
{
	static struct tp_link s[RANKS][RANKS][4], r[RANKS][RANKS][4];

	(void)state;
	for (int from = 0; from < RANKS; from++)
		for (int to = 0; to < RANKS; to++)
			for (int c = 0; from != to && c < 4; c++) open_link(c, 0, from, to, &s[from][to][c], &r[from][to][c]);
	for (uint32_t n = 0; n < 40; n++)
		for (int from = 0; from < RANKS; from++)
			for (int to = 0; to < RANKS; to++)
				for (int c = 0; from != to && c < 4; c++) {
					uint32_t value = n * 1000 + (uint32_t)(from * 100 + to * 10 + c);
					while (!try_send(&s[from][to][c], &value, sizeof(value), value)) progress_all();
					struct tp_slot *slot = wait_chunk(&r[from][to][c]);
					assert_int_equal(slot->tag, value);
					assert_memory_equal(slot->data, &value, sizeof(value));
					tp_link_release(&r[from][to][c]);
				}
}

static void what_was_published_survives_the_close(void **state)
{
	static struct tp_link s, r;

	(void)state;
	open_link(0, 0, 0, 1, &s, &r);
	while (!tp_net_link_is_ready(&s) || !tp_net_link_is_ready(&r)) progress_all();
	for (uint32_t i = 0; i < 8; i++) assert_true(try_send(&s, &i, sizeof(i), i));
	tp_net_links_close(world.nets[0], &s);
	for (uint32_t i = 0; i < 8; i++) {
		assert_int_equal(wait_chunk(&r)->tag, i);
		tp_link_release(&r);
	}
}

static void a_sender_that_leaves_in_good_order_is_no_error(void **state)
{
	static struct tp_link s, r;

	(void)state;
	open_link(0, 0, 0, 1, &s, &r);
	while (!tp_net_link_is_ready(&s) || !tp_net_link_is_ready(&r)) progress_all();
	assert_int_equal(tp_net_link_check(&r), ncclSuccess);
	tp_net_links_destroy(world.nets[0]);
	world.nets[0] = NULL;
	while (r.net->state != TP_NET_LEFT) progress_all();
	progress_all();
	assert_int_equal(tp_net_link_check(&r), ncclRemoteError);
	assert_non_null(strstr(tp_log_last_error(), "rank 0"));
}

static void a_chunk_above_the_capacity_is_an_error(void **state)
{
	static struct tp_link s, r;
	struct tp_slot *slot;
	bool moved = false;

	(void)state;
	open_link(0, 0, 0, 1, &s, &r);
	while (!tp_net_link_is_ready(&s)) progress_all();
	slot = tp_link_claim(&s);
	slot->bytes = 65537;
	slot->kind = TP_SLOT_INLINE;
	tp_link_publish(&s, slot);
	assert_int_equal(tp_net_links_progress(world.nets[0], &moved), ncclInternalError);
	atomic_store(&world.abort[0], 1);
}

static void descriptors_to_sleep_on_are_offered_while_something_is_awaited(void **state)
{
	static struct tp_link s, r;
	int fds[16];
	uint32_t events[16];

	(void)state;
	assert_int_equal(tp_net_links_poll_fds(world.nets[1], fds, events, 16), 0);
	open_link(0, 0, 0, 1, &s, &r);
	assert_true(tp_net_links_poll_fds(world.nets[1], fds, events, 16) >= 1);
	while (!tp_net_link_is_ready(&s) || !tp_net_link_is_ready(&r)) progress_all();
	progress_all();
	assert_int_equal(tp_net_links_poll_fds(world.nets[1], fds, events, 16), 1);
	assert_int_equal(tp_net_links_poll_fds(world.nets[0], fds, events, 16), 0);
}

static void opening_and_closing_leaves_nothing_behind(void **state)
{
	int before = open_descriptors();
	static struct tp_link s, r;

	(void)state;
	for (int i = 0; i < 50; i++) {
		open_link(0, 0, 0, 1, &s, &r);
		if (i % 2) while (!tp_net_link_is_ready(&s) || !tp_net_link_is_ready(&r)) progress_all();
		tp_net_links_close(world.nets[0], &s);
		tp_net_links_close(world.nets[1], &r);
		tp_net_links_destroy(world.nets[0]);
		tp_net_links_destroy(world.nets[1]);
		tp_net_links_destroy(world.nets[2]);
		make_world(NULL);
	}
	assert_int_equal(open_descriptors(), before);
}

/* Rank 0 lives in a child, which ends without a word as soon as its data is out. */
static void what_came_before_a_sudden_end_can_be_used(void **state)
{
	static struct tp_link r;
	pid_t child;

	(void)state;
	child = fork();
	if (child == 0) {
		static struct tp_link s;
		bool moved;
		if (tp_net_links_open(world.nets[0], NULL, 0, 0, 0, 1, &s) != ncclSuccess) _exit(1);
		for (uint32_t i = 0; i < 5; i++)
			if (!try_send(&s, &i, sizeof(i), i)) _exit(2);
		while (!tp_link_drained(&s))
			if (tp_net_links_progress(world.nets[0], &moved) != ncclSuccess) _exit(3);
		_exit(0);
	}
	memset(&r, 0, sizeof(r));
	assert_int_equal(tp_net_links_open(world.nets[1], NULL, 0, 0, 0, 1, &r), ncclSuccess);
	while (r.net->state != TP_NET_LOST) progress_all();
	assert_int_equal(waitpid(child, NULL, 0), child);
	for (uint32_t i = 0; i < 5; i++) {
		progress_all();
		assert_int_equal(tp_link_peek(&r)->tag, i);
		tp_link_release(&r);
	}
	bool moved = false;
	ncclResult_t result = ncclSuccess;
	while (result == ncclSuccess) result = tp_net_links_progress(world.nets[1], &moved);
	assert_int_equal(result, ncclRemoteError);
	atomic_store(&world.abort[1], 1);
}

/* Rank 1 lives in a child, which is killed in the middle. */
static void a_killed_receiver_or_sender_is_a_remote_error(void **state)
{
	(void)state;
	for (int child_sends = 0; child_sends < 2; child_sends++) {
		struct tp_link mine = { 0 };
		int me = child_sends ? 1 : 0, other = 1 - me;
		ncclResult_t result = ncclSuccess;
		pid_t child = fork();
		if (child == 0) {
			struct tp_link theirs = { 0 };
			if (tp_net_links_open(world.nets[other], NULL, 0, 0, 0, 1, &theirs) != ncclSuccess) _exit(1);
			for (uint32_t n = 0;; n++) {
				bool moved;
				if (tp_net_links_progress(world.nets[other], &moved) != ncclSuccess) _exit(2);
				if (child_sends) try_send(&theirs, &n, sizeof(n), n);
				else if (tp_link_peek(&theirs)) tp_link_release(&theirs);
				if (theirs.next > 100) raise(SIGKILL);
			}
		}
		assert_int_equal(tp_net_links_open(world.nets[me], NULL, 0, 0, 0, 1, &mine), ncclSuccess);
		for (uint32_t n = 0; result == ncclSuccess; n++) {
			bool moved;
			if (!child_sends) try_send(&mine, &n, sizeof(n), n);
			result = tp_net_links_progress(world.nets[me], &moved);
			if (child_sends && tp_link_peek(&mine)) tp_link_release(&mine);
		}
		assert_int_equal(result, ncclRemoteError);
		assert_non_null(strstr(tp_log_last_error(), "rank 0 -> rank 1"));
		assert_int_equal(waitpid(child, NULL, 0), child);
		atomic_store(&world.abort[me], 1);
		tp_net_links_close(world.nets[me], &mine);
		end_world(NULL);
		make_world(NULL);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(chunks_arrive_in_order_with_their_tags, make_world, end_world),
		cmocka_unit_test_setup_teardown(memory_on_loan_is_sent_from_where_it_lies, make_world, end_world),
		cmocka_unit_test_setup_teardown(what_was_lent_is_nobody_s_after_a_recall, make_world, end_world),
		cmocka_unit_test_setup_teardown(a_full_ring_holds_the_sender_back, make_world, end_world),
		cmocka_unit_test_setup_teardown(a_sender_may_come_before_its_receiver_asks, make_world, end_world),
		cmocka_unit_test_setup_teardown(all_pairs_and_channels_at_once, make_world, end_world),
		cmocka_unit_test_setup_teardown(what_was_published_survives_the_close, make_world, end_world),
		cmocka_unit_test_setup_teardown(a_sender_that_leaves_in_good_order_is_no_error, make_world, end_world),
		cmocka_unit_test_setup_teardown(a_chunk_above_the_capacity_is_an_error, make_world, end_world),
		cmocka_unit_test_setup_teardown(descriptors_to_sleep_on_are_offered_while_something_is_awaited, make_world, end_world),
		cmocka_unit_test_setup_teardown(opening_and_closing_leaves_nothing_behind, make_world, end_world),
		cmocka_unit_test_setup_teardown(what_came_before_a_sudden_end_can_be_used, make_world, end_world),
		cmocka_unit_test_setup_teardown(a_killed_receiver_or_sender_is_a_remote_error, make_world, end_world),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
