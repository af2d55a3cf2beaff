/* Flows: what is under way to one receiving socket, of all QPs of this process, so that its buffer isn't overrun.
 *
 * Connected QPs know what they have under way and count it here. Nobody acknowledges datagrams; but a peer like us answers one that asks (a bit
 * that other cards leave alone) by a word: this has come out of the socket, and what was sent before it has too, or is lost; and so many
 * bytes the socket's buffer and the QP's receives can take now. So datagrams have a window: a sender asks when an eighth of it has gone,
 * waits when it is full, and shrinks it when no word comes. That paces, it promises nothing: a datagram that finds no receive is
 * lost, and so is one whose socket was full all the same, by what others sent.
 *
 * Who never answers isn't one of ours and isn't waited for any more, after five waits (0.6 s in all: one of ours may get no processor for a
 * while, and what it can't take meanwhile would be lost). Who has fallen silent (stopped, or gone) holds nobody up for longer than that
 * either: then what exceeds the least window is lost at once, until a word comes. */
#include <stdlib.h>
#include <string.h>
#include "verbs/flow.h"
#include "verbs/internal.h"
#include "verbs/wire.h"

enum { WINDOW_FIRST = 256 << 10, WINDOW_MAX = 1 << 20, WINDOW_MIN = 64 << 10, ASKS = 8, GROWTH = 8 };
enum { SILENT_MOST = 5, WORD_NS = 20000000, LOOK_NS = 1000000 };

static struct tp_flow *flows;
static pthread_mutex_t flows_lock = PTHREAD_MUTEX_INITIALIZER;

void tp_flow_forget(void)
{
	pthread_mutex_init(&flows_lock, NULL);
	flows = NULL;
}

static struct tp_flow *make(const union tp_addr *to, uint32_t slot)
{
	struct tp_flow *flow = tp_alloc(1, sizeof(*flow), "a flow of the wire");
	if (!flow)
		return NULL;
	flow->to = *to;
	flow->slot = slot;
	flow->window = WINDOW_FIRST;
	pthread_mutex_init(&flow->lock, NULL);
	flow->next = flows;
	flows = flow;
	return flow;
}

struct tp_flow *tp_flow_find(const union tp_addr *to, uint32_t slot)
{
	pthread_mutex_lock(&flows_lock);
	struct tp_flow *flow = flows;
	while (flow && (flow->slot != slot || memcmp(&flow->to, to, sizeof(*to))))
		flow = flow->next;
	if (!flow)
		flow = make(to, slot);
	pthread_mutex_unlock(&flows_lock);
	return flow;
}

int64_t tp_flow_bytes(struct tp_flow *flow)
{
	int64_t datagrams = atomic_load_explicit(&flow->datagrams, memory_order_relaxed);
	if (datagrams && tp_clock_ns() >= atomic_load_explicit(&flow->datagrams_until_ns, memory_order_relaxed))
		datagrams = 0;
	return atomic_load_explicit(&flow->bytes, memory_order_relaxed) + datagrams;
}

/* ---- datagrams ---- */

static void show_locked(struct tp_flow *flow, uint64_t now)
{
	atomic_store_explicit(&flow->datagrams, (int64_t)(flow->sent - flow->known), memory_order_relaxed);
	atomic_store_explicit(&flow->datagrams_until_ns, now + WORD_NS, memory_order_relaxed);
}

/* Bytes that may be under way. */
static uint64_t limit_of(const struct tp_flow *flow, uint32_t budget)
{
	int64_t others = atomic_load_explicit(&flow->bytes, memory_order_relaxed);
	uint64_t left = others < (int64_t)budget ? budget - (uint64_t)TP_MAX(others, 0) : 0, limit = TP_MIN(flow->window, TP_MAX(left, (uint64_t)WINDOW_MIN));
	return flow->speaks ? TP_MIN(limit, flow->told) : limit;
}

static uint64_t deadline_of(const struct tp_flow *flow)
{
	return flow->word_ns + ((uint64_t)WORD_NS << TP_MIN(flow->silent, (uint32_t)SILENT_MOST));
}

static void wait_locked(struct tp_flow *flow, uint32_t qpn)
{
	for (int i = 0; i < flow->waiting_count; i++)
		if (flow->waiting[i] == qpn)
			return;
	if (flow->waiting_count < TP_FLOW_WAITERS)
		flow->waiting[flow->waiting_count++] = qpn;
}

/* The window is full. GO: not any more, as no word came in time. */
static enum tp_flow_word full_locked(struct tp_flow *flow, uint32_t qpn, uint64_t now, uint64_t *until_ns)
{
	uint64_t deadline = deadline_of(flow);
	if (now < deadline) {
		if (flow->silent >= SILENT_MOST && flow->speaks)
			return TP_FLOW_LOSE;
		if (flow->silent >= SILENT_MOST) {
			flow->known = flow->sent;
			return TP_FLOW_GO;
		}
		wait_locked(flow, qpn);
		*until_ns = flow->waiting_count < TP_FLOW_WAITERS ? deadline : TP_MIN(deadline, now + LOOK_NS);
		return TP_FLOW_WAIT;
	}
	flow->silent += flow->silent < SILENT_MOST;
	if (flow->speaks)
		flow->window = TP_MAX(flow->window / 2, (uint64_t)WINDOW_MIN);
	flow->known = flow->sent;
	flow->word_ns = now;
	return TP_FLOW_GO;
}

static bool asks_locked(struct tp_flow *flow, uint64_t limit, uint32_t cost, const struct tp_flow_mark *datagram)
{
	if (flow->sent - flow->asked < limit / ASKS && flow->sent - flow->known + cost <= limit)
		return false;
	flow->asked = flow->sent;
	flow->marks[flow->marks_made++ % TP_FLOW_MARKS] = (struct tp_flow_mark){ datagram->qpn, datagram->psn, flow->sent };
	return true;
}

enum tp_flow_word tp_flow_admit(struct tp_flow *flow, uint32_t budget, const struct tp_flow_mark *datagram, uint32_t bytes, uint64_t *until_ns)
{
	uint32_t cost = TP_FLOW_COST(bytes);
	enum tp_flow_word word = TP_FLOW_GO;
	pthread_mutex_lock(&flow->lock);
	uint64_t now = tp_clock_ns(), limit = limit_of(flow, budget);
	bool full = flow->sent != flow->known && flow->sent - flow->known + cost > limit;
	if (full)
		word = full_locked(flow, datagram->qpn, now, until_ns);
	/* The last of a burst needn't ask: what was sent long ago has arrived, or never will. */
	else if (now >= atomic_load_explicit(&flow->datagrams_until_ns, memory_order_relaxed))
		flow->known = flow->asked = flow->sent;
	if (word == TP_FLOW_GO) {
		if (flow->sent == flow->known)
			flow->word_ns = now;
		flow->sent += cost;
		if (asks_locked(flow, limit, cost, datagram))
			word = TP_FLOW_ASK;
		show_locked(flow, now);
	}
	pthread_mutex_unlock(&flow->lock);
	return word;
}

static const struct tp_flow_mark *find_mark(const struct tp_flow *flow, uint32_t qpn, uint32_t psn)
{
	for (uint32_t i = 0; i < TP_MIN(flow->marks_made, TP_FLOW_MARKS); i++)
		if (flow->marks[i].qpn == qpn && flow->marks[i].psn == psn)
			return &flow->marks[i];
	return NULL;
}

/* Returns how many QPs waited. */
static int arrived_locked(struct tp_flow *flow, const struct tp_flow_mark *mark, uint32_t told, uint32_t *waiting)
{
	uint64_t now = tp_clock_ns();
	flow->speaks = true;
	flow->silent = 0;
	flow->word_ns = now;
	flow->told = told;
	if (mark->sent > flow->known) {
		flow->window = TP_MIN(flow->window + (mark->sent - flow->known) / GROWTH, (uint64_t)WINDOW_MAX);
		flow->known = mark->sent;
	}
	show_locked(flow, now);
	int count = flow->waiting_count;
	memcpy(waiting, flow->waiting, (size_t)count * sizeof(waiting[0]));
	flow->waiting_count = 0;
	return count;
}

void tp_flow_arrived(const union tp_addr *from, uint32_t slot, uint32_t qpn, uint32_t psn, uint32_t told)
{
	uint32_t waiting[TP_FLOW_WAITERS];
	int count = 0;
	pthread_mutex_lock(&flows_lock);
	struct tp_flow *flow = flows;
	while (flow && (flow->slot != slot || !tp_wire_same_host(&flow->to, from)))
		flow = flow->next;
	pthread_mutex_unlock(&flows_lock);
	if (!flow)
		return;
	pthread_mutex_lock(&flow->lock);
	const struct tp_flow_mark *mark = find_mark(flow, qpn, psn);
	if (mark)
		count = arrived_locked(flow, mark, told, waiting);
	pthread_mutex_unlock(&flow->lock);
	for (int i = 0; i < count; i++)
		tp_qp_run_again(waiting[i]);
}
