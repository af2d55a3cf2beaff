/* Leases: who polls completion queues moves packets itself, and while a poller was here within the lease's length the progress thread leaves descriptors
 * alone. How long that is the thread learns: a lease is given when packets come just after a poll, grows (to LONG_NS) while pollers renew it, and shrinks
 * (to nothing) when packets were found waiting at its end, as with programs that poll memory and no completion queue. Those
 * get none for a while: for so many packets' wakings, twice as many after each vain lease.
 *
 * A poller that is always here, and yet stays away at times, was put aside by whoever else wants its processor. It is back in a moment, and the thread in its
 * place would put the next one aside: where processors are scarce, that cost a third of what was moved. Its lease grows to PROMPT_NS. Whoever comes by
 * once in a while to poll gets no such lease: packets would wait for it each time. */
#include "verbs/internal.h"

enum { SHORT_NS = 20000, LONG_NS = 200000, PROMPT_NS = 2000000 /* about the kernel's slice */ };
/* The score of polls that found packets: one more for each within LONG_NS of the poll before, less by SCORE_LATE for one that came later. */
enum { SCORE_MOST = 64, SCORE_PROMPT = 32, SCORE_LATE = 8 };

static _Atomic uint64_t polled_ns;      /* when a poller was here last */
static _Atomic uint64_t lease_ns;
static _Atomic int score;

static struct {
	bool waited;                    /* for the end of one, since packets were served last */
	uint32_t refuse, vain;          /* so many wakings give none; how many were given in vain, in a row */
} state;        /* the progress thread's alone */

static uint64_t load(_Atomic uint64_t *word) { return atomic_load_explicit(word, memory_order_relaxed); }
static void store(_Atomic uint64_t *word, uint64_t value) { atomic_store_explicit(word, value, memory_order_relaxed); }

static uint64_t longest(void) { return atomic_load_explicit(&score, memory_order_relaxed) >= SCORE_PROMPT ? PROMPT_NS : LONG_NS; }

/* Since the last poll; a poll that came after now was read counts as one of now. */
static uint64_t gap(uint64_t now)
{
	uint64_t polled = load(&polled_ns);
	return now > polled ? now - polled : 0;
}

/* Of a poller that isn't prompt any more it is shorter at once. */
static uint64_t length(void) { return TP_MIN(load(&lease_ns), longest()); }

static void grow(uint64_t lease) { store(&lease_ns, TP_MIN(2 * lease, longest())); }

bool tp_lease_holds(uint64_t now)
{
	return gap(now) < length();
}

uint64_t tp_lease_end_ns(void) { return load(&polled_ns) + length(); }

bool tp_lease_leaves(uint64_t now)
{
	if (state.waited || gap(now) > SHORT_NS)
		return false;
	if (state.refuse) {
		state.refuse--;
		return false;
	}
	if (!load(&lease_ns))
		store(&lease_ns, SHORT_NS);
	return true;
}

void tp_lease_waited(uint64_t now)
{
	state.waited = true;
	if (!tp_lease_holds(now))
		return;
	grow(length());
	state.vain = 0;
}

void tp_lease_learn(int done)
{
	uint64_t lease = length();
	if (done == 0) {        /* a poller was faster */
		if (lease)
			grow(lease);
		else
			store(&lease_ns, SHORT_NS);
		state.refuse = state.vain = 0;
	} else if (state.waited) {
		lease = lease / 4 < SHORT_NS ? 0 : lease / 4;
		store(&lease_ns, lease);
		if (!lease)
			state.refuse = 8u << (state.vain < 5 ? state.vain++ : 5);
	}
	state.waited = false;
}

void tp_lease_defer(uint64_t now)
{
	if (!load(&lease_ns))
		store(&lease_ns, SHORT_NS);
	store(&polled_ns, now);
}

void tp_lease_poll(uint64_t now, bool packets)
{
	if (packets) {
		int before = atomic_load_explicit(&score, memory_order_relaxed);
		int after = gap(now) > LONG_NS ? TP_MAX(before - SCORE_LATE, 0) : TP_MIN(before + 1, (int)SCORE_MOST);
		if (after != before)
			atomic_store_explicit(&score, after, memory_order_relaxed);
	}
	store(&polled_ns, now);
}

bool tp_lease_cancel(void)
{
	if (!load(&lease_ns) || !load(&polled_ns))
		return false;
	store(&polled_ns, 0);
	return true;
}

void tp_lease_forget(void) { store(&lease_ns, 0); }
