/* What does it cost to be connected and to have nothing to do? Two processes connect a reliable queue pair each, exchange a message, ask
 * for an event and sleep. Prints `idle_percent`: processor time that both took, all threads, in percent of the time they slept. */
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SLEEP_MS = 1500, SETTLE_MS = 300 };
struct place { union ibv_gid gid; uint32_t qpn, psn; };

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

static double used_ms(void)
{
	struct rusage usage;
	getrusage(RUSAGE_SELF, &usage);
	return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1e3 + (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-3;
}

static void connect_qp(struct ibv_qp *qp, const struct place *own, const struct place *peer)
{
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer->qpn, .rq_psn = peer->psn, .min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = peer->gid, .hop_limit = 64 } } };
	struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .timeout = 18, .retry_cnt = 7, .rnr_retry = 7, .sq_psn = own->psn };
	if (ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) ||
		ibv_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
			IBV_QP_MIN_RNR_TIMER) ||
		ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC))
		fail("connecting");
}

static void wait_for(struct ibv_cq *cq, int count)
{
	struct ibv_wc wc;
	while (count)
		if (ibv_poll_cq(cq, 1, &wc) == 1 && count--)
			if (wc.status)
				fail(ibv_wc_status_str(wc.status));
}

static double be_idle(int to_peer)
{
	int count;
	struct ibv_device **devices = ibv_get_device_list(&count);
	struct ibv_context *context = count > 0 ? ibv_open_device(devices[0]) : NULL;
	struct ibv_pd *pd = context ? ibv_alloc_pd(context) : NULL;
	struct ibv_comp_channel *channel = pd ? ibv_create_comp_channel(context) : NULL;
	struct ibv_cq *cq = channel ? ibv_create_cq(context, 16, NULL, channel, 0) : NULL;
	struct ibv_qp_init_attr attr = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_qp *qp = cq ? ibv_create_qp(pd, &attr) : NULL;
	struct place own = { .psn = (uint32_t)getpid() & 0xffffff }, peer;
	static char bytes[128];
	struct ibv_mr *mr = qp ? ibv_reg_mr(pd, bytes, sizeof(bytes), IBV_ACCESS_LOCAL_WRITE) : NULL;
	if (!mr || ibv_query_gid(context, 1, 0, &own.gid))
		fail("the card");
	own.qpn = qp->qp_num;
	if (write(to_peer, &own, sizeof(own)) != sizeof(own) || read(to_peer, &peer, sizeof(peer)) != sizeof(peer))
		fail("the peer");
	struct ibv_sge out = { (uintptr_t)bytes, 64, mr->lkey }, in = { (uintptr_t)bytes + 64, 64, mr->lkey };
	struct ibv_recv_wr recv = { .sg_list = &in, .num_sge = 1 }, *bad_recv;
	struct ibv_send_wr send = { .sg_list = &out, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad_send;
	connect_qp(qp, &own, &peer);
	if (ibv_post_recv(qp, &recv, &bad_recv) || ibv_post_send(qp, &send, &bad_send))
		fail("posting");
	wait_for(cq, 2);
	if (ibv_req_notify_cq(cq, 0))
		fail("asking for an event");
	poll(NULL, 0, SETTLE_MS);
	double before = used_ms();
	struct pollfd event = { .fd = channel->fd, .events = POLLIN };
	if (poll(&event, 1, SLEEP_MS))
		fail("an event for nothing");
	return used_ms() - before;
}

int main(void)
{
	int ends[2];
	double other = 0;
	if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends))
		fail("socketpair");
	pid_t child = fork();
	double own = be_idle(ends[child ? 0 : 1]);
	if (child == 0)
		_exit(write(ends[1], &own, sizeof(own)) != sizeof(own));
	if (read(ends[0], &other, sizeof(other)) != sizeof(other))
		fail("the peer");
	waitpid(child, NULL, 0);
	printf("idle_percent %.3f\n", (own + other) / SLEEP_MS * 100);
	return 0;
}
