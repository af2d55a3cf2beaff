/* Completion queues that are read field by field. From start_poll to end_poll one thread owns the reading side (poll_lock), not
 * the ring: work may be posted and completed meanwhile. */
#include <errno.h>
#include <stdlib.h>
#include "verbs/internal.h"

static inline struct tp_cq *cq_of(struct ibv_cq_ex *ex) { return (struct tp_cq *)ex; }
static inline const struct ibv_wc *wc_of(struct ibv_cq_ex *ex) { return &cq_of(ex)->current.wc; }

static int next_poll(struct ibv_cq_ex *ex)
{
	struct tp_cq *cq = cq_of(ex);
	if (!tp_cq_take(cq, &cq->current))
		return ENOENT;
	ex->status = cq->current.wc.status;
	ex->wr_id = cq->current.wc.wr_id;
	return 0;
}

static int start_poll(struct ibv_cq_ex *ex, struct ibv_poll_cq_attr *attr)
{
	if (attr && attr->comp_mask)
		return EINVAL;
	pthread_mutex_lock(&cq_of(ex)->poll_lock);
	int error = next_poll(ex);
	if (error)
		pthread_mutex_unlock(&cq_of(ex)->poll_lock);
	return error;
}

static void end_poll(struct ibv_cq_ex *ex) { pthread_mutex_unlock(&cq_of(ex)->poll_lock); }

static enum ibv_wc_opcode read_opcode(struct ibv_cq_ex *ex) { return wc_of(ex)->opcode; }
static uint32_t read_vendor_err(struct ibv_cq_ex *ex) { return wc_of(ex)->vendor_err; }
static uint32_t read_byte_len(struct ibv_cq_ex *ex) { return wc_of(ex)->byte_len; }
static __be32 read_imm_data(struct ibv_cq_ex *ex) { return wc_of(ex)->imm_data; }
static uint32_t read_qp_num(struct ibv_cq_ex *ex) { return wc_of(ex)->qp_num; }
static uint32_t read_src_qp(struct ibv_cq_ex *ex) { return wc_of(ex)->src_qp; }
static unsigned int read_wc_flags(struct ibv_cq_ex *ex) { return wc_of(ex)->wc_flags; }
static uint32_t read_slid(struct ibv_cq_ex *ex) { return wc_of(ex)->slid; }
static uint8_t read_sl(struct ibv_cq_ex *ex) { return wc_of(ex)->sl; }
static uint8_t read_dlid_path_bits(struct ibv_cq_ex *ex) { return wc_of(ex)->dlid_path_bits; }
static uint64_t read_completion_ts(struct ibv_cq_ex *ex) { return cq_of(ex)->current.when_ns; }

/* The time stamp is of the monotonic clock: its distance from now, back from the wall clock's now. */
static uint64_t read_wallclock(struct ibv_cq_ex *ex)
{
	struct timespec wall;
	clock_gettime(CLOCK_REALTIME, &wall);
	uint64_t age = tp_clock_ns() - cq_of(ex)->current.when_ns;
	return (uint64_t)wall.tv_sec * 1000000000u + (uint64_t)wall.tv_nsec - age;
}

#define STAMPS (IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK)

static void fill_readers(struct tp_cq *cq)
{
	struct ibv_cq_ex *ex = &cq->ex;
	ex->start_poll = start_poll;
	ex->next_poll = next_poll;
	ex->end_poll = end_poll;
	ex->read_opcode = read_opcode;
	ex->read_vendor_err = read_vendor_err;
	ex->read_wc_flags = read_wc_flags;
	ex->read_byte_len = cq->wc_flags & IBV_WC_EX_WITH_BYTE_LEN ? read_byte_len : NULL;
	ex->read_imm_data = cq->wc_flags & IBV_WC_EX_WITH_IMM ? read_imm_data : NULL;
	ex->read_qp_num = cq->wc_flags & IBV_WC_EX_WITH_QP_NUM ? read_qp_num : NULL;
	ex->read_src_qp = cq->wc_flags & IBV_WC_EX_WITH_SRC_QP ? read_src_qp : NULL;
	ex->read_slid = cq->wc_flags & IBV_WC_EX_WITH_SLID ? read_slid : NULL;
	ex->read_sl = cq->wc_flags & IBV_WC_EX_WITH_SL ? read_sl : NULL;
	ex->read_dlid_path_bits = cq->wc_flags & IBV_WC_EX_WITH_DLID_PATH_BITS ? read_dlid_path_bits : NULL;
	ex->read_completion_ts = cq->wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP ? read_completion_ts : NULL;
	ex->read_completion_wallclock_ns = cq->wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK ? read_wallclock : NULL;
}

/* 0 or the errno of what can't be had. */
static int check_attr(const struct ibv_cq_init_attr_ex *attr)
{
	const uint64_t flags = IBV_WC_STANDARD_FLAGS | STAMPS;
	const uint32_t known = IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD;
	if (attr->comp_mask & ~known)
		return TP_CARD_FAIL(EINVAL, "a completion queue was asked for with the unknown attributes 0x%x", attr->comp_mask & ~known);
	if (attr->wc_flags & ~flags)
		return TP_CARD_FAIL(EOPNOTSUPP, "completions can't have the fields 0x%llx (VLAN, flow tags and tag matching need hardware)",
			(unsigned long long)(attr->wc_flags & ~flags));
	if ((attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS) &&
		(attr->flags & ~(uint32_t)(IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN)))
		return TP_CARD_FAIL(EINVAL, "a completion queue was asked for with the unknown flags 0x%x", attr->flags);
	return 0;
}

struct ibv_cq_ex *tp_cq_create_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr)
{
	int error = check_attr(attr);
	struct tp_cq *cq = error ? NULL : tp_alloc(1, sizeof(*cq), "a completion queue");
	if (!error)
		error = cq ? tp_cq_init(cq, context, attr->cqe, attr->cq_context, attr->channel, attr->comp_vector) : ENOMEM;
	if (error) {
		free(cq);
		errno = error;
		return NULL;
	}
	cq->wc_flags = attr->wc_flags;
	cq->stamped = attr->wc_flags & STAMPS;
	cq->ignore_overrun = (attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS) && (attr->flags & IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN);
	if ((attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_PD) && attr->parent_domain) {
		cq->parent = tp_pd_of(attr->parent_domain);
		atomic_fetch_add_explicit(&cq->parent->users, 1, memory_order_relaxed);
	}
	fill_readers(cq);
	return &cq->ex;
}
