/* Deaths at any moment, stops, strangers at the ports, poor surroundings: a job goes on or ends with an error that says why,
 * in time. */
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>

#include "api/helper_ranks.h"

/* ---- a death, at a moment that the seed draws */

struct death { int victim; unsigned after_us; bool holder; size_t count; };

static void dies_some_time(struct ranks *r)
{
	const struct death *d = r->arg;
	float *a = calloc(d->count, sizeof(*a)), *b = calloc(d->count, sizeof(*b));
	_Atomic int *died = &r->shared->word[0];
	ranks_barrier(r);
	if (r->rank == d->victim) {
		pid_t self = getpid();
		/* Holds every descriptor of its parent open until all others have noticed. */
		if (d->holder && fork() == 0) {
			for (int i = 0; i < 40000 && atomic_load(&r->shared->word[1]) < r->nranks - 1; i++) usleep(1000);
			_exit(0);
		}
		if (fork() == 0) {
			usleep(d->after_us);
			atomic_store(died, (int)(ranks_now_ms() & 0x3fffffff));
			kill(self, SIGKILL);
			_exit(0);
		}
	}
	ncclResult_t result = ncclSuccess;
	uint64_t start = ranks_now_ms();
	for (int i = 0; result == ncclSuccess && ranks_now_ms() - start < 30000; i++) {
		if (i % 3 == 2) result = ncclAllGather(a, b, d->count / (size_t)r->nranks, ncclFloat, r->comm, NULL);
		else result = ncclAllReduce(a, b, d->count, ncclFloat, ncclSum, r->comm, NULL);
	}
	int late = (int)(ranks_now_ms() & 0x3fffffff) - atomic_load(died);
	REQUIRE_IS(result, ncclRemoteError);
	atomic_fetch_add(&r->shared->word[1], 1);
	char text[32];
	snprintf(text, sizeof(text), "rank %d", d->victim);
	REQUIRE_ERROR_HAS(text);
	/* What is promised is 3 s, on a machine that doesn't stand still. */
	if (late > ranks_patience_ms(8000)) fprintf(stderr, "rank %d heard of the death of rank %d after %d ms\n", r->rank, d->victim, late);
	REQUIRE(late <= ranks_patience_ms(8000));
	free(a);
	free(b);
}

static unsigned draw(unsigned *seed)
{
	*seed = *seed * 1103515245u + 12345u;
	return *seed >> 16 & 0x7fff;
}

static void die(int rounds, unsigned seed, bool holder)
{
	for (int i = 0; i < rounds; i++) {
		unsigned before = seed;
		int nranks = 2 + (int)(draw(&seed) % 3), nhosts = 1 + (int)(draw(&seed) % 2);
		struct death d = { .victim = (int)(draw(&seed) % (unsigned)nranks), .after_us = draw(&seed) % 30000, .holder = holder,
			.count = (size_t)1 << draw(&seed) % 18 };
		struct ranks_options options = { .nranks = nranks, .nhosts = nhosts, .may_die = UINT64_C(1) << d.victim };
		if (!ranks_run(&options, dies_some_time, &d))
			fail_msg("seed %u: rank %d of %d on %d hosts, after %u us, %zu elements", before, d.victim, nranks, nhosts, d.after_us, d.count);
	}
}

static void a_death_at_any_moment_is_named_in_time(void **state) { (void)state; die(8, 20, false); }
static void a_child_that_holds_the_sockets_hides_no_death(void **state) { (void)state; die(3, 5, true); }

/* ---- a rank that stands still for a while */

static void stands_still(struct ranks *r)
{
	int value = 1, sum = 0;
	for (int i = 0; i < 50; i++) {
		if (i == 20 && r->rank == r->nranks - 1) {
			pid_t self = getpid();
			if (fork() == 0) {
				kill(self, SIGSTOP);
				usleep(1200000);
				kill(self, SIGCONT);
				_exit(0);
			}
		}
		REQUIRE_OK(ncclAllReduce(&value, &sum, 1, ncclInt, ncclSum, r->comm, NULL));
		REQUIRE(sum == r->nranks);
	}
}

static void a_stopped_rank_only_delays(void **state)
{
	(void)state;
	for (int nhosts = 1; nhosts <= 2; nhosts++) {
		struct ranks_options options = { .nranks = 2, .nhosts = nhosts };
		assert_true(ranks_run(&options, stands_still, NULL));
	}
}

/* ---- a port scan while the job runs: the last rank is the stranger */

enum { PORTS_MAX = 64, SCAN_ROUNDS = 6 };

static bool is_socket_of(pid_t pid, unsigned long inode)
{
	char path[64], want[48], found[64];
	snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
	snprintf(want, sizeof(want), "socket:[%lu]", inode);
	DIR *dir = opendir(path);
	bool is = false;
	for (struct dirent *e; dir && !is && (e = readdir(dir));) {
		ssize_t n = readlinkat(dirfd(dir), e->d_name, found, sizeof(found) - 1);
		is = n > 0 && (found[n] = '\0', !strcmp(found, want));
	}
	if (dir) closedir(dir);
	return is;
}

static int listening_ports(struct ranks *r, struct sockaddr_in *out)
{
	FILE *f = fopen("/proc/net/tcp", "r");
	char line[256];
	int n = 0;
	while (f && fgets(line, sizeof(line), f) && n < PORTS_MAX) {
		unsigned addr, port, state;
		unsigned long inode;
		if (sscanf(line, " %*d: %x:%x %*x:%*x %x %*x:%*x %*x:%*x %*x %*u %*u %lu", &addr, &port, &state, &inode) != 4 || state != 0x0a) continue;
		bool ours = false;
		for (int p = 0; p < r->nranks - 1 && !ours; p++) ours = is_socket_of(r->shared->pids[p], inode);
		if (ours) out[n++] = (struct sockaddr_in){ .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr = { addr } };
	}
	if (f) fclose(f);
	return n;
}

static void scan(struct ranks *r)
{
	static const char zeros[4096];
	static const char http[] = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", tls[] = "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03";
	static const char junk[] = "telpher\1\2\3\4\377\377\377\377";
	const struct { const char *data; size_t bytes; } words[] = { { "", 0 }, { http, sizeof(http) - 1 }, { tls, sizeof(tls) - 1 },
		{ zeros, sizeof(zeros) }, { junk, sizeof(junk) - 1 } };
	int kept[PORTS_MAX * SCAN_ROUNDS], nkept = 0, scanned = 0;
	for (int round = 0; round < SCAN_ROUNDS; round++) {
		struct sockaddr_in ports[PORTS_MAX];
		int n = listening_ports(r, ports);
		scanned += n;
		for (int p = 0; p < n; p++) {
			for (size_t w = 0; w < sizeof(words) / sizeof(words[0]); w++) {
				int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
				if (fd < 0 || connect(fd, (struct sockaddr *)&ports[p], sizeof(ports[p]))) {
					if (fd >= 0) close(fd);
					continue;
				}
				ssize_t sent = words[w].bytes ? send(fd, words[w].data, words[w].bytes, MSG_NOSIGNAL) : 0;
				(void)sent;
				/* One who says nothing stays. */
				if (w == 0) kept[nkept++] = fd;
				else close(fd);
			}
		}
		usleep(20000);
	}
	for (int k = 0; k < nkept; k++) close(kept[k]);
	REQUIRE(scanned > SCAN_ROUNDS);
	atomic_store(&r->shared->word[0], 1);
}

static void works_meanwhile(struct ranks *r)
{
	if (r->rank == r->nranks - 1) {
		while (atomic_load(&r->shared->word[1]) < r->nranks - 1) usleep(1000);
		scan(r);
		return;
	}
	int n = r->nranks - 1, slowest = 0;
	ncclComm_t comm;
	REQUIRE_OK(ncclCommInitRank(&comm, n, r->id, r->rank));
	atomic_fetch_add(&r->shared->word[1], 1);
	for (int i = 0, stop = 0; !stop; i++) {
		uint64_t start = ranks_now_ms();
		/* All ranks end at the same turn: the first says when. */
		int value[2] = { i, r->rank == 0 && atomic_load(&r->shared->word[0]) }, sum[2];
		REQUIRE_OK(ncclAllReduce(value, sum, 2, ncclInt, ncclSum, comm, NULL));
		REQUIRE(sum[0] == n * i);
		stop = sum[1];
		if (i % 50 == 0) {
			/* Somebody who joins and links that are made under the strangers' eyes. */
			ncclComm_t other;
			REQUIRE_OK(ncclCommSplit(comm, 0, -r->rank, &other, NULL));
			REQUIRE_OK(ncclAllReduce(value, sum, 1, ncclInt, ncclMax, other, NULL));
			REQUIRE(sum[0] == i);
			REQUIRE_OK(ncclCommDestroy(other));
		}
		int took = (int)(ranks_now_ms() - start);
		if (took > slowest) slowest = took;
	}
	/* Whoever waits for a stranger's word waits for ten seconds. */
	if (slowest > ranks_patience_ms(6000)) fprintf(stderr, "rank %d: a turn took %d ms\n", r->rank, slowest);
	REQUIRE(slowest <= ranks_patience_ms(6000));
	REQUIRE_OK(ncclCommDestroy(comm));
}

static void a_port_scan_changes_and_delays_nothing(void **state)
{
	(void)state;
	for (int nhosts = 1; nhosts <= 3; nhosts += 2) {
		struct ranks_options options = { .nranks = 3, .nhosts = nhosts, .no_comm = true };
		assert_true(ranks_run(&options, works_meanwhile, NULL));
	}
}

/* ---- /dev/shm */

enum shm_state { SHM_FULL, SHM_ABSENT };

static void change_dev_shm(struct ranks *r, enum shm_state what)
{
	REQUIRE(unshare(CLONE_NEWNS) == 0);
	REQUIRE(mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0);
	if (what == SHM_FULL) {
		REQUIRE(mount("none", "/dev/shm", "tmpfs", 0, "size=4096") == 0);
		int fd = open("/dev/shm/all", O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
		static const char page[4096];
		REQUIRE(fd >= 0);
		while (write(fd, page, sizeof(page)) > 0) {}
		REQUIRE(errno == ENOSPC);
		close(fd);
		return;
	}
	REQUIRE(mount("none", "/dev", "tmpfs", 0, "size=64k") == 0);
	REQUIRE(mknod("/dev/null", S_IFCHR | 0666, makedev(1, 3)) == 0);
	REQUIRE(mknod("/dev/urandom", S_IFCHR | 0666, makedev(1, 9)) == 0);
	REQUIRE(access("/dev/shm", F_OK) != 0);
}

static void works_without_dev_shm(struct ranks *r)
{
	enum { COUNT = 300000 };
	change_dev_shm(r, *(enum shm_state *)r->arg);
	ncclComm_t comm;
	float *a = malloc(COUNT * sizeof(*a));
	REQUIRE_OK(ncclCommInitRank(&comm, r->nranks, r->id, r->rank));
	for (int k = 0; k < 3; k++) {
		for (int i = 0; i < COUNT; i++) a[i] = (float)(i % 100);
		REQUIRE_OK(ncclAllReduce(a, a, COUNT, ncclFloat, ncclSum, comm, NULL));
		for (int i = 0; i < COUNT; i++) REQUIRE(a[i] == (float)(i % 100 * r->nranks));
	}
	REQUIRE_OK(ncclCommDestroy(comm));
	free(a);
}

/* Not in a container without the capability, nor where the root directory is no mount of its own (chroot). */
static bool may_mount(void)
{
	int status = 1;
	pid_t pid = fork();
	if (pid == 0)
		_exit(unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) || mount("none", "/dev/shm", "tmpfs", 0, "size=4096"));
	return pid > 0 && waitpid(pid, &status, 0) == pid && status == 0;
}

static void dev_shm_is_not_needed(void **state)
{
	(void)state;
	if (!may_mount()) skip();
	for (enum shm_state what = SHM_FULL; what <= SHM_ABSENT; what++) {
		struct ranks_options options = { .nranks = 2, .no_comm = true };
		if (!ranks_run(&options, works_without_dev_shm, &what)) fail_msg("/dev/shm %s", what == SHM_FULL ? "full" : "absent");
	}
}

/* ---- one rank has too few descriptors: at every point where they may run out */

static int count_descriptors(void)
{
	DIR *dir = opendir("/proc/self/fd");
	int n = -1;     /* its own */
	while (dir && readdir(dir)) n++;
	if (dir) closedir(dir);
	return n - 2;
}

/* True: it went well for both. */
static bool one_try(struct ranks *r, int turn, int number)
{
	float *a = calloc(100000, sizeof(*a));
	ncclComm_t comm = NULL;
	if (r->rank == 0) REQUIRE_OK(ncclGetUniqueId(&r->shared->id));
	ranks_barrier(r);
	ncclUniqueId id = r->shared->id;
	struct rlimit before, limit;
	REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
	limit = before;
	limit.rlim_cur = (rlim_t)(count_descriptors() + turn);
	if (r->rank == 1 && turn) REQUIRE(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	ncclResult_t result = ncclCommInitRank(&comm, r->nranks, id, r->rank);
	for (int k = 0; k < 2 && result == ncclSuccess; k++) result = ncclAllReduce(a, a, k ? 100000 : 5, ncclFloat, ncclSum, comm, NULL);
	if (r->rank == 1) REQUIRE(setrlimit(RLIMIT_NOFILE, &before) == 0);
	REQUIRE(result == ncclSuccess || result == ncclSystemError || result == ncclRemoteError);
	if (result != ncclSuccess) REQUIRE(ncclGetLastError(NULL)[0]);
	_Atomic char *failures = (_Atomic char *)&r->shared->bytes[number];
	if (result != ncclSuccess) atomic_fetch_add(failures, 1);
	if (comm) REQUIRE_OK(result == ncclSuccess ? ncclCommDestroy(comm) : ncclCommAbort(comm));
	free(a);
	ranks_barrier(r);
	return !atomic_load(failures);
}

static void runs_out(struct ranks *r)
{
	static const int turns[] = { 0, 1, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 16, 18, 20, 24, 0 };
	int number = 0;
	for (size_t i = 0; i < sizeof(turns) / sizeof(turns[0]); i++) {
		bool good = one_try(r, turns[i], number++);
		/* The time limit is short: on a busy machine a rank may come too late. */
		for (int again = 0; !turns[i] && !good && again < 20; again++) good = one_try(r, turns[i], number++);
		REQUIRE(turns[i] || good);
	}
}

static void too_few_descriptors_of_one_rank_are_an_error_of_all(void **state)
{
	(void)state;
	for (int nhosts = 1; nhosts <= 2; nhosts++) {
		struct ranks_options options = { .nranks = 2, .nhosts = nhosts, .no_comm = true, .env = { "TELPHER_INIT_TIMEOUT=1" } };
		assert_true(ranks_run(&options, runs_out, NULL));
	}
}

/* ---- idle */

static double cpu_ms(void)
{
	struct rusage u;
	getrusage(RUSAGE_SELF, &u);
	return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1e3 + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e3;
}

static void rests(struct ranks *r)
{
	static float a[50000];
	cudaStream_t stream;
	REQUIRE_OK(telpher_stream_create(&stream));
	REQUIRE_OK(ncclAllReduce(a, a, 10, ncclFloat, ncclSum, r->comm, NULL));
	REQUIRE_OK(ncclAllReduce(a, a, 50000, ncclFloat, ncclSum, r->comm, NULL));
	REQUIRE_OK(ncclAllReduce(a, a, 50000, ncclFloat, ncclSum, r->comm, stream));
	REQUIRE_OK(telpher_stream_synchronize(stream));
	REQUIRE_OK(telpher_stream_destroy(stream));
	ranks_barrier(r);
	/* What was done before may have an end yet, on a busy machine a late one. */
	double used = 1, idle = 1;
	for (int tries = 0; used > 0.04 * idle && tries < 20; tries++) {
		double before = cpu_ms();
		uint64_t start = ranks_now_ms();
		usleep(400000);
		used = cpu_ms() - before;
		idle = (double)(ranks_now_ms() - start);
	}
	if (used > 0.04 * idle) fprintf(stderr, "rank %d used %.1f ms of processor time in %.1f idle ms\n", r->rank, used, idle);
	REQUIRE(used <= 0.04 * idle);
	ranks_barrier(r);
}

static void an_idle_communicator_uses_no_processor(void **state)
{
	(void)state;
	for (int nhosts = 1; nhosts <= 2; nhosts++) {
		struct ranks_options options = { .nranks = 2, .nhosts = nhosts };
		assert_true(ranks_run(&options, rests, NULL));
	}
}

static void crowd(struct ranks *r)
{
	static int a[5000], b[5000];
	for (int i = 0; i < 100; i++) {
		int count = i % 10 == 9 ? 5000 : 1 + i;
		for (int k = 0; k < count; k++) a[k] = r->rank + k;
		REQUIRE_OK(ncclAllReduce(a, b, (size_t)count, ncclInt, ncclMax, r->comm, NULL));
		for (int k = 0; k < count; k++) REQUIRE(b[k] == r->nranks - 1 + k);
	}
}

static void more_ranks_than_processors_work(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 8 };
	assert_true(ranks_run(&options, crowd, NULL));
	options.nhosts = 2;
	assert_true(ranks_run(&options, crowd, NULL));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_death_at_any_moment_is_named_in_time), cmocka_unit_test(a_child_that_holds_the_sockets_hides_no_death),
		cmocka_unit_test(a_stopped_rank_only_delays), cmocka_unit_test(a_port_scan_changes_and_delays_nothing),
		cmocka_unit_test(dev_shm_is_not_needed), cmocka_unit_test(too_few_descriptors_of_one_rank_are_an_error_of_all),
		cmocka_unit_test(an_idle_communicator_uses_no_processor), cmocka_unit_test(more_ranks_than_processors_work),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
