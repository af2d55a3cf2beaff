#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <sys/stat.h>
#include "helper_net.h"
#include "net/socket.h"

const struct tp_net_hello net_hello = {
	.secret = "a secret of thirty-two bytes....", .comm_hash = 0x1234567890abcdef, .from = 3, .to = 5, .channel = 2, .lane_class = 1
};

static char log_path[64];

void net_set_environment(const char *first, ...)
{
	va_list args;

	va_start(args, first);
	for (const char *s = first; s; s = va_arg(args, const char *)) {
		char name[64];
		const char *value = strchr(s, '=');
		size_t n = value ? (size_t)(value - s) : strlen(s);
		assert_true(n < sizeof(name));
		memcpy(name, s, n);
		name[n] = 0;
		if (value) setenv(name, value + 1, 1);
		else unsetenv(name);
	}
	va_end(args);
	tp_param_reload();
	tp_sock_forget_devices();
}

void net_pair_open(struct net_pair *pair)
{
	unsigned char handle[TP_NET_HANDLE_BYTES];
	void *state = NULL;

	memset(pair, 0, sizeof(*pair));
	assert_int_equal(tp_net_socket.init(), ncclSuccess);
	assert_int_equal(tp_net_socket.listen(0, handle, &pair->listener), ncclSuccess);
	while (!pair->send_comm || !pair->recv_comm) {
		if (!pair->send_comm) assert_int_equal(tp_net_socket.connect(0, handle, &net_hello, &state, &pair->send_comm), ncclSuccess);
		if (!pair->recv_comm) {
			struct tp_net_hello expect = net_hello;
			expect.from = expect.to = -1;
			expect.channel = expect.lane_class = 0;
			assert_int_equal(tp_net_socket.accept(pair->listener, &expect, &pair->who, &pair->recv_comm), ncclSuccess);
		}
		sched_yield();
	}
	assert_null(state);
}

void net_pair_close(struct net_pair *pair)
{
	if (pair->send_comm) assert_int_equal(tp_net_socket.close_send(pair->send_comm), ncclSuccess);
	if (pair->recv_comm) assert_int_equal(tp_net_socket.close_recv(pair->recv_comm), ncclSuccess);
	if (pair->listener) assert_int_equal(tp_net_socket.close_listen(pair->listener), ncclSuccess);
	memset(pair, 0, sizeof(*pair));
}

void net_fill(unsigned char *data, size_t bytes, uint32_t seed)
{
	for (size_t i = 0; i < bytes; i++) data[i] = (unsigned char)((i * 2654435761u >> 13) + seed * 31u + (i >> 8));
}

void net_check(const unsigned char *data, size_t bytes, uint32_t seed)
{
	for (size_t i = 0; i < bytes; i++) {
		unsigned char right = (unsigned char)((i * 2654435761u >> 13) + seed * 31u + (i >> 8));
		if (data[i] != right) fail_msg("byte %zu of %zu is %u, should be %u", i, bytes, data[i], right);
	}
}

ncclResult_t net_wait(void *request, size_t *bytes)
{
	bool done = false;
	ncclResult_t result;

	do {
		result = tp_net_socket.test(request, &done, bytes);
		if (!done) sched_yield();
	} while (result == ncclSuccess && !done);
	return result;
}

void net_send_one(struct net_pair *pair, const void *data, size_t bytes, int tag, void **request)
{
	assert_int_equal(tp_net_socket.isend(pair->send_comm, data, bytes, tag, NULL, request), ncclSuccess);
	assert_non_null(*request);
}

void net_recv_one(struct net_pair *pair, void *data, size_t bytes, int tag, void **request)
{
	assert_int_equal(tp_net_socket.irecv(pair->recv_comm, 1, &data, &bytes, &tag, NULL, request), ncclSuccess);
	assert_non_null(*request);
}

ncclResult_t net_wait_both(void *a, void *b, size_t *bytes_of_b)
{
	bool a_done = false, b_done = false;

	while (!a_done || !b_done) {
		if (!a_done) TP_TRY(tp_net_socket.test(a, &a_done, NULL));
		if (!b_done) TP_TRY(tp_net_socket.test(b, &b_done, bytes_of_b));
		if (!a_done || !b_done) sched_yield();
	}
	return ncclSuccess;
}

void net_log_capture(void)
{
	snprintf(log_path, sizeof(log_path), "/tmp/telpher-net-log-%d-XXXXXX", (int)getpid());
	int fd = mkstemp(log_path);
	assert_true(fd >= 0);
	close(fd);
	setenv("NCCL_DEBUG", "INFO", 1);
	setenv("NCCL_DEBUG_SUBSYS", "ALL", 1);
	setenv("NCCL_DEBUG_FILE", log_path, 1);
	tp_log_reset();
}

char *net_log_text(void)
{
	struct stat st;
	int fd = open(log_path, O_RDONLY);
	assert_true(fd >= 0);
	assert_int_equal(fstat(fd, &st), 0);
	char *text = calloc(1, (size_t)st.st_size + 1);
	assert_non_null(text);
	assert_int_equal(read(fd, text, (size_t)st.st_size), st.st_size);
	close(fd);
	return text;
}

void net_log_end(void)
{
	unlink(log_path);
	unsetenv("NCCL_DEBUG");
	unsetenv("NCCL_DEBUG_SUBSYS");
	unsetenv("NCCL_DEBUG_FILE");
	tp_log_reset();
}

static int count_entries(const char *path)
{
	DIR *dir = opendir(path);
	int n = 0;

	assert_non_null(dir);
	while (readdir(dir)) n++;
	closedir(dir);
	return n;
}

int net_open_descriptors(void) { return count_entries("/proc/self/fd"); }
int net_threads(void) { return count_entries("/proc/self/task"); }

uint32_t net_random(uint32_t *state)
{
	*state = *state * 1664525u + 1013904223u;
	return *state >> 8;
}
