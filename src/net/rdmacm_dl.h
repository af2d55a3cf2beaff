/* librdmacm, opened at run time as libibverbs is (verbs_dl.h), and only where somebody asks for connections by rdma_cm. Layouts are those of
 * <rdma/rdma_cma.h>. Each of its functions has had one version since it came into the library, so names do without. */
#ifndef TP_NET_RDMACM_DL_H
#define TP_NET_RDMACM_DL_H

#include <rdma/rdma_cma.h>
#include "net/verbs_dl.h"

struct tp_rdmacm {
	char file[256];                     /* what was opened */
	struct rdma_event_channel *(*create_event_channel)(void);
	void (*destroy_event_channel)(struct rdma_event_channel *channel);
	int (*get_cm_event)(struct rdma_event_channel *channel, struct rdma_cm_event **event);
	int (*ack_cm_event)(struct rdma_cm_event *event);
	int (*create_id)(struct rdma_event_channel *channel, struct rdma_cm_id **id, void *context, enum rdma_port_space space);
	int (*destroy_id)(struct rdma_cm_id *id);
	int (*set_option)(struct rdma_cm_id *id, int level, int name, void *value, size_t bytes);
	int (*bind_addr)(struct rdma_cm_id *id, struct sockaddr *addr);
	int (*listen)(struct rdma_cm_id *id, int backlog);
	__be16 (*get_src_port)(struct rdma_cm_id *id);
	int (*resolve_addr)(struct rdma_cm_id *id, struct sockaddr *from, struct sockaddr *to, int timeout_ms);
	int (*resolve_route)(struct rdma_cm_id *id, int timeout_ms);
	int (*connect)(struct rdma_cm_id *id, struct rdma_conn_param *param);
	int (*accept)(struct rdma_cm_id *id, struct rdma_conn_param *param);
	int (*reject)(struct rdma_cm_id *id, const void *data, uint8_t bytes);
	int (*establish)(struct rdma_cm_id *id);
	int (*init_qp_attr)(struct rdma_cm_id *id, struct ibv_qp_attr *attr, int *mask);
};

/* Opened once, kept for the life of the process: the one that goes with these verbs. NULL: it can't be, and why says so in a line with its
 * cure (nothing is logged). */
const struct tp_rdmacm *tp_rdmacm_open(const struct tp_verbs *verbs, char *why, size_t bytes);

/* "RDMA_CM_EVENT_REJECTED", and what an event with this status usually means and where to look: a sentence or two. */
const char *tp_rdmacm_event_name(int event);
const char *tp_rdmacm_event_advice(int event, int status);
/* A status as its event has it: "8 (invalid service ID)" of a rejection, "-110 (Connection timed out)" of others. */
const char *tp_rdmacm_status_text(int event, int status, char text[96]);

#endif
