/* libibverbs, opened at run time: nothing here is linked to it, so a program starts on machines that have none. Whoever talks to
 * RDMA devices (the transport, the probe) takes its functions from here, with the layouts of <infiniband/verbs.h>; posting and
 * polling are inline functions of that header and work as they are.
 *
 * Names are looked up with the versions they had when they came into the library, so that an old entry with other arguments is
 * never taken for the new one. What an older library doesn't have is NULL in the table: a feature missing, not a failure. */
#ifndef TP_NET_VERBS_DL_H
#define TP_NET_VERBS_DL_H

#include <infiniband/verbs.h>
#include "base/base.h"

struct tp_verbs {
	char file[256];                     /* what was opened */
	bool software;                      /* it is Telpher's software card, not hardware's library */
	struct ibv_device **(*get_device_list)(int *count);
	void (*free_device_list)(struct ibv_device **list);
	const char *(*get_device_name)(struct ibv_device *device);
	struct ibv_context *(*open_device)(struct ibv_device *device);
	int (*close_device)(struct ibv_context *context);
	int (*get_async_event)(struct ibv_context *context, struct ibv_async_event *event);
	void (*ack_async_event)(struct ibv_async_event *event);
	int (*query_device)(struct ibv_context *context, struct ibv_device_attr *attr);
	int (*query_port_old)(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr);  /* see tp_verbs_query_port */
	int (*query_gid)(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid);
	int (*query_qp)(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init);
	struct ibv_pd *(*alloc_pd)(struct ibv_context *context);
	int (*dealloc_pd)(struct ibv_pd *pd);
	struct ibv_mr *(*reg_mr)(struct ibv_pd *pd, void *addr, size_t length, int access);
	int (*dereg_mr)(struct ibv_mr *mr);
	struct ibv_comp_channel *(*create_comp_channel)(struct ibv_context *context);
	int (*destroy_comp_channel)(struct ibv_comp_channel *channel);
	struct ibv_cq *(*create_cq)(struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *channel, int vector);
	int (*destroy_cq)(struct ibv_cq *cq);
	int (*get_cq_event)(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context);
	void (*ack_cq_events)(struct ibv_cq *cq, unsigned events);
	struct ibv_qp *(*create_qp)(struct ibv_pd *pd, struct ibv_qp_init_attr *attr);
	int (*modify_qp)(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask);
	int (*destroy_qp)(struct ibv_qp *qp);
	const char *(*event_type_str)(enum ibv_event_type event);
	/* From here on: NULL where the library has no such thing. */
	int (*fork_init)(void);
	uint64_t (*get_device_guid)(struct ibv_device *device);
	int (*query_pkey)(struct ibv_context *context, uint8_t port, int index, __be16 *pkey);
	struct ibv_mr *(*reg_mr_iova2)(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned access);
	struct ibv_mr *(*reg_dmabuf_mr)(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access);
	int (*query_gid_ex)(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry, uint32_t flags, size_t bytes);
	ssize_t (*query_gid_table)(struct ibv_context *context, struct ibv_gid_entry *entries, size_t max, uint32_t flags, size_t bytes);
	int (*query_ece)(struct ibv_qp *qp, struct ibv_ece *ece);
	int (*set_ece)(struct ibv_qp *qp, struct ibv_ece *ece);
};

enum tp_verbs_which {
	TP_VERBS_FOUND,             /* what the loader finds (NCCL_IBVERBS_LIB, libibverbs.so.1, libibverbs.so): may be the software card */
	TP_VERBS_CARD,              /* the software card, from its folder beside ours if it isn't the one found */
	TP_VERBS_CARD_FIRST         /* the same, and no other is opened to see: the card's librdmacm can't be loaded beside another libibverbs */
};
/* Opened once, kept for the life of the process. NULL: it can't be, and why says so in a line (nothing is logged). */
const struct tp_verbs *tp_verbs_open(enum tp_verbs_which which, char *why, size_t bytes);
/* All fields of the port's attributes that the device fills in, the rest zero; *mbps: its rate in Mb/s, 0: told by unknown codes. 0 or errno. */
int tp_verbs_query_port(const struct tp_verbs *verbs, struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, uint32_t *mbps);

/* Names as verbs.h writes them, and what a completion's status usually means and where to look, for messages. */
const char *tp_verbs_status_name(int status);           /* "IBV_WC_RETRY_EXC_ERR" */
const char *tp_verbs_status_advice(int status);         /* one sentence or two */
const char *tp_verbs_port_state_name(int state);        /* "ACTIVE", "DOWN" */
int tp_verbs_mtu_bytes(int mtu);                        /* of enum ibv_mtu */

#endif
