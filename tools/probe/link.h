/* Queue pairs of a probe: RC, one completion queue for all, each transition a function of its own, so that it can be timed. */
#ifndef TELPHER_PROBE_LINK_H
#define TELPHER_PROBE_LINK_H

#include "probe/meet.h"
#include "probe/port.h"

#define PROBE_DEPTH 64                      /* requests in a queue, where the card takes so many */

struct probe_link {
	const struct probe_port *port;
	struct ibv_cq *cq;
	int nqps;
	uint32_t depth;
	struct ibv_qp *qps[PROBE_MAX_QPS];
	uint32_t psn;
	struct probe_hello remote;              /* what the other side said of its own */
	char remote_name[200];
};

int probe_link_create(const struct probe_port *port, int nqps, struct probe_link *out);
void probe_link_destroy(struct probe_link *link);
int probe_link_to_init(struct probe_link *link);
/* Fills in this side's part of a HELLO; memory and what is wanted are the caller's. */
void probe_link_describe(const struct probe_link *link, struct probe_hello *out);
/* The other side's HELLO; fails where it can't be reached or doesn't fit. */
int probe_link_learn(struct probe_link *link, const struct probe_hello *remote);
int probe_link_to_rtr(struct probe_link *link);
int probe_link_to_rts(struct probe_link *link);
/* The text of a failed completion: who, where, what it means, what to look at. Returns 1. */
int probe_link_failed(const struct probe_link *link, const struct ibv_wc *wc, const char *what);

#endif
