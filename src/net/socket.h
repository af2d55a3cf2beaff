/* The Socket transport's own parts: socket.c (devices, listener, the table), socket_connect.c and socket_accept.c (the two
 * ends of the handshake), socket_data.c (requests), socket_thread.c (helper threads). Not for other folders. */
#ifndef TP_NET_SOCKET_INTERNAL_H
#define TP_NET_SOCKET_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include "net/socket_hello.h"

#define TP_SOCK_MAX_DEVICES 16
#define TP_SOCK_MAX_STREAMS 65          /* 64 for bulk data and, with helper threads, one for headers and small messages */
#define TP_SOCK_STAGE_BYTES 4096
#define TP_SOCK_WHOLE_BYTES (64u << 10) /* up to here a message goes over socket 0 alone */
#define TP_SOCK_PART_BYTES (64u << 10)  /* no stripe is smaller */

struct tp_sock_params { int nthreads, nsocks_per_thread, sndbuf, rcvbuf, retries, retry_ms, connect_ms, hello_ms; };
/* nthreads and nsocks_per_thread: what this side would like for device dev. */
void tp_sock_get_params(int dev, struct tp_sock_params *out);
ncclResult_t tp_sock_device(int dev, struct tp_interface *out);
/* Looks for interfaces anew at the next use (tests; not while connections are made). */
void tp_sock_forget_devices(void);
void tp_sock_tune(int fd, const struct tp_sock_params *params);

/* ---- data ---- */
struct tp_sock_comm;

struct tp_sock_request {
	struct tp_sock_comm *comm;
	bool busy;                          /* given out, not yet tested to its end */
	uint64_t number;                    /* of the message on its connection */
	int tag;
	int nparts;
	struct iovec parts[TP_NET_MAX_PARTS];
	size_t capacity;                    /* of the parts together */
	size_t bytes;                       /* of the message: known at once (send), with its header (receive) */
	struct tp_wire_message header;
	_Atomic int left;                   /* streams that still have to do their part; release there, acquire in test */
};

/* One socket of a connection and how far it is. Only its owner (the caller, or one helper thread) touches it. */
struct tp_sock_stream {
	int fd;
	uint64_t at;                        /* the message it is working on: stream 0 counts all, others the striped ones */
	size_t done;                        /* bytes of its part (stream 0: and of the header) */
	bool blocked;                       /* the last call found the socket full (empty) */
};

struct tp_sock_helper {
	struct tp_sock_comm *comm;
	pthread_t thread;
	int wake_fd;                        /* eventfd */
	_Atomic uint32_t sleeping;
	int first, count;                   /* its streams */
};

struct tp_sock_comm {
	bool sending;
	int nstreams, nthreads;
	int from, to;
	char peer[TP_ADDR_TEXT];
	struct tp_sock_stream *streams;
	struct tp_sock_request requests[TP_NET_MAX_REQUESTS];
	uint64_t posted;                    /* messages the caller has posted */
	/* Striped messages in order; published (release) after the entry is complete, acquired by whoever moves streams > 0. */
	_Atomic uint64_t striped;
	struct tp_sock_request *striped_at[TP_NET_MAX_REQUESTS];
	_Atomic int error;                  /* the first ncclResult_t that went wrong; it stays */
	/* receiving: bytes read ahead on socket 0, so that a small message costs one system call */
	unsigned char *stage;
	size_t stage_at, stage_end;
	bool ended;                         /* receiving: the stream ended between two messages */
	/* helper threads */
	struct tp_sock_helper *helpers;
	int nhelpers;                       /* running */
	int done_fd;                        /* eventfd: a helper finished a request */
	_Atomic uint32_t signalled;         /* done_fd is set */
	_Atomic uint32_t stopping;
};

/* Takes over fds, whatever the result. */
ncclResult_t tp_sock_comm_create(bool sending, const int *fds, int nfds, int nthreads, const struct tp_net_hello *who,
	struct tp_sock_comm **out);
void tp_sock_comm_destroy(struct tp_sock_comm *comm);
/* Moves one stream until it blocks or has nothing to do. Errors are kept in the comm. */
void tp_sock_stream_move(struct tp_sock_comm *comm, int stream);
bool tp_sock_stream_has_work(struct tp_sock_comm *comm, int stream);
ncclResult_t tp_sock_isend(void *comm, const void *data, size_t bytes, int tag, void *mhandle, void **request);
ncclResult_t tp_sock_isendv(void *comm, const struct iovec *parts, int n, int tag, void *const *mhandles, void **request);
ncclResult_t tp_sock_irecv(void *comm, int n, void *const *data, const size_t *bytes, const int *tags, void *const *mhandles,
	void **request);
ncclResult_t tp_sock_test(void *request, bool *done, size_t *sizes);
int tp_sock_poll_fds(void *comm, int *fds, uint32_t *events, int max);

ncclResult_t tp_sock_helpers_start(struct tp_sock_comm *comm);
void tp_sock_helpers_stop(struct tp_sock_comm *comm);
void tp_sock_helpers_wake(struct tp_sock_comm *comm);
void tp_sock_signal_done(struct tp_sock_comm *comm);

/* ---- handshake ---- */
ncclResult_t tp_sock_connect(int dev, const void *handle, const struct tp_net_hello *hello, void **state, void **send_comm);
/* The same with one socket and whichever device leads there: a connection for others to talk over. */
ncclResult_t tp_sock_connect_one(const void *handle, const struct tp_net_hello *hello, void **state, void **send_comm);
int tp_sock_comm_take_fd(void *comm);    /* of one socket, nothing sent or received yet: the caller's now, the comm is gone */
void tp_sock_cancel_connect(void *state);
int tp_sock_poll_connect_fds(void *state, int *fds, uint32_t *events, int max);
ncclResult_t tp_sock_listen(int dev, void *handle, void **listener);
ncclResult_t tp_sock_accept(void *listener, const struct tp_net_hello *expect, struct tp_net_hello *who, void **recv_comm);
int tp_sock_poll_listen_fds(void *listener, int *fds, uint32_t *events, int max);
ncclResult_t tp_sock_close_listen(void *listener);

#endif
