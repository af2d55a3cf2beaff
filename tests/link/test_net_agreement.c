/* Network links of two processes that meet by the real rendezvous: what must be equal on both is, or both say what isn't. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "link/net_link.h"

/* One rank: 0 where the outcome and words of the last error are as they should be. */
static int rank_runs(int rank, const ncclUniqueId *id, const char *chunk, ncclResult_t expected, const char *words)
{
	static _Atomic uint32_t abort_flag;
	struct tp_boot_args args = { .rank = rank, .nranks = 2, .nids = 1, .ids = id, .abort = &abort_flag, .name = "test" };
	struct tp_net_links_options options = { .nchannels = 1 };
	struct tp_net_links *nets = NULL;
	struct tp_link link = { 0 };
	struct tp_boot *boot;
	bool moved;

	setenv("TELPHER_NET_CHUNK", chunk, 1);
	tp_param_reload();
	if (tp_boot_open(&args, &boot) != ncclSuccess) return 1;
	if (tp_net_links_create(boot, &options, &nets) != expected) return 2;
	if (words && !strstr(tp_log_last_error(), words)) return 3;
	if (nets) {
		if (tp_net_links_open(nets, NULL, 0, 0, 0, 1, &link) != ncclSuccess) return 4;
		if (rank == 0) {
			struct tp_slot *slot = tp_link_claim(&link);
			slot->bytes = 5;
			slot->tag = 11;
			slot->kind = TP_SLOT_INLINE;
			memcpy(slot->data, "hello", 5);
			tp_link_publish(&link, slot);
		} else {
			struct tp_slot *slot;
			while (!(slot = tp_link_peek(&link))) {
				if (tp_net_links_progress(nets, &moved) != ncclSuccess) return 5;
				sched_yield();
			}
			if (slot->tag != 11 || slot->bytes != 5 || memcmp(slot->data, "hello", 5) != 0) return 6;
			tp_link_release(&link);
		}
		while (tp_net_links_need_progress(nets))
			if (tp_net_links_progress(nets, &moved) != ncclSuccess) return 7;
		if (tp_net_links_capacity(nets) != (size_t)atoi(chunk) * 1024 || strcmp(tp_net_links_via(nets), "NET/Socket/0") != 0) return 8;
		tp_net_links_close(nets, &link);
		tp_net_links_destroy(nets);
	}
	tp_boot_close(boot);
	return 0;
}

static void both_ranks(const char *chunk_of_0, const char *chunk_of_1, ncclResult_t expected, const char *words)
{
	int pipes[2], status;
	ncclUniqueId id;
	pid_t children[2];

	setenv("NCCL_SOCKET_IFNAME", "lo", 1);
	assert_int_equal(pipe(pipes), 0);
	for (int rank = 0; rank < 2; rank++) {
		children[rank] = fork();
		if (children[rank] != 0) continue;
		/* The id is made by the process that serves it. */
		if (rank == 0 && (tp_boot_unique_id(&id) != ncclSuccess || write(pipes[1], &id, sizeof(id)) != sizeof(id))) _exit(20);
		if (rank == 1 && read(pipes[0], &id, sizeof(id)) != sizeof(id)) _exit(21);
		_exit(rank_runs(rank, &id, rank ? chunk_of_1 : chunk_of_0, expected, words));
	}
	for (int rank = 0; rank < 2; rank++) {
		assert_int_equal(waitpid(children[rank], &status, 0), children[rank]);
		assert_int_equal(status, 0);
	}
	close(pipes[0]);
	close(pipes[1]);
}

static void two_processes_agree_and_exchange_a_chunk(void **state)
{
	(void)state;
	both_ranks("64K", "64K", ncclSuccess, NULL);
}

static void different_chunk_sizes_are_an_error_that_names_both(void **state)
{
	(void)state;
	both_ranks("64K", "128K", ncclInvalidUsage, "65536 on rank 0");
	both_ranks("64K", "128K", ncclInvalidUsage, "131072 on rank 1");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(two_processes_agree_and_exchange_a_chunk),
		cmocka_unit_test(different_chunk_sizes_are_an_error_that_names_both),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
