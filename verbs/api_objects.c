/* Exported calls: domains, memory, completion queues, address handles, queue pairs. */
#include <stdlib.h>
#include <string.h>
#include "verbs/api.h"

TP_API(struct ibv_pd *, alloc_pd, (struct ibv_context *context)) { return tp_pd_alloc(context); }
TP_API(int, dealloc_pd, (struct ibv_pd *pd)) { return tp_pd_dealloc(pd); }

/* The exported functions without iova2's flags accept what the header's macros leave to them. */
TP_API(struct ibv_mr *, reg_mr, (struct ibv_pd *pd, void *addr, size_t length, int access))
{
	return tp_mr_reg(pd, addr, length, (uintptr_t)addr, (unsigned)access);
}
TP_API(struct ibv_mr *, reg_mr_iova, (struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, int access))
{
	return tp_mr_reg(pd, addr, length, iova, (unsigned)access);
}
TP_API(struct ibv_mr *, reg_mr_iova2, (struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access))
{
	return tp_mr_reg(pd, addr, length, iova, access);
}
TP_API(struct ibv_mr *, reg_dmabuf_mr, (struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access))
{
	return tp_mr_reg_dma_buf(pd, offset, length, iova, fd, (unsigned)access);
}
TP_API(int, rereg_mr, (struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *addr, size_t length, int access))
{
	return tp_mr_rereg(mr, flags, pd, addr, length, access);
}
TP_API(int, dereg_mr, (struct ibv_mr *mr)) { return tp_mr_dereg(mr); }

TP_API(struct ibv_comp_channel *, create_comp_channel, (struct ibv_context *context)) { return tp_channel_create(context); }
TP_API(int, destroy_comp_channel, (struct ibv_comp_channel *channel)) { return tp_channel_destroy(channel); }
TP_API(int, get_cq_event, (struct ibv_comp_channel *channel, struct ibv_cq **cq, void **context)) { return tp_channel_get(channel, cq, context); }
TP_API(void, ack_cq_events, (struct ibv_cq *cq, unsigned int count)) { tp_channel_ack(cq, count); }

TP_API(struct ibv_cq *, create_cq, (struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *channel, int vector))
{
	return tp_cq_create(context, cqe, cq_context, channel, vector);
}
TP_API(int, resize_cq, (struct ibv_cq *cq, int cqe)) { return tp_cq_resize(cq, cqe); }
TP_API(int, destroy_cq, (struct ibv_cq *cq)) { return tp_cq_destroy(cq); }

TP_API(struct ibv_srq *, create_srq, (struct ibv_pd *pd, struct ibv_srq_init_attr *attr)) { return tp_srq_create(pd, attr); }
TP_API(int, modify_srq, (struct ibv_srq *srq, struct ibv_srq_attr *attr, int mask)) { return tp_srq_modify(srq, attr, mask); }
TP_API(int, query_srq, (struct ibv_srq *srq, struct ibv_srq_attr *attr)) { return tp_srq_query(srq, attr); }
TP_API(int, destroy_srq, (struct ibv_srq *srq)) { return tp_srq_destroy(srq); }

TP_API(struct ibv_qp *, create_qp, (struct ibv_pd *pd, struct ibv_qp_init_attr *attr))
{
	struct ibv_qp_init_attr_ex wide = { .qp_context = attr->qp_context, .send_cq = attr->send_cq, .recv_cq = attr->recv_cq, .srq = attr->srq,
		.cap = attr->cap, .qp_type = attr->qp_type, .sq_sig_all = attr->sq_sig_all, .comp_mask = IBV_QP_INIT_ATTR_PD, .pd = pd };
	struct ibv_qp *qp = tp_qp_create(pd->context, &wide);
	if (qp)
		attr->cap = wide.cap;
	return qp;
}
TP_API(int, modify_qp, (struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)) { return tp_qp_modify(qp, attr, mask); }
TP_API(int, query_qp, (struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init))
{
	return tp_qp_query(qp, attr, mask, init);
}
TP_API(int, destroy_qp, (struct ibv_qp *qp)) { return tp_qp_destroy(qp); }

TP_API(struct ibv_qp_ex *, qp_to_qp_ex, (struct ibv_qp *ibv))
{
	struct tp_qp *qp = (struct tp_qp *)ibv;
	return qp->extended ? &qp->ex : NULL;
}

/* flags 0: whole messages in order, 1 or 0; RETURN_CAPS (1): bits 0 (whole messages) and 1 (aligned 128 bytes). */
TP_API(int, query_qp_data_in_order, (struct ibv_qp *qp, enum ibv_wr_opcode op, uint32_t flags))
{
	(void)qp;
	(void)op;
	return flags & 1 ? 3 : 1;
}

TP_API(int, query_ece, (struct ibv_qp *qp, struct ibv_ece *ece))
{
	(void)qp;
	memset(ece, 0, sizeof(*ece));
	return 0;
}
TP_API(int, set_ece, (struct ibv_qp *qp, struct ibv_ece *ece))
{
	(void)qp;
	if (ece->comp_mask)
		return EINVAL;
	/* Nothing of another vendor's extensions is kept: the options that remain are none. */
	ece->options = 0;
	return ece->vendor_id ? EOPNOTSUPP : 0;
}

TP_API(struct ibv_ah *, create_ah, (struct ibv_pd *pd, struct ibv_ah_attr *attr)) { return tp_ah_create(pd, attr); }
TP_API(int, destroy_ah, (struct ibv_ah *ah)) { return tp_ah_destroy(ah); }
TP_API(int, init_ah_from_wc, (struct ibv_context *context, uint8_t port, struct ibv_wc *wc, struct ibv_grh *grh, struct ibv_ah_attr *attr))
{
	int error = tp_ah_from_wc(context, port, wc, grh, attr);
	if (error)
		errno = error;
	return error ? -1 : 0;
}
TP_API(struct ibv_ah *, create_ah_from_wc, (struct ibv_pd *pd, struct ibv_wc *wc, struct ibv_grh *grh, uint8_t port))
{
	struct ibv_ah_attr attr;
	int error = tp_ah_from_wc(pd->context, port, wc, grh, &attr);
	if (!error)
		return tp_ah_create(pd, &attr);
	errno = error;
	return NULL;
}
TP_API(int, attach_mcast, (struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid))
{
	(void)lid;
	return tp_mcast_attach(qp, gid);
}
TP_API(int, detach_mcast, (struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid))
{
	(void)lid;
	return tp_mcast_detach(qp, gid);
}
