/* UC's sender. What it sends is done when it is sent; but a socket that takes no more loses it, so a peer like us says now and then what
 * arrived, and not more than a window is sent beyond that. Where no word comes one packet asks again; somebody else's card never says
 * one, and isn't waited for any more after a while, nor by the next connection to the same process. All under the QP's lock. */
#include "verbs/internal.h"
#include "verbs/rc.h"

/* UC waits for a word of what arrived: so long at first, twice as long each time in vain, so many times: for
 * a second in all, as a peer on a busy machine may get no processor for long. */
enum { PACE_NS = 2000000, PACE_TRIES = 9, PACE_KNOWN_NS = 20000000, PACE_KNOWN_TRIES = 6 };

void tp_uc_pushed(struct tp_qp *qp)
{
	struct tp_rc *rc = tp_rc_of(qp);
	rc->una = rc->next;
	if (rc->current == qp->sq.head) {
		rc->idle_ns = tp_clock_ns();
		if (!rc->paced_held)
			rc->paced_ns = 0;
	}
	/* Who isn't paced hears words of old packets too, and PSNs must not come round meanwhile. */
	if (!rc->paced && tp_psn_diff(rc->next, rc->paced_psn) > (int32_t)rc->window)
		rc->paced_psn = tp_psn_add(rc->next, TP_WIRE_PSN_MASK + 1 - rc->window);
}

static uint64_t pace_after(const struct tp_rc *rc) { return (uint64_t)(rc->credited ? PACE_KNOWN_NS : PACE_NS) << rc->paced_vain; }

uint64_t tp_uc_waits_until(struct tp_qp *qp)
{
	struct tp_rc *rc = tp_rc_of(qp);
	if (!tp_rc_under_way(rc))
		return 0;
	if (rc->current == qp->sq.head)
		return rc->idle_ns + PACE_KNOWN_NS;
	if (!rc->paced_ns)
		rc->paced_ns = tp_clock_ns();
	return rc->paced_ns + pace_after(rc);
}

void tp_uc_credit(struct tp_qp *qp, uint32_t psn)
{
	struct tp_rc *rc = tp_rc_of(qp);
	psn = tp_psn_add(psn, 1);
	if (!rc->started || tp_psn_diff(psn, rc->paced_psn) <= 0 || tp_psn_diff(psn, rc->next) > 0)
		return;
	rc->credited = rc->paced = true;
	rc->paced_held = false;
	rc->paced_vain = 0;
	rc->paced_psn = psn;
	rc->paced_ns = 0;
	atomic_store_explicit(&rc->flow->uc_mute, false, memory_order_relaxed);
	tp_rc_set_flow(rc);
}

/* No word came. One packet more asks; where that was so for long nobody is there who would ever say a word, and what goes there
 * isn't counted until one comes. */
void tp_uc_unanswered(struct tp_qp *qp, uint64_t now)
{
	struct tp_rc *rc = tp_rc_of(qp);
	uint32_t window = rc->window;
	if (rc->current == qp->sq.head) {
		/* What nobody was asked about has arrived by now, or is lost: it takes no room. */
		rc->paced_psn = rc->next;
		rc->paced_held = false;
		rc->paced_ns = 0;
		tp_rc_set_flow(rc);
		tp_rc_arm(qp);
		return;
	}
	rc->paced_ns = now;
	rc->paced_held = false;
	rc->paced = ++rc->paced_vain < (uint32_t)(rc->credited ? PACE_KNOWN_TRIES : PACE_TRIES);
	if (!rc->paced) {
		if (!rc->credited)
			atomic_store_explicit(&rc->flow->uc_mute, true, memory_order_relaxed);
		rc->paced_vain = 0;
	} else {
		rc->paced_psn = rc->next;
		rc->window = 1;
	}
	tp_rc_set_flow(rc);
	tp_rc_push(qp);
	rc->window = window;
	rc->paced_held = rc->paced;
	rc->paced_ns = now;
}
