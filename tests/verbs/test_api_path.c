/* The short way between two processes of one machine: what it does, in which order, and when it isn't taken. */
#include "verbs/helper_api_two.h"
#include <arpa/inet.h>
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static void fill(uint8_t *at, uint32_t bytes, uint32_t seed)
{
	for (uint32_t i = 0; i < bytes; i++)
		at[i] = (uint8_t)((i + seed) * 2654435761u >> 24);
}
static bool is_filled(const uint8_t *at, uint32_t bytes, uint32_t seed)
{
	for (uint32_t i = 0; i < bytes; i++)
		if (at[i] != (uint8_t)((i + seed) * 2654435761u >> 24))
			return false;
	return true;
}
static bool is_all(const uint8_t *at, uint32_t bytes, uint8_t value)
{
	for (uint32_t i = 0; i < bytes; i++)
		if (at[i] != value)
			return false;
	return true;
}

static void expect(const struct outcome *outcome, const char *carrier)
{
	char text[128];
	assert_true(outcome->a_ok);
	assert_true(outcome->b_ok);
	snprintf(text, sizeof(text), "carried by %s", carrier);
	if (!strstr(outcome->log, text))
		fail_msg("nothing was %s: %s", text, outcome->log);
}

/* ---- operations ---- */

static const uint32_t sizes[] = { 0, 1, 8, 9, 4095, 8192, 8193, 100000, 3000001 };

static int writes_and_reads(struct end *end)
{
	CHECK(end_open(end, NULL) == 0);
	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		fill(end->data, sizes[i], sizes[i]);
		CHECK(end_do(end, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = sizes[i], .remote_offset = 5 }) == 0);
		memset(end->data, 0, sizes[i]);
		CHECK(end_do(end, &(struct request){ .opcode = IBV_WR_RDMA_READ, .bytes = sizes[i], .remote_offset = 5 }) == 0);
		CHECK(is_filled(end->data, sizes[i], sizes[i]));
	}
	CHECK(end_meet(end) == 0);
	return end_close(end);
}
static int is_written_to(struct end *end)
{
	uint32_t last = sizes[sizeof(sizes) / sizeof(sizes[0]) - 1];
	CHECK(end_open(end, NULL) == 0);
	CHECK(end_meet(end) == 0);
	CHECK(is_all(end->data, 5, 0xbb));
	CHECK(is_filled(end->data + 5, last, last));
	CHECK(end->data[5 + last] == 0xbb);
	return end_close(end);
}
static void writes_and_reads_of_any_size_go_straight_into_the_other_process(void **state)
{
	(void)state;
	static struct outcome outcome;
	run_two(&outcome, writes_and_reads, is_written_to);
	expect(&outcome, "path");
}

static int sends(struct end *end)
{
	struct ibv_wc wc;
	CHECK(end_open(end, NULL) == 0);
	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		fill(end->data, sizes[i], (uint32_t)i);
		CHECK(end_do(end, &(struct request){ .opcode = i % 2 ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND, .bytes = sizes[i], .imm = htonl((uint32_t)i) }) == 0);
		CHECK(end_meet(end) == 0);
		CHECK(end_do(end, &(struct request){ .opcode = IBV_WR_RDMA_WRITE_WITH_IMM, .bytes = sizes[i], .imm = htonl(99) }) == 0);
	}
	CHECK(ibv_poll_cq(end->cq, 1, &wc) == 0);
	CHECK(end_meet(end) == 0);
	return end_close(end);
}
static int receives(struct end *end)
{
	struct ibv_wc wc;
	CHECK(end_open(end, NULL) == 0);
	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		/* Too late, now and then: the other side waits. */
		if (i % 3 == 0)
			poll(NULL, 0, 3);
		CHECK(end_recv(end, i, 0, 3500000) == 0);
		CHECK(end_wait(end, &wc) == 0);
		CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV && wc.byte_len == sizes[i] && wc.wr_id == i);
		CHECK(!(i % 2) || (wc.wc_flags == IBV_WC_WITH_IMM && wc.imm_data == htonl((uint32_t)i)));
		CHECK(is_filled(end->data, sizes[i], (uint32_t)i));
		memset(end->data, 0, sizes[i]);
		CHECK(end_meet(end) == 0);
		CHECK(end_recv(end, 1000 + i, 3600000, 1) == 0);
		CHECK(end_wait(end, &wc) == 0);
		CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM && wc.byte_len == sizes[i] && wc.imm_data == htonl(99));
		CHECK(is_filled(end->data, sizes[i], (uint32_t)i));
	}
	CHECK(end_meet(end) == 0);
	return end_close(end);
}
static void sends_and_immediates_find_their_receives(void **state)
{
	(void)state;
	static struct outcome outcome;
	run_two(&outcome, sends, receives);
	expect(&outcome, "path");
}

static int counts(struct end *end)
{
	CHECK(end_open(end, NULL) == 0);
	for (int i = 0; i < 500; i++)
		CHECK(end_do(end, &(struct request){ .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .bytes = 8, .remote_offset = 64, .compare_add = 1 }) == 0);
	CHECK(end_do(end, &(struct request){ .opcode = IBV_WR_ATOMIC_CMP_AND_SWP, .bytes = 8, .remote_offset = 72,
		.compare_add = 0xbbbbbbbbbbbbbbbbu, .swap = 4 }) == 0);
	CHECK(is_all(end->data, 8, 0xbb));
	CHECK(end_meet(end) == 0);
	return end_close(end);
}
static int is_counted(struct end *end)
{
	uint64_t word;
	CHECK(end_open(end, NULL) == 0);
	CHECK(end_meet(end) == 0);
	memcpy(&word, end->data + 64, 8);
	CHECK(word == 0xbbbbbbbbbbbbbbbbu + 500);
	memcpy(&word, end->data + 72, 8);
	CHECK(word == 4);
	return end_close(end);
}
static void atomics_are_done_at_the_target_while_its_program_sleeps(void **state)
{
	(void)state;
	static struct outcome outcome;
	run_two(&outcome, counts, is_counted);
	expect(&outcome, "path");
}

/* ---- order ---- */

enum { ROUNDS = 300 };

/* A message, then a WRITE to what the message's receiver looks at, then a message: whatever way each takes. */
static int keeps_order(struct end *end)
{
	struct ibv_wc wc;
	CHECK(end_open(end, NULL) == 0);
	for (uint32_t i = 0; i < ROUNDS; i++) {
		uint32_t bytes = i % 3 == 0 ? 4 : i % 3 == 1 ? 5000 : 60000;
		memset(end->data, (int)(i & 127), bytes);
		memset(end->data + 100000, (int)(i & 127) + 1, bytes);
		CHECK(end_post(end, &(struct request){ .opcode = IBV_WR_SEND, .offset = 0, .bytes = bytes, .flags = IBV_SEND_SIGNALED }) == 0);
		CHECK(end_post(end, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .offset = 100000, .bytes = bytes, .remote_offset = 200000 }) == 0);
		CHECK(end_post(end, &(struct request){ .opcode = IBV_WR_RDMA_READ, .offset = 300000, .bytes = bytes, .remote_offset = 200000 }) == 0);
		CHECK(end_post(end, &(struct request){ .opcode = IBV_WR_SEND, .offset = 100000, .bytes = bytes }) == 0);
		for (int k = 0; k < 4; k++) {
			CHECK(end_wait(end, &wc) == 0);
			CHECK(wc.status == IBV_WC_SUCCESS);
			CHECK(wc.opcode == (k == 1 ? IBV_WC_RDMA_WRITE : k == 2 ? IBV_WC_RDMA_READ : IBV_WC_SEND));
		}
		CHECK(is_all(end->data + 300000, bytes, (uint8_t)((i & 127) + 1)));
		CHECK(end_meet(end) == 0);
	}
	return end_close(end);
}
static int sees_order(struct end *end)
{
	struct ibv_wc wc;
	CHECK(end_open(end, NULL) == 0);
	for (uint32_t i = 0; i < ROUNDS; i++) {
		uint32_t bytes = i % 3 == 0 ? 4 : i % 3 == 1 ? 5000 : 60000;
		CHECK(end_recv(end, 1, 0, 60000) == 0);
		CHECK(end_wait(end, &wc) == 0);
		CHECK(wc.status == IBV_WC_SUCCESS && is_all(end->data, bytes, (uint8_t)(i & 127)));
		/* No receive for the second yet: it waits, and is no obstacle to the WRITE before it. */
		CHECK(end_recv(end, 2, 0, 60000) == 0);
		CHECK(end_wait(end, &wc) == 0);
		CHECK(wc.status == IBV_WC_SUCCESS && is_all(end->data, bytes, (uint8_t)((i & 127) + 1)));
		CHECK(is_all(end->data + 200000, bytes, (uint8_t)((i & 127) + 1)));
		CHECK(end_meet(end) == 0);
	}
	return end_close(end);
}
static void requests_take_effect_in_order_whatever_way_each_takes(void **state)
{
	(void)state;
	static struct outcome outcome;
	run_two(&outcome, keeps_order, sees_order);
	expect(&outcome, "path");
}

static int floods(struct end *end)
{
	struct ibv_wc wc;
	uint32_t posted = 0, ended = 0;
	CHECK(end_open(end, &(struct end_options){ .wr = 512 }) == 0);
	while (ended < 20000) {
		while (posted < 20000 && posted - ended < 512) {
			memcpy(end->data + posted % 512 * 4096, &posted, 4);
			CHECK(end_post(end, &(struct request){ .opcode = IBV_WR_SEND, .offset = posted % 512 * 4096, .bytes = 4 + posted % 4000 }) == 0);
			posted++;
		}
		CHECK(end_wait(end, &wc) == 0);
		CHECK(wc.status == IBV_WC_SUCCESS);
		ended++;
	}
	CHECK(end_meet(end) == 0);
	return end_close(end);
}
static int drinks(struct end *end)
{
	struct ibv_wc wc;
	CHECK(end_open(end, &(struct end_options){ .wr = 512 }) == 0);
	for (uint32_t i = 0; i < 256; i++)
		CHECK(end_recv(end, i, i * 4096, 4096) == 0);
	for (uint32_t i = 0; i < 20000; i++) {
		uint32_t number;
		CHECK(end_wait(end, &wc) == 0);
		CHECK(wc.status == IBV_WC_SUCCESS && wc.byte_len == 4 + i % 4000 && wc.wr_id == i % 256);
		memcpy(&number, end->data + i % 256 * 4096, 4);
		CHECK(number == i);
		CHECK(end_recv(end, i % 256, i % 256 * 4096, 4096) == 0);
	}
	CHECK(end_meet(end) == 0);
	return end_close(end);
}
static void a_flood_of_messages_fills_the_ring_and_loses_none(void **state)
{
	(void)state;
	static struct outcome outcome;
	run_two(&outcome, floods, drinks);
	expect(&outcome, "path");
}

/* ---- sleeping ---- */

static int wakes_the_other(struct end *end)
{
	CHECK(end_open(end, NULL) == 0);
	for (int i = 0; i < 20; i++) {
		CHECK(end_meet(end) == 0);
		poll(NULL, 0, i % 4);
		CHECK(end_do(end, &(struct request){ .opcode = IBV_WR_SEND, .bytes = 16 }) == 0);
	}
	CHECK(end_meet(end) == 0);
	return end_close(end);
}
static int sleeps_on_the_channel(struct end *end)
{
	struct ibv_wc wc;
	struct ibv_cq *cq;
	void *context;
	CHECK(end_open(end, NULL) == 0);
	for (uint32_t i = 0; i < 20; i++) {
		CHECK(end_recv(end, i, 0, 64) == 0);
		CHECK(ibv_req_notify_cq(end->cq, 0) == 0);
		CHECK(end_meet(end) == 0);
		CHECK(ibv_get_cq_event(end->channel, &cq, &context) == 0);
		ibv_ack_cq_events(cq, 1);
		CHECK(ibv_poll_cq(end->cq, 1, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
		for (int k = 0; k < 100; k++)   /* a poller, for a while */
			CHECK(ibv_poll_cq(end->cq, 1, &wc) == 0);
	}
	CHECK(end_meet(end) == 0);
	return end_close(end);
}
static void an_armed_channel_is_rung(void **state)
{
	(void)state;
	static struct outcome outcome;
	run_two(&outcome, wakes_the_other, sleeps_on_the_channel);
	expect(&outcome, "path");
}

/* ---- memory that goes ---- */

static int writes_until_refused(struct end *end)
{
	struct ibv_wc wc = { .status = IBV_WC_SUCCESS };
	CHECK(end_open(end, NULL) == 0);
	memset(end->data, 0x11, 300000);
	while (wc.status == IBV_WC_SUCCESS) {
		CHECK(end_post(end, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 300000 }) == 0);
		CHECK(end_wait(end, &wc) == 0);
	}
	CHECK(wc.status == IBV_WC_REM_ACCESS_ERR);
	CHECK(end_meet(end) == 0);
	return end_close(end);
}
static int deregisters(struct end *end)
{
	CHECK(end_open(end, NULL) == 0);
	volatile uint8_t *last = end->data + 299999;
	while (*last != 0x11)
		;
	CHECK(ibv_dereg_mr(end->mr) == 0);
	end->mr = NULL;
	memset(end->data, 0x22, END_BYTES);
	CHECK(end_meet(end) == 0);
	CHECK(is_all(end->data, END_BYTES, 0x22));
	return end_close(end);
}
static void nobody_writes_to_a_region_once_it_is_deregistered(void **state)
{
	(void)state;
	static struct outcome outcome;
	for (int i = 0; i < 10; i++) {
		run_two(&outcome, writes_until_refused, deregisters);
		expect(&outcome, "path");
	}
}

/* ---- death ---- */

static int sends_to_the_dead(struct end *end)
{
	struct ibv_wc wc = { .status = IBV_WC_SUCCESS };
	int flushed = 0;
	/* No timeout: hardware would try for ever. */
	CHECK(end_open(end, &(struct end_options){ .no_timeout = true }) == 0);
	for (int i = 0; i < 8; i++)
		CHECK(end_post(end, &(struct request){ .opcode = IBV_WR_SEND, .bytes = 10000 }) == 0);
	CHECK(write(end->to_peer, "k", 1) == 1);
	CHECK(end_wait(end, &wc) == 0);
	CHECK(wc.status == IBV_WC_RETRY_EXC_ERR);
	for (; flushed < 7; flushed++) {
		CHECK(end_wait(end, &wc) == 0);
		CHECK(wc.status == IBV_WC_WR_FLUSH_ERR);
	}
	return end_close(end);
}
static int writes_to_the_dead(struct end *end)
{
	struct ibv_wc wc = { .status = IBV_WC_SUCCESS };
	CHECK(end_open(end, &(struct end_options){ .no_timeout = true }) == 0);
	CHECK(write(end->to_peer, "k", 1) == 1);
	while (wc.status == IBV_WC_SUCCESS) {
		CHECK(end_post(end, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 1000000 }) == 0);
		CHECK(end_wait(end, &wc) == 0);
	}
	CHECK(wc.status == IBV_WC_RETRY_EXC_ERR);
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
static void requests_to_a_process_that_died_end_with_12(void **state)
{
	(void)state;
	static struct outcome outcome;
	run_two_killed(&outcome, sends_to_the_dead, is_killed);
	expect(&outcome, "path");
	run_two_killed(&outcome, writes_to_the_dead, is_killed);
	expect(&outcome, "path");
}

static int forks_and_goes_on(struct end *end)
{
	CHECK(end_open(end, NULL) == 0);
	CHECK(end_do(end, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 64 }) == 0);
	for (int i = 0; i < 3; i++) {
		int status;
		pid_t pid = fork();
		if (pid == 0) {
			struct ibv_wc wc;
			struct ibv_send_wr wr = { 0 }, *bad;
			/* All that was inherited is inert. */
			bool inert = SANITIZED || (ibv_poll_cq(end->cq, 1, &wc) <= 0 && ibv_post_send(end->qp, &wr, &bad) != 0);
			_exit(inert ? 0 : 1);
		}
		CHECK(waitpid(pid, &status, 0) == pid && status == 0);
		CHECK(end_do(end, &(struct request){ .opcode = IBV_WR_SEND, .bytes = 20000 }) == 0);
	}
	CHECK(end_meet(end) == 0);
	return end_close(end);
}
static int takes_three(struct end *end)
{
	struct ibv_wc wc;
	CHECK(end_open(end, NULL) == 0);
	for (uint32_t i = 0; i < 3; i++) {
		CHECK(end_recv(end, i, 0, 20000) == 0);
		CHECK(end_wait(end, &wc) == 0);
		CHECK(wc.status == IBV_WC_SUCCESS);
	}
	CHECK(end_meet(end) == 0);
	return end_close(end);
}
static void a_fork_disturbs_nothing(void **state)
{
	(void)state;
	static struct outcome outcome;
	run_two(&outcome, forks_and_goes_on, takes_three);
	expect(&outcome, "path");
}

/* ---- memory that was born shared ---- */

static uint8_t *shared_memory(void)
{
	int fd = memfd_create("test", MFD_CLOEXEC);
	if (fd < 0 || ftruncate(fd, END_BYTES) != 0)
		return NULL;
	uint8_t *at = mmap(NULL, END_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	return at == MAP_FAILED ? NULL : at;
}
static int counts_in_shared_memory(struct end *end)
{
	CHECK(end_open(end, &(struct end_options){ .data = shared_memory() }) == 0);
	for (int i = 0; i < 1000; i++) {
		uint64_t word = (uint64_t)i;
		memcpy(end->data, &word, 8);
		CHECK(end_do(end, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 8 }) == 0);
		CHECK(end_do(end, &(struct request){ .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .offset = 16, .bytes = 8, .compare_add = 1000 }) == 0);
		CHECK(end_do(end, &(struct request){ .opcode = IBV_WR_RDMA_READ, .offset = 32, .bytes = 8 }) == 0);
		memcpy(&word, end->data + 32, 8);
		CHECK(word == (uint64_t)i + 1000);
	}
	CHECK(end_do(end, &(struct request){ .opcode = IBV_WR_SEND, .offset = 0, .bytes = 1000000 }) == 0);
	CHECK(end_meet(end) == 0);
	end->own.extra = 1;
	return end_close(end);
}
static int lends_shared_memory(struct end *end)
{
	struct ibv_wc wc;
	uint64_t word;
	CHECK(end_open(end, &(struct end_options){ .data = shared_memory() }) == 0);
	CHECK(end_recv(end, 1, 1000000, 1000000) == 0);
	CHECK(end_wait(end, &wc) == 0);
	memcpy(&word, end->data, 8);
	CHECK(wc.status == IBV_WC_SUCCESS && word == 999 + 1000);
	CHECK(end_meet(end) == 0);
	end->own.extra = 1;
	return end_close(end);
}
static void memory_that_was_born_shared_is_written_by_stores(void **state)
{
	(void)state;
	static struct outcome outcome;
	run_two(&outcome, counts_in_shared_memory, lends_shared_memory);
	expect(&outcome, "path");
}

/* One file after another is registered at the same place: what is remembered of the last one is of no use. */
static int fills_many(struct end *end)
{
	CHECK(end_open(end, NULL) == 0);
	for (uint32_t i = 0; i < 50; i++) {
		CHECK(end_meet(end) == 0);
		fill(end->data, 4096, i);
		CHECK(end_do(end, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 4096 }) == 0);
		CHECK(end_meet(end) == 0);
	}
	return end_close(end);
}
static int shows_many(struct end *end)
{
	CHECK(end_open(end, NULL) == 0);
	for (uint32_t i = 0; i < 50; i++) {
		int fd = memfd_create("test", MFD_CLOEXEC);
		CHECK(fd >= 0 && ftruncate(fd, 8192) == 0);
		uint8_t *at = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		CHECK(at != MAP_FAILED);
		struct ibv_mr *mr = ibv_reg_mr(end->pd, at + 100, 4096, SIDE_ACCESS);
		CHECK(mr);
		end->own.addr = (uintptr_t)at + 100;
		end->own.rkey = mr->rkey;
		CHECK(end_meet(end) == 0);
		CHECK(end_meet(end) == 0);
		CHECK(is_filled(at + 100, 4096, i) && at[99] == 0 && at[4196] == 0);
		CHECK(ibv_dereg_mr(mr) == 0);
		munmap(at, 8192);
		close(fd);
	}
	return end_close(end);
}
static void shared_files_come_and_go(void **state)
{
	(void)state;
	static struct outcome outcome;
	run_two(&outcome, fills_many, shows_many);
	expect(&outcome, "path");
}

/* ---- the wire all the same ---- */

static bool forbid_process_vm(void)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 1, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_writev, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { .len = sizeof(code) / sizeof(code[0]), .filter = code };
	return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}
static int sends_without_process_vm(struct end *end)
{
	CHECK(forbid_process_vm());
	return sends(end);
}
static int receives_without_process_vm(struct end *end)
{
	CHECK(forbid_process_vm());
	return receives(end);
}
static void where_process_vm_is_refused_the_wire_is_taken(void **state)
{
	(void)state;
	static struct outcome outcome;
	run_two(&outcome, sends_without_process_vm, receives);
	expect(&outcome, "wire (process_vm_readv and process_vm_writev are refused");
	run_two(&outcome, sends, receives_without_process_vm);
	expect(&outcome, "wire (process_vm_readv and process_vm_writev are refused");
	assert_null(strstr(outcome.log, "carried by path"));
}

static int sends_undumpable(struct end *end)
{
	CHECK(prctl(PR_SET_DUMPABLE, 0) == 0);
	return sends(end);
}
static void a_process_that_is_not_dumpable_is_reached_by_the_wire(void **state)
{
	(void)state;
	static struct outcome outcome;
	run_two(&outcome, sends_undumpable, receives);
	expect(&outcome, "wire (one of the two processes isn't dumpable");
}

static int sends_by_wire(struct end *end)
{
	setenv("TELPHER_VERBS_CARRIER", "wire", 1);
	return sends(end);
}
static void either_side_can_ask_for_the_wire(void **state)
{
	(void)state;
	static struct outcome outcome;
	run_two(&outcome, sends_by_wire, receives);
	expect(&outcome, "wire (TELPHER_VERBS_CARRIER is wire");
	assert_null(strstr(outcome.log, "carried by path"));
}

int main(void)
{
	setenv("TELPHER_VERBS_HIDE_REAL", "1", 1);
	unsetenv("TELPHER_VERBS_CARRIER");
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(writes_and_reads_of_any_size_go_straight_into_the_other_process),
		cmocka_unit_test(sends_and_immediates_find_their_receives),
		cmocka_unit_test(atomics_are_done_at_the_target_while_its_program_sleeps),
		cmocka_unit_test(requests_take_effect_in_order_whatever_way_each_takes),
		cmocka_unit_test(a_flood_of_messages_fills_the_ring_and_loses_none),
		cmocka_unit_test(an_armed_channel_is_rung),
		cmocka_unit_test(nobody_writes_to_a_region_once_it_is_deregistered),
		cmocka_unit_test(requests_to_a_process_that_died_end_with_12),
		cmocka_unit_test(a_fork_disturbs_nothing),
		cmocka_unit_test(memory_that_was_born_shared_is_written_by_stores),
		cmocka_unit_test(shared_files_come_and_go),
		cmocka_unit_test(where_process_vm_is_refused_the_wire_is_taken),
		cmocka_unit_test(a_process_that_is_not_dumpable_is_reached_by_the_wire),
		cmocka_unit_test(either_side_can_ask_for_the_wire),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
