/* Connections whose processes may end (watch.h). Both numbers of one are known from a REP, or from a REQ and the RTU after it. */
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "verbs/cm_name.h"
#include "verbs/keeper/watch.h"

enum { SEEN_MAX = 4096, TRIES = 5, FIRST_MS = 20, AGAIN_MS = 200, HALF_MS = 60000 };

struct seen {
	union tp_addr own, peer;
	uint32_t own_id, peer_id, peer_qpn;     /* own_id 0: not known yet */
	uint64_t since_ms, due_ms;              /* due_ms 0: its process lives, as far as we know */
	int tries;
};
static struct seen seen[SEEN_MAX];
static int count;

static struct seen *find(const union tp_addr *peer, uint32_t peer_id)
{
	for (int i = 0; i < count; i++)
		if (seen[i].peer_id == peer_id && tp_wire_same_host(&seen[i].peer, peer))
			return &seen[i];
	return NULL;
}

static void forget(struct seen *which) { *which = seen[--count]; }

/* Requests that came to nothing make room, the oldest first; connections don't. */
static struct seen *add(void)
{
	if (count < SEEN_MAX)
		return &seen[count++];
	struct seen *oldest = NULL;
	for (int i = 0; i < count; i++)
		if (!seen[i].own_id && (!oldest || seen[i].since_ms < oldest->since_ms))
			oldest = &seen[i];
	return oldest;
}

void tp_watch_saw(const struct tp_ingress *in, const struct tp_cm_mad *mad)
{
	struct seen *known = find(&in->from, mad->local_id);
	switch (mad->kind) {
	case TP_CM_REQ: case TP_CM_REP:
		if (!known && (known = add()) != NULL)
			*known = (struct seen){ .own = in->to, .peer = in->from, .own_id = mad->remote_id, .peer_id = mad->local_id, .peer_qpn = mad->qpn,
				.since_ms = tp_clock_ms() };
		break;
	case TP_CM_RTU:
		if (known)
			known->own_id = mad->remote_id;
		break;
	case TP_CM_DREQ: case TP_CM_DREP: case TP_CM_REJ:
		if (known)
			forget(known);
		break;
	default: break;
	}
}

void tp_watch_ended(void)
{
	/* A process's descriptors are closed one after the other: its name may still be there. So look a little later, and twice. */
	for (int i = 0; i < count; i++)
		if (!seen[i].due_ms) {
			seen[i].due_ms = tp_clock_ms() + FIRST_MS;
			seen[i].tries = 0;
		}
}

static bool lives(uint32_t own_id)
{
	struct sockaddr_un address;
	struct tp_cm_name name = tp_cm_name_of_number(own_id);
	socklen_t length = tp_cm_name_address(&name, &address);
	int s = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	bool refused = s >= 0 && connect(s, (struct sockaddr *)&address, length) < 0 && errno == ECONNREFUSED;
	if (s >= 0)
		close(s);
	return !refused;
}

/* False: it needs no more looks. */
static bool look(struct seen *which, uint64_t now_ms)
{
	bool alive = !which->own_id || lives(which->own_id);
	if (!which->own_id && now_ms - which->since_ms > HALF_MS)
		return false;
	if (alive) {
		which->due_ms = which->tries++ ? 0 : now_ms + AGAIN_MS;
		return true;
	}
	if (which->tries++ >= TRIES)
		return false;
	struct tp_cm_mad mad = { .kind = TP_CM_DREQ, .local_id = which->own_id, .remote_id = which->peer_id, .qpn = which->peer_qpn };
	tp_secret_random(&mad.transaction, sizeof(mad.transaction));
	tp_gsi_say(&which->own, &which->peer, &mad);
	which->due_ms = now_ms + AGAIN_MS;
	return true;
}

int tp_watch_tick(void)
{
	uint64_t now_ms = tp_clock_ms(), next_ms = 0;
	for (int i = count - 1; i >= 0; i--) {
		if (seen[i].due_ms && seen[i].due_ms <= now_ms && !look(&seen[i], now_ms)) {
			forget(&seen[i]);
			continue;
		}
		if (seen[i].due_ms && (!next_ms || seen[i].due_ms < next_ms))
			next_ms = seen[i].due_ms;
	}
	return !next_ms ? -1 : next_ms > now_ms ? (int)(next_ms - now_ms) : 0;
}
