/* Packets out. They are copied into a buffer of the thread, then given their ICRC there: an application may change its memory
 * while it is being sent, and a packet whose ICRC were made of other bytes than those sent would never arrive. Packets of
 * equal length go to the kernel as one piece, which it cuts (UDP segmentation offload). */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "verbs/capture.h"
#include "verbs/wire_fault.h"
#include "verbs/rc.h"

enum { BUFFER_BYTES = 256 << 10 };

static pthread_key_t buffer_key;
static pthread_once_t buffer_once = PTHREAD_ONCE_INIT;
static _Thread_local struct tp_burst *own;

static void make_key(void) { pthread_key_create(&buffer_key, free); }

struct tp_burst *tp_burst_start(struct tp_port *port, struct tp_endpoint *endpoint, uint32_t sender, const struct tp_route *route,
	const struct tp_icrc *icrc)
{
	if (!own) {
		pthread_once(&buffer_once, make_key);
		own = tp_alloc(1, sizeof(*own) + BUFFER_BYTES, "a buffer for packets");
		if (!own)
			return NULL;
		own->data = (uint8_t *)(own + 1);
		pthread_setspecific(buffer_key, own);
	}
	own->port = port;
	own->endpoint = endpoint;
	own->sender = sender;
	own->route = route;
	own->icrc = icrc;
	own->used = 0;
	own->count = 0;
	own->closed = true;
	own->whole = atomic_load_explicit(&endpoint->whole, memory_order_relaxed);
	own->error = 0;
	return own;
}

/* Bytes of a packet on the wire, above UDP. */
static uint32_t packet_bytes(const struct tp_packet *packet)
{
	return (uint32_t)tp_wire_header_bytes(packet->opcode) + ((packet->bytes + 3) & ~3u) + TP_WIRE_ICRC_BYTES;
}

static bool fits_frame(const struct tp_burst *burst, uint32_t bytes)
{
	if (burst->count == 0 || burst->closed || burst->whole)
		return false;
	const struct tp_frame *frame = &burst->frames[burst->count - 1];
	return bytes <= frame->segment && frame->bytes + bytes <= TP_PORT_FRAME_BYTES && burst->packets[burst->count - 1] < TP_PORT_SEGMENTS;
}

uint8_t *tp_burst_packet(struct tp_burst *burst, const struct tp_packet *packet)
{
	uint32_t bytes = packet_bytes(packet);
	if (burst->used + bytes > BUFFER_BYTES || (!fits_frame(burst, bytes) && burst->count == TP_PORT_FRAMES)) {
		if (!tp_burst_flush(burst))
			return NULL;
	}
	return burst->data + burst->used + tp_wire_build(packet, burst->data + burst->used);
}

/* The packet that lies behind those in use goes into a frame. */
static void append(struct tp_burst *burst, uint32_t psn, uint32_t bytes)
{
	if (!fits_frame(burst, bytes)) {
		burst->frames[burst->count] = (struct tp_frame){ .data = burst->data + burst->used, .segment = bytes };
		burst->psns[burst->count] = psn;
		burst->packets[burst->count] = 0;
		burst->count++;
		burst->closed = false;
	}
	struct tp_frame *frame = &burst->frames[burst->count - 1];
	if (bytes < frame->segment)
		burst->closed = true;
	frame->bytes += bytes;
	burst->packets[burst->count - 1]++;
	burst->used += bytes;
}

static void seal(struct tp_burst *burst, uint32_t bytes)
{
	uint8_t *at = burst->data + burst->used;
	uint16_t id = fits_frame(burst, bytes) ? (uint16_t)burst->packets[burst->count - 1] : 0;
	uint32_t whole = bytes - TP_WIRE_ICRC_BYTES;
	tp_icrc_store(at + whole, tp_icrc_of(burst->icrc, id, at, whole));
}

/* The faults that strike packets that go out. */
static void commit_faulty(struct tp_burst *burst, uint32_t psn, uint32_t bytes)
{
	struct tp_fault_packet packet = { .from = &burst->endpoint->addr, .to = &burst->route->to, .tos = burst->route->tos,
		.data = burst->data + burst->used, .bytes = bytes, .out = true };
	uint8_t copy[TP_WIRE_PACKET_MAX];
	int copies = tp_fault_packet(&packet, burst->endpoint, burst->sender, burst->route);
	if (copies > 1)
		memcpy(copy, packet.data, bytes);
	if (copies > 0)
		append(burst, psn, bytes);
	/* Where there is no room for the second there is none. */
	if (copies > 1 && burst->used + bytes <= BUFFER_BYTES && (fits_frame(burst, bytes) || burst->count < TP_PORT_FRAMES)) {
		memcpy(burst->data + burst->used, copy, bytes);
		append(burst, psn, bytes);
	}
}

void tp_burst_commit(struct tp_burst *burst, const struct tp_packet *packet)
{
	uint32_t bytes = packet_bytes(packet);
	uint8_t *at = burst->data + burst->used;
	memset(at + bytes - TP_WIRE_ICRC_BYTES - (-packet->bytes & 3), 0, -packet->bytes & 3);
	seal(burst, bytes);
	if (tp_fault_out() && !burst->route->mute)
		commit_faulty(burst, packet->psn, bytes);
	else
		append(burst, packet->psn, bytes);
}

static void count_sent(struct tp_burst *burst, int frames)
{
	uint64_t bytes = 0, packets = 0;
	for (int i = 0; i < frames; i++) {
		bytes += burst->frames[i].bytes;
		packets += burst->packets[i];
	}
	if (!packets)
		return;
	tp_counter_add(burst->port, TP_CNT_PORT_XMIT_DATA, bytes / 4);
	tp_counter_add(burst->port, TP_CNT_PORT_XMIT_PACKETS, packets);
}

static void capture(struct tp_burst *burst)
{
	union tp_addr from = burst->endpoint->addr;
	from.v4.sin_port = burst->endpoint->sender_ports[burst->sender];
	for (int i = 0; i < burst->count; i++)
		for (uint32_t at = 0, k = 0; at < burst->frames[i].bytes; at += burst->frames[i].segment, k++)
			tp_capture_packet(&(struct tp_capture){ .from = from, .to = burst->route->to, .tos = burst->route->tos,
				.ttl = burst->route->ttl ? burst->route->ttl : 64, .id = (uint16_t)k, .out = true, .data = burst->frames[i].data + at,
				.bytes = TP_MIN(burst->frames[i].segment, burst->frames[i].bytes - at) });
}

bool tp_burst_flush(struct tp_burst *burst)
{
	if (burst->error || burst->count == 0)
		return !burst->error;
	int error = 0, sent = burst->count;
	if (tp_capture_on())
		capture(burst);
	if (!burst->route->mute)
		sent = tp_endpoint_send(burst->endpoint, burst->sender, burst->route, burst->frames, burst->count, &error);
	count_sent(burst, sent);
	if (sent < burst->count) {
		burst->error = error;
		burst->lost_psn = burst->psns[sent];
		/* Interfaces without checksum offload refuse segmented sends. */
		if ((error == EIO || error == EINVAL) && burst->frames[sent].bytes > burst->frames[sent].segment) {
			char text[TP_ADDR_TEXT];
			TP_INFO(TP_NET, "no segmentation offload towards %s: packets are sent one by one", tp_addr_format(&burst->route->to, text));
			atomic_store_explicit(&burst->endpoint->whole, true, memory_order_relaxed);
			burst->error = EAGAIN;
		} else if (error != EAGAIN) {
			tp_counter_add(burst->port, TP_CNT_PORT_XMIT_DISCARDS, 1);
		} else {
			tp_counter_add(burst->port, TP_CNT_PORT_XMIT_WAIT, 1);
		}
	}
	burst->count = 0;
	burst->used = 0;
	burst->closed = true;
	return !burst->error;
}

bool tp_burst_send_one(struct tp_qp *qp, const struct tp_packet *packet)
{
	struct tp_rc *rc = tp_rc_of(qp);
	struct tp_burst *burst = tp_burst_start(qp->port, rc->endpoint, rc->sender, &rc->route, &rc->out);
	if (!burst)
		return false;
	uint8_t *payload = tp_burst_packet(burst, packet);
	if (payload && packet->bytes)
		memcpy(payload, packet->payload, packet->bytes);
	if (payload)
		tp_burst_commit(burst, packet);
	return tp_burst_flush(burst) || burst->error != EAGAIN;
}
