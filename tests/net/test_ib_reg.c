/* The registration cache: ranges inside a registered one share it, what nobody holds is gone; from several threads, at random. */
#include <pthread.h>
#include "helper_ib.h"

#define PAGE ((size_t)4096)

static struct tp_ib_context *context(void) { return tp_ib_port(0)->context; }

static int card(void **state)
{
	(void)state;
	ib_use_card(NULL);
	assert_int_equal(tp_net_ib.init(), ncclSuccess);
	return 0;
}

static void a_range_inside_shares_the_registration(void **state)
{
	unsigned char *data = aligned_alloc(PAGE, 64 * PAGE);
	struct tp_ib_mr_node *a, *b, *c;
	struct ibv_mr *ma, *mb, *mc;

	(void)state;
	assert_int_equal(tp_ib_reg_get(context(), data + 100, 40 * PAGE, &a, &ma), ncclSuccess);
	assert_ptr_equal(ma->addr, data);
	assert_int_equal(ma->length, 41 * PAGE);
	assert_int_equal(tp_ib_reg_get(context(), data + 5 * PAGE, 7, &b, &mb), ncclSuccess);
	assert_ptr_equal(ma, mb);
	assert_int_equal(tp_ib_reg_get(context(), data + 40 * PAGE, 2 * PAGE, &c, &mc), ncclSuccess);
	assert_ptr_not_equal(ma, mc);
	assert_int_equal(tp_ib_reg_count(context()), 2);
	assert_int_equal(tp_ib_reg_put(context(), a), ncclSuccess);
	assert_int_equal(tp_ib_reg_count(context()), 2);
	assert_int_equal(tp_ib_reg_put(context(), b), ncclSuccess);
	assert_int_equal(tp_ib_reg_put(context(), c), ncclSuccess);
	assert_int_equal(tp_ib_reg_count(context()), 0);
	free(data);
}

/* The program may unmap what it has deregistered and register the same addresses anew, whatever holds a part of the old. */
static void what_is_held_in_part_is_not_found_again(void **state)
{
	unsigned char *data = aligned_alloc(PAGE, 64 * PAGE);
	struct tp_ib_mr_node *whole, *part, *again, *same;
	struct ibv_mr *mwhole, *mpart, *magain, *msame;

	(void)state;
	assert_int_equal(tp_ib_reg_get(context(), data, 64 * PAGE, &whole, &mwhole), ncclSuccess);
	assert_int_equal(tp_ib_reg_get(context(), data + 5 * PAGE, PAGE, &part, &mpart), ncclSuccess);
	assert_ptr_equal(mwhole, mpart);
	assert_int_equal(tp_ib_reg_put(context(), whole), ncclSuccess);
	assert_int_equal(tp_ib_reg_get(context(), data, 64 * PAGE, &again, &magain), ncclSuccess);
	assert_ptr_not_equal(magain, mpart);
	assert_int_equal(tp_ib_reg_get(context(), data, 64 * PAGE, &same, &msame), ncclSuccess);
	assert_ptr_equal(msame, magain);
	assert_int_equal(tp_ib_reg_count(context()), 2);
	assert_int_equal(tp_ib_reg_put(context(), part), ncclSuccess);
	assert_int_equal(tp_ib_reg_put(context(), again), ncclSuccess);
	assert_int_equal(tp_ib_reg_get(context(), data, 64 * PAGE, &again, &magain), ncclSuccess);
	assert_ptr_equal(msame, magain);
	assert_int_equal(tp_ib_reg_put(context(), again), ncclSuccess);
	assert_int_equal(tp_ib_reg_put(context(), same), ncclSuccess);
	assert_int_equal(tp_ib_reg_count(context()), 0);
	free(data);
}

enum { THREADS = 4, TURNS = 2000, HELD = 40, PAGES = 256 };
static unsigned char *arena;
static _Atomic int wrong;

static void *use_it(void *arg)
{
	struct { struct tp_ib_mr_node *node; struct ibv_mr *mr; uintptr_t at; size_t bytes; } held[HELD] = { 0 };
	uint32_t seed = (uint32_t)(uintptr_t)arg;

	for (int turn = 0; turn < TURNS + HELD; turn++) {
		uint32_t i = turn < TURNS ? net_random(&seed) % HELD : (uint32_t)(turn - TURNS);
		if (held[i].node) {
			/* Still what it was, whatever others did. */
			if ((uintptr_t)held[i].mr->addr > held[i].at || (uintptr_t)held[i].mr->addr + held[i].mr->length < held[i].at + held[i].bytes) wrong++;
			if (tp_ib_reg_put(context(), held[i].node) != ncclSuccess) wrong++;
			held[i].node = NULL;
		} else if (turn < TURNS) {
			size_t from = net_random(&seed) % (PAGES * PAGE), most = PAGES * PAGE - from;
			size_t wish = net_random(&seed) % (net_random(&seed) % 8 ? 3 * PAGE : 100 * PAGE) + 1;
			held[i].bytes = TP_MIN(wish, most);
			held[i].at = (uintptr_t)arena + from;
			if (tp_ib_reg_get(context(), arena + from, held[i].bytes, &held[i].node, &held[i].mr) != ncclSuccess) wrong++;
			else if ((uintptr_t)held[i].mr->addr > held[i].at || (uintptr_t)held[i].mr->addr + held[i].mr->length < held[i].at + held[i].bytes) wrong++;
		}
	}
	return NULL;
}

static void threads_register_and_deregister_at_random(void **state)
{
	pthread_t threads[THREADS];

	(void)state;
	arena = aligned_alloc(PAGE, PAGES * PAGE);
	for (int i = 0; i < THREADS; i++) assert_int_equal(pthread_create(&threads[i], NULL, use_it, (void *)(uintptr_t)(i * 77 + 1)), 0);
	for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
	assert_int_equal(wrong, 0);
	assert_int_equal(tp_ib_reg_count(context()), 0);
	free(arena);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup(a_range_inside_shares_the_registration, card),
		cmocka_unit_test_setup(what_is_held_in_part_is_not_found_again, card),
		cmocka_unit_test_setup(threads_register_and_deregister_at_random, card),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
