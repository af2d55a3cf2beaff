/* Who shares processors with whom. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "comm/internal.h"

enum { MAX = 16 };

struct machine {
	struct ncclComm *comm;
	struct tp_boot boot;
	struct tp_boot_peer peers[MAX];
	struct tp_cores_place places[MAX];
};

static int set_up(void **state)
{
	struct machine *m = calloc(1, sizeof(*m));
	m->comm = calloc(1, sizeof(*m->comm));
	m->comm->boot = &m->boot;
	m->boot.peers = m->peers;
	*state = m;
	return 0;
}

static int tear_down(void **state)
{
	struct machine *m = *state;
	free(m->comm);
	free(m);
	return 0;
}

static void add(struct machine *m, int host, uint64_t machine, uint64_t mask, int count)
{
	int r = m->comm->nranks++;
	int local = 0;
	for (int o = 0; o < r; o++) local += m->peers[o].host == host;
	m->peers[r].host = host;
	m->peers[r].local = local;
	m->places[r] = (struct tp_cores_place){ .machine = machine, .mask = { mask }, .count = count };
	if (host >= m->boot.nhosts) m->boot.nhosts = host + 1;
}

static void judge(struct machine *m) { assert_int_equal(tp_cores_judge(m->comm, m->places, sizeof(m->places[0])), ncclSuccess); }

static void ranks_that_fit_are_not_crowded(void **state)
{
	struct machine *m = *state;
	add(m, 0, 7, 0x3, 2);
	add(m, 0, 7, 0x3, 2);
	judge(m);
	assert_false(m->comm->crowded);
	assert_int_equal(m->comm->model.cores_per_domain, 2);
}

static void virtual_hosts_share_their_machine(void **state)
{
	struct machine *m = *state;
	for (int r = 0; r < 4; r++) add(m, r / 2, 7, 0x3, 2);
	judge(m);
	assert_true(m->comm->crowded);
	assert_int_equal(m->comm->model.cores_per_domain, 1);
}

static void hosts_that_are_machines_share_nothing(void **state)
{
	struct machine *m = *state;
	for (int r = 0; r < 4; r++) add(m, r / 2, 7 + (uint64_t)(r / 2), 0x3, 2);
	judge(m);
	assert_false(m->comm->crowded);
	assert_int_equal(m->comm->model.cores_per_domain, 2);
}

static void ranks_bound_to_processors_of_their_own_are_not_crowded(void **state)
{
	struct machine *m = *state;
	for (int r = 0; r < 8; r++) add(m, 0, 7, 1u << r, 1);
	judge(m);
	assert_false(m->comm->crowded);
	assert_int_equal(m->comm->model.cores_per_domain, 8);
}

static void ranks_bound_to_one_processor_are_crowded(void **state)
{
	struct machine *m = *state;
	add(m, 0, 7, 0x1, 1);
	add(m, 0, 7, 0x1, 1);
	judge(m);
	assert_true(m->comm->crowded);
	assert_int_equal(m->comm->model.cores_per_domain, 1);
}

static void a_quota_counts_not_the_mask(void **state)
{
	struct machine *m = *state;
	for (int r = 0; r < 4; r++) add(m, 0, 7, 0xffff, 2);
	judge(m);
	assert_true(m->comm->crowded);
	assert_int_equal(m->comm->model.cores_per_domain, 2);
}

static void the_model_takes_the_least_of_all_hosts(void **state)
{
	struct machine *m = *state;
	add(m, 0, 7, 0xf, 4);
	add(m, 0, 7, 0xf, 4);
	add(m, 1, 8, 0x1, 1);
	judge(m);
	assert_false(m->comm->crowded);
	assert_int_equal(m->comm->model.cores_per_domain, 1);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(ranks_that_fit_are_not_crowded, set_up, tear_down),
		cmocka_unit_test_setup_teardown(virtual_hosts_share_their_machine, set_up, tear_down),
		cmocka_unit_test_setup_teardown(hosts_that_are_machines_share_nothing, set_up, tear_down),
		cmocka_unit_test_setup_teardown(ranks_bound_to_processors_of_their_own_are_not_crowded, set_up, tear_down),
		cmocka_unit_test_setup_teardown(ranks_bound_to_one_processor_are_crowded, set_up, tear_down),
		cmocka_unit_test_setup_teardown(a_quota_counts_not_the_mask, set_up, tear_down),
		cmocka_unit_test_setup_teardown(the_model_takes_the_least_of_all_hosts, set_up, tear_down),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
