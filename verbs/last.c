/* The answers of connections that are gone (last.h). */
#include <pthread.h>
#include <string.h>
#include "verbs/engine.h"
#include "verbs/last.h"
#include "verbs/rc.h"

static struct {
	pthread_mutex_t lock;           /* below the QPs' */
	struct tp_last kept[TP_LAST_MAX];       /* the newest; qpn 0: none */
	uint32_t count;                 /* ever */
} lasts = { .lock = PTHREAD_MUTEX_INITIALIZER };

static bool same_host(const union tp_addr *a, const union tp_addr *b)
{
	if (a->sa.sa_family != b->sa.sa_family)
		return false;
	return a->sa.sa_family == AF_INET6 ? !memcmp(&a->v6.sin6_addr, &b->v6.sin6_addr, 16) : a->v4.sin_addr.s_addr == b->v4.sin_addr.s_addr;
}

static bool is_data(uint8_t operation)
{
	return operation <= TP_OP_WRITE_ONLY_IMM || operation == TP_OP_SEND_LAST_INV || operation == TP_OP_SEND_ONLY_INV;
}

bool tp_last_answers(const struct tp_last *last, const struct tp_ingress *in, const struct tp_packet *packet, struct tp_packet *answer)
{
	struct tp_icrc icrc;
	bool refused = last->last_word && packet->psn == last->last_psn, served = tp_psn_diff(packet->psn, last->recv_psn) < 0;
	if (packet->qpn != last->qpn || tp_wire_transport(packet->opcode) != last->transport || !same_host(&in->from, &last->peer) ||
		!same_host(&in->to, &last->own))
		return false;
	if (!refused && (!served || !packet->ack_request || !is_data(tp_wire_operation(packet->opcode))))
		return false;
	tp_icrc_prepare(&in->from, &in->to, &icrc);
	if (!tp_wire_icrc_fits(&icrc, in))
		return false;
	*answer = (struct tp_packet){ .opcode = (uint8_t)(last->transport << 5 | TP_OP_ACK), .pkey = TP_CARD_PKEY, .qpn = last->dest_qpn,
		.psn = refused ? last->last_psn : tp_psn_add(last->recv_psn, TP_WIRE_PSN_MASK), .msn = last->msn, .keeps = true,
		.syndrome = refused ? last->last_word : TP_SYN_ACK | TP_WIRE_CREDITS_INVALID };
	return true;
}

void tp_last_keep(const struct tp_last *last)
{
	pthread_mutex_lock(&lasts.lock);
	lasts.kept[lasts.count++ % TP_LAST_MAX] = *last;
	pthread_mutex_unlock(&lasts.lock);
}

void tp_last_drop(uint32_t qpn)
{
	pthread_mutex_lock(&lasts.lock);
	for (uint32_t i = 0; i < TP_MIN(lasts.count, TP_LAST_MAX); i++)
		if (lasts.kept[i].qpn == qpn)
			lasts.kept[i].qpn = 0;
	pthread_mutex_unlock(&lasts.lock);
}

/* A repeat's answer, sent as the connection would have. */
static void reply(struct tp_endpoint *endpoint, const struct tp_last *last, const struct tp_packet *answer)
{
	struct tp_route route = { .to = last->peer, .tos = last->tos, .ttl = last->ttl };
	union tp_addr from;
	struct tp_icrc icrc;
	if (tp_endpoint_sender(endpoint, 0, &from))
		return;
	tp_icrc_prepare(&from, &route.to, &icrc);
	struct tp_burst *burst = tp_burst_start(NULL, endpoint, 0, &route, &icrc);
	if (!burst || !tp_burst_packet(burst, answer))
		return;
	tp_burst_commit(burst, answer);
	tp_burst_flush(burst);
}

void tp_last_serve(const struct tp_ingress *in, const struct tp_packet *packet)
{
	struct tp_packet answer;
	struct tp_last last;
	bool found = false;
	uint64_t now = tp_clock_ns();
	pthread_mutex_lock(&lasts.lock);
	for (uint32_t i = 0; i < TP_MIN(lasts.count, TP_LAST_MAX) && !found; i++) {
		last = lasts.kept[i];
		found = last.qpn == packet->qpn && now < last.until_ns && tp_last_answers(&last, in, packet, &answer);
	}
	pthread_mutex_unlock(&lasts.lock);
	if (found)
		reply(in->endpoint, &last, &answer);
}

int tp_last_all(struct tp_last out[TP_LAST_MAX])
{
	int count = 0;
	uint64_t now = tp_clock_ns();
	pthread_mutex_lock(&lasts.lock);
	for (uint32_t i = 0; i < TP_MIN(lasts.count, TP_LAST_MAX); i++)
		if (lasts.kept[i].qpn && now < lasts.kept[i].until_ns)
			out[count++] = lasts.kept[i];
	pthread_mutex_unlock(&lasts.lock);
	return count;
}

void tp_last_forget(void)
{
	pthread_mutex_init(&lasts.lock, NULL);
	lasts.count = 0;
}
