/* Ids from the environment, derived ids, several roots. */
#include "helper_boot.h"
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>

static void open_with(const ncclUniqueId *ids, int nids, int rank, int nranks, struct tp_boot **boot)
{
	struct tp_boot_args args = { .rank = rank, .nranks = nranks, .nids = nids, .ids = ids, .timeout_ms = 30000 };
	must(tp_boot_open(&args, boot) == ncclSuccess);
}

static void meet_by_address(struct helper_job *job)
{
	ncclUniqueId id;
	struct tp_boot *boot;
	char address[32];
	if (job->rank == 0) {
		/* Below those that the kernel gives to whoever asks for any, and those of other tests: nobody gets it while nobody listens there. */
		union tp_addr at = { .v4 = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) } };
		int port = 10000 + (int)getpid() % 7000, fd;
		for (at.v4.sin_port = htons((uint16_t)port); tp_socket_listen(&at, 1, &fd) != ncclSuccess; at.v4.sin_port = htons((uint16_t)++port)) {}
		close(fd);
		helper_put(job, 0, port);
	}
	helper_await(job, 0, 1);
	snprintf(address, sizeof(address), "127.0.0.1:%d", helper_get(job, 0));
	setenv("NCCL_COMM_ID", address, 1);
	if (!getenv("TELPHER_JOB_SECRET_FILE")) setenv("TELPHER_JOB_SECRET", "the job's words", 1);
	tp_param_reload();
	/* The same id again and again, each time another communicator; rank 0 is late. */
	for (int i = 0; i < 3; i++) {
		if (job->rank == 0 && i == 0) usleep(300000);
		must(tp_boot_unique_id(&id) == ncclSuccess);
		open_with(&id, 1, job->rank, job->nranks, &boot);
		helper_check_gather(boot, 2, 64);
		tp_boot_close(boot);
	}
}
static void ranks_meet_by_address_and_job_secret(void **state) { (void)state; assert_int_equal(helper_run(4, 2, meet_by_address, NULL), 0); }

static void an_address_without_a_secret_is_refused_unless_it_is_loopback(void **state)
{
	ncclUniqueId id;
	(void)state;
	unsetenv("TELPHER_JOB_SECRET");
	setenv("NCCL_COMM_ID", "192.0.2.77:4000", 1);
	tp_param_reload();
	assert_int_equal(tp_boot_unique_id(&id), ncclInvalidUsage);
	assert_non_null(strstr(tp_log_last_error(), "TELPHER_JOB_SECRET"));
	setenv("NCCL_COMM_ID", "127.0.0.1:4000", 1);
	tp_param_reload();
	assert_int_equal(tp_boot_unique_id(&id), ncclSuccess);
	assert_non_null(strstr(tp_log_last_error(), "any process of this machine can join"));
	unsetenv("NCCL_COMM_ID");
	tp_param_reload();
}

static char secret_path[64];
static void write_secret(const char *text, mode_t mode)
{
	int fd = open(secret_path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
	assert_true(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text) && fchmod(fd, mode) == 0);
	close(fd);
}
static void use_file(const char *path)
{
	unsetenv("TELPHER_JOB_SECRET");
	setenv("TELPHER_JOB_SECRET_FILE", path, 1);
	setenv("NCCL_COMM_ID", "127.0.0.1:4000", 1);
	tp_param_reload();
}
static void meet_by_file(struct helper_job *job)
{
	ncclUniqueId by_file, by_words;
	use_file(secret_path);
	must(tp_boot_unique_id(&by_file) == ncclSuccess);
	setenv("TELPHER_JOB_SECRET", "words of a file", 1);
	tp_param_reload();
	must(tp_boot_unique_id(&by_words) == ncclSuccess);
	must(memcmp(&by_file, &by_words, sizeof(by_file)) == 0);        /* the line's end is no part of it */
	if (job->rank % 2) unsetenv("TELPHER_JOB_SECRET");
	meet_by_address(job);
}
static void a_file_can_hold_the_jobs_secret(void **state)
{
	ncclUniqueId id;
	(void)state;
	snprintf(secret_path, sizeof(secret_path), "/tmp/telpher-test-secret.%d", (int)getpid());
	write_secret("words of a file\n", 0600);
	assert_int_equal(helper_run(4, 2, meet_by_file, NULL), 0);
	write_secret("words of a file\n", 0644);
	use_file(secret_path);
	assert_int_equal(tp_boot_unique_id(&id), ncclSuccess);
	assert_non_null(strstr(tp_log_last_error(), "can be read by others"));
	write_secret("short\n", 0600);
	assert_int_equal(tp_boot_unique_id(&id), ncclInvalidUsage);
	assert_non_null(strstr(tp_log_last_error(), "has 5 characters"));
	unlink(secret_path);
	assert_int_equal(tp_boot_unique_id(&id), ncclSystemError);
	assert_non_null(strstr(tp_log_last_error(), "can't be read: No such file"));
	unsetenv("TELPHER_JOB_SECRET_FILE");
	unsetenv("NCCL_COMM_ID");
	tp_param_reload();
}

static void split_in_two(struct helper_job *job)
{
	struct tp_boot *boot, *child;
	ncclUniqueId id;
	helper_open(job, &boot);
	int colour = job->rank % 2;
	if (colour == 0) usleep(150000);        /* roots that are later than their members */
	struct { int kind, counter, colour; } salt = { 1, 7, colour };
	must(tp_boot_derive_id(boot, colour, &salt, sizeof(salt), &id) == ncclSuccess);
	open_with(&id, 1, job->rank / 2, job->nranks / 2, &child);
	must(child->comm_hash != boot->comm_hash && memcmp(child->secret, boot->secret, sizeof(boot->secret)) != 0);
	helper_check_gather(child, 3, 64);
	must(tp_boot_barrier(boot) == ncclSuccess);
	tp_boot_close(child);
	tp_boot_close(boot);
}
static void members_of_a_split_meet_by_a_derived_id(void **state)
{
	(void)state;
	assert_int_equal(helper_run(6, 1, split_in_two, NULL), 0);
	assert_int_equal(helper_run(6, 3, split_in_two, NULL), 0);
}

static void shrink(struct helper_job *job)
{
	struct tp_boot *boot, *child;
	struct tp_event event;
	ncclUniqueId id;
	helper_open(job, &boot);
	helper_add(job, 0);
	helper_await(job, 0, job->nranks);
	if (job->rank == 1) kill(getpid(), SIGKILL);
	must(helper_event(boot, 30000, &event) && event.rank == 1);
	must(tp_boot_derive_id(boot, 0, "shrunk", 6, &id) == ncclSuccess);
	open_with(&id, 1, job->rank > 1 ? job->rank - 1 : job->rank, job->nranks - 1, &child);
	helper_check_gather(child, 3, 64);
	tp_boot_close(child);
	helper_add(job, 1);
	helper_await(job, 1, job->nranks - 1);
	tp_boot_close(boot);
}
static void survivors_meet_by_a_derived_id(void **state)
{
	int expected[4] = { 0, SIGKILL, 0, 0 };
	(void)state;
	assert_int_equal(helper_run(4, 1, shrink, expected), 0);
	assert_int_equal(helper_run(4, 4, shrink, expected), 0);
}

#define ROOTS 3
static ncclUniqueId *root_ids;
/* Ranks 1, 4 and 6 do; the shared page carries them. */
static void make_ids(struct helper_job *job)
{
	int maker = job->rank == 1 ? 0 : job->rank == 4 ? 1 : job->rank == 6 ? 2 : -1;
	if (maker >= 0) {
		must(tp_boot_unique_id(&root_ids[maker]) == ncclSuccess);
		helper_add(job, 0);
	}
	helper_await(job, 0, ROOTS);
}

static void meet_at_several_roots(struct helper_job *job)
{
	struct tp_boot *boot;
	make_ids(job);
	open_with(root_ids, ROOTS, job->rank, job->nranks, &boot);
	helper_check_gather(boot, 3, 64);
	tp_boot_close(boot);
}
static int patience_ms;
static void one_is_missing_at_several_roots(struct helper_job *job)
{
	struct tp_boot *boot;
	make_ids(job);
	if (job->rank == 5) return;
	struct tp_boot_args args = { .rank = job->rank, .nranks = job->nranks, .nids = ROOTS, .ids = root_ids, .timeout_ms = patience_ms };
	must(tp_boot_open(&args, &boot) == ncclRemoteError);
	must(strstr(tp_log_last_error(), "never came: ranks 5"));
	helper_add(job, 1);
	helper_await(job, 1, job->nranks - 1);
}
static void ranks_meet_at_several_roots(void **state)
{
	(void)state;
	root_ids = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	assert_int_equal(helper_run(8, 1, meet_at_several_roots, NULL), 0);
	assert_int_equal(helper_run(8, 3, meet_at_several_roots, NULL), 0);
	assert_int_equal(helper_run(8, 8, meet_at_several_roots, NULL), 0);
	/* Where one who comes is late itself, on a busy machine, they are given more time. */
	patience_ms = 2000;
	int wrong = helper_run(8, 1, one_is_missing_at_several_roots, NULL);
	patience_ms = 30000;
	if (wrong) wrong = helper_run(8, 1, one_is_missing_at_several_roots, NULL);
	assert_int_equal(wrong, 0);
	munmap(root_ids, 4096);
}

int main(int argc, char **argv)
{
	if (argc > 1) cmocka_set_test_filter(argv[1]);
	setenv("NCCL_SOCKET_IFNAME", "lo", 1);
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(ranks_meet_by_address_and_job_secret),
		cmocka_unit_test(an_address_without_a_secret_is_refused_unless_it_is_loopback),
		cmocka_unit_test(a_file_can_hold_the_jobs_secret),
		cmocka_unit_test(members_of_a_split_meet_by_a_derived_id),
		cmocka_unit_test(survivors_meet_by_a_derived_id),
		cmocka_unit_test(ranks_meet_at_several_roots),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
