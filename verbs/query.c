/* What devices and ports say of themselves. */
#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>
#include "verbs/internal.h"

/* The port's structure in newer headers: one more field. */
struct port_attr_wide { struct ibv_port_attr base; uint32_t active_speed_ex; };

void tp_query_device(struct tp_device *device, struct ibv_device_attr_ex *out)
{
	const uint32_t rc = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_READ |
		IBV_ODP_SUPPORT_ATOMIC | IBV_ODP_SUPPORT_SRQ_RECV;
	memset(out, 0, sizeof(*out));
	struct ibv_device_attr *attr = &out->orig_attr;
	snprintf(attr->fw_ver, sizeof(attr->fw_ver), "0.1.0");
	attr->node_guid = attr->sys_image_guid = device->guid;
	attr->max_mr_size = UINT64_MAX;
	attr->page_size_cap = 0xfffff000;
	attr->vendor_id = 0xffffff;
	attr->vendor_part_id = 0;
	attr->max_qp = (1 << TP_CARD_QP_SLOTS_LOG) - 16;
	attr->max_qp_wr = TP_CARD_QP_WR;
	attr->device_cap_flags = IBV_DEVICE_RESIZE_MAX_WR | IBV_DEVICE_BAD_PKEY_CNTR | IBV_DEVICE_BAD_QKEY_CNTR |
		IBV_DEVICE_CURR_QP_STATE_MOD | IBV_DEVICE_PORT_ACTIVE_EVENT | IBV_DEVICE_SYS_IMAGE_GUID | IBV_DEVICE_RC_RNR_NAK_GEN |
		IBV_DEVICE_SRQ_RESIZE | IBV_DEVICE_N_NOTIFY_CQ | IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_XRC |
		IBV_DEVICE_MEM_MGT_EXTENSIONS | IBV_DEVICE_MEM_WINDOW_TYPE_2B;
	attr->max_sge = attr->max_sge_rd = TP_CARD_SGE;
	attr->max_cq = 1 << 16;
	attr->max_cqe = TP_CARD_CQE - 1;
	attr->max_mr = (1 << TP_CARD_KEY_SLOTS_LOG) - 16;
	attr->max_mw = attr->max_mr;
	attr->max_pd = 1 << 16;
	attr->max_qp_rd_atom = attr->max_qp_init_rd_atom = TP_CARD_RD_ATOMIC;
	attr->max_res_rd_atom = TP_CARD_RD_ATOMIC * attr->max_qp;
	attr->atomic_cap = IBV_ATOMIC_GLOB;
	attr->max_mcast_grp = 1 << 13;
	attr->max_mcast_qp_attach = 1 << 10;
	attr->max_total_mcast_qp_attach = 1 << 16;
	attr->max_ah = 1 << 20;
	attr->max_srq = 1 << 15;
	attr->max_srq_wr = TP_CARD_QP_WR;
	attr->max_srq_sge = TP_CARD_SGE;
	attr->max_pkeys = 1;
	attr->local_ca_ack_delay = 15;
	attr->phys_port_cnt = (uint8_t)device->nports;

	out->odp_caps.general_caps = IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT;
	out->odp_caps.per_transport_caps.rc_odp_caps = rc;
	out->odp_caps.per_transport_caps.uc_odp_caps = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_SRQ_RECV;
	out->odp_caps.per_transport_caps.ud_odp_caps = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_SRQ_RECV;
	out->xrc_odp_caps = rc;
	out->completion_timestamp_mask = UINT64_MAX;
	out->hca_core_clock = 1000000;      /* kHz: time stamps are nanoseconds */
	out->device_cap_flags_ex = attr->device_cap_flags;
	out->cq_mod_caps.max_cq_count = UINT16_MAX;
	out->cq_mod_caps.max_cq_period = UINT16_MAX;
	out->pci_atomic_caps.fetch_add = out->pci_atomic_caps.compare_swap = IBV_PCI_ATOMIC_OPERATION_8_BYTE_SIZE_SUP;
	out->phys_port_cnt_ex = (uint32_t)device->nports;
}

/* Width (1: 1x, 2: 4x, 4: 8x, 16: 2x) and speed (a lane's) that give the rate, or the nearest below. */
static void rate_fields(uint32_t gbps, uint8_t *width, uint8_t *speed, uint32_t *speed_ex)
{
	static const struct { uint32_t gbps; uint8_t width; uint32_t speed; } table[] = {
		{ 1600, 4, 256 }, { 800, 2, 256 }, { 400, 2, 128 }, { 200, 2, 64 }, { 100, 2, 32 }, { 56, 2, 16 }, { 50, 16, 32 },
		{ 40, 2, 4 }, { 25, 1, 32 }, { 20, 2, 2 }, { 10, 2, 1 }, { 5, 1, 2 }, { 0, 1, 1 },
	};
	size_t i = 0;
	while (table[i].gbps > gbps)
		i++;
	*width = table[i].width;
	*speed = table[i].speed > 128 ? 128 : (uint8_t)table[i].speed;
	*speed_ex = table[i].speed;
}

int tp_query_port(struct ibv_context *context, uint8_t number, struct ibv_port_attr *out, size_t bytes)
{
	struct tp_port *port = tp_card_port(context, number);
	struct port_attr_wide wide = { 0 };
	struct ibv_port_attr *attr = &wide.base;
	if (!port)
		return TP_CARD_FAIL(EINVAL, "%s has no port %u: its ports are 1 to %d", context->device->name, number, tp_device_of(context)->nports);
	bool active = atomic_load_explicit(&port->state, memory_order_relaxed) == IBV_PORT_ACTIVE;
	attr->state = active ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
	attr->max_mtu = IBV_MTU_4096;
	attr->active_mtu = port->mtu;
	attr->gid_tbl_len = port->gid_table_len;
	attr->port_cap_flags = IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS;
	attr->max_msg_sz = TP_CARD_MSG_BYTES;
	attr->pkey_tbl_len = 1;
	attr->max_vl_num = 1;
	attr->phys_state = active ? 5 : 3;  /* link up; disabled */
	attr->link_layer = IBV_LINK_LAYER_ETHERNET;
	rate_fields(port->rate_gbps, &attr->active_width, &attr->active_speed, &wide.active_speed_ex);
	memset(out, 0, bytes);
	memcpy(out, &wide, TP_MIN(bytes, sizeof(wide)));
	return 0;
}

int tp_query_gid_entry(struct ibv_context *context, uint32_t number, uint32_t index, struct ibv_gid_entry *out)
{
	struct tp_port *port = tp_card_port(context, number);
	struct tp_gid gid;
	if (!port)
		return TP_CARD_FAIL(EINVAL, "%s has no port %u: its ports are 1 to %d", context->device->name, number, tp_device_of(context)->nports);
	if (!tp_port_gid(port, index, &gid))
		return index < (uint32_t)port->gid_table_len ? ENODATA : EINVAL;
	memset(out, 0, sizeof(*out));
	out->gid = gid.gid;
	out->gid_index = index;
	out->port_num = number;
	out->gid_type = gid.type;
	out->ndev_ifindex = gid.ifindex;
	return 0;
}
