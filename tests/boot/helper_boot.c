#include "helper_boot.h"
#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>

struct shared {
	ncclUniqueId id;
	_Atomic int id_claimed, id_ready;
	_Atomic int words[64];
	int pids[4096];
};
static struct shared *shared;

int helper_run(int nranks, int nhosts, void (*body)(struct helper_job *job), const int *expected)
{
	int wrong = 0;
	pid_t parent = getpid();
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	assert_ptr_not_equal(shared, MAP_FAILED);
	fflush(NULL);
	for (int rank = 0; rank < nranks; rank++) {
		pid_t pid = fork();
		assert_true(pid >= 0);
		if (pid == 0) {
			struct helper_job job = { .nranks = nranks, .nhosts = nhosts, .rank = rank, .id = &shared->id };
			char host[32];
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			if (getppid() != parent) _exit(1);
			if (nhosts > 1) {
				snprintf(host, sizeof(host), "host-%d", (int)((int64_t)rank * nhosts / nranks));
				setenv("NCCL_HOSTID", host, 1);
			}
			alarm(250);
			body(&job);
			_exit(0);
		}
		shared->pids[rank] = pid;
	}
	for (int rank = 0; rank < nranks; rank++) {
		int status, right = expected ? expected[rank] : 0;
		while (waitpid(shared->pids[rank], &status, 0) < 0 && errno == EINTR) {}
		if (right >= 0 && status != right) {
			fprintf(stderr, "rank %d ended with status %#x, expected %#x\n", rank, status, right);
			wrong++;
		}
	}
	munmap(shared, sizeof(*shared));
	return wrong;
}

static void get_id(struct helper_job *job, int rank)
{
	if (rank == 0 && !atomic_exchange(&shared->id_claimed, 1)) {
		must(tp_boot_unique_id(job->id) == ncclSuccess);
		atomic_store(&shared->id_ready, 1);
	}
	while (!atomic_load(&shared->id_ready)) usleep(1000);
}

ncclResult_t helper_try_open(struct helper_job *job, int rank, int nranks, int timeout_ms, struct tp_boot **boot)
{
	get_id(job, job->rank);
	struct tp_boot_args args = { .rank = rank, .nranks = nranks, .nids = 1, .ids = job->id, .device = rank, .timeout_ms = timeout_ms };
	return tp_boot_open(&args, boot);
}

void helper_open(struct helper_job *job, struct tp_boot **boot)
{
	must(helper_try_open(job, job->rank, job->nranks, 60000, boot) == ncclSuccess);
}

void helper_put(struct helper_job *job, int word, int value) { (void)job; atomic_store(&shared->words[word], value); }
int helper_get(struct helper_job *job, int word) { (void)job; return atomic_load(&shared->words[word]); }
void helper_add(struct helper_job *job, int word) { (void)job; atomic_fetch_add(&shared->words[word], 1); }
void helper_await(struct helper_job *job, int word, int at_least)
{
	while (helper_get(job, word) < at_least) usleep(1000);
}

bool helper_event(struct tp_boot *boot, int ms, struct tp_event *out)
{
	uint64_t until = tp_clock_ms() + (uint64_t)ms;
	while (!tp_boot_first_event(boot, out)) {
		if (tp_clock_ms() > until) return false;
		usleep(2000);
	}
	return true;
}

void helper_check_gather(struct tp_boot *boot, int rounds, size_t bytes_each)
{
	size_t words = bytes_each / 4;
	uint32_t *all = malloc((size_t)boot->nranks * bytes_each);
	must(all);
	for (int round = 0; round < rounds; round++) {
		memset(all, 0xee, (size_t)boot->nranks * bytes_each);
		for (size_t i = 0; i < words; i++) all[(size_t)boot->rank * words + i] = (uint32_t)(boot->rank * 1000 + round) + (uint32_t)i;
		must(tp_boot_all_gather(boot, all, bytes_each) == ncclSuccess);
		for (int r = 0; r < boot->nranks; r++)
			for (size_t i = 0; i < words; i++) must(all[(size_t)r * words + i] == (uint32_t)(r * 1000 + round) + (uint32_t)i);
	}
	free(all);
}

static int count_entries(const char *path)
{
	int count = 0;
	DIR *dir = opendir(path);
	if (!dir) return -1;
	while (readdir(dir)) count++;
	closedir(dir);
	return count;
}
int helper_count_fds(void) { return count_entries("/proc/self/fd"); }
int helper_count_threads(void) { return count_entries("/proc/self/task"); }
bool helper_settle(int fds, int threads)
{
	for (int i = 0; i < 1000 && (helper_count_fds() > fds || helper_count_threads() > threads); i++) usleep(20000);
	return helper_count_fds() <= fds && helper_count_threads() <= threads;
}

struct thread_rank {
	pthread_t thread;
	int rank, nranks;
	ncclUniqueId id;
	void (*body)(struct tp_boot *boot, void *arg);
	void *arg;
};

static void *thread_main(void *arg)
{
	struct thread_rank *t = arg;
	struct tp_boot *boot = NULL;
	struct tp_boot_args args = { .rank = t->rank, .nranks = t->nranks, .nids = 1, .ids = &t->id, .device = t->rank, .timeout_ms = 60000 };
	must(tp_boot_open(&args, &boot) == ncclSuccess);
	t->body(boot, t->arg);
	tp_boot_close(boot);
	return NULL;
}

void helper_threads(int nranks, void (*body)(struct tp_boot *boot, void *arg), void *arg)
{
	struct thread_rank *ranks = calloc((size_t)nranks, sizeof(*ranks));
	pthread_attr_t attr;
	ncclUniqueId id;
	assert_non_null(ranks);
	assert_int_equal(tp_boot_unique_id(&id), ncclSuccess);
	pthread_attr_init(&attr);
	pthread_attr_setstacksize(&attr, 256 * 1024);
	for (int r = 0; r < nranks; r++) {
		ranks[r] = (struct thread_rank){ .rank = r, .nranks = nranks, .id = id, .body = body, .arg = arg };
		assert_int_equal(pthread_create(&ranks[r].thread, &attr, thread_main, &ranks[r]), 0);
	}
	for (int r = 0; r < nranks; r++) pthread_join(ranks[r].thread, NULL);
	pthread_attr_destroy(&attr);
	free(ranks);
}
