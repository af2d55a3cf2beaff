/* TCP, the network that is always there: one device an interface, several sockets a connection.
 *
 * Who moves the bytes: the caller, in isend, irecv and test, unless NCCL_SOCKET_NTHREADS asks for helper threads. */
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/fork.h"
#include "net/socket.h"

enum { P_NTHREADS, P_NSOCKS, P_CONNECT_TIMEOUT, P_HELLO_TIMEOUT };
static struct tp_param socket_params[] = {
	[P_NTHREADS] = { .name = "NCCL_SOCKET_NTHREADS", .kind = TP_PARAM_INT, .fallback = "-2", .min = -2, .max = 16,
		.doc = "helper threads a socket connection; 0 and 1: none; -2: 2 on AWS, 4 on Google Cloud, else 1" },
	[P_NSOCKS] = { .name = "NCCL_NSOCKS_PERTHREAD", .kind = TP_PARAM_INT, .fallback = "-2", .min = -2, .max = 64,
		.doc = "sockets a helper thread (without threads: a connection); -2: 8 on AWS, else 1" },
	[P_CONNECT_TIMEOUT] = { .name = "TELPHER_SOCKET_CONNECT_TIMEOUT", .kind = TP_PARAM_INT, .fallback = "60000", .min = 1, .max = 86400000,
		.doc = "ms after which a data connection that gets no answer is given up" },
	[P_HELLO_TIMEOUT] = { .name = "TELPHER_SOCKET_HELLO_TIMEOUT", .kind = TP_PARAM_INT, .fallback = "5000", .min = 1, .max = 3600000,
		.doc = "ms that somebody who connects has to prove that it belongs to the job" },
};
TP_PARAM_TABLE("socket", socket_params)

static struct {
	pthread_mutex_t lock;
	bool ready;
	int count;
	struct tp_interface devices[TP_SOCK_MAX_DEVICES];
} sock = { .lock = PTHREAD_MUTEX_INITIALIZER };
TP_FORK_RENEW(sock.lock)               /* what asks the kernel for its interfaces runs under it; ready is set last */

static ncclResult_t sock_init(void)
{
	ncclResult_t result = ncclSuccess;
	char line[TP_SOCK_MAX_DEVICES * (TP_ADDR_TEXT + 24)];
	size_t used = 0;

	pthread_mutex_lock(&sock.lock);
	if (!sock.ready) {
		result = tp_socket_interfaces(sock.devices, TP_SOCK_MAX_DEVICES, &sock.count);
		if (result == ncclSuccess && sock.count == 0)
			result = TP_FAIL(ncclInvalidUsage, "NET/Socket : no interface to use on %s", tp_host_name());
		sock.ready = result == ncclSuccess;
		for (int i = 0; sock.ready && i < sock.count; i++) {
			char text[TP_ADDR_TEXT];
			used += (size_t)snprintf(line + used, sizeof(line) - used, " [%d]%s:%s", i, sock.devices[i].name, tp_addr_format(&sock.devices[i].addr, text));
		}
		if (sock.ready) TP_INFO(TP_INIT | TP_NET, "NET/Socket : Using%s", line);
	}
	pthread_mutex_unlock(&sock.lock);
	return result;
}

void tp_sock_forget_devices(void)
{
	pthread_mutex_lock(&sock.lock);
	sock.ready = false;
	pthread_mutex_unlock(&sock.lock);
}

static ncclResult_t sock_devices(int *count)
{
	TP_TRY(sock_init());
	*count = sock.count;
	return ncclSuccess;
}

ncclResult_t tp_sock_device(int dev, struct tp_interface *out)
{
	TP_TRY(sock_init());
	if (dev < 0 || dev >= sock.count) return ncclInvalidArgument;
	*out = sock.devices[dev];
	return ncclSuccess;
}

/* The first line of /sys/class/net/<name>/<what>; false where there is none. */
static bool read_sys(const char *name, const char *what, char *out, size_t size)
{
	char path[128];
	int fd;
	ssize_t n;

	snprintf(path, sizeof(path), "/sys/class/net/%s/%s", name, what);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0) return false;
	n = read(fd, out, size - 1);
	close(fd);
	if (n <= 0) return false;
	out[n] = 0;
	out[strcspn(out, "\n")] = 0;
	return true;
}

static void pci_path(const char *name, char *out, size_t size)
{
	char path[128], *full;

	snprintf(path, sizeof(path), "/sys/class/net/%s/device", name);
	full = realpath(path, NULL);
	snprintf(out, size, "%s", full ? full : "");
	free(full);
}

static ncclResult_t sock_properties(int dev, struct tp_net_properties *out)
{
	struct tp_net_properties p = { .memory = TP_NET_HOST, .speed_mbps = 10000, .max_comms = 65536, .max_recvs = 1, .max_parts = TP_NET_MAX_PARTS };
	struct tp_interface ifc;
	char text[32];

	if (tp_sock_device(dev, &ifc) != ncclSuccess) return TP_FAIL(ncclInternalError, "NET/Socket : there is no device %d", dev);
	snprintf(p.name, sizeof(p.name), "%s", ifc.name);
	pci_path(ifc.name, p.pci_path, sizeof(p.pci_path));
	/* Virtual interfaces say nothing, -1 or nonsense. */
	if (read_sys(ifc.name, "speed", text, sizeof(text)) && atoi(text) > 0) p.speed_mbps = (uint32_t)atoi(text);
	p.guid = (uint64_t)dev;
	*out = p;
	return ncclSuccess;
}

/* A parameter of base/socket.c's table, which is for all sockets. */
static int shared_param(const char *name, int otherwise)
{
	struct tp_param *param = tp_param_find(name);
	return param ? (int)tp_param_int(param) : otherwise;
}

void tp_sock_get_params(int dev, struct tp_sock_params *out)
{
	struct tp_interface ifc;
	char vendor[16] = "";
	int nthreads = (int)tp_param_int(&socket_params[P_NTHREADS]), nsocks = (int)tp_param_int(&socket_params[P_NSOCKS]);
	int auto_threads = 1, auto_socks = 1;

	/* The clouds' virtual cards limit the rate of one flow. */
	if ((nthreads < 0 || nsocks < 0) && tp_sock_device(dev, &ifc) == ncclSuccess) read_sys(ifc.name, "device/vendor", vendor, sizeof(vendor));
	if (strcasecmp(vendor, "0x1d0f") == 0) auto_threads = 2, auto_socks = 8;
	else if (strcasecmp(vendor, "0x1ae0") == 0) auto_threads = 4, auto_socks = 1;
	if (nthreads < 0) nthreads = auto_threads;
	if (nthreads == 0) nthreads = 1;
	if (nsocks < 0) nsocks = nthreads > 1 || auto_threads == 1 ? auto_socks : 1;
	if (nsocks == 0) nsocks = 1;
	if (nthreads * nsocks > 64) {
		TP_WARN("NET/Socket : NCCL_SOCKET_NTHREADS=%d times NCCL_NSOCKS_PERTHREAD=%d is above 64 sockets a connection; using %d sockets a thread",
			nthreads, nsocks, 64 / nthreads);
		nsocks = 64 / nthreads;
	}
	out->nthreads = nthreads;
	out->nsocks_per_thread = nsocks;
	out->sndbuf = shared_param("NCCL_SOCKET_SNDBUF", -1);
	out->rcvbuf = shared_param("NCCL_SOCKET_RCVBUF", -1);
	out->retries = shared_param("NCCL_SOCKET_RETRY_CNT", 34);
	out->retry_ms = shared_param("NCCL_SOCKET_RETRY_SLEEP_MSEC", 100);
	out->connect_ms = (int)tp_param_int(&socket_params[P_CONNECT_TIMEOUT]);
	out->hello_ms = (int)tp_param_int(&socket_params[P_HELLO_TIMEOUT]);
}

void tp_sock_tune(int fd, const struct tp_sock_params *params)
{
	int one = 1;

	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	if (params->sndbuf >= 0) setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &params->sndbuf, sizeof(params->sndbuf));
	if (params->rcvbuf >= 0) setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &params->rcvbuf, sizeof(params->rcvbuf));
}

static ncclResult_t sock_reg_memory(void *comm, void *data, size_t bytes, enum tp_net_memory kind, void **mhandle)
{
	(void)comm, (void)data, (void)bytes;
	if (kind != TP_NET_HOST) return TP_FAIL(ncclInternalError, "NET/Socket : only host memory can be sent over sockets");
	*mhandle = NULL;
	return ncclSuccess;
}

static ncclResult_t sock_reg_dmabuf(void *comm, void *data, size_t bytes, uint64_t offset, int fd, void **mhandle)
{
	(void)comm, (void)data, (void)bytes, (void)offset, (void)fd, (void)mhandle;
	return TP_FAIL(ncclInternalError, "NET/Socket : a DMA-BUF can't be sent over sockets");
}

static ncclResult_t sock_dereg_memory(void *comm, void *mhandle)
{
	(void)comm, (void)mhandle;
	return ncclSuccess;
}

/* What was received is in host memory, visible to whoever sees the request done. */
static ncclResult_t sock_iflush(void *comm, int n, void *const *data, const size_t *bytes, void *const *mhandles, void **request)
{
	(void)comm, (void)n, (void)data, (void)bytes, (void)mhandles;
	*request = NULL;
	return ncclSuccess;
}

static ncclResult_t sock_close(void *comm)
{
	tp_sock_comm_destroy(comm);
	return ncclSuccess;
}

const struct tp_net_ops tp_net_socket = {
	.name = "Socket",
	.init = sock_init,
	.devices = sock_devices,
	.properties = sock_properties,
	.listen = tp_sock_listen,
	.connect = tp_sock_connect,
	.cancel_connect = tp_sock_cancel_connect,
	.accept = tp_sock_accept,
	.reg_memory = sock_reg_memory,
	.reg_dmabuf = sock_reg_dmabuf,
	.dereg_memory = sock_dereg_memory,
	.isend = tp_sock_isend,
	.isendv = tp_sock_isendv,
	.any_memory = true,
	.irecv = tp_sock_irecv,
	.iflush = sock_iflush,
	.test = tp_sock_test,
	.poll_fds = tp_sock_poll_fds,
	.poll_connect_fds = tp_sock_poll_connect_fds,
	.poll_listen_fds = tp_sock_poll_listen_fds,
	.close_send = sock_close,
	.close_recv = sock_close,
	.close_listen = tp_sock_close_listen,
};
