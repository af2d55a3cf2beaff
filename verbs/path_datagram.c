/* UD by the short way: a datagram is put into the ring of the link to its process, found by its QP number and address; the target
 * places it by the functions that all carriers use. It has gone once it lies in the ring, so it needs no answer.
 *
 * Where the ring is full the QP waits until its reader has made room, so a burst loses nothing; but for a process that has read nothing for
 * LOOKS times LOOK_NS nobody waits: what comes then is lost, as on hardware where a receiver doesn't keep up, until it reads again. Looks are
 * counted beside the time, since on a machine that stood still as a whole the reader had no chance. */
#include <string.h>
#include "verbs/internal.h"
#include "verbs/ud.h"

#define LOOK_NS 120000000u
#define LOOKS 5u
#define PLACE_NS 1000000000u        /* so long an address is taken to be where it was */

/* ---- out ---- */

static struct tp_ud_place *place_of(struct tp_ud *ud, const struct tp_av *av, int slot)
{
	struct tp_ud_place *place = &ud->places[slot];
	uint64_t now = tp_clock_ns();
	if (now >= place->until_ns || memcmp(&place->dgid, &av->dgid, sizeof(av->dgid))) {
		place->dgid = av->dgid;
		place->until_ns = now + PLACE_NS;
		place->here = tp_path_is_here(av);
	}
	return place;
}

/* The link to the datagram's process, with a user more; NULL: it takes another way. */
static struct tp_path_link *link_to(struct tp_qp *qp, const struct tp_wqe *wqe)
{
	int slot = (int)tp_qpn_slot(wqe->ud.qpn) & (TP_PATH_SLOTS - 1);
	struct tp_path_link *link;
	if (slot == 0)          /* the keeper's */
		return NULL;
	struct tp_ud_place *place = place_of(tp_ud_of(qp), &wqe->ud.av, slot);
	enum tp_path_reason reason = place->here ? tp_path_reach_slot(slot, tp_qp_is_posting, &link) : TP_PATH_OTHER_HOST;
	if (reason != place->reason || !place->told) {
		place->reason = reason;
		place->told = true;
		TP_INFO(TP_NET, "QP 0x%06x: datagrams to the process of QP 0x%06x are carried by %s (%s)", qp->ibv.qp_num, wqe->ud.qpn,
			reason == TP_PATH_TAKEN ? "path" : "wire", tp_path_reason_text(reason));
	}
	if (reason != TP_PATH_TAKEN)
		return NULL;
	if (!tp_path_is_watched(link))
		return link;
	tp_path_release(link);
	return NULL;
}

/* There is no room: true where the QP waits for some, as a user of the link; else it has waited long enough, or there is room now. */
static bool waits(struct tp_ud *ud, struct tp_path_link *link, uint32_t bytes, bool *lost)
{
	uint64_t head = atomic_load_explicit(&link->out->head, memory_order_relaxed), now = tp_clock_ns();
	*lost = atomic_load_explicit(&link->stuck_at, memory_order_relaxed) == head + 1;
	if (*lost)
		return false;
	if (!ud->full_since_ns || ud->full_head != head) {
		ud->full_since_ns = ud->full_looked_ns = now;
		ud->full_head = head;
		ud->full_looks = 0;
	}
	if (now - ud->full_looked_ns >= LOOK_NS) {
		ud->full_looked_ns = now;
		ud->full_looks++;
	}
	*lost = ud->full_looks >= LOOKS;
	if (*lost) {
		atomic_store_explicit(&link->stuck_at, head + 1, memory_order_relaxed);
		TP_INFO(TP_NET, "process %d has read nothing for %.1f s: datagrams to it are lost until it does", (int)link->pid,
			(double)(now - ud->full_since_ns) * 1e-9);
		return false;
	}
	if (tp_path_await_room(link, &ud->waiter, bytes)) {
		tp_path_forget_room(link, &ud->waiter);
		return false;
	}
	ud->full = link;
	ud->wait_until_ns = ud->full_looked_ns + LOOK_NS;
	return true;
}

void tp_path_stop_waiting(struct tp_ud *ud)
{
	if (!ud->full)
		return;
	tp_path_forget_room(ud->full, &ud->waiter);
	tp_path_release(ud->full);
	ud->full = NULL;
}

static void write_datagram(struct tp_qp *qp, const struct tp_wqe *wqe, struct tp_path_request *request, uint32_t bytes)
{
	const struct tp_av *av = &wqe->ud.av;
	struct tp_path_datagram *datagram = (struct tp_path_datagram *)(void *)((uint8_t *)request + TP_PATH_HEAD_BYTES);
	*request = (struct tp_path_request){ .bytes = bytes, .opcode = (uint8_t)wqe->opcode, .form = TP_PATH_HERE, .type = IBV_QPT_UD,
		.dest_qpn = wqe->ud.qpn, .src_qpn = qp->ibv.qp_num, .imm = wqe->imm, .length = wqe->length, .rkey = tp_ud_qkey(qp, wqe),
		.flags = wqe->flags & IBV_SEND_SOLICITED ? TP_PATH_SOLICITED : 0 };
	*datagram = (struct tp_path_datagram){ .dgid = av->dgid, .gid_type = (uint8_t)av->type, .kind = tp_engine_packet_kind(av) };
	tp_engine_make_grh(av, tp_ud_wire_bytes(wqe), datagram->grh);
}

enum tp_path_sent tp_path_send_datagram(struct tp_qp *qp, const struct tp_wqe *wqe, const struct tp_span *spans, int count)
{
	struct tp_ud *ud = tp_ud_of(qp);
	struct tp_path_link *link = link_to(qp, wqe);
	const uint32_t heads = TP_PATH_HEAD_BYTES + sizeof(struct tp_path_datagram), bytes = (uint32_t)tp_align_up(heads + wqe->length, 64);
	if (!link)
		return TP_PATH_ELSEWHERE;
	struct tp_path_request *request;
	bool lost = false;
	while (!(request = tp_path_reserve(link, bytes)) && !lost)
		if (waits(ud, link, bytes, &lost))
			return TP_PATH_WAITS;
	ud->full_since_ns = 0;
	if (!request) {
		tp_counter_add(tp_card_port(qp->ibv.context, wqe->ud.av.port), TP_CNT_PORT_XMIT_DISCARDS, 1);
	} else if (tp_span_read(spans, count, 0, (uint8_t *)request + heads, wqe->length)) {
		tp_path_abandon(link);
	} else {
		write_datagram(qp, wqe, request, bytes);
		tp_path_commit_datagram(link, bytes);
		atomic_fetch_add_explicit(&link->ring_ops, 1, memory_order_relaxed);
		tp_path_ring_bell(link);
	}
	tp_path_release(link);
	return TP_PATH_GONE;
}

/* ---- in ---- */

void tp_path_take_datagram(const struct tp_path_request *request, const uint8_t *data)
{
	struct tp_path_datagram head;
	struct tp_qp *qp = tp_qp_get(request->dest_qpn);
	tp_path_be_slow();
	if (!qp)
		return;
	memcpy(&head, data, sizeof(head));
	struct tp_span span = { .grip = { .addr = (uint8_t *)(uintptr_t)data + sizeof(head) }, .bytes = request->length };
	bool has_imm = request->opcode == IBV_WR_SEND_WITH_IMM;
	struct tp_datagram datagram = { .grh = head.grh, .spans = &span, .nspans = request->length ? 1 : 0, .bytes = request->length,
		.src_qp = request->src_qpn, .qkey = request->rkey, .imm = has_imm ? request->imm : 0, .has_imm = has_imm,
		.dest_qp = request->dest_qpn, .solicited = request->flags & TP_PATH_SOLICITED, .sl = head.kind, .dgid = &head.dgid,
		.gid_type = (enum ibv_gid_type)head.gid_type };
	tp_target_datagram(qp, &datagram);
	tp_qp_put(qp);
}
