/* What must not start says why, to every rank: wrong ids, versions, ranks; ranks that never come; and strangers are dropped. */
#include "helper_boot.h"
#include <arpa/inet.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include "boot/internal.h"

/* The root's process stays until all have heard the reason. */
static void expect_failure(struct helper_job *job, int rank, int nranks, int timeout_ms, ncclResult_t result, const char *a, const char *b,
	int survivors)
{
	struct tp_boot *boot;
	must(helper_try_open(job, rank, nranks, timeout_ms, &boot) == result);
	must(strstr(tp_log_last_error(), a));
	must(strstr(tp_log_last_error(), b));
	helper_add(job, 1);
	helper_await(job, 1, survivors);
}

static void one_comes_twice(struct helper_job *job)
{
	expect_failure(job, job->rank == 2 ? 1 : job->rank, 4, 20000, ncclInvalidArgument, "rank 1 is there twice", "pid", 3);
}
static void a_duplicate_rank_fails_all_ranks(void **state)
{
	(void)state;
	assert_int_equal(helper_run(3, 1, one_comes_twice, NULL), 0);
}

static void one_counts_wrongly(struct helper_job *job)
{
	expect_failure(job, job->rank, job->rank == 2 ? 5 : 4, 20000, ncclInvalidArgument, "5", "4", 3);
}
static void different_numbers_of_ranks_fail_all_ranks(void **state)
{
	(void)state;
	assert_int_equal(helper_run(3, 1, one_counts_wrongly, NULL), 0);
}

static int patience_ms;
static void some_never_come(struct helper_job *job)
{
	expect_failure(job, job->rank == 2 ? 6 : job->rank, 9, patience_ms, ncclRemoteError, "never came", "2-5, 7-8", 3);
}
static void the_error_of_a_timeout_names_who_is_missing(void **state)
{
	(void)state;
	/* Where one who comes is late itself, on a busy machine, they are given more time. */
	patience_ms = 1500;
	if (helper_run(3, 1, some_never_come, NULL) == 0) return;
	patience_ms = 30000;
	assert_int_equal(helper_run(3, 1, some_never_come, NULL), 0);
}

/* Joins by hand, as a library of another version would. */
static void join_as_version(struct helper_job *job, uint32_t protocol, uint32_t library)
{
	struct tp_joiner joiner = {0};
	must(tp_id_parse(job->id, &joiner.id) == ncclSuccess);
	joiner.first = joiner.id;
	joiner.join = (struct tp_wire_join){ .protocol = protocol, .library = library, .rank = 1, .nranks = 3, .nids = 1, .timeout_ms = 20000 };
	joiner.deadline_ms = tp_clock_ms() + 20000;
	tp_service_init_cond(&joiner.cond);
	must(tp_join_start(&joiner) == ncclSuccess);
	must(tp_join_wait(&joiner, &joiner.seated, NULL) == ncclInvalidUsage);
	must(strstr(tp_log_last_error(), "version"));
	tp_join_end(&joiner);
	pthread_cond_destroy(&joiner.cond);
}
static void one_is_of_another_version(struct helper_job *job)
{
	if (job->rank == 1) {
		helper_await(job, 0, 1);
		join_as_version(job, TP_WIRE_PROTOCOL + 1, 20103);
	} else {
		if (job->rank == 0) {
			must(tp_boot_unique_id(job->id) == ncclSuccess);
			helper_put(job, 0, 1);
		}
		helper_await(job, 0, 1);
		struct tp_boot *boot;
		struct tp_boot_args args = { .rank = job->rank, .nranks = 3, .nids = 1, .ids = job->id, .timeout_ms = 20000 };
		must(tp_boot_open(&args, &boot) == ncclInvalidUsage);
		must(strstr(tp_log_last_error(), "2.1.3") && strstr(tp_log_last_error(), "0.1.0") && strstr(tp_log_last_error(), "rank 1"));
	}
	helper_add(job, 1);
	helper_await(job, 1, 3);
}
static void a_rank_of_another_version_fails_all_ranks(void **state)
{
	(void)state;
	assert_int_equal(helper_run(3, 1, one_is_of_another_version, NULL), 0);
}

static bool has_joined(void)
{
	bool joined = false;
	tp_service_lock();
	for (struct tp_conn *conn = tp_service.conns; conn; conn = conn->next)
		joined |= conn->caller && conn->state == TP_CONN_OPEN && conn->hello.kind == TP_WIRE_JOIN;
	tp_service_unlock();
	return joined;
}
static void *die_once_joined(void *unused)
{
	while (!has_joined()) usleep(1000);
	usleep(50000);
	kill(getpid(), SIGKILL);
	return unused;
}
static void one_dies_at_init(struct helper_job *job)
{
	struct tp_boot *boot;
	pthread_t thread;
	if (job->rank == 1) {
		must(pthread_create(&thread, NULL, die_once_joined, NULL) == 0);
		helper_try_open(job, 1, 4, 20000, &boot);
		_exit(1);
	}
	expect_failure(job, job->rank, 4, 20000, ncclRemoteError, "rank 1", "died", 2);
}
static void a_rank_that_dies_at_init_fails_the_others(void **state)
{
	int expected[3] = { 0, SIGKILL, 0 };
	(void)state;
	assert_int_equal(helper_run(3, 1, one_dies_at_init, expected), 0);
}

static void *set_flag(void *flag)
{
	usleep(200000);
	atomic_store((_Atomic uint32_t *)flag, 1);
	return NULL;
}
static void an_abort_flag_ends_the_wait_at_init(void **state)
{
	_Atomic uint32_t flag = 0;
	struct tp_boot *boot;
	pthread_t thread;
	ncclUniqueId id;
	(void)state;
	assert_int_equal(tp_boot_unique_id(&id), ncclSuccess);
	struct tp_boot_args args = { .rank = 0, .nranks = 2, .nids = 1, .ids = &id, .timeout_ms = 60000, .abort = &flag };
	pthread_create(&thread, NULL, set_flag, &flag);
	assert_int_equal(tp_boot_open(&args, &boot), ncclInternalError);
	pthread_join(thread, NULL);
}

static void open_fails_within(int timeout_ms, const ncclUniqueId *id, ncclResult_t result, const char *text)
{
	struct tp_boot *boot;
	struct tp_boot_args args = { .rank = 0, .nranks = 1, .nids = 1, .ids = id, .timeout_ms = timeout_ms };
	assert_int_equal(tp_boot_open(&args, &boot), result);
	assert_non_null(strstr(tp_log_last_error(), text));
}

static void open_fails(const ncclUniqueId *id, ncclResult_t result, const char *text) { open_fails_within(20000, id, result, text); }

static void ids_that_are_not_ours_are_told_apart(void **state)
{
	ncclUniqueId id, other;
	(void)state;
	memset(&id, 0, sizeof(id));
	open_fails(&id, ncclInvalidArgument, "all zeros");
	memset(&id, 0x5a, sizeof(id));
	open_fails(&id, ncclInvalidArgument, "another library made it");
	assert_int_equal(tp_boot_unique_id(&id), ncclSuccess);
	other = id;
	other.internal[50] ^= 1;
	open_fails(&other, ncclInvalidArgument, "damaged");
	other = id;
	other.internal[8] = 9;
	open_fails(&other, ncclInvalidUsage, "format 9");
	struct tp_boot *boot;
	struct tp_boot_args args = { .rank = 0, .nranks = 1, .nids = 1, .ids = &id };
	assert_int_equal(tp_boot_open(&args, &boot), ncclSuccess);
	open_fails(&id, ncclInvalidUsage, "complete already");
	tp_boot_close(boot);
}

static void a_root_that_is_gone_is_said_to_be(void **state)
{
	ncclUniqueId id;
	struct tp_id parsed;
	(void)state;
	assert_int_equal(tp_boot_unique_id(&id), ncclSuccess);
	assert_int_equal(tp_id_parse(&id, &parsed), ncclSuccess);
	parsed.root.v4.sin_port = htons(1);
	tp_secret_random(parsed.secret, sizeof(parsed.secret));
	tp_id_write(&parsed, &id);
	open_fails_within(800, &id, ncclRemoteError, "refuses connections");
}

/* ---- strangers */

static int call(const ncclUniqueId *id)
{
	struct tp_id parsed;
	must(tp_id_parse(id, &parsed) == ncclSuccess);
	int fd = socket(parsed.root.sa.sa_family, SOCK_STREAM, 0);
	must(fd >= 0 && connect(fd, &parsed.root.sa, tp_addr_len(&parsed.root)) == 0);
	return fd;
}

/* What the log says of a caller that sends these bytes; the caller is dropped. */
static void expect_dropped(const ncclUniqueId *id, const void *bytes, size_t count, const char *text)
{
	char byte;
	int fd = call(id);
	must(send(fd, bytes, count, MSG_NOSIGNAL) == (ssize_t)count);
	while (recv(fd, &byte, 1, 0) > 0) {}
	close(fd);
	if (text) must(strstr(tp_log_last_error(), text));
}

static void send_nonsense(const ncclUniqueId *id)
{
	char zeros[64] = {0}, random[64];
	struct tp_wire_hello hello;
	struct tp_id parsed;
	tp_secret_random(random, sizeof(random));
	random[0] = 'R';
	expect_dropped(id, "GET /metrics HTTP/1.1\r\n\r\n", 25, "a stranger at 127.0.0.1");
	must(strstr(tp_log_last_error(), "an HTTP request"));
	expect_dropped(id, "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11, "a TLS hello");
	expect_dropped(id, zeros, sizeof(zeros), "sent zeros");
	expect_dropped(id, random, sizeof(random), "not ours");
	must(tp_id_parse(id, &parsed) == ncclSuccess);
	tp_wire_hello_make(&hello, TP_WIRE_JOIN, 0, parsed.name ^ 1);
	expect_dropped(id, &hello, sizeof(hello), NULL);
	hello.format = 77;
	expect_dropped(id, &hello, sizeof(hello), "version 77");
	tp_wire_hello_make(&hello, TP_WIRE_JOIN, 0, parsed.name);
	char forged[sizeof(hello) + 32];
	memcpy(forged, &hello, sizeof(hello));
	memset(forged + sizeof(hello), 7, 32);
	expect_dropped(id, forged, sizeof(forged), "not its secret");
}

/* Proves the secret by hand; keys: of the frames that may follow. */
static int call_and_prove(const ncclUniqueId *id, uint8_t keys[2][TP_SECRET_BYTES])
{
	struct tp_wire_hello hello;
	struct tp_wire_challenge challenge;
	struct tp_id parsed;
	uint8_t proof[TP_SECRET_BYTES];
	int fd = call(id);
	must(tp_id_parse(id, &parsed) == ncclSuccess);
	tp_wire_hello_make(&hello, TP_WIRE_JOIN, 0, parsed.name);
	must(send(fd, &hello, sizeof(hello), 0) == sizeof(hello));
	must(recv(fd, &challenge, sizeof(challenge), MSG_WAITALL) == sizeof(challenge));
	tp_wire_prove(parsed.secret, TP_WIRE_CALLER, &hello, challenge.nonce, proof);
	must(send(fd, proof, sizeof(proof), 0) == sizeof(proof));
	tp_wire_session(parsed.secret, &hello, challenge.nonce, keys);
	return fd;
}

/* Sends what no rank would. */
static void send_bad_frame(const ncclUniqueId *id, int kind)
{
	struct tp_wire_frame frame;
	uint8_t keys[2][TP_SECRET_BYTES];
	char byte, body[64] = { TP_WIRE_PROTOCOL };
	int fd = call_and_prove(id, keys);
	tp_wire_seal(&frame, keys[0], TP_FRAME_JOIN, 0, body, sizeof(body));
	if (kind == 0) frame.bytes = 0x7fffffff;                /* longer than anything */
	if (kind == 1) frame.mac[3] ^= 1;                       /* forged */
	if (kind == 2) frame.number = 5;                        /* replayed */
	must(send(fd, &frame, sizeof(frame), 0) == sizeof(frame));
	if (kind == 3) shutdown(fd, SHUT_WR);                   /* broken off */
	else send(fd, body, sizeof(body), MSG_NOSIGNAL);        /* kind 4: a proven join that is too short */
	while (recv(fd, &byte, 1, 0) > 0) {}
	close(fd);
}

/* Everything that a rank once said, heard by somebody in between who says it again. */
static void replay(struct helper_job *job)
{
	struct { struct tp_wire_hello hello; uint8_t proof[TP_SECRET_BYTES]; struct tp_wire_frame frame; struct tp_wire_join join; } __attribute__((packed))
		said = {0};
	struct tp_wire_challenge challenge;
	struct tp_id parsed;
	struct tp_boot *boot;
	uint8_t keys[2][TP_SECRET_BYTES];
	must(tp_boot_unique_id(job->id) == ncclSuccess && tp_id_parse(job->id, &parsed) == ncclSuccess);
	int fd = call(job->id);
	tp_wire_hello_make(&said.hello, TP_WIRE_JOIN, 0, parsed.name);
	must(send(fd, &said.hello, sizeof(said.hello), 0) == sizeof(said.hello));
	must(recv(fd, &challenge, sizeof(challenge), MSG_WAITALL) == sizeof(challenge));
	tp_wire_prove(parsed.secret, TP_WIRE_CALLER, &said.hello, challenge.nonce, said.proof);
	tp_wire_session(parsed.secret, &said.hello, challenge.nonce, keys);
	said.join = (struct tp_wire_join){ .protocol = TP_WIRE_PROTOCOL, .library = TP_WIRE_LIBRARY, .rank = 0, .nranks = 1, .nids = 1, .timeout_ms = 20000 };
	tp_wire_seal(&said.frame, keys[0], TP_FRAME_JOIN, 0, &said.join, sizeof(said.join));
	must(send(fd, said.proof, sizeof(said.proof), 0) == sizeof(said.proof));
	close(fd);
	expect_dropped(job->id, &said, sizeof(said), "not its secret");
	/* The rank whose words they were was not let in by them. */
	struct tp_boot_args args = { .rank = 0, .nranks = 1, .nids = 1, .ids = job->id, .timeout_ms = 20000 };
	must(tp_boot_open(&args, &boot) == ncclSuccess);
	tp_boot_close(boot);
}
static void a_recorded_session_is_of_no_use(void **state) { (void)state; assert_int_equal(helper_run(1, 1, replay, NULL), 0); }

static void prove_and_wait(struct helper_job *job)
{
	struct { struct tp_wire_frame frame; struct tp_wire_join join; } __attribute__((packed)) said = {0};
	struct tp_boot *first, *boot;
	ncclUniqueId id;
	uint8_t keys[2][TP_SECRET_BYTES];
	char byte;
	must(tp_boot_unique_id(job->id) == ncclSuccess);
	int fd = call_and_prove(job->id, keys);
	struct tp_boot_args args = { .rank = 0, .nranks = 1, .nids = 1, .ids = job->id, .timeout_ms = 20000 };
	must(tp_boot_open(&args, &first) == ncclSuccess);
	/* So many that the first id is forgotten. */
	for (int i = 0; i < 100; i++) {
		must(tp_boot_unique_id(&id) == ncclSuccess);
		args.ids = &id;
		must(tp_boot_open(&args, &boot) == ncclSuccess);
		tp_boot_close(boot);
	}
	expect_dropped(job->id, "GET / HTTP/1.1\r\n\r\n", 18, NULL);      /* wakes the service thread, which forgets then */
	said.join = (struct tp_wire_join){ .protocol = TP_WIRE_PROTOCOL, .library = TP_WIRE_LIBRARY, .rank = 0, .nranks = 1, .nids = 1, .timeout_ms = 20000 };
	tp_wire_addr_put(&said.join.service, &first->peers[0].service);
	tp_wire_seal(&said.frame, keys[0], TP_FRAME_JOIN, 0, &said.join, sizeof(said.join));
	send(fd, &said, sizeof(said), MSG_NOSIGNAL);
	must(recv(fd, &byte, 1, 0) <= 0);
	close(fd);
	tp_boot_close(first);
}
static void a_caller_that_never_joins_goes_with_its_id(void **state) { (void)state; assert_int_equal(helper_run(1, 1, prove_and_wait, NULL), 0); }

static void meet_among_strangers(struct helper_job *job)
{
	struct tp_boot *boot;
	if (job->rank == 0) {
		int silent[50], slow;
		must(tp_boot_unique_id(job->id) == ncclSuccess);
		for (int i = 0; i < 50; i++) silent[i] = call(job->id);
		slow = call(job->id);
		must(send(slow, TP_WIRE_MAGIC, 8, 0) == 8);     /* … and never more */
		send_nonsense(job->id);
		for (int kind = 0; kind <= 4; kind++) send_bad_frame(job->id, kind);
		helper_put(job, 0, 1);
		struct tp_boot_args args = { .rank = 0, .nranks = 3, .nids = 1, .ids = job->id, .timeout_ms = 20000 };
		uint64_t begin = tp_clock_ms();
		must(tp_boot_open(&args, &boot) == ncclSuccess);
		must(tp_clock_ms() - begin < TP_HANDSHAKE_MS);  /* nobody waited for the silent ones */
		for (int i = 0; i < 50; i++) close(silent[i]);
		close(slow);
	} else {
		helper_await(job, 0, 1);
		struct tp_boot_args args = { .rank = job->rank, .nranks = 3, .nids = 1, .ids = job->id, .timeout_ms = 20000 };
		must(tp_boot_open(&args, &boot) == ncclSuccess);
	}
	helper_check_gather(boot, 3, 64);
	tp_boot_close(boot);
}
static void strangers_are_dropped_and_delay_nobody(void **state)
{
	(void)state;
	assert_int_equal(helper_run(3, 3, meet_among_strangers, NULL), 0);
}

int main(int argc, char **argv)
{
	if (argc > 1) cmocka_set_test_filter(argv[1]);
	setenv("NCCL_SOCKET_IFNAME", "lo", 1);
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_duplicate_rank_fails_all_ranks),
		cmocka_unit_test(different_numbers_of_ranks_fail_all_ranks),
		cmocka_unit_test(the_error_of_a_timeout_names_who_is_missing),
		cmocka_unit_test(a_rank_of_another_version_fails_all_ranks),
		cmocka_unit_test(a_rank_that_dies_at_init_fails_the_others),
		cmocka_unit_test(strangers_are_dropped_and_delay_nobody),
		cmocka_unit_test(a_recorded_session_is_of_no_use),
		cmocka_unit_test(a_caller_that_never_joins_goes_with_its_id),
		cmocka_unit_test(an_abort_flag_ends_the_wait_at_init),
		cmocka_unit_test(ids_that_are_not_ours_are_told_apart),
		cmocka_unit_test(a_root_that_is_gone_is_said_to_be),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
