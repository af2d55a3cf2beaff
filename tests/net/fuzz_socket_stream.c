/* Arbitrary bytes where messages are expected: on the sockets of a receiving connection, and on those of a guest. */
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "net/socket.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The first byte says how many sockets, the rest is shared out to them. */
static void feed_messages(const uint8_t *data, size_t size)
{
	enum { RECEIVES = 4, ROOM = 200000 };
	static unsigned char room[RECEIVES][ROOM];
	struct tp_net_hello who = { .from = 0, .to = 1 };
	struct tp_sock_comm *comm;
	int count = 1 + data[0] % 3, theirs[3], ours[3];
	void *requests[RECEIVES];
	size_t each = (size - 1) / (size_t)count;

	for (int i = 0; i < count; i++) {
		int pair[2];
		if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) abort();
		ours[i] = pair[0];
		theirs[i] = pair[1];
		if (send(theirs[i], data + 1 + (size_t)i * each, each, MSG_DONTWAIT) < 0 && each > 0) abort();
		shutdown(theirs[i], SHUT_WR);
	}
	if (tp_sock_comm_create(false, ours, count, 0, &who, &comm) != ncclSuccess) abort();
	for (int i = 0; i < RECEIVES; i++) {
		void *at = room[i];
		size_t bytes = ROOM;
		int tag = i;
		if (tp_sock_irecv(comm, 1, &at, &bytes, &tag, NULL, &requests[i]) != ncclSuccess) requests[i] = NULL;
	}
	for (int i = 0; i < RECEIVES; i++) {
		bool done = false;
		size_t bytes = 0;
		for (int tries = 0; tries < 20 && requests[i] && !done; tries++)
			if (tp_sock_test(requests[i], &done, &bytes) != ncclSuccess) break;
		if (done && bytes > ROOM) abort();
	}
	tp_sock_comm_destroy(comm);
	for (int i = 0; i < count; i++) close(theirs[i]);
}

static void feed_listener(const uint8_t *data, size_t size)
{
	static void *listener;
	static unsigned char handle[TP_NET_HANDLE_BYTES];
	struct tp_net_hello expect = { .comm_hash = 1 }, who;
	union tp_addr addr;
	uint64_t id;
	void *comm = NULL;
	int fd;

	if (!listener && tp_sock_listen(0, handle, &listener) != ncclSuccess) abort();
	if (tp_wire_read_handle(handle, &addr, &id) != ncclSuccess) abort();
	fd = socket(addr.sa.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0 || connect(fd, &addr.sa, tp_addr_len(&addr)) != 0) abort();
	if (size && send(fd, data, size, MSG_NOSIGNAL) < 0) abort();
	for (int i = 0; i < 3; i++)
		if (tp_sock_accept(listener, &expect, &who, &comm) != ncclSuccess || comm) abort();
	/* A reset leaves no TIME_WAIT behind, of which thousands a second would use up the ports. */
	setsockopt(fd, SOL_SOCKET, SO_LINGER, &(struct linger){ 1, 0 }, sizeof(struct linger));
	close(fd);
	for (int i = 0; i < 2; i++)
		if (tp_sock_accept(listener, &expect, &who, &comm) != ncclSuccess || comm) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static bool ready;

	if (!ready) {
		setenv("NCCL_SOCKET_IFNAME", "lo", 1);
		setenv("NCCL_DEBUG", "VERSION", 1);
		tp_param_reload();
		tp_log_reset();
		ready = true;
	}
	if (size < 2) return 0;
	if (data[0] & 0x80) feed_listener(data + 1, size - 1);
	else feed_messages(data, size);
	return 0;
}
