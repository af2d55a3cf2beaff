/* Address handles, and the resolution of an address vector into what a packet needs. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "verbs/internal.h"
#include "verbs/wire.h"

int tp_av_resolve(struct ibv_context *context, const struct ibv_ah_attr *attr, uint8_t number, struct tp_av *out)
{
	struct tp_port *port = tp_card_port(context, number);
	struct tp_gid gid;
	if (!port)
		return TP_CARD_FAIL(EINVAL, "%s has no port %u: its ports are 1 to %d", context->device->name, number, tp_device_of(context)->nports);
	if (!attr->is_global)
		return TP_CARD_FAIL(EINVAL, "RoCE needs a GRH: set is_global and grh.dgid, a LID means nothing on Ethernet");
	if (!tp_port_gid(port, attr->grh.sgid_index, &gid))
		return TP_CARD_FAIL(EINVAL, "%s port %u has no GID at index %u (its table has %d)", context->device->name, number, attr->grh.sgid_index,
			port->ngids);
	*out = (struct tp_av){ .dgid = attr->grh.dgid, .sgid = gid.gid, .sgid_index = attr->grh.sgid_index, .port = number,
		.traffic_class = attr->grh.traffic_class, .hop_limit = attr->grh.hop_limit ? attr->grh.hop_limit : 64, .sl = attr->sl,
		.static_rate = attr->static_rate, .flow_label = attr->grh.flow_label, .type = gid.type, .from = gid.addr };
	tp_gid_to_addr(&attr->grh.dgid, gid.ifindex, TP_WIRE_UDP_PORT, &out->to);
	return 0;
}

struct ibv_ah *tp_ah_create(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
	struct tp_ah *ah = tp_alloc(1, sizeof(*ah), "an address handle");
	int error = ah ? tp_av_resolve(pd->context, attr, attr->port_num, &ah->av) : ENOMEM;
	if (error) {
		free(ah);
		errno = error;
		return NULL;
	}
	ah->ibv.context = pd->context;
	ah->ibv.pd = pd;
	atomic_fetch_add_explicit(&tp_pd_of(pd)->users, 1, memory_order_relaxed);
	return &ah->ibv;
}

int tp_ah_destroy(struct ibv_ah *ibv)
{
	if (!tp_context_mine(ibv->context))
		return 0;       /* a forked child: it stays, inert */
	atomic_fetch_sub_explicit(&tp_pd_of(ibv->pd)->users, 1, memory_order_release);
	free((struct tp_ah *)ibv);
	return 0;
}

/* The addresses of a datagram, from its GRH: IPv6's fields, or an IPv4 header in the last 20 bytes. */
static void addresses_of(const struct ibv_grh *grh, union ibv_gid *from, union ibv_gid *to, uint32_t *flow, uint8_t *traffic_class)
{
	const uint8_t *ip = (const uint8_t *)grh + 20;
	memset(from, 0, sizeof(*from));
	memset(to, 0, sizeof(*to));
	if (ip[0] == 0x45 && ntohl(grh->version_tclass_flow) >> 28 != 6) {
		from->raw[10] = from->raw[11] = to->raw[10] = to->raw[11] = 0xff;
		memcpy(from->raw + 12, ip + 12, 4);
		memcpy(to->raw + 12, ip + 16, 4);
		*flow = 0;
		*traffic_class = ip[1];
		return;
	}
	uint32_t word = ntohl(grh->version_tclass_flow);
	*from = grh->sgid;
	*to = grh->dgid;
	*flow = word & 0xfffff;
	*traffic_class = (uint8_t)(word >> 20);
}

int tp_ah_from_wc(struct ibv_context *context, uint8_t number, struct ibv_wc *wc, struct ibv_grh *grh, struct ibv_ah_attr *attr)
{
	struct tp_port *port = tp_card_port(context, number);
	union ibv_gid from, to;
	memset(attr, 0, sizeof(*attr));
	attr->dlid = wc->slid;
	attr->sl = wc->sl;
	attr->src_path_bits = wc->dlid_path_bits;
	attr->port_num = number;
	if (!(wc->wc_flags & IBV_WC_GRH))
		return 0;
	addresses_of(grh, &from, &to, &attr->grh.flow_label, &attr->grh.traffic_class);
	int index = port ? tp_port_find_gid(port, &to, IBV_GID_TYPE_ROCE_V2) : -1;
	if (index < 0 && port)
		index = tp_port_find_gid(port, &to, -1);
	if (index < 0)
		return TP_CARD_FAIL(EINVAL, "the datagram's destination isn't a GID of %s port %u, so there is no answering it", context->device->name, number);
	attr->is_global = 1;
	attr->grh.dgid = from;
	attr->grh.sgid_index = (uint8_t)index;
	attr->grh.hop_limit = 64;
	return 0;
}
