/* The kernel tells of addresses and links that come and go; the ports' GID tables and states follow. It is asked only from the
 * first queue pair, or the first wait for an event, on: programs that merely look need no thread. */
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <sys/socket.h>
#include <unistd.h>
#include "verbs/internal.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int watch_fd = -1;
static _Atomic bool asked;

static int on_change(int fd, void *arg)
{
	char message[8192];
	struct tp_device *devices;
	(void)arg;
	/* What changed doesn't matter (and may have been lost, ENOBUFS): everything is read anew. */
	while (recv(fd, message, sizeof(message), MSG_DONTWAIT) > 0)
		;
	int count = tp_card_devices(&devices);
	for (int i = 0; i < count; i++)
		for (int p = 0; p < devices[i].nports; p++)
			tp_port_refresh(&devices[i].ports[p]);
	return 1;
}

static int open_netlink(void)
{
	struct sockaddr_nl addr = { .nl_family = AF_NETLINK, .nl_groups = RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR };
	int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
	if (fd >= 0 && bind(fd, (const struct sockaddr *)&addr, sizeof(addr))) {
		close(fd);
		fd = -1;
	}
	return fd;
}

void tp_gid_watch(void)
{
	if (atomic_load_explicit(&asked, memory_order_relaxed))
		return;
	pthread_mutex_lock(&lock);
	if (!atomic_exchange_explicit(&asked, true, memory_order_relaxed)) {
		watch_fd = open_netlink();
		if (watch_fd < 0)
			TP_INFO(TP_NET, "changes of network addresses won't be noticed: netlink can't be opened (%m)");
		else if (tp_progress_watch(watch_fd, on_change, NULL)) {
			close(watch_fd);
			watch_fd = -1;
		}
	}
	pthread_mutex_unlock(&lock);
}

void tp_gid_watch_forget(void)
{
	pthread_mutex_init(&lock, NULL);
	if (watch_fd >= 0)
		close(watch_fd);
	watch_fd = -1;
	atomic_store_explicit(&asked, false, memory_order_relaxed);
}
