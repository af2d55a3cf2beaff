/* The one socket wrapper: addresses, interfaces, TCP with deadlines. All descriptors are close-on-exec. */
#ifndef TP_BASE_SOCKET_H
#define TP_BASE_SOCKET_H

#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include "nccl.h"

union tp_addr { struct sockaddr sa; struct sockaddr_in v4; struct sockaddr_in6 v6; };
#define TP_ADDR_TEXT 96
struct tp_interface { char name[16]; union tp_addr addr; };

/* "192.0.2.2<34567>", NCCL's form; text holds TP_ADDR_TEXT bytes; returns text. */
const char *tp_addr_format(const union tp_addr *addr, char *text);
/* "host:port", "[v6]:port"; what names the source of the text in the error. */
ncclResult_t tp_addr_parse(const char *text, const char *what, union tp_addr *out);
socklen_t tp_addr_len(const union tp_addr *addr);
/* Interfaces that NCCL_SOCKET_IFNAME (prefix list, ^ excludes, = exact) and NCCL_SOCKET_FAMILY allow, in NCCL's order
 * of preference; none is ncclInvalidUsage that lists what there is. */
ncclResult_t tp_socket_interfaces(struct tp_interface *out, int max, int *count);
/* The interface whose subnet holds remote (connecting side), or the first allowed one. */
ncclResult_t tp_socket_interface_for(const union tp_addr *remote, struct tp_interface *out);
/* Listens at addr (port 0: any); addr gets the port. */
ncclResult_t tp_socket_listen(union tp_addr *addr, int backlog, int *fd);
/* Connects within timeout_ms, retrying refused connections (NCCL_SOCKET_RETRY_CNT, _SLEEP_MSEC); from may be NULL. The
 * descriptor is blocking, TCP_NODELAY. what names the peer in the error. */
ncclResult_t tp_socket_connect(const union tp_addr *to, const union tp_addr *from, int timeout_ms, const char *what, int *fd);
/* Starts a non-blocking connect; ncclInProgress while it is under way (poll for POLLOUT, then _finish). */
ncclResult_t tp_socket_connect_start(const union tp_addr *to, const union tp_addr *from, int *fd);
ncclResult_t tp_socket_connect_finish(int fd);
/* The same for callers that try again or say by themselves what is wrong: nothing is logged. 0, EINPROGRESS (start only) or
 * the errno of the failure; *hopeless: trying again is no use. */
int tp_socket_try_connect_start(const union tp_addr *to, const union tp_addr *from, int *fd, bool *hopeless);
int tp_socket_try_connect_finish(int fd);
/* All bytes or an error, by the deadline (tp_clock_ms; 0: none). A closed peer is ncclRemoteError. Errors aren't logged
 * where what is NULL. Work on blocking and non-blocking descriptors. */
ncclResult_t tp_socket_send(int fd, const void *data, size_t bytes, uint64_t deadline_ms, const char *what);
ncclResult_t tp_socket_recv(int fd, void *data, size_t bytes, uint64_t deadline_ms, const char *what);
ncclResult_t tp_socket_set_nonblocking(int fd, bool on);
/* Abstract Unix sockets (no file is left behind): name without the leading zero byte. */
ncclResult_t tp_unix_listen(const char *name, int backlog, int *fd);
ncclResult_t tp_unix_connect(const char *name, int timeout_ms, int *fd);
int tp_unix_try_connect(const char *name, int timeout_ms, int *fd);    /* the same; nothing is logged; 0 or errno */
/* Who connected: abstract sockets have no permissions of their own. */
ncclResult_t tp_unix_peer(int sock, pid_t *pid, uid_t *uid);
/* fd and the bytes in one message (10 s at most); the receiver must expect the same number of bytes. A message of other
 * than one descriptor is refused, and what came with it closed. */
ncclResult_t tp_unix_send_fd(int sock, int fd, const void *data, size_t bytes);
ncclResult_t tp_unix_recv_fd(int sock, int *fd, void *data, size_t bytes, uint64_t deadline_ms);

#endif
