/* Messages of the connection manager to and from the wire, in the process that they are for (gsi.h). */
#include <arpa/inet.h>
#include <errno.h>
#include <string.h>
#include "verbs/capture.h"
#include "verbs/gsi.h"
#include "verbs/internal.h"
#include "verbs/rc.h"
#include "verbs/wire_fault.h"

enum { CATCH_UP = 64 };

/* The entry of a GID of RoCE v2, and its port. */
static struct tp_port *find_gid(const union ibv_gid *own, struct tp_gid *out)
{
	struct tp_device *devices;
	int count = tp_card_devices(&devices);
	for (int d = 0; d < count; d++)
		for (int p = 0; p < devices[d].nports; p++) {
			struct tp_port *port = &devices[d].ports[p];
			int index = tp_port_find_gid(port, own, IBV_GID_TYPE_ROCE_V2);
			if (index >= 0 && tp_port_gid(port, (uint32_t)index, out))
				return port;
		}
	return NULL;
}

static int listen_at_all(void)
{
	struct tp_device *devices;
	int count = tp_card_devices(&devices), opened = 0, first_error = ENODEV;
	for (int d = 0; d < count; d++)
		for (int p = 0; p < devices[d].nports; p++)
			for (uint32_t i = 0; i < TP_CARD_GIDS; i++) {
				struct tp_gid gid;
				struct tp_endpoint *endpoint;
				if (!tp_port_gid(&devices[d].ports[p], i, &gid) || gid.type != IBV_GID_TYPE_ROCE_V2 || gid.addr.sa.sa_family == AF_UNSPEC)
					continue;
				int error = tp_wire_open(&gid.addr, &endpoint);
				opened += error == 0;
				if (error && first_error == ENODEV)
					first_error = error;
			}
	return opened ? 0 : first_error;
}

int tp_gsi_listen(const union ibv_gid *own)
{
	struct tp_gid gid;
	struct tp_endpoint *endpoint;
	int slot = tp_engine_slot();
	if (slot < 0)
		return -slot;
	if (!own)
		return listen_at_all();
	return find_gid(own, &gid) ? tp_wire_open(&gid.addr, &endpoint) : ENODEV;
}

int tp_gsi_send(const union ibv_gid *from, const union ibv_gid *to, uint8_t tos, const uint8_t mad[TP_MAD_BYTES])
{
	static _Atomic uint32_t sent;
	struct tp_gid gid;
	struct tp_endpoint *endpoint;
	union tp_addr source;
	int slot = tp_engine_slot();
	if (slot < 0)
		return -slot;
	struct tp_port *port = find_gid(from, &gid);
	int error = port ? tp_wire_open(&gid.addr, &endpoint) : ENODEV;
	if (!error)
		error = tp_endpoint_sender(endpoint, 0, &source);
	if (error)
		return error;
	struct tp_route route = { .tos = tos, .ttl = 64 };
	struct tp_icrc icrc;
	tp_gid_to_addr(to, gid.ifindex, TP_WIRE_UDP_PORT, &route.to);
	tp_icrc_prepare(&source, &route.to, &icrc);
	struct tp_packet packet = { .opcode = TP_WIRE_UD << 5 | TP_OP_SEND_ONLY, .pkey = TP_CARD_PKEY, .qpn = TP_GSI_QPN, .src_qpn = TP_GSI_QPN,
		.qkey = TP_CARD_QKEY_GSI, .psn = atomic_fetch_add_explicit(&sent, 1, memory_order_relaxed) & TP_WIRE_PSN_MASK, .bytes = TP_MAD_BYTES };
	struct tp_burst *burst = tp_burst_start(port, endpoint, 0, &route, &icrc);
	uint8_t *payload = burst ? tp_burst_packet(burst, &packet) : NULL;
	if (!payload)
		return ENOMEM;
	memcpy(payload, mad, TP_MAD_BYTES);
	tp_burst_commit(burst, &packet);
	tp_burst_flush(burst);
	return burst->error;
}

/* A thread that takes packets in may have lost its processor in the middle of it, and meanwhile others pass. */
static void await_readers(void)
{
	for (struct tp_endpoint *e = tp_endpoint_first(); e; e = e->next) {
		pthread_mutex_lock(&e->receive_lock);
		pthread_mutex_unlock(&e->receive_lock);
	}
}

void tp_gsi_catch_up(void)
{
	await_readers();
	for (int i = 0; i < CATCH_UP && tp_path.progress() + tp_wire.progress() > 0; i++)
		;
	await_readers();
}

int tp_gsi_take(const void *data, size_t bytes, uint8_t mad[TP_MAD_BYTES], union ibv_gid *from, union ibv_gid *to)
{
	struct tp_gsi_parcel parcel;
	if (bytes != sizeof(parcel))
		return 0;
	memcpy(&parcel, data, sizeof(parcel));
	if (parcel.magic != TP_GSI_MAGIC)
		return 0;
	int copies = 1;
	if (tp_fault_wire() && !parcel.struck)
		copies = tp_fault_packet(&(struct tp_fault_packet){ .from = &parcel.from, .to = &parcel.to, .tos = parcel.tos, .data = parcel.packet,
			.bytes = sizeof(parcel.packet) }, NULL, 0, NULL);
	for (int i = 0; i < copies && tp_capture_on() && !parcel.struck; i++)
		tp_capture_packet(&(struct tp_capture){ .from = parcel.from, .to = parcel.to, .tos = parcel.tos, .ttl = parcel.ttl, .data = parcel.packet,
			.bytes = sizeof(parcel.packet) });
	struct tp_ingress in = { .from = parcel.from, .to = parcel.to, .data = parcel.packet, .bytes = sizeof(parcel.packet) };
	struct tp_cm_mad parsed;
	/* A fault may have damaged it. */
	if (copies == 0 || !tp_gsi_parse(&in, &parsed))
		return 0;
	/* A DREQ must not overtake the acknowledgement of the last message. */
	tp_gsi_catch_up();
	memcpy(mad, parcel.packet + sizeof(parcel.packet) - TP_WIRE_ICRC_BYTES - TP_MAD_BYTES, TP_MAD_BYTES);
	tp_gid_from_addr(&parcel.from, from);
	tp_gid_from_addr(&parcel.to, to);
	return copies;
}
