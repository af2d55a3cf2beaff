/* How long it takes to start many ranks on this machine.
 *
 *   cmake -S . -B build -DTELPHER_BENCH=ON -DCMAKE_BUILD_TYPE=Release && ninja -C build bench_init_scale
 *   NCCL_SOCKET_IFNAME=lo build/bench/bench_init_scale [threads|processes|hosts] [ranks] [repeats]
 *
 * threads (default): all ranks in this process. processes: one each, on one host. hosts: one each, each a host of its own
 * (NCCL_HOSTID), so that everything between ranks goes over TCP. 64 ranks and one run are the defaults.
 * Prints a line a run: the time until the last rank has opened, then of one all-gather of 64 bytes, one barrier and the close;
 * exits with 1 where a rank failed, which says why on stderr. 1,024 processes need a limit of some 1,100 descriptors (ulimit
 * -n) in the root and as many processes (ulimit -u). */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include "boot/boot.h"

struct times { _Atomic uint64_t opened, gathered, barrier, closed; _Atomic int failed, done; ncclUniqueId id; _Atomic int id_ready; };
static struct times *times;
static int nranks;

static void later(_Atomic uint64_t *slot)
{
	uint64_t now = tp_clock_ns(), seen = atomic_load(slot);
	while (seen < now && !atomic_compare_exchange_weak(slot, &seen, now)) {}
}

static void *run_rank(void *arg)
{
	int rank = (int)(intptr_t)arg;
	struct tp_boot *boot;
	char *all = calloc((size_t)nranks, 64);
	struct tp_boot_args args = { .rank = rank, .nranks = nranks, .nids = 1, .ids = &times->id, .timeout_ms = 120000 };
	if (!all || tp_boot_open(&args, &boot) != ncclSuccess) {
		atomic_fetch_add(&times->failed, 1);
		fprintf(stderr, "rank %d: %s\n", rank, tp_log_last_error());
		free(all);
		return NULL;
	}
	later(&times->opened);
	bool failed = tp_boot_all_gather(boot, all, 64) != ncclSuccess;
	later(&times->gathered);
	failed = tp_boot_barrier(boot) != ncclSuccess || failed;
	if (failed) {
		atomic_fetch_add(&times->failed, 1);
		fprintf(stderr, "rank %d: %s\n", rank, tp_log_last_error());
	}
	later(&times->barrier);
	tp_boot_close(boot);
	later(&times->closed);
	free(all);
	return NULL;
}

static void run_threads(void)
{
	pthread_t *threads = calloc((size_t)nranks, sizeof(*threads));
	pthread_attr_t attr;
	pthread_attr_init(&attr);
	pthread_attr_setstacksize(&attr, 256 * 1024);
	if (tp_boot_unique_id(&times->id) != ncclSuccess) exit(1);
	for (int r = 0; r < nranks; r++)
		if (pthread_create(&threads[r], &attr, run_rank, (void *)(intptr_t)r)) exit(1);
	for (int r = 0; r < nranks; r++) pthread_join(threads[r], NULL);
	pthread_attr_destroy(&attr);
	free(threads);
}

static void run_processes(int own_hosts)
{
	for (int r = 0; r < nranks; r++) {
		pid_t pid = fork();
		if (pid < 0) exit(1);
		if (pid > 0) continue;
		if (own_hosts) {
			char host[32];
			snprintf(host, sizeof(host), "host-%d", r);
			setenv("NCCL_HOSTID", host, 1);
		}
		if (r == 0) {
			if (tp_boot_unique_id(&times->id) != ncclSuccess) _exit(1);
			atomic_store(&times->id_ready, 1);
		}
		while (!atomic_load(&times->id_ready)) usleep(1000);
		run_rank((void *)(intptr_t)r);
		_exit(0);
	}
	int status;
	while (wait(&status) > 0 || errno == EINTR)
		if (status) atomic_fetch_add(&times->failed, 1);
}

int main(int argc, char **argv)
{
	const char *kind = argc > 1 ? argv[1] : "threads";
	int repeats = argc > 3 ? atoi(argv[3]) : 1;
	nranks = argc > 2 ? atoi(argv[2]) : 64;
	if (nranks < 1 || repeats < 1 || (strcmp(kind, "threads") && strcmp(kind, "processes") && strcmp(kind, "hosts"))) {
		fprintf(stderr, "usage: %s [threads|processes|hosts] [ranks] [repeats]\n", argv[0]);
		return 2;
	}
	for (int i = 0; i < repeats; i++) {
		times = mmap(NULL, sizeof(*times), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
		uint64_t begin = tp_clock_ns();
		if (strcmp(kind, "threads") == 0) run_threads();
		else run_processes(strcmp(kind, "hosts") == 0);
		uint64_t opened = atomic_load(&times->opened);
		printf("%s %d ranks: open %.3f s, all-gather of 64 B %.3f s, barrier %.3f s, close %.3f s, failed %d\n", kind, nranks, (double)(opened - begin) * 1e-9,
			(double)(atomic_load(&times->gathered) - opened) * 1e-9, (double)(atomic_load(&times->barrier) - atomic_load(&times->gathered)) * 1e-9,
			(double)(atomic_load(&times->closed) - atomic_load(&times->barrier)) * 1e-9, atomic_load(&times->failed));
		if (atomic_load(&times->failed)) return 1;
		munmap(times, sizeof(*times));
	}
	return 0;
}
