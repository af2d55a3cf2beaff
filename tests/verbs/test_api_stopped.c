/* Peers of this machine that are stopped, or dead: who waits for them says whom for, and hardware's timing can be had. */
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include "verbs/helper_api_two.h"

/* Has this process said so? The log is its own file (helper_api_two.c). */
static bool said(const char *what)
{
	char line[1000];
	FILE *file = fopen(getenv("NCCL_DEBUG_FILE"), "re");
	bool found = false;
	while (file && !found && fgets(line, sizeof(line), file))
		found = strstr(line, what) != NULL;
	if (file)
		fclose(file);
	return found;
}

static bool has_stopped(pid_t pid)
{
	char path[64], text[400], *end;
	snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
	FILE *file = fopen(path, "re");
	size_t got = file ? fread(text, 1, sizeof(text) - 1, file) : 0;
	if (file)
		fclose(file);
	text[got] = 0;
	return (end = strrchr(text, ')')) != NULL && end[2] == 'T';
}

/* ---- a peer that is stopped inside a region ---- */

struct helper { struct end *end; _Atomic bool gone; bool told; };

/* Lets the peer go on when it has been named, or there is nobody to wait for. */
static void *wakes(void *arg)
{
	struct helper *helper = arg;
	char wanted[100];
	snprintf(wanted, sizeof(wanted), "waits for process %d,", (int)helper->end->peer.pid);
	time_t until = time(NULL) + 30;
	while (!helper->gone && !helper->told && time(NULL) < until) {
		helper->told = said(wanted);
		poll(NULL, 0, 5);
	}
	kill(helper->end->peer.pid, SIGCONT);
	return NULL;
}

/* Its peer is stopped most likely in the kernel, on its way out of copying: it is inside until it goes on. */
static int deregisters_while_the_peer_is_stopped(struct end *end)
{
	struct helper helper = { .end = end };
	CHECK(end_open(end, NULL) == 0);
	for (int tries = 0; tries < 50 && !helper.told; tries++) {
		pthread_t thread;
		CHECK(end_meet(end) == 0);
		volatile uint8_t *last = end->data + END_BYTES - 1;
		while (*last != 0x11)
			;
		CHECK(kill(end->peer.pid, SIGSTOP) == 0);
		while (!has_stopped(end->peer.pid))
			;
		helper.gone = false;
		CHECK(pthread_create(&thread, NULL, wakes, &helper) == 0);
		CHECK(ibv_dereg_mr(end->mr) == 0);
		helper.gone = true;
		/* Nobody writes there any more. */
		memset(end->data, 0x22, END_BYTES);
		pthread_join(thread, NULL);
		CHECK(end_meet(end) == 0);
		for (uint32_t i = 0; i < END_BYTES; i++)
			CHECK(end->data[i] == 0x22);
		end->mr = ibv_reg_mr(end->pd, end->data, END_BYTES, SIDE_ACCESS);
		CHECK(end->mr);
		end->own.rkey = end->mr->rkey;
		end->own.extra = helper.told;
		/* The refused request ended the connection. */
		CHECK(end_reconnect(end) == 0);
	}
	CHECK(helper.told);
	end->own.extra = 0;
	return end_close(end);
}
static int writes_and_is_stopped(struct end *end)
{
	CHECK(end_open(end, NULL) == 0);
	memset(end->data, 0x11, END_BYTES);
	while (!end->peer.extra) {
		struct ibv_wc wc = { .status = IBV_WC_SUCCESS };
		CHECK(end_meet(end) == 0);
		while (wc.status == IBV_WC_SUCCESS) {
			CHECK(end_post(end, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = END_BYTES }) == 0);
			CHECK(end_wait(end, &wc) == 0);
		}
		CHECK(wc.status == IBV_WC_REM_ACCESS_ERR);
		CHECK(end_meet(end) == 0);
		CHECK(end_reconnect(end) == 0);
	}
	return end_close(end);
}
static void a_peer_that_is_stopped_inside_a_region_is_named(void **state)
{
	(void)state;
	static struct outcome outcome;
	run_two(&outcome, deregisters_while_the_peer_is_stopped, writes_and_is_stopped);
	assert_true(outcome.a_ok && outcome.b_ok);
	assert_non_null(strstr(outcome.log, "carried by path"));
}

/* ---- a peer that is stopped and serves nothing ---- */

static int sends_to_one_that_is_stopped(struct end *end)
{
	char wanted[100];
	struct ibv_wc wc;
	/* Hardware's timeout is long over by then, but hardware would have answered. */
	CHECK(end_open(end, &(struct end_options){ .timeout = 8 }) == 0);
	CHECK(end_meet(end) == 0);
	CHECK(kill(end->peer.pid, SIGSTOP) == 0);
	while (!has_stopped(end->peer.pid))
		;
	CHECK(end_post(end, &(struct request){ .opcode = IBV_WR_SEND, .bytes = 64 }) == 0);
	snprintf(wanted, sizeof(wanted), "process %d has served nothing", (int)end->peer.pid);
	for (time_t until = time(NULL) + 30; !said(wanted) && time(NULL) < until; poll(NULL, 0, 5))
		CHECK(ibv_poll_cq(end->cq, 1, &wc) == 0);
	CHECK(said(wanted));
	CHECK(kill(end->peer.pid, SIGCONT) == 0);
	CHECK(end_wait(end, &wc) == 0 && wc.status == IBV_WC_SUCCESS);
	CHECK(end_meet(end) == 0);
	return end_close(end);
}
static int receives(struct end *end)
{
	struct ibv_wc wc;
	CHECK(end_open(end, &(struct end_options){ .timeout = 8 }) == 0);
	CHECK(end_recv(end, 1, 0, 64) == 0);
	CHECK(end_meet(end) == 0);
	CHECK(end_wait(end, &wc) == 0 && wc.status == IBV_WC_SUCCESS);
	CHECK(end_meet(end) == 0);
	return end_close(end);
}
static void a_peer_that_is_stopped_is_named_and_not_taken_for_dead(void **state)
{
	(void)state;
	static struct outcome outcome;
	run_two(&outcome, sends_to_one_that_is_stopped, receives);
	assert_true(outcome.a_ok && outcome.b_ok);
	assert_non_null(strstr(outcome.log, "carried by path"));
}

/* ---- hardware's timing ---- */

static int waits_as_long_as_hardware(struct end *end)
{
	struct ibv_wc wc;
	char byte;
	setenv("TELPHER_VERBS_DEATH", "timeout", 1);
	/* Timeout 0 is for ever. */
	CHECK(end_open(end, &(struct end_options){ .no_timeout = true }) == 0);
	CHECK(end_post(end, &(struct request){ .opcode = IBV_WR_SEND, .bytes = 64 }) == 0);
	CHECK(write(end->to_peer, "k", 1) == 1);
	CHECK(recv(end->to_peer, &byte, 1, MSG_WAITALL) == 0);
	for (int i = 0; i < 50; i++, poll(NULL, 0, 10))
		CHECK(ibv_poll_cq(end->cq, 1, &wc) == 0);
	to_error(end->qp);
	CHECK(end_wait(end, &wc) == 0 && wc.status == IBV_WC_WR_FLUSH_ERR);
	return end_close(end);
}
static int is_killed(struct end *end)
{
	char byte;
	CHECK(end_open(end, NULL) == 0);
	CHECK(recv(end->to_peer, &byte, 1, MSG_WAITALL) == 1);
	raise(SIGKILL);
	return 1;
}
static void who_asks_for_it_waits_for_the_dead_as_hardware_does(void **state)
{
	(void)state;
	static struct outcome outcome;
	run_two_killed(&outcome, waits_as_long_as_hardware, is_killed);
	assert_true(outcome.a_ok && outcome.b_ok);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_peer_that_is_stopped_inside_a_region_is_named),
		cmocka_unit_test(a_peer_that_is_stopped_is_named_and_not_taken_for_dead),
		cmocka_unit_test(who_asks_for_it_waits_for_the_dead_as_hardware_does),
	};
	setenv("TELPHER_VERBS_HIDE_REAL", "1", 1);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
