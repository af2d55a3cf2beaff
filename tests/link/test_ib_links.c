/* Net links over RDMA: two ranks of one process over the software card. Chunks that are lent to cards that take few places a message (it is told to be one); the end. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "link/net_link.h"
#include "net/ib/ib.h"

#define BYTES 100000

static struct {
	struct tp_boot boots[2];
	struct tp_boot_peer peers[2];
	_Atomic uint32_t abort[2];
	struct tp_net_links *nets[2];
	unsigned char handles[2][TP_NET_HANDLE_BYTES];
	struct tp_link sender, receiver;
} world;

static void make_world(int places)
{
	struct tp_net_links_options options = { .net_name = "IB", .nchannels = 1 };

	memset(&world, 0, sizeof(world));
	tp_ib_forget_devices();
	tp_param_reload();
	assert_int_equal(tp_net_ib.init(), ncclSuccess);
	for (int i = 0; i < tp_ib_port_count(); i++) tp_ib_port(i)->context->attr.max_sge = places;
	for (int r = 0; r < 2; r++) {
		world.peers[r] = (struct tp_boot_peer){ .rank = r, .host = r, .pid = getpid(), .host_name = "here", .device = r };
		world.boots[r] = (struct tp_boot){ .rank = r, .nranks = 2, .host = r, .nhosts = 2, .nlocal = 1, .peers = world.peers, .comm_hash = 77,
			.secret = "a secret of the communicator", .abort = &world.abort[r] };
		assert_int_equal(tp_net_links_listen(&world.boots[r], &options, world.handles[r], &world.nets[r]), ncclSuccess);
	}
	for (int r = 0; r < 2; r++) {
		memcpy(world.nets[r]->handles, world.handles, sizeof(world.handles));
		assert_int_equal(tp_net_links_open(world.nets[r], NULL, 0, 0, 0, 1, r ? &world.receiver : &world.sender), ncclSuccess);
	}
}

static void progress(void)
{
	for (int r = 0; r < 2; r++) {
		bool moved = false;
		assert_int_equal(tp_net_links_progress(world.nets[r], &moved), ncclSuccess);
	}
	sched_yield();
}

static void end_world(void)
{
	for (int r = 0; r < 2; r++) tp_net_links_destroy(world.nets[r]);
}

/* A chunk of bytes that begins with `first` from elsewhere. */
static void lend(const unsigned char *memory, uint32_t bytes, uint64_t first, uint32_t first_bytes)
{
	struct tp_slot *slot = tp_link_claim(&world.sender);
	struct tp_slot_lent *lent = (struct tp_slot_lent *)slot->data;
	void *grant;

	assert_true(tp_link_lend(&world.sender, memory, bytes, &grant));
	*lent = (struct tp_slot_lent){ .addr = (uintptr_t)memory, .grant = grant, .first_bytes = first_bytes };
	memcpy(lent->first, &first, sizeof(first));
	slot->tag = 5;
	slot->kind = TP_SLOT_LENT;
	slot->bytes = first_bytes + bytes;
	tp_link_publish(&world.sender, slot);
}

static void two_places_are_enough(void **state)
{
	unsigned char *memory = malloc(BYTES);
	struct tp_net_buffer *buffer;
	struct tp_slot *slot;
	uint64_t first = 0x1122334455667788;

	(void)state;
	make_world(2);
	for (int i = 0; i < BYTES; i++) memory[i] = (unsigned char)(i * 7 + (i >> 8));
	while (!tp_net_link_is_ready(&world.sender) || !tp_net_link_is_ready(&world.receiver)) progress();
	assert_int_equal(tp_net_links_register(world.nets[0], memory, BYTES, &buffer), ncclSuccess);
	for (uint32_t first_bytes = 0; first_bytes <= 8; first_bytes += 8) {
		lend(memory, BYTES, first, first_bytes);
		while (!(slot = tp_link_peek(&world.receiver))) progress();
		assert_int_equal(slot->bytes, first_bytes + BYTES);
		assert_memory_equal(slot->data, &first, first_bytes);
		assert_memory_equal(slot->data + first_bytes, memory, BYTES);
		tp_link_release(&world.receiver);
		while (!tp_link_drained(&world.sender)) progress();
	}
	tp_net_links_deregister(world.nets[0], buffer);
	end_world();
	free(memory);
}

static void with_one_place_all_is_copied(void **state)
{
	static unsigned char memory[BYTES];
	struct tp_net_buffer *buffer;
	void *grant;

	(void)state;
	make_world(1);
	while (!tp_net_link_is_ready(&world.sender) || !tp_net_link_is_ready(&world.receiver)) progress();
	assert_int_equal(tp_net_links_register(world.nets[0], memory, BYTES, &buffer), ncclSuccess);
	assert_false(tp_link_lend(&world.sender, memory, BYTES, &grant));
	tp_net_links_deregister(world.nets[0], buffer);
	end_world();
}

/* Else sums of what isn't registered would be made in the wrong place, and copied once more. */
static void only_what_is_registered_is_lent(void **state)
{
	static unsigned char memory[2 * BYTES];
	struct tp_net_buffer *buffer;

	(void)state;
	make_world(2);
	while (!tp_net_link_is_ready(&world.sender) || !tp_net_link_is_ready(&world.receiver)) progress();
	assert_false(tp_link_prepare_loan(&world.sender, memory, BYTES));
	assert_int_equal(tp_net_links_register(world.nets[0], memory, BYTES, &buffer), ncclSuccess);
	assert_true(tp_link_prepare_loan(&world.sender, memory, BYTES));
	assert_false(tp_link_prepare_loan(&world.sender, memory + 1, BYTES));
	tp_net_links_deregister(world.nets[0], buffer);
	assert_false(tp_link_prepare_loan(&world.sender, memory, BYTES));
	end_world();
}

/* No room for its last word: what it sent arrives all the same, and who waits for more is told that it has left. */
static void a_sender_that_ends_in_front_of_a_full_ring_has_left(void **state)
{
	struct tp_slot *slot;
	ncclResult_t result = ncclSuccess;

	(void)state;
	make_world(2);
	while (!tp_net_link_is_ready(&world.sender) || !tp_net_link_is_ready(&world.receiver)) progress();
	for (uint32_t i = 0; i <= world.sender.mask; i++) {
		slot = tp_link_claim(&world.sender);
		slot->tag = i;
		slot->kind = TP_SLOT_INLINE;
		slot->bytes = 1000;
		memset(slot->data, (int)i, 1000);
		tp_link_publish(&world.sender, slot);
	}
	while (!tp_link_drained(&world.sender)) progress();
	tp_net_links_destroy(world.nets[0]);
	for (uint32_t i = 0; i <= world.receiver.mask; i++) {
		while (!(slot = tp_link_peek(&world.receiver))) sched_yield();
		assert_int_equal(slot->tag, i);
		assert_int_equal(slot->data[999], i);
		tp_link_release(&world.receiver);
	}
	while (result == ncclSuccess) {
		bool moved = false;
		assert_int_equal(tp_net_links_progress(world.nets[1], &moved), ncclSuccess);
		result = tp_net_link_check(&world.receiver);
		sched_yield();
	}
	assert_int_equal(result, ncclRemoteError);
	assert_non_null(strstr(tp_log_last_error(), "has left the communicator"));
	tp_net_links_destroy(world.nets[1]);
}

/* Of every size between a line and a slot, while the rings are moved into large pages under what is on its way. */
static void a_ring_keeps_what_it_holds_when_its_first_large_chunk_comes(void **state)
{
	enum { CHUNKS = 60, FIRST_LARGE = 12 };
	static unsigned char expected[400000];

	(void)state;
	make_world(2);
	while (!tp_net_link_is_ready(&world.sender) || !tp_net_link_is_ready(&world.receiver)) progress();
	assert_true(world.sender.capacity >= sizeof(expected));
	for (uint32_t sent = 0, got = 0; got < CHUNKS;) {
		struct tp_slot *slot = sent < CHUNKS ? tp_link_claim(&world.sender) : NULL;
		if (slot) {
			slot->bytes = sent < FIRST_LARGE ? 64 + sent : sent % 3 ? 400000 - sent : 100;
			slot->tag = sent;
			slot->kind = TP_SLOT_INLINE;
			memset(slot->data, (int)sent + 1, slot->bytes);
			tp_link_publish(&world.sender, slot);
			sent++;
		}
		progress();
		if (!(slot = tp_link_peek(&world.receiver))) continue;
		if (got + world.receiver.mask < FIRST_LARGE) assert_false(world.receiver.net->enlarged);
		assert_int_equal(slot->tag, got);
		assert_int_equal(slot->bytes, got < FIRST_LARGE ? 64 + got : got % 3 ? 400000 - got : 100);
		memset(expected, (int)got + 1, slot->bytes);
		assert_memory_equal(slot->data, expected, slot->bytes);
		tp_link_release(&world.receiver);
		got++;
	}
	assert_true(world.sender.net->enlarged && world.receiver.net->enlarged);
	while (!tp_link_drained(&world.sender)) progress();
	end_world();
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(two_places_are_enough),
		cmocka_unit_test(with_one_place_all_is_copied),
		cmocka_unit_test(only_what_is_registered_is_lent),
		cmocka_unit_test(a_sender_that_ends_in_front_of_a_full_ring_has_left),
		cmocka_unit_test(a_ring_keeps_what_it_holds_when_its_first_large_chunk_comes),
	};

	setenv("TELPHER_VERBS_HIDE_REAL", "1", 1);
	setenv("NCCL_IBVERBS_LIB", CARD_LIBRARY, 1);
	setenv("NCCL_IB_HCA", "telpher", 1);
	setenv("NCCL_SOCKET_IFNAME", "lo", 1);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
