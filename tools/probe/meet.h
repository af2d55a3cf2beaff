/* The exchange of a probe's two ends over TCP, as records (wire.h). Functions return 0, or 1 having said what is wrong. */
#ifndef TELPHER_PROBE_MEET_H
#define TELPHER_PROBE_MEET_H

#include "base/base.h"
#include "probe/probe.h"
#include "probe/wire.h"

#define PROBE_PORT 18515
#define PROBE_ANSWER_MS 20000               /* what needs no data moved */
/* What needs so many bytes filled or looked at first, on a machine that is busy with other things (32 MB/s). */
#define PROBE_PATIENCE_MS(bytes) (3 * PROBE_ANSWER_MS + (int)TP_MIN((bytes) >> 15, (uint64_t)1 << 30))
#define PROBE_WHILE_ALIVE_MS 0x7fffffff     /* what takes as long as the peer likes: that it lives is known from the connection (keepalive) */

struct probe_peer {
	int fd;
	char name[128];                         /* "host<port>", for messages */
	bool said_failed;                       /* its FAILED was reported: it needs none of ours */
};

/* On all addresses, of IPv4 and IPv6: two sockets, -1 where there is no such. port 0: any. */
struct probe_listener { int fds[2], port; };
int probe_listen(int port, struct probe_listener *out);
void probe_stop_listening(struct probe_listener *listener);
int probe_accept(const struct probe_listener *listener, struct probe_peer *out);
int probe_meet(const char *server, int port, struct probe_peer *out);
void probe_part(struct probe_peer *peer);   /* closes; telling it the last error, if there was one */

int probe_tell(struct probe_peer *peer, const struct probe_record *record);
/* The next record, which must be of this type. A FAILED is reported as the peer's error. */
int probe_hear(struct probe_peer *peer, enum probe_type type, int timeout_ms, struct probe_record *out);
/* While data moves: has the peer ended, or failed? 0: no. Doesn't take a record that is in time. */
int probe_look(struct probe_peer *peer);

#endif
