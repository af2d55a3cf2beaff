/* Groups of sends and receives by the CUDA executor: random ones that match, large ones that take several launches, and what
 * happens where they don't match. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "exec/cuda/internal.h"
#include "exec/helper_cuda.h"
#include "exec/helper_reduce.h"

enum { CHANNELS = 5, POOL_BYTES = 8 << 20, MOST = 4096, ROUNDS = SANITIZED_THREAD ? 4 : 10 };

struct message { int from, to; size_t bytes; uint32_t number; };
struct group { struct message *all; int count; };

static unsigned char byte_of(const struct message *m, size_t i)
{
	uint64_t x = ((uint64_t)m->number << 40 | (uint64_t)m->from << 32) + i / 7 * 0x9e3779b97f4a7c15u;
	return (unsigned char)(x >> 29 ^ x >> 11 ^ i);
}

/* Every rank draws the same. */
static void draw_group(uint64_t *state, int nranks, int count, size_t most_bytes, struct group *g)
{
	static const size_t odd[] = { 0, 1, 7, 16, 127, 128, 129, 4096 };
	g->count = count;
	for (int i = 0; i < count; i++) {
		struct message *m = &g->all[i];
		m->from = (int)(reduce_draw(state) % (unsigned)nranks);
		m->to = (int)(reduce_draw(state) % (unsigned)nranks);
		m->number = (uint32_t)reduce_draw(state);
		size_t at_most = reduce_draw(state) % 3 ? most_bytes / 64 : most_bytes;
		m->bytes = reduce_draw(state) % 3 == 0 ? odd[reduce_draw(state) % TP_ARRAY_LEN(odd)] : reduce_draw(state) % (at_most + 1);
	}
}

/* The calls of one rank: those of each peer and direction in the order of the group, otherwise in an order of its own. */
static int own_calls(const struct group *g, int rank, uint64_t *state, struct tp_exec_transfer *calls, int *messages)
{
	int n = 0;
	for (int i = 0; i < g->count; i++) {
		if (g->all[i].from == rank) messages[n++] = 2 * i + 1;
		if (g->all[i].to == rank) messages[n++] = 2 * i;
	}
	for (int pass = 0; pass < 3 * n; pass++) {
		int i = (int)(reduce_draw(state) % (unsigned)TP_MAX(n - 1, 1));
		if (i + 1 >= n) continue;
		const struct message *a = &g->all[messages[i] / 2], *b = &g->all[messages[i + 1] / 2];
		bool a_sends = messages[i] % 2, b_sends = messages[i + 1] % 2;
		if (a_sends == b_sends && (a_sends ? a->to == b->to : a->from == b->from)) continue;
		int swap = messages[i];
		messages[i] = messages[i + 1];
		messages[i + 1] = swap;
	}
	for (int i = 0; i < n; i++) {
		const struct message *m = &g->all[messages[i] / 2];
		bool sends = messages[i] % 2;
		calls[i] = (struct tp_exec_transfer){ .peer = sends ? m->to : m->from, .is_send = sends, .bytes = m->bytes };
	}
	return n;
}

static int run_group(struct world *world, struct cuda_rank *c, const struct group *g, uint64_t *state)
{
	int *messages = malloc(2 * MOST * sizeof(*messages));
	struct tp_exec_transfer *calls = malloc(2 * MOST * sizeof(*calls));
	unsigned char *host = malloc(POOL_BYTES);
	WORLD_CHECK(messages && calls && host);
	int n = own_calls(g, world->rank, state, calls, messages), failed = 0;
	cuda_reset(c);
	for (int i = 0; i < n; i++) {
		calls[i].buf = cuda_take(c, calls[i].bytes + 1, reduce_draw(state) % 3 ? 0 : reduce_draw(state) % 16);
		WORLD_CHECK(calls[i].buf);
		for (size_t k = 0; k <= calls[i].bytes; k++) host[k] = calls[i].is_send ? byte_of(&g->all[messages[i] / 2], k) : 0xa5;
		cuda_put(c, calls[i].buf, host, calls[i].bytes + 1);
	}
	struct tp_exec_call call = { .block_bytes = 0, .chunk_bytes = 1 << 20, .line_bytes = 16, .transfers = calls, .ntransfers = n };
	if (n) WORLD_CHECK(tp_cuda_exec_launch(c->exec, c->stream, &call, 1) == ncclSuccess);
	for (int i = 0; i < n && !failed; i++) {
		if (calls[i].is_send) continue;
		cuda_get(c, host, calls[i].buf, calls[i].bytes + 1);
		const struct message *m = &g->all[messages[i] / 2];
		for (size_t k = 0; k < m->bytes && !failed; k++) {
			if (host[k] == byte_of(m, k)) continue;
			fprintf(stderr, "rank %d: byte %zu of %zu from rank %d is wrong\n", world->rank, k, m->bytes, m->from);
			failed = __LINE__;
		}
		if (host[m->bytes] != 0xa5) failed = __LINE__;
	}
	free(messages);
	free(calls);
	free(host);
	return failed;
}

static int random_groups(struct world *world)
{
	const int *ndevices = world->arg;
	struct cuda_rank c;
	struct group g = { .all = malloc(MOST * sizeof(*g.all)) };
	uint64_t common = 77 + (unsigned)world->nranks, own = 1000 + (unsigned)world->rank;
	WORLD_CHECK(g.all && cuda_open(world, CHANNELS, *ndevices, POOL_BYTES, &c));
	for (int round = 0; round < ROUNDS; round++) {
		draw_group(&common, world->nranks, (int)(reduce_draw(&common) % (unsigned)(6 * world->nranks)), 300000, &g);
		int failed = run_group(world, &c, &g, &own);
		if (failed) return failed;
	}
	cuda_close(world, &c);
	free(g.all);
	return 0;
}

static int large_groups(struct world *world)
{
	static const int counts[] = { 700, 1500, 90 };
	const int *ndevices = world->arg;
	struct cuda_rank c;
	struct group g = { .all = malloc(MOST * sizeof(*g.all)) };
	uint64_t common = 5, own = 3000 + (unsigned)world->rank;
	WORLD_CHECK(g.all && cuda_open(world, CHANNELS, *ndevices, POOL_BYTES, &c));
	for (size_t i = 0; i < TP_ARRAY_LEN(counts); i++) {
		draw_group(&common, world->nranks, counts[i], 600, &g);
		int failed = run_group(world, &c, &g, &own);
		if (failed) return failed;
	}
	cuda_close(world, &c);
	free(g.all);
	return 0;
}

/* Rank 1 sends more than rank 0 receives. */
static int sizes_differ(struct world *world)
{
	struct cuda_rank c;
	struct tp_cuda_status status;
	WORLD_CHECK(cuda_open(world, CHANNELS, 2, POOL_BYTES, &c));
	size_t bytes = world->rank ? 500000 : 5000;
	void *buf = cuda_take(&c, bytes, 0);
	struct tp_exec_transfer t = { .peer = !world->rank, .is_send = world->rank == 1, .buf = buf, .bytes = bytes };
	struct tp_exec_call call = { .chunk_bytes = 4096, .line_bytes = 16, .transfers = &t, .ntransfers = 1 };
	WORLD_CHECK(tp_cuda_exec_launch(c.exec, c.stream, &call, 1) == ncclSuccess);
	if (world->rank == 0) tp_cuda->StreamSynchronize(c.stream);
	tp_cuda_exec_status(c.exec, &status);
	if (world->rank == 0) {
		WORLD_CHECK(status.fault == TP_CUDA_SIZE && status.peer == 1 && status.found == 500000 && status.expected == 5000);
		WORLD_CHECK(tp_cuda_exec_launch(c.exec, c.stream, &call, 1) == ncclInvalidUsage);
	}
	world_barrier(world);
	tp_cuda_exec_abort(c.exec);
	tp_cuda->StreamSynchronize(c.stream);
	tp_cuda_exec_status(c.exec, &status);
	WORLD_CHECK(status.fault == (world->rank ? TP_CUDA_ABORTED : TP_CUDA_SIZE));
	WORLD_CHECK(status.launched == 1 && status.completed == 1);
	cuda_close(world, &c);
	return 0;
}

static int self_sends_differ(struct world *world)
{
	struct cuda_rank c;
	WORLD_CHECK(cuda_open(world, CHANNELS, 1, POOL_BYTES, &c));
	unsigned char *buf = cuda_take(&c, 100, 0);
	struct tp_exec_transfer t[2] = { { world->rank, true, buf, 10 }, { world->rank, false, buf + 50, 20 } };
	struct tp_exec_call call = { .chunk_bytes = 4096, .line_bytes = 16, .transfers = t, .ntransfers = 2 };
	WORLD_CHECK(tp_cuda_exec_launch(c.exec, c.stream, &call, 1) == ncclInvalidUsage);
	call.ntransfers = 1;
	WORLD_CHECK(tp_cuda_exec_launch(c.exec, c.stream, &call, 1) == ncclInvalidUsage);
	t[1].bytes = 10;
	call.ntransfers = 2;
	WORLD_CHECK(tp_cuda_exec_launch(c.exec, c.stream, &call, 1) == ncclSuccess);
	cuda_close(world, &c);
	return 0;
}

static void run(int (*body)(struct world *world), int nranks, int ndevices)
{
	struct world_options options = { .kind = WORLD_THREADS, .nranks = nranks, .nchannels = CHANNELS };
	assert_int_equal(world_run(&options, body, &ndevices), 0);
}

static void random_groups_arrive_whole(void **state)
{
	(void)state;
	run(random_groups, 2, 1);
	run(random_groups, 3, 3);
	run(random_groups, 7, 2);
}

static void groups_of_more_than_a_launch_arrive_whole(void **state)
{
	(void)state;
	run(large_groups, 2, 1);
	run(large_groups, 4, 4);
}

static void unequal_sizes_are_named_and_abort_ends_who_waits(void **state)
{
	(void)state;
	run(sizes_differ, 2, 2);
}

static void sends_to_oneself_must_match(void **state)
{
	(void)state;
	run(self_sends_differ, 2, 1);
}

int main(void)
{
	if (!cuda_has_driver()) {
		fprintf(stderr, "no GPU driver\n");
		return 77;
	}
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(random_groups_arrive_whole),
		cmocka_unit_test(groups_of_more_than_a_launch_arrive_whole),
		cmocka_unit_test(unequal_sizes_are_named_and_abort_ends_who_waits),
		cmocka_unit_test(sends_to_oneself_must_match),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
