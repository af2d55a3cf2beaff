/* Who measures with whom: all ranks see the same rounds, in each of which a rank gives to one or takes from one, and both ends know it; all
 * neighbours are there, both ways. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include "comm/pace.h"
#include "comm/topo.h"

#define MOST 128

static struct tp_boot_peer peers[MOST];
static struct tp_boot boot = { .peers = peers };
static struct tp_comm_pace paces[MOST];
static bool paired[MOST][MOST];

static void check(int nranks, int nhosts)
{
	memset(peers, 0, sizeof(peers));
	memset(paces, 0, sizeof(paces));
	memset(paired, 0, sizeof(paired));
	boot.nranks = nranks;
	boot.nhosts = nhosts;
	for (int r = 0, first = 0; r < nranks; r++) {
		peers[r].host = r * nhosts / nranks;
		if (r && peers[r].host != peers[r - 1].host) first = r;
		peers[r].local = r - first;
	}
	for (int r = 0; r < nranks; r++) {
		struct ncclComm comm = { .rank = r, .nranks = nranks, .boot = &boot };
		boot.host = peers[r].host;
		boot.local = peers[r].local;
		tp_pace_pair_up(&comm, &paces[r]);
		assert_int_equal(paces[r].nrounds, paces[0].nrounds);
	}
	assert_true(paces[0].nrounds > 0 && paces[0].nrounds <= TP_PACE_ROUNDS);
	for (int round = 0; round < paces[0].nrounds; round++) {
		for (int r = 0; r < nranks; r++) {
			const struct tp_pace_round *own = &paces[r].rounds[round];
			if (own->from < 0) continue;
			assert_true(own->from != own->to && (own->from == r || own->to == r));
			const struct tp_pace_round *other = &paces[own->from == r ? own->to : own->from].rounds[round];
			assert_int_equal(other->from, own->from);
			assert_int_equal(other->to, own->to);
			paired[own->from][own->to] = true;
		}
	}
	for (int r = 0; r < nranks; r++) {
		assert_true(paired[r][(r + 1) % nranks]);
		assert_true(paired[(r + 1) % nranks][r]);
	}
}

static void both_ends_of_every_pair_know_of_it(void **s)
{
	(void)s;
	for (int nranks = 2; nranks <= 16; nranks++)
		for (int nhosts = 1; nhosts <= nranks; nhosts++) check(nranks, nhosts);
	check(MOST, MOST);
	check(64, 33);
	check(99, 33);
}

static void far_hosts_meet_too(void **s)
{
	(void)s;
	check(64, 16);
	for (int host = 0; host < 16; host++)
		for (int distance = 1; distance <= 8; distance *= 2)
			if (distance > 1) assert_true(paired[4 * host][4 * ((host + distance) % 16)]);
}

int main(void)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(both_ends_of_every_pair_know_of_it), cmocka_unit_test(far_hosts_meet_too) };
	return cmocka_run_group_tests(tests, NULL, NULL);
}
