/* Packets of WRITEs that are kept until their message is whole, then written in an order that the seed decides (scatter.h). */
#include <stdlib.h>
#include <string.h>
#include "base/fork.h"
#include "verbs/internal.h"
#include "verbs/scatter.h"

enum { PIECES_MAX = 4096 };     /* of a message: what comes after is written at once */

struct piece { uint64_t addr; uint32_t bytes; uint8_t data[]; };
struct pile { struct pile *next; uint32_t qpn; uint32_t count; struct piece *pieces[PIECES_MAX]; };

static struct pile *piles;      /* one a QP that has a message under way */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* A forked child has none of its parent's QPs. */
static void fork_child(void)
{
	pthread_mutex_init(&lock, NULL);
	piles = NULL;
}
TP_FORK_HOOK(TP_FORK_BASE, NULL, NULL, fork_child)

static void throw_away(struct pile *pile)
{
	for (uint32_t i = 0; i < pile->count; i++)
		free(pile->pieces[i]);
	free(pile);
}

/* Takes the QP's pile out of the list; and those of QPs that are no more. */
static struct pile *take(uint32_t qpn)
{
	struct pile *found = NULL;
	pthread_mutex_lock(&lock);
	for (struct pile **at = &piles; *at;) {
		struct pile *pile = *at;
		struct tp_qp *qp = pile->qpn == qpn ? NULL : tp_qp_get(pile->qpn);
		if (qp) {
			tp_qp_put(qp);
			at = &pile->next;
			continue;
		}
		*at = pile->next;
		if (pile->qpn == qpn)
			found = pile;
		else
			throw_away(pile);
	}
	pthread_mutex_unlock(&lock);
	return found;
}

static void put_back(struct pile *pile)
{
	pthread_mutex_lock(&lock);
	pile->next = piles;
	piles = pile;
	pthread_mutex_unlock(&lock);
}

bool tp_scatter_keeps(struct tp_qp *qp, uint64_t addr, const void *data, uint32_t bytes, bool first)
{
	struct pile *pile = take(qp->ibv.qp_num);
	if (first) {
		/* What is left is of a message that never became whole. */
		if (pile)
			throw_away(pile);
		pile = tp_fault(TP_FAULT_SCATTER, qp->ibv.context->device->name, 0) ? calloc(1, sizeof(*pile)) : NULL;
		if (pile)
			pile->qpn = qp->ibv.qp_num;
	}
	if (!pile)
		return false;
	struct piece *piece = pile->count < PIECES_MAX ? malloc(sizeof(*piece) + bytes) : NULL;
	if (piece) {
		piece->addr = addr;
		piece->bytes = bytes;
		memcpy(piece->data, data, bytes);
		pile->pieces[pile->count++] = piece;
	}
	put_back(pile);
	return piece != NULL;
}

enum tp_reply tp_scatter_places(struct tp_qp *qp, uint32_t srqn, uint32_t rkey)
{
	struct pile *pile = take(qp->ibv.qp_num);
	enum tp_reply reply = TP_REPLY_ACK;
	if (!pile)
		return reply;
	for (uint32_t left = pile->count; left > 0 && reply == TP_REPLY_ACK; left--) {
		uint32_t which = (uint32_t)tp_fault_draw(TP_FAULT_SCATTER, left);
		struct piece *piece = pile->pieces[which];
		pile->pieces[which] = pile->pieces[left - 1];
		pile->pieces[left - 1] = piece;
		struct tp_grip grip;
		reply = tp_target_write_enter_locked(qp, srqn, rkey, piece->addr, piece->bytes, &grip);
		if (reply != TP_REPLY_ACK)
			break;
		if (tp_grip_write(&grip, 0, piece->data, piece->bytes))
			reply = TP_REPLY_REMOTE_ACCESS;
		tp_key_leave(&grip);
	}
	throw_away(pile);
	return reply;
}
