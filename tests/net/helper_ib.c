#include <sched.h>
#include "helper_ib.h"
#include "net/socket.h"

void ib_use_card(const char *devices)
{
	static const char *const names[] = { "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_QPS_PER_CONNECTION", "NCCL_IB_SPLIT_DATA_ON_QPS", "NCCL_IB_ADAPTIVE_ROUTING",
		"NCCL_IB_DISABLE", "NCCL_IB_TIMEOUT", "NCCL_NET", "TELPHER_IB_PATHS", "TELPHER_IB_PATH_TIMEOUT", "NCCL_IB_RESILIENCY_PORT_FAILOVER", "NCCL_IB_ADDR_FAMILY",
		"NCCL_IB_USE_INLINE", "NCCL_IB_RETRY_CNT", "TELPHER_VERBS_NOTE", "NCCL_NET_MERGE_LEVEL", "NCCL_NET_FORCE_MERGE", "NCCL_IB_MERGE_NICS", "NCCL_IB_ECE_ENABLE",
		"TELPHER_IB_CONNECT", "TELPHER_IB_RDMACM_LIB", "NCCL_IB_TC", "NCCL_IB_FIFO_TC", "NCCL_IB_SL", "NCCL_IB_PKEY", "NCCL_IB_PCI_RELAXED_ORDERING",
		"NCCL_IB_RETURN_ASYNC_EVENTS", "NCCL_IB_RESILIENCY_PORT_RECOVERY", "NCCL_IB_MQP_RETRY_CNT", "NCCL_IB_MQP_RETRY_SLEEP_MSEC" };

	for (size_t i = 0; i < TP_ARRAY_LEN(names); i++) unsetenv(names[i]);
	/* The card reads its own once a process. */
	if (devices) setenv("TELPHER_VERBS_DEVICES", devices, 1);
	setenv("TELPHER_VERBS_HIDE_REAL", "1", 1);
	setenv("NCCL_IBVERBS_LIB", CARD_LIBRARY, 1);
	net_set_environment("NCCL_SOCKET_IFNAME=lo", "NCCL_SOCKET_FAMILY", "NCCL_IB_HCA=telpher", NULL);
	tp_ib_forget_devices();
}

void ib_pair_open(struct ib_pair *pair, size_t bytes) { ib_pair_open_on(pair, bytes, 0, 0); }

void ib_pair_open_on(struct ib_pair *pair, size_t bytes, int from, int to)
{
	unsigned char handle[TP_NET_HANDLE_BYTES];
	struct tp_net_hello expect = net_hello;
	void *state = NULL;

	memset(pair, 0, sizeof(*pair));
	expect.from = expect.to = -1;
	assert_int_equal(tp_net_ib.init(), ncclSuccess);
	assert_int_equal(tp_net_ib.listen(to, handle, &pair->listener), ncclSuccess);
	while (!pair->send_comm || !pair->recv_comm) {
		if (!pair->send_comm) assert_int_equal(tp_net_ib.connect(from, handle, &net_hello, &state, &pair->send_comm), ncclSuccess);
		if (!pair->recv_comm) assert_int_equal(tp_net_ib.accept(pair->listener, &expect, &pair->who, &pair->recv_comm), ncclSuccess);
		sched_yield();
	}
	assert_null(state);
	pair->bytes = bytes;
	pair->from = calloc(1, bytes);
	pair->to = calloc(1, bytes);
	assert_non_null(pair->from);
	assert_non_null(pair->to);
	assert_int_equal(tp_net_ib.reg_memory(pair->send_comm, pair->from, bytes, TP_NET_HOST, &pair->send_memory), ncclSuccess);
	assert_int_equal(tp_net_ib.reg_memory(pair->recv_comm, pair->to, bytes, TP_NET_HOST, &pair->recv_memory), ncclSuccess);
}

void ib_pair_close(struct ib_pair *pair)
{
	if (pair->send_comm) {
		assert_int_equal(tp_net_ib.dereg_memory(pair->send_comm, pair->send_memory), ncclSuccess);
		assert_int_equal(tp_net_ib.close_send(pair->send_comm), ncclSuccess);
	}
	if (pair->recv_comm) {
		assert_int_equal(tp_net_ib.dereg_memory(pair->recv_comm, pair->recv_memory), ncclSuccess);
		assert_int_equal(tp_net_ib.close_recv(pair->recv_comm), ncclSuccess);
	}
	assert_int_equal(tp_net_ib.close_listen(pair->listener), ncclSuccess);
	free(pair->from);
	free(pair->to);
	memset(pair, 0, sizeof(*pair));
}

void *ib_send(struct ib_pair *pair, size_t offset, size_t bytes, int tag)
{
	void *request = NULL;

	while (!request) {
		if (tp_net_ib.isend(pair->send_comm, pair->from + offset, bytes, tag, pair->send_memory, &request) != ncclSuccess) return NULL;
		/* The other end moves too, as it would in a thread of its own. */
		if (!request && pair->recv_comm && tp_ib_progress(pair->recv_comm) != ncclSuccess) return NULL;
		if (!request) sched_yield();
	}
	return request;
}

void *ib_recv(struct ib_pair *pair, size_t offset, size_t bytes, int tag)
{
	void *request = NULL, *at = pair->to + offset;

	if (tp_net_ib.irecv(pair->recv_comm, 1, &at, &bytes, &tag, &pair->recv_memory, &request) != ncclSuccess) return NULL;
	return request;
}

ncclResult_t ib_wait_both(void *a, void *b, size_t *bytes_of_b)
{
	bool a_done = false, b_done = false;

	while (!a_done || !b_done) {
		/* An end that is through moves on too, as it does inside a communicator that has other work. */
		if (a_done) tp_ib_progress(((struct tp_ib_request *)a)->comm);
		if (b_done) tp_ib_progress(((struct tp_ib_request *)b)->comm);
		if (!a_done) TP_TRY(tp_net_ib.test(a, &a_done, NULL));
		if (!b_done) TP_TRY(tp_net_ib.test(b, &b_done, bytes_of_b));
		if (!a_done || !b_done) sched_yield();
	}
	return ncclSuccess;
}

ncclResult_t ib_exchange(struct ib_pair *pair, size_t offset, size_t bytes, int tag)
{
	static uint32_t seed;
	size_t got = 0;
	void *receive, *send;

	net_fill(pair->from + offset, bytes, ++seed);
	receive = ib_recv(pair, offset, bytes, tag);
	/* The last message may have come through just before the connection failed. */
	if (!receive && ((struct tp_ib_comm *)pair->recv_comm)->error) return ncclRemoteError;
	assert_non_null(receive);
	send = ib_send(pair, offset, bytes, tag);
	if (!send) return ncclRemoteError;
	TP_TRY(ib_wait_both(send, receive, &got));
	assert_int_equal(got, bytes);
	net_check(pair->to + offset, bytes, seed);
	return ncclSuccess;
}

void ib_receiver_leaves(void)
{
	struct ib_pair pair;
	void *receive, *send;
	bool done;

	for (int i = 0; i < 20; i++) {
		ib_pair_open(&pair, 4096);
		receive = ib_recv(&pair, 0, 4096, 5);
		assert_non_null(send = ib_send(&pair, 0, 4096, 5));
		for (done = false; !done;) assert_int_equal(tp_net_ib.test(receive, &done, NULL), ncclSuccess);
		tp_net_ib.dereg_memory(pair.recv_comm, pair.recv_memory);
		tp_net_ib.close_recv(pair.recv_comm);
		pair.recv_comm = NULL;
		for (done = false; !done;) assert_int_equal(tp_net_ib.test(send, &done, NULL), ncclSuccess);
		ib_pair_close(&pair);
	}
}
