/* Calls that do not match are found, whichever hosts they are made on. */
#include "helper_boot.h"

static struct tp_call call_of(uint64_t seq, int func, uint64_t count)
{
	struct tp_call call;
	memset(&call, 0, sizeof(call));     /* the padding too: it is compared below */
	call.seq = seq;
	call.count = count;
	call.func = (uint8_t)func;
	call.type = ncclFloat32;
	call.op = ncclSum;
	call.root = func == 3 ? 1 : -1;
	call.hash = (uint32_t)(count * 64 + (uint64_t)func);
	return call;
}

static bool find(struct tp_boot *boot, uint64_t seq, int ms, struct tp_event *event)
{
	uint64_t until = tp_clock_ms() + (uint64_t)ms;
	while (!tp_boot_find_mismatch(boot, seq, event)) {
		if (tp_clock_ms() > until) return false;
		usleep(20000);
	}
	return true;
}

static void call_differently(struct helper_job *job)
{
	struct tp_boot *boot;
	struct tp_event event;
	struct tp_call call, seen;
	memset(&seen, 0, sizeof(seen));
	helper_open(job, &boot);
	for (uint64_t seq = 1; seq < 7; seq++) {
		call = call_of(seq, 0, 4);
		tp_boot_post_call(boot, &call);
	}
	must(!tp_boot_find_mismatch(boot, 6, &event));
	must(tp_boot_barrier(boot) == ncclSuccess);         /* nobody has heard of the next call yet */
	call = job->rank == 3 ? call_of(7, 3, 8) : call_of(7, 0, 4);
	tp_boot_post_call(boot, &call);
	must(tp_boot_last_call(boot, boot->rank, &seen) && memcmp(&seen, &call, sizeof(call)) == 0);
	must(find(boot, 7, 30000, &event));
	must(event.kind == TP_EVENT_MISMATCH && event.result == ncclInvalidUsage);
	must(strstr(event.text, "called AllReduce(count 4, float, sum)") && strstr(event.text, " as its 7th call, "));
	must(strstr(event.text, "rank 3 called Broadcast(count 8, float, root 1)"));
	helper_add(job, 0);
	helper_await(job, 0, job->nranks);
	tp_boot_close(boot);
}
static void mismatched_calls_of_one_host_are_found(void **state) { (void)state; assert_int_equal(helper_run(4, 1, call_differently, NULL), 0); }
static void mismatched_calls_of_several_hosts_are_found(void **state)
{
	(void)state;
	assert_int_equal(helper_run(4, 4, call_differently, NULL), 0);
	assert_int_equal(helper_run(6, 3, call_differently, NULL), 0);
}

static void call_alike(struct helper_job *job)
{
	struct tp_boot *boot;
	struct tp_event event;
	struct tp_call call, seen;
	memset(&seen, 0, sizeof(seen));
	helper_open(job, &boot);
	for (uint64_t seq = 1; seq < 40; seq++) {
		/* Ranks are at different places of one sequence. */
		if (job->rank == 1 && seq > 35) break;
		call = call_of(seq, (int)(seq % 8), seq);
		tp_boot_post_call(boot, &call);
	}
	must(!find(boot, job->rank == 1 ? 35 : 39, 700, &event));
	for (int r = 0; r < boot->nranks; r++)
		if (boot->peers[r].host == boot->host) must(tp_boot_last_call(boot, r, &seen) && seen.seq <= 39);
	must(tp_boot_barrier(boot) == ncclSuccess);
	tp_boot_close(boot);
}
static void equal_calls_are_no_mismatch(void **state)
{
	(void)state;
	assert_int_equal(helper_run(4, 2, call_alike, NULL), 0);
}

int main(int argc, char **argv)
{
	if (argc > 1) cmocka_set_test_filter(argv[1]);
	setenv("NCCL_SOCKET_IFNAME", "lo", 1);
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(mismatched_calls_of_one_host_are_found),
		cmocka_unit_test(mismatched_calls_of_several_hosts_are_found),
		cmocka_unit_test(equal_calls_are_no_mismatch),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
