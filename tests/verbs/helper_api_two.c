#include "verbs/helper_api_two.h"
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

int failed_at(const char *file, int line, const char *what)
{
	fprintf(stderr, "%s:%d: process %d: not so: %s\n", file, line, (int)getpid(), what);
	return 1;
}

static pid_t start(int (*role)(struct end *end), bool is_a, int socket, int other, const char *log)
{
	pid_t pid = fork();
	if (pid)
		return pid;
	struct end end = { .is_a = is_a, .to_peer = socket };
	close(other);
	setenv("NCCL_DEBUG", "INFO", 1);
	setenv("NCCL_DEBUG_SUBSYS", "NET", 1);
	setenv("NCCL_DEBUG_FILE", log, 1);
	alarm(250);
	int status = role(&end);
	fflush(NULL);
	/* Leak checkers have their say by way of exit. */
	exit(status);
}

static void add_log(struct outcome *outcome, const char *name)
{
	size_t used = strlen(outcome->log);
	FILE *file = fopen(name, "r");
	if (!file)
		return;
	used += fread(outcome->log + used, 1, sizeof(outcome->log) - 1 - used, file);
	outcome->log[used] = 0;
	fclose(file);
	unlink(name);
}

static void run(struct outcome *outcome, int (*a)(struct end *end), int (*b)(struct end *end), bool killed)
{
	int sockets[2], status_a = 0, status_b = 0;
	char names[2][64];
	memset(outcome, 0, sizeof(*outcome));
	for (int i = 0; i < 2; i++)
		snprintf(names[i], sizeof(names[i]), "/tmp/telpher-test-%d-%d", (int)getpid(), i);
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets), 0);
	pid_t pid_a = start(a, true, sockets[0], sockets[1], names[0]), pid_b = start(b, false, sockets[1], sockets[0], names[1]);
	close(sockets[0]);
	close(sockets[1]);
	waitpid(pid_a, &status_a, 0);
	waitpid(pid_b, &status_b, 0);
	outcome->a_ok = status_a == 0;
	outcome->b_ok = killed ? WIFSIGNALED(status_b) && WTERMSIG(status_b) == SIGKILL : status_b == 0;
	add_log(outcome, names[0]);
	add_log(outcome, names[1]);
	if (!outcome->a_ok || !outcome->b_ok)
		fprintf(stderr, "a ended with 0x%x, b with 0x%x; their log:\n%s", (unsigned)status_a, (unsigned)status_b, outcome->log);
}

void run_two(struct outcome *outcome, int (*a)(struct end *end), int (*b)(struct end *end)) { run(outcome, a, b, false); }
void run_two_killed(struct outcome *outcome, int (*a)(struct end *end), int (*b)(struct end *end)) { run(outcome, a, b, true); }

/* The thread sanitizer doesn't see what processes order by their messages. But the card's thread holds the queue pair's lock when it
 * touches memory for the other one, as this does. */
static int touch_lock(struct end *end)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	CHECK(ibv_query_qp(end->qp, &attr, IBV_QP_STATE, &init) == 0);
	return 0;
}

int end_meet(struct end *end)
{
	CHECK(touch_lock(end) == 0);
	CHECK(write(end->to_peer, &end->own, sizeof(end->own)) == (ssize_t)sizeof(end->own));
	CHECK(recv(end->to_peer, &end->peer, sizeof(end->peer), MSG_WAITALL) == (ssize_t)sizeof(end->peer));
	return touch_lock(end);
}

static int connect_qp(struct end *end, const struct end_options *options)
{
	bool reliable = end->qp->qp_type == IBV_QPT_RC;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = end->peer.qpn, .rq_psn = end->peer.psn,
		.max_dest_rd_atomic = 16, .min_rnr_timer = 1, .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .hop_limit = 64, .dgid = end->peer.gid } } };
	int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	CHECK(ibv_modify_qp(end->qp, &attr, reliable ? mask | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : mask) == 0);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .sq_psn = end->own.psn, .timeout = options->no_timeout ? 0 : options->timeout ? options->timeout : 20,
		.retry_cnt = 7, .rnr_retry = options->rnr_retry ? options->rnr_retry : 7, .max_rd_atomic = 16 };
	mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
	CHECK(ibv_modify_qp(end->qp, &attr, reliable ? mask | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC : mask) == 0);
	return 0;
}

static int init_qp(struct end *end)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC };
	return ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

static const struct end_options plain;

int end_open(struct end *end, const struct end_options *given)
{
	const struct end_options *options = given ? given : &plain;
	int count;
	struct ibv_device **list = ibv_get_device_list(&count);
	CHECK(list && count >= 1);
	end->context = ibv_open_device(list[0]);
	CHECK(end->context);
	ibv_free_device_list(list);
	end->pd = ibv_alloc_pd(end->context);
	end->channel = ibv_create_comp_channel(end->context);
	CHECK(end->pd && end->channel);
	end->cq = ibv_create_cq(end->context, 1024, NULL, end->channel, 0);
	CHECK(end->cq);
	uint32_t wr = options->wr ? options->wr : 64;
	struct ibv_qp_init_attr init = { .send_cq = end->cq, .recv_cq = end->cq, .qp_type = options->type ? options->type : IBV_QPT_RC, .sq_sig_all = 1,
		.cap = { .max_send_wr = wr, .max_recv_wr = wr, .max_send_sge = 4, .max_recv_sge = 4, .max_inline_data = 64 } };
	end->qp = ibv_create_qp(end->pd, &init);
	CHECK(end->qp);
	end->data = options->data ? options->data : aligned_alloc(4096, END_BYTES);
	CHECK(end->data);
	memset(end->data, end->is_a ? 0xaa : 0xbb, END_BYTES);
	end->mr = ibv_reg_mr(end->pd, end->data, END_BYTES, SIDE_ACCESS);
	CHECK(end->mr);
	CHECK(init_qp(end) == 0);
	end->own = (struct end_info){ .qpn = end->qp->qp_num, .psn = end->is_a ? 0xfffff0 : 77, .rkey = end->mr->rkey, .addr = (uintptr_t)end->data,
		.pid = getpid() };
	CHECK(ibv_query_gid(end->context, 1, 0, &end->own.gid) == 0);
	CHECK(end_meet(end) == 0);
	CHECK(connect_qp(end, options) == 0);
	return end_meet(end);
}

int end_close(struct end *end)
{
	bool own = end->own.extra == 0;
	CHECK(ibv_destroy_qp(end->qp) == 0);
	CHECK(ibv_destroy_cq(end->cq) == 0);
	CHECK(!end->mr || ibv_dereg_mr(end->mr) == 0);
	CHECK(ibv_destroy_comp_channel(end->channel) == 0);
	CHECK(ibv_dealloc_pd(end->pd) == 0);
	CHECK(ibv_close_device(end->context) == 0);
	if (own)
		free(end->data);
	return 0;
}

int end_reconnect(struct end *end)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RESET };
	CHECK(ibv_modify_qp(end->qp, &attr, IBV_QP_STATE) == 0);
	CHECK(init_qp(end) == 0);
	CHECK(end_meet(end) == 0);
	CHECK(connect_qp(end, &plain) == 0);
	return end_meet(end);
}

int end_recv(struct end *end, uint64_t id, uint32_t offset, uint32_t bytes)
{
	struct ibv_sge sge = { .addr = (uintptr_t)end->data + offset, .length = bytes, .lkey = end->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;
	return ibv_post_recv(end->qp, &wr, &bad);
}

int end_post(struct end *end, const struct request *request)
{
	struct ibv_sge sge = { .addr = (uintptr_t)end->data + request->offset, .length = request->bytes, .lkey = end->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = request->id, .sg_list = &sge, .num_sge = 1, .opcode = request->opcode, .send_flags = request->flags,
		.imm_data = request->imm }, *bad;
	uint64_t addr = end->peer.addr + request->remote_offset;
	uint32_t rkey = request->rkey ? request->rkey : end->peer.rkey;
	if (request->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || request->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = addr;
		wr.wr.atomic.rkey = rkey;
		wr.wr.atomic.compare_add = request->compare_add;
		wr.wr.atomic.swap = request->swap;
	} else {
		wr.wr.rdma.remote_addr = addr;
		wr.wr.rdma.rkey = rkey;
	}
	return ibv_post_send(end->qp, &wr, &bad);
}

int end_wait(struct end *end, struct ibv_wc *wc)
{
	time_t until = time(NULL) + 30;
	int got;
	while ((got = ibv_poll_cq(end->cq, 1, wc)) == 0 && time(NULL) < until)
		;
	CHECK(got == 1);
	return 0;
}

int end_do(struct end *end, const struct request *request)
{
	struct ibv_wc wc;
	CHECK(end_post(end, request) == 0);
	CHECK(end_wait(end, &wc) == 0);
	if (wc.status != IBV_WC_SUCCESS)
		fprintf(stderr, "opcode %d ended with status %d\n", request->opcode, wc.status);
	CHECK(wc.status == IBV_WC_SUCCESS);
	return 0;
}
