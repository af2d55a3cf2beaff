/* Groups of sends and receives, random and matched, and what happens where ranks don't agree. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "exec/helper_world.h"

enum { GROUPS = SANITIZED_THREAD ? 6 : 12, MOST = 24 };
struct message { int from, to; size_t bytes; };

static uint32_t draw(uint32_t *state)
{
	*state = *state * 1664525u + 1013904223u;
	return *state >> 8;
}

static unsigned char content(unsigned group, int message, size_t i) { return (unsigned char)(group * 31 + (unsigned)message * 7 + i * 13 + (i >> 8)); }

/* Every rank draws the same messages; the order in which it posts its own is the same everywhere, as matching demands. */
static int draw_group(unsigned group, int nranks, struct message *out)
{
	static const size_t sizes[] = { 0, 1, 40, 41, 48, 4096, 16384, 65537, 300000, 1500000 };
	uint32_t state = group * 77 + (uint32_t)nranks;
	int count = 1 + (int)(draw(&state) % MOST);
	for (int i = 0; i < count; i++)
		out[i] = (struct message){ (int)(draw(&state) % (unsigned)nranks), (int)(draw(&state) % (unsigned)nranks),
			sizes[draw(&state) % TP_ARRAY_LEN(sizes)] };
	return count;
}

static int run_transfers(struct world *world, const struct tp_exec_transfer *transfers, int n, ncclResult_t want)
{
	struct tp_transfer plain[2 * MOST];
	struct tp_plan *plan;
	for (int i = 0; i < n; i++) plain[i] = (struct tp_transfer){ transfers[i].peer, transfers[i].is_send };
	WORLD_CHECK(tp_plan_p2p(world->rank, world->nranks, plain, n, &plan) == ncclSuccess);
	struct tp_exec_call call = { .plan = plan, .chunk_bytes = 128 << 10, .line_bytes = 16, .reduce = { .type = ncclInt8 }, .tag = 99,
		.transfers = transfers, .ntransfers = n };
	ncclResult_t result = world_run_call(world, &call);
	tp_plan_free(plan);
	WORLD_CHECK(result == want);
	return 0;
}

static int random_groups(struct world *world)
{
	struct message messages[MOST];
	struct tp_exec_transfer transfers[2 * MOST];
	for (unsigned group = 0; group < GROUPS; group++) {
		int count = draw_group(group, world->nranks, messages), n = 0;
		int which[2 * MOST];
		for (int i = 0; i < count; i++) {
			for (int is_send = 1; is_send >= 0; is_send--) {
				const struct message *m = &messages[i];
				if ((is_send ? m->from : m->to) != world->rank) continue;
				unsigned char *buf = malloc(m->bytes + 1);
				WORLD_CHECK(buf);
				for (size_t k = 0; is_send && k < m->bytes; k++) buf[k] = content(group, i, k);
				buf[m->bytes] = 0x5a;
				which[n] = i;
				transfers[n++] = (struct tp_exec_transfer){ is_send ? m->to : m->from, is_send, buf, m->bytes };
			}
		}
		if (n) {
			int failed = run_transfers(world, transfers, n, ncclSuccess);
			if (failed) return failed;
		}
		for (int t = 0; t < n; t++) {
			unsigned char *buf = transfers[t].buf;
			for (size_t k = 0; k < transfers[t].bytes; k++) WORLD_CHECK(buf[k] == content(group, which[t], k));
			WORLD_CHECK(buf[transfers[t].bytes] == 0x5a);
			free(buf);
		}
	}
	return 0;
}

static void matched_groups_deliver_each_message_whole(void **state)
{
	(void)state;
	for (int n = 1; n < 6; n += 1 + n / 2) {
		for (int k = 0; k < 2 * WORLD_KINDS; k++) {
			struct world_options options = { .kind = k / 2 ? WORLD_PROCESSES : WORLD_THREADS, .nranks = n, .nchannels = 1, .by_ref = k % 2 };
			assert_int_equal(world_run(&options, random_groups, NULL), 0);
		}
	}
}

static int unequal_sizes(struct world *world)
{
	static char buf[100000];
	size_t bytes = world->rank ? 4096 : *(const size_t *)world->arg;
	struct tp_exec_transfer transfer = { 1 - world->rank, world->rank == 0, buf, bytes };
	if (world->rank == 0) {
		/* The sender of a reference waits for it to be read, which never happens: it only starts. */
		struct tp_plan *plan;
		struct tp_exec_op *op;
		bool moved, done;
		WORLD_CHECK(tp_plan_p2p(0, 2, &(struct tp_transfer){ 1, true }, 1, &plan) == ncclSuccess);
		struct tp_exec_call call = { .plan = plan, .chunk_bytes = 128 << 10, .line_bytes = 16, .reduce = { .type = ncclInt8 }, .tag = 99,
			.transfers = &transfer, .ntransfers = 1 };
		WORLD_CHECK(tp_exec_start(world->exec, &call, &op) == ncclSuccess);
		WORLD_CHECK(tp_exec_run(world->exec, op, &moved, &done) == ncclSuccess);
		world_barrier(world);
		if (!done) tp_exec_cancel(world->exec, op);
		tp_plan_free(plan);
		return 0;
	}
	int failed = run_transfers(world, &transfer, 1, ncclInvalidUsage);
	char want[64];
	snprintf(want, sizeof(want), "which sends %zu", *(const size_t *)world->arg);
	world_barrier(world);
	WORLD_CHECK(strstr(tp_log_last_error(), want) && strstr(tp_log_last_error(), "4096"));
	return failed;
}

static void a_send_of_another_size_than_its_receive_is_an_error_that_names_both(void **state)
{
	(void)state;
	static const size_t sizes[] = { 0, 8, 4095, 50000, 100000 };
	for (size_t i = 0; i < TP_ARRAY_LEN(sizes); i++) {
		for (int by_ref = 0; by_ref < 2; by_ref++) {
			struct world_options options = { .kind = WORLD_PROCESSES, .nranks = 2, .nchannels = 1, .by_ref = by_ref };
			assert_int_equal(world_run(&options, unequal_sizes, &sizes[i]), 0);
		}
	}
}

static int other_call(struct world *world)
{
	bool fused = *(const bool *)world->arg, handled = false;
	struct tp_layout *layout;
	struct tp_plan *plan;
	float in[4] = { 1, 2, 3, 4 }, out[4];
	WORLD_CHECK(tp_layout_create(2, (const int[]){ 0, 0 }, &layout) == ncclSuccess);
	struct tp_plan_spec spec = { TP_ALL_REDUCE, TP_ALGO_ONE_SHOT, -1, 1, layout };
	WORLD_CHECK(tp_plan_create(&spec, world->rank, &plan) == ncclSuccess);
	struct tp_exec_call call = { .plan = plan, .input = in, .output = out, .block_bytes = 8, .chunk_bytes = 4096, .line_bytes = 16,
		.reduce = { .type = ncclFloat32, .op = ncclSum }, .tag = 1 + (uint32_t)world->rank };
	ncclResult_t result = ncclSuccess;
	if (fused) result = tp_exec_one_shot(world->exec, &call, world->crowded, NULL, NULL, &handled);
	if (!handled) result = world_run_call(world, &call);
	WORLD_CHECK(result == ncclInvalidUsage);
	WORLD_CHECK(strstr(tp_log_last_error(), "belongs to another call"));
	tp_exec_forget(world->exec, plan);
	tp_plan_free(plan);
	tp_layout_free(layout);
	return 0;
}

static void a_chunk_of_another_call_is_an_error_at_once(void **state)
{
	(void)state;
	for (int fused = 0; fused < 2; fused++) {
		bool arg = fused;
		struct world_options options = { .kind = WORLD_PROCESSES, .nranks = 2, .nchannels = 1, .by_ref = true };
		assert_int_equal(world_run(&options, other_call, &arg), 0);
	}
}

struct poll_state { int calls; };

static ncclResult_t give_up(void *arg, uint64_t waited_ns)
{
	struct poll_state *state = arg;
	return ++state->calls > 3 && waited_ns > 1000000 ? ncclRemoteError : ncclSuccess;
}

static int waits_in_vain(struct world *world)
{
	struct tp_layout *layout;
	struct tp_plan *plan;
	float in[2] = { 1, 2 }, out[2];
	if (world->rank) return 0;
	WORLD_CHECK(tp_layout_create(2, (const int[]){ 0, 0 }, &layout) == ncclSuccess);
	struct tp_plan_spec spec = { TP_ALL_REDUCE, TP_ALGO_ONE_SHOT, -1, 1, layout };
	WORLD_CHECK(tp_plan_create(&spec, world->rank, &plan) == ncclSuccess);
	struct tp_exec_call call = { .plan = plan, .input = in, .output = out, .block_bytes = 8, .chunk_bytes = 4096, .line_bytes = 16,
		.reduce = { .type = ncclFloat32, .op = ncclSum }, .tag = 1 };
	struct poll_state state = { 0 };
	bool handled;
	WORLD_CHECK(tp_exec_one_shot(world->exec, &call, world->crowded, give_up, &state, &handled) == ncclRemoteError);
	WORLD_CHECK(handled && state.calls > 3);
	tp_exec_forget(world->exec, plan);
	tp_plan_free(plan);
	tp_layout_free(layout);
	return 0;
}

static void a_fused_wait_ends_when_its_poll_says_so(void **state)
{
	(void)state;
	struct world_options options = { .kind = WORLD_PROCESSES, .nranks = 2, .nchannels = 1, .by_ref = true };
	assert_int_equal(world_run(&options, waits_in_vain, NULL), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(matched_groups_deliver_each_message_whole),
		cmocka_unit_test(a_send_of_another_size_than_its_receive_is_an_error_that_names_both),
		cmocka_unit_test(a_chunk_of_another_call_is_an_error_at_once),
		cmocka_unit_test(a_fused_wait_ends_when_its_poll_says_so),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
