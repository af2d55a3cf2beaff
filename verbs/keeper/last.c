/* Answers in the name of those who have ended (last.h). */
#include <fcntl.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "verbs/gsi.h"
#include "verbs/keeper/last.h"
#include "verbs/last.h"
#include "verbs/rc.h"
#include "verbs/share.h"

#ifndef UDP_GRO
#define UDP_GRO 104
#endif
#ifndef SOL_UDP
#define SOL_UDP 17
#endif
enum { KEPT_MAX = 4096, AT_ONCE = 64, BUFFER_BYTES = 65536 };

static struct tp_last kept[KEPT_MAX];
static int count;
static uint64_t until_ns[TP_SHARE_SLOTS];   /* the latest of each slot's */

static int slot_of(const struct tp_last *last) { return (int)tp_qpn_slot(last->qpn); }

static bool sound(const struct tp_last *last, int slot, uint64_t now)
{
	return slot_of(last) == slot && last->qpn <= TP_WIRE_PSN_MASK && last->until_ns > now && last->until_ns <= now + TP_LAST_NS &&
		(last->transport == TP_WIRE_RC || last->transport == TP_WIRE_XRC);
}

static void make_room(uint64_t now)
{
	for (int i = count - 1; i >= 0; i--)
		if (kept[i].until_ns <= now)
			kept[i] = kept[--count];
}

void tp_keeper_last_read(int pipe, int slot)
{
	struct tp_last last;
	uint64_t now = tp_clock_ns();
	fcntl(pipe, F_SETFL, O_NONBLOCK);
	if (slot <= 0 || slot >= TP_SHARE_SLOTS)
		return;
	if (count == KEPT_MAX)
		make_room(now);
	/* It was written before the pipe came here, so none comes in pieces. */
	while (count < KEPT_MAX && read(pipe, &last, sizeof(last)) == (ssize_t)sizeof(last)) {
		if (!sound(&last, slot, now))
			continue;
		kept[count++] = last;
		until_ns[slot] = TP_MAX(until_ns[slot], last.until_ns);
	}
}

void tp_keeper_last_drop(int slot)
{
	for (int i = count - 1; i >= 0; i--)
		if (slot_of(&kept[i]) == slot)
			kept[i] = kept[--count];
	until_ns[slot] = 0;
}

bool tp_keeper_last_any(int slot) { return until_ns[slot] && tp_clock_ns() < until_ns[slot]; }

static void answer(const struct tp_ingress *in)
{
	struct tp_packet packet, reply;
	if (!tp_wire_parse(in->data, in->bytes, &packet))
		return;
	for (int i = 0; i < count; i++)
		if (kept[i].qpn == packet.qpn && tp_last_answers(&kept[i], in, &packet, &reply)) {
			tp_gsi_utter(&kept[i].own, &kept[i].peer, &reply);
			return;
		}
}

void tp_keeper_last_serve(int fd, const union tp_addr *own)
{
	static uint8_t buffer[BUFFER_BYTES];
	for (int i = 0; i < AT_ONCE; i++) {
		struct tp_ingress in = { .to = *own };
		_Alignas(struct cmsghdr) uint8_t control[128];
		struct iovec vector = { .iov_base = buffer, .iov_len = sizeof(buffer) };
		struct msghdr message = { .msg_name = &in.from, .msg_namelen = sizeof(in.from), .msg_iov = &vector, .msg_iovlen = 1,
			.msg_control = control, .msg_controllen = sizeof(control) };
		ssize_t n = recvmsg(fd, &message, MSG_DONTWAIT);
		int segment = 0;
		if (n < 0)
			return;
		for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c))
			if (c->cmsg_level == SOL_UDP && c->cmsg_type == UDP_GRO)
				memcpy(&segment, CMSG_DATA(c), sizeof(segment));
		if (segment <= 0)
			segment = (int)n;
		for (int at = 0; at < n && !(message.msg_flags & MSG_TRUNC); at += segment) {
			in.data = buffer + at;
			in.bytes = (uint32_t)TP_MIN(segment, (int)n - at);
			in.index = (uint16_t)(at / segment);
			answer(&in);
		}
	}
}
