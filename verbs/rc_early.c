/* Packets that came before their turn, because one before them was lost: kept, and served when it has come again. To the other side
 * it is as if the network had been slow with them. So a loss costs a packet, not all that was under way behind it. We say in what
 * we answer that we do so (a reserved bit, which others ignore); a sender that reads it repeats only what a NAK names, others
 * go back as ever. */
#include <stdlib.h>
#include <string.h>
#include "verbs/rc.h"

enum { PLACES = 1024 };
#define BYTES_MAX (64ll << 20)      /* of all connections */

struct kept { struct tp_packet packet; uint32_t bytes; uint8_t data[]; };
struct tp_early { uint32_t count; struct kept *places[PLACES]; };

static _Atomic int64_t kept_bytes;

static void drop(struct tp_early *early, uint32_t place)
{
	struct kept *kept = early->places[place];
	if (!kept)
		return;
	atomic_fetch_sub_explicit(&kept_bytes, kept->bytes, memory_order_relaxed);
	free(kept);
	early->places[place] = NULL;
	early->count--;
}

void tp_early_keep(struct tp_early **early, const struct tp_packet *packet, uint32_t expected)
{
	if (tp_psn_diff(packet->psn, expected) >= PLACES)
		return;
	/* No memory: lost, as it would be without us. */
	if (!*early && !(*early = calloc(1, sizeof(**early))))
		return;
	uint32_t place = packet->psn % PLACES, bytes = (uint32_t)sizeof(struct kept) + packet->bytes;
	struct kept *there = (*early)->places[place];
	if (there && there->packet.psn == packet->psn)
		return;
	drop(*early, place);
	if (atomic_load_explicit(&kept_bytes, memory_order_relaxed) + bytes > BYTES_MAX)
		return;
	struct kept *kept = malloc(bytes);
	if (!kept)
		return;
	kept->packet = *packet;
	kept->bytes = bytes;
	if (packet->bytes)
		memcpy(kept->data, packet->payload, packet->bytes);
	kept->packet.payload = kept->data;
	(*early)->places[place] = kept;
	(*early)->count++;
	atomic_fetch_add_explicit(&kept_bytes, bytes, memory_order_relaxed);
}

const struct tp_packet *tp_early_at(struct tp_early *early, uint32_t psn)
{
	struct kept *kept = early && early->count ? early->places[psn % PLACES] : NULL;
	return kept && kept->packet.psn == psn ? &kept->packet : NULL;
}

void tp_early_pass(struct tp_early *early, uint32_t from, uint32_t to)
{
	if (!early || !early->count)
		return;
	uint32_t packets = (uint32_t)TP_MIN(tp_psn_diff(to, from), (int32_t)PLACES);
	for (uint32_t i = 0; i < packets; i++)
		drop(early, tp_psn_add(from, i) % PLACES);
}

bool tp_early_any(const struct tp_early *early) { return early && early->count; }

void tp_early_free(struct tp_early **early)
{
	for (uint32_t i = 0; *early && i < PLACES; i++)
		drop(*early, i);
	free(*early);
	*early = NULL;
}
