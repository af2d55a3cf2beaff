/* Exported calls that translate the kernel's structures, as the original librdmacm imports them. */
#include <infiniband/sa.h>
#include <rdma/ib_user_sa.h>
#include <rdma/ib_user_verbs.h>
#include <string.h>
#include "verbs/api.h"

TP_API(void, copy_ah_attr_from_kern, (struct ibv_ah_attr *to, const struct ib_uverbs_ah_attr *from))
{
	memset(to, 0, sizeof(*to));
	memcpy(to->grh.dgid.raw, from->grh.dgid, sizeof(to->grh.dgid));
	to->grh.flow_label = from->grh.flow_label;
	to->grh.sgid_index = from->grh.sgid_index;
	to->grh.hop_limit = from->grh.hop_limit;
	to->grh.traffic_class = from->grh.traffic_class;
	to->dlid = from->dlid;
	to->sl = from->sl;
	to->src_path_bits = from->src_path_bits;
	to->static_rate = from->static_rate;
	to->is_global = from->is_global;
	to->port_num = from->port_num;
}

TP_API(void, copy_qp_attr_from_kern, (struct ibv_qp_attr *to, const struct ib_uverbs_qp_attr *from))
{
	memset(to, 0, sizeof(*to));
	to->qp_state = (enum ibv_qp_state)from->qp_state;
	to->cur_qp_state = (enum ibv_qp_state)from->cur_qp_state;
	to->path_mtu = (enum ibv_mtu)from->path_mtu;
	to->path_mig_state = (enum ibv_mig_state)from->path_mig_state;
	to->qkey = from->qkey;
	to->rq_psn = from->rq_psn;
	to->sq_psn = from->sq_psn;
	to->dest_qp_num = from->dest_qp_num;
	to->qp_access_flags = from->qp_access_flags;
	to->cap = (struct ibv_qp_cap){ .max_send_wr = from->max_send_wr, .max_recv_wr = from->max_recv_wr, .max_send_sge = from->max_send_sge,
		.max_recv_sge = from->max_recv_sge, .max_inline_data = from->max_inline_data };
	tp_api_copy_ah_attr_from_kern(&to->ah_attr, &from->ah_attr);
	tp_api_copy_ah_attr_from_kern(&to->alt_ah_attr, &from->alt_ah_attr);
	to->pkey_index = from->pkey_index;
	to->alt_pkey_index = from->alt_pkey_index;
	to->en_sqd_async_notify = from->en_sqd_async_notify;
	to->sq_draining = from->sq_draining;
	to->max_rd_atomic = from->max_rd_atomic;
	to->max_dest_rd_atomic = from->max_dest_rd_atomic;
	to->min_rnr_timer = from->min_rnr_timer;
	to->port_num = from->port_num;
	to->timeout = from->timeout;
	to->retry_cnt = from->retry_cnt;
	to->rnr_retry = from->rnr_retry;
	to->alt_port_num = from->alt_port_num;
	to->alt_timeout = from->alt_timeout;
}

TP_API(void, copy_path_rec_from_kern, (struct ibv_sa_path_rec *to, const struct ib_user_path_rec *from))
{
	memset(to, 0, sizeof(*to));
	memcpy(to->dgid.raw, from->dgid, sizeof(to->dgid));
	memcpy(to->sgid.raw, from->sgid, sizeof(to->sgid));
	to->dlid = from->dlid;
	to->slid = from->slid;
	to->raw_traffic = (int)from->raw_traffic;
	to->flow_label = from->flow_label;
	to->hop_limit = (uint8_t)from->hop_limit;
	to->traffic_class = from->traffic_class;
	to->reversible = (int)from->reversible;
	to->numb_path = from->numb_path;
	to->pkey = from->pkey;
	to->sl = from->sl;
	to->mtu_selector = from->mtu_selector;
	to->mtu = from->mtu;
	to->rate_selector = from->rate_selector;
	to->rate = from->rate;
	to->packet_life_time_selector = from->packet_life_time_selector;
	to->packet_life_time = from->packet_life_time;
	to->preference = from->preference;
}

TP_API(void, copy_path_rec_to_kern, (struct ib_user_path_rec *to, const struct ibv_sa_path_rec *from))
{
	memset(to, 0, sizeof(*to));
	memcpy(to->dgid, from->dgid.raw, sizeof(to->dgid));
	memcpy(to->sgid, from->sgid.raw, sizeof(to->sgid));
	to->dlid = from->dlid;
	to->slid = from->slid;
	to->raw_traffic = (uint32_t)from->raw_traffic;
	to->flow_label = from->flow_label;
	to->hop_limit = from->hop_limit;
	to->traffic_class = from->traffic_class;
	to->reversible = (uint32_t)from->reversible;
	to->numb_path = from->numb_path;
	to->pkey = from->pkey;
	to->sl = from->sl;
	to->mtu_selector = from->mtu_selector;
	to->mtu = from->mtu;
	to->rate_selector = from->rate_selector;
	to->rate = from->rate;
	to->packet_life_time_selector = from->packet_life_time_selector;
	to->packet_life_time = from->packet_life_time;
	to->preference = from->preference;
}
