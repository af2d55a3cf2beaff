/* The wire as a carrier: QPs are attached to an endpoint, packets that come in find their QP.
 *
 * A packet is dropped, and counted, unless its form is right, its ICRC fits, its QP exists and its source is that QP's peer.
 * Packets of one QP that come in together are served under one hold of its lock; answers leave at its end. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "verbs/capture.h"
#include "verbs/fault.h"
#include "verbs/internal.h"
#include "verbs/last.h"
#include "verbs/rc.h"
#include "verbs/wire_fault.h"

static struct tp_param params[] = {
	{ .name = "TELPHER_VERBS_CARRIER", .kind = TP_PARAM_ENUM, .fallback = "auto", .choices = "auto|wire|path",
		.doc = "wire: everything goes as packets, between QPs of one machine and process too; auto: the shortest way; "
			"path: as auto, but QPs of one process as if they were of two" },
};
TP_PARAM_TABLE("verbs", params)

/* ---- packets in ---- */

/* The QP whose lock is held while its packets come. */
struct arrivals { struct tp_qp *qp; uint32_t packets; bool answered; };

static void finish(struct arrivals *arrivals)
{
	struct tp_qp *qp = arrivals->qp;
	if (!qp)
		return;
	uint32_t packets = arrivals->packets;
	bool answered = arrivals->answered;
	*arrivals = (struct arrivals){ 0 };
	if (qp->carrier == &tp_wire) {
		struct tp_rc *rc = tp_rc_of(qp);
		if (packets)
			rc->served_ns = tp_clock_ns();
		if (answered)
			atomic_store_explicit(&rc->flow->heard_ns, rc->served_ns, memory_order_relaxed);
		if (!tp_rc_hold(qp, packets))
			tp_rc_answer(qp);
		if (atomic_load_explicit(&qp->state, memory_order_relaxed) == IBV_QPS_SQD && !qp->running && rc->una != rc->top) {
			qp->running = true;
			tp_rc_push(qp);
			qp->running = false;
			pthread_cond_broadcast(&qp->idle);
		}
		tp_qp_run_locked(qp);
		tp_qp_settle_locked(qp);
	}
	pthread_mutex_unlock(&qp->lock);
	tp_qp_put(qp);
}

static bool admits(struct tp_qp *qp, const struct tp_ingress *in, const struct tp_packet *packet)
{
	struct tp_rc *rc = tp_rc_of(qp);
	uint8_t transport = tp_wire_transport(packet->opcode);
	if (!tp_wire_same_host(&in->from, &rc->route.to) || rc->endpoint != in->endpoint)
		return false;
	if (packet->opcode != TP_WIRE_CNP_OPCODE && transport != rc->transport)
		return false;
	if ((packet->pkey & 0x7fff) != (TP_CARD_PKEY & 0x7fff) && packet->opcode != TP_WIRE_CNP_OPCODE)
		return false;
	if (rc->in_port != in->from.v4.sin_port || !rc->in_port) {
		tp_icrc_prepare(&in->from, &in->to, &rc->in);
		rc->in_port = in->from.v4.sin_port;
	}
	if (tp_wire_icrc_fits(&rc->in, in))
		return true;
	tp_counter_add(qp->port, TP_CNT_RX_ICRC_ENCAPSULATED, 1);
	return false;
}

/* Returns whether it was an answer. */
static bool serve(struct tp_qp *qp, const struct tp_ingress *in, const struct tp_packet *packet)
{
	struct tp_rc *rc = tp_rc_of(qp);
	uint8_t operation = tp_wire_operation(packet->opcode);
	bool answer = operation >= TP_OP_READ_FIRST && operation <= TP_OP_ATOMIC_ACK;
	tp_counter_add(qp->port, TP_CNT_PORT_RCV_DATA, in->bytes / 4);
	tp_counter_add(qp->port, TP_CNT_PORT_RCV_PACKETS, 1);
	tp_counter_add(qp->port, TP_CNT_UNICAST_RCV, 1);
	if (packet->opcode == TP_WIRE_CNP_OPCODE) {
		tp_counter_add(qp->port, TP_CNT_RP_CNP_HANDLED, 1);
		tp_rc_congested(qp);
		return false;
	}
	if ((in->tos & 3) == 3)
		tp_rc_notify(qp);
	if (rc->transport == TP_WIRE_UC && operation == TP_OP_ACK)
		tp_uc_credit(qp, packet->psn);
	else if (rc->transport == TP_WIRE_UC)
		tp_uc_request(qp, packet);
	else if (answer)
		tp_rc_answered(qp, packet);
	else
		tp_rc_request(qp, packet);
	return answer;
}

static void arrive(const struct tp_ingress *in, struct arrivals *arrivals)
{
	struct tp_packet packet;
	if (!tp_wire_parse(in->data, in->bytes, &packet))
		return;
	if (tp_wire_transport(packet.opcode) == TP_WIRE_UD) {
		finish(arrivals);
		tp_ud_arrive(in, &packet);
		return;
	}
	if (in->endpoint->multicast)
		return;
	if (!arrivals->qp || arrivals->qp->ibv.qp_num != packet.qpn) {
		finish(arrivals);
		struct tp_qp *qp = tp_qp_get(packet.qpn);
		if (!qp) {
			tp_last_serve(in, &packet);
			return;
		}
		pthread_mutex_lock(&qp->lock);
		arrivals->qp = qp;
	}
	struct tp_qp *qp = arrivals->qp;
	if (!qp->carrier) {
		tp_last_serve(in, &packet);
	} else if (qp->carrier == &tp_wire && admits(qp, in, &packet)) {
		arrivals->packets++;
		arrivals->answered |= serve(qp, in, &packet);
	}
}

static void capture_in(const struct tp_ingress *in)
{
	tp_capture_packet(&(struct tp_capture){ .from = in->from, .to = in->to, .tos = in->tos, .ttl = in->ttl, .id = in->index, .data = in->data,
		.bytes = in->bytes });
}

static void take(const struct tp_ingress *in, void *arg)
{
	int copies = 1;
	if (tp_fault_wire()) {
		struct tp_fault_packet packet = { .from = &in->from, .to = &in->to, .tos = in->tos, .data = (uint8_t *)(uintptr_t)in->data, .bytes = in->bytes };
		copies = in->bytes ? tp_fault_packet(&packet, NULL, 0, NULL) : 0;
	}
	for (; copies > 0; copies--) {
		if (tp_capture_on())
			capture_in(in);
		arrive(in, arg);
	}
}

void tp_wire_take(const struct tp_ingress *in)
{
	struct arrivals arrivals = { 0 };
	take(in, &arrivals);
	finish(&arrivals);
}

/* Threads that take packets in; none begins while the process's end is prepared (at_exit). */
static _Atomic int receiving;
static _Atomic bool ending;

static int receive(struct tp_endpoint *endpoint)
{
	struct arrivals arrivals = { 0 };
	/* Sequentially consistent: either who ends sees us, or we see that it ends. */
	atomic_fetch_add_explicit(&receiving, 1, memory_order_seq_cst);
	if (atomic_load_explicit(&ending, memory_order_seq_cst)) {
		atomic_fetch_sub_explicit(&receiving, 1, memory_order_relaxed);
		return -1;
	}
	uint64_t slow_ns = tp_fault_slow_ns();
	if (slow_ns)
		nanosleep(&(struct timespec){ .tv_sec = (time_t)(slow_ns / 1000000000u), .tv_nsec = (long)(slow_ns % 1000000000u) }, NULL);
	int packets = tp_endpoint_receive(endpoint, take, &arrivals);
	finish(&arrivals);
	/* Pairs with the acquire in await_receivers. */
	atomic_fetch_sub_explicit(&receiving, 1, memory_order_release);
	return packets;
}

static int ready(int fd, void *arg)
{
	(void)fd;
	return receive(arg);
}

static int progress(void)
{
	int packets = 0;
	for (struct tp_endpoint *e = tp_endpoint_first(); e; e = e->next) {
		int some = receive(e);
		packets += TP_MAX(some, 0);
	}
	if (tp_progress_expected())
		tp_rc_flush_held(tp_clock_ns());
	return packets;
}

bool tp_wire_catch_up(void)
{
	enum { BATCH = 32 };        /* fewer are all that there were */
	bool all = true;
	for (struct tp_endpoint *e = tp_endpoint_first(); e; e = e->next) {
		int packets = receive(e);
		all = all && packets >= 0 && packets < BATCH;
	}
	if (tp_progress_expected())
		tp_rc_flush_held(tp_clock_ns());
	return all;
}

int tp_wire_watch(struct tp_endpoint *endpoint) { return tp_progress_watch(endpoint->receive_fd, ready, endpoint); }

static pthread_mutex_t open_lock = PTHREAD_MUTEX_INITIALIZER;

int tp_wire_open(const union tp_addr *addr, struct tp_endpoint **out)
{
	struct tp_endpoint *endpoint;
	pthread_mutex_lock(&open_lock);
	int error = tp_endpoint_open(addr, &endpoint);
	if (!error && !endpoint->watched && !(error = tp_wire_watch(endpoint)))
		endpoint->watched = true;
	pthread_mutex_unlock(&open_lock);
	if (!error)
		*out = endpoint;
	return error;
}

/* ---- QPs ---- */

static uint8_t transport_of(enum ibv_qp_type type)
{
	return type == IBV_QPT_UC ? TP_WIRE_UC : type == IBV_QPT_RC ? TP_WIRE_RC : TP_WIRE_XRC;
}

static void from_environment(void)
{
	tp_capture_from_environment();
	tp_fault_packets_from_environment();
	tp_engine_wire_always = tp_param_int(&params[0]) == 1;
	tp_engine_path_always = tp_param_int(&params[0]) == 2;
}

/* At the first QP. */
static int slot(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	pthread_once(&once, from_environment);
	return tp_share_slot();
}

static int prepare(struct tp_qp *qp, struct tp_rc *rc)
{
	union tp_addr from;
	int error = tp_wire_open(&qp->av.from, &rc->endpoint);
	if (error)
		return error;
	rc->sender = (qp->ibv.qp_num ^ qp->attr.dest_qp_num ^ qp->av.flow_label) % TP_PORT_SENDERS;
	error = tp_endpoint_sender(rc->endpoint, rc->sender, &from);
	if (error)
		return error;
	rc->route = (struct tp_route){ .to = qp->av.to, .tos = qp->av.traffic_class, .ttl = qp->av.hop_limit, .mute = qp->av.type == IBV_GID_TYPE_ROCE_V1 };
	rc->same_host = tp_wire_same_host(&rc->endpoint->addr, &rc->route.to);
	rc->transport = transport_of(qp->ibv.qp_type);
	rc->mtu = tp_mtu_bytes(qp->attr.path_mtu);
	tp_icrc_prepare(&from, &rc->route.to, &rc->out);
	rc->flow = tp_flow_find(&rc->route.to, tp_qpn_slot(qp->attr.dest_qp_num));
	rc->timer = rc->flow ? tp_timer_new(tp_rc_fire, qp) : NULL;
	return rc->timer ? 0 : ENOMEM;
}

/* All of them, the newest first: for the end of the process. */
static struct { pthread_mutex_t lock; struct tp_rc *newest; } connections = { .lock = PTHREAD_MUTEX_INITIALIZER };     /* below the QPs' */

static void enlist(struct tp_rc *rc, uint32_t qpn)
{
	pthread_mutex_lock(&connections.lock);
	rc->qpn = qpn;
	rc->older = connections.newest;
	if (rc->older)
		rc->older->newer = rc;
	connections.newest = rc;
	pthread_mutex_unlock(&connections.lock);
}

static void delist(struct tp_rc *rc)
{
	pthread_mutex_lock(&connections.lock);
	if (rc->older)
		rc->older->newer = rc->newer;
	if (rc->newer)
		rc->newer->older = rc->older;
	else
		connections.newest = rc->older;
	pthread_mutex_unlock(&connections.lock);
}

void tp_wire_forget(void)
{
	pthread_mutex_init(&open_lock, NULL);
	pthread_mutex_init(&connections.lock, NULL);
	connections.newest = NULL;
	atomic_store_explicit(&receiving, 0, memory_order_relaxed);
	atomic_store_explicit(&ending, false, memory_order_relaxed);
}

/* What its peer may still ask for; false: nothing came from there lately. */
static bool last_of(struct tp_qp *qp, struct tp_last *last)
{
	struct tp_rc *rc = tp_rc_of(qp);
	uint64_t now = tp_clock_ns();
	if (!rc->served_ns || now - rc->served_ns >= TP_LAST_NS || rc->transport == TP_WIRE_UC || rc->route.mute)
		return false;
	*last = (struct tp_last){ .own = rc->endpoint->addr, .peer = rc->route.to, .until_ns = now + TP_LAST_NS, .qpn = qp->ibv.qp_num,
		.dest_qpn = qp->attr.dest_qp_num, .recv_psn = qp->recv_psn, .msn = rc->msn, .last_psn = rc->last_psn, .last_word = rc->last_word,
		.transport = rc->transport, .tos = rc->route.tos, .ttl = rc->route.ttl };
	return true;
}

static int attach(struct tp_qp *qp)
{
	struct tp_rc *rc = tp_alloc(1, sizeof(*rc), "a connection of the wire");
	if (!rc)
		return ENOMEM;
	int error = prepare(qp, rc);
	if (error) {
		free(rc);
		return error;
	}
	rc->window = rc->transport == TP_WIRE_UC ? TP_UC_WINDOW_BYTES / rc->mtu : TP_RC_WINDOW_FIRST;
	if (rc->route.mute)
		TP_WARN("QP 0x%06x uses GID %u, which is of RoCE v1: without a real card no packet goes out; choose a RoCE v2 GID", qp->ibv.qp_num,
			qp->av.sgid_index);
	qp->carrier_data = rc;
	tp_last_drop(qp->ibv.qp_num);
	enlist(rc, qp->ibv.qp_num);
	return 0;
}

/* The first PSN is known from RTS on; nothing was sent before. */
static void run(struct tp_qp *qp)
{
	struct tp_rc *rc = tp_rc_of(qp);
	if (!rc->started) {
		rc->started = true;
		rc->una = rc->next = rc->top = rc->recover = rc->acked = rc->seen = qp->send_psn;
		rc->current = qp->sq.exec;
		rc->paced_psn = rc->next;
		rc->paced_held = false;
		rc->paced_ns = 0;
		rc->paced_vain = 0;
		rc->paced = rc->transport == TP_WIRE_UC && !atomic_load_explicit(&rc->flow->uc_mute, memory_order_relaxed);
	}
	tp_rc_push(qp);
	qp->send_psn = rc->top;
}

static void stop(struct tp_qp *qp)
{
	struct tp_rc *rc = tp_rc_of(qp);
	tp_rc_answer_all(qp);
	tp_timer_arm(rc->timer, 0);
	tp_early_free(&rc->early);
	tp_early_free(&rc->early_answers);
	if (!rc->started)
		return;
	atomic_fetch_sub_explicit(&rc->flow->bytes, rc->flow_bytes, memory_order_relaxed);
	rc->flow_bytes = 0;
	rc->una = rc->next = rc->top;
	rc->failed = IBV_WC_SUCCESS;
	rc->reads_count = 0;
	rc->rnr_until_ns = rc->blocked_until_ns = rc->progress_ns = rc->probe_ns = 0;
	/* SQE to RTS: what comes then is numbered on. */
	rc->started = false;
	qp->send_psn = rc->top;
}

static void detach(struct tp_qp *qp)
{
	struct tp_rc *rc = tp_rc_of(qp);
	struct tp_last last;
	delist(rc);
	if (last_of(qp, &last))
		tp_last_keep(&last);
	tp_early_free(&rc->early);
	tp_early_free(&rc->early_answers);
	tp_timer_free(rc->timer);
	free(rc->gathered);
	free(rc);
	qp->carrier_data = NULL;
}

const struct tp_carrier tp_wire = { .name = "wire", .attach = attach, .run = run, .stop = stop, .detach = detach, .progress = progress };

/* ---- the end of the process ---- */

/* A program may end right after it took its last message. What it owes is sent; and what may be asked for once more, because that is
 * lost, is told to the keeper. Whoever holds a lock isn't waited for long. */
enum { END_MS = 200 };

static void await_receivers(uint64_t deadline_ms)
{
	while (atomic_load_explicit(&receiving, memory_order_acquire) > 0 && tp_clock_ms() < deadline_ms)
		nanosleep(&(struct timespec){ .tv_nsec = 20000 }, NULL);
}

static bool lock_until(pthread_mutex_t *lock, uint64_t deadline_ms)
{
	uint64_t now = tp_clock_ms();
	struct timespec until;
	if (pthread_mutex_trylock(lock) == 0)
		return true;
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_nsec += (long)(deadline_ms > now ? deadline_ms - now : 0) * 1000000;
	until.tv_sec += until.tv_nsec / 1000000000;
	until.tv_nsec %= 1000000000;
	return pthread_mutex_timedlock(lock, &until) == 0;
}

/* The newest connections' numbers. */
static int list_connections(uint32_t qpns[TP_LAST_MAX], uint64_t deadline_ms)
{
	int count = 0;
	if (!lock_until(&connections.lock, deadline_ms))
		return 0;
	for (struct tp_rc *rc = connections.newest; rc && count < TP_LAST_MAX; rc = rc->older)
		qpns[count++] = rc->qpn;
	pthread_mutex_unlock(&connections.lock);
	return count;
}

/* Pays what it owes; gives what it may owe yet. */
static bool settle(struct tp_qp *qp, uint64_t deadline_ms, struct tp_last *last)
{
	bool owes = false;
	if (!lock_until(&qp->lock, deadline_ms))
		return false;
	if (qp->carrier == &tp_wire) {
		if (!qp->running)
			tp_rc_answer_all(qp);
		owes = last_of(qp, last);
	}
	pthread_mutex_unlock(&qp->lock);
	return owes;
}

__attribute__((destructor)) static void at_exit(void)
{
	static struct tp_last lasts[2 * TP_LAST_MAX];
	uint32_t qpns[TP_LAST_MAX];
	uint64_t deadline_ms = tp_clock_ms() + END_MS;
	if (!tp_endpoint_first())
		return;
	tp_rc_hold_end();
	atomic_store_explicit(&ending, true, memory_order_seq_cst);
	await_receivers(deadline_ms);
	int count = list_connections(qpns, deadline_ms), told = 0;
	for (int i = 0; i < count; i++) {
		struct tp_qp *qp = tp_qp_get(qpns[i]);
		if (!qp)
			continue;
		told += settle(qp, deadline_ms, &lasts[told]);
		tp_qp_put(qp);
	}
	told += tp_last_all(lasts + told);
	if (told)
		tp_share_leave(lasts, told);
	/* Others' destructors may still wait for something. */
	atomic_store_explicit(&ending, false, memory_order_seq_cst);
}

__attribute__((constructor)) static void announce(void)
{
	tp_engine_wire = &tp_wire;
	tp_engine_wire_slot = slot;
	tp_ud_init();
}
