/* Which of its devices a rank's network links use. Without more being said channels take turns with them, whoever leads where. Who knows the machine
 * says for each rank which ones are near to it (tp_links_seat); each rank then tells all others these, with a listener at each, so that both
 * ends of a link know which device either of them uses, by the same rule:
 *
 *   the sender's: where it is the end of the channel's ring on its host, the one that the search for rings has it leave by; else those near to it, channel by
 *   channel in turn;
 *   the receiver's: of those near to it, and the one by which the channel's ring comes in, one on the sender's network, and of these one on its rail, if there
 *   is one; else the ring's, or by turns too.
 *
 * NCCL_CROSS_NIC: 1 doesn't look at rails; 0 keeps to them where the receiver has the rail at all, near or not; 2 (the default) where it is near. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"
#include "link/net_link.h"

static const struct tp_net_seats *seats_of(const struct tp_net_links *nets, int rank)
{
	return (const void *)((const char *)nets->seats + (size_t)rank * nets->seats_stride);
}

bool tp_net_links_may_seat(const struct tp_net_links *nets) { return nets->most_devs > 1; }

const struct tp_link_seat *tp_net_links_seats(const struct tp_net_links *nets, int rank, int *count)
{
	if (!nets->seats) return NULL;
	*count = seats_of(nets, rank)->near;
	return seats_of(nets, rank)->list;
}

/* The ring's place of a channel; without one it is by turns. */
static int usual_of(const struct tp_net_seats *s, const uint8_t places[TP_LINK_RINGS_MAX], int channel)
{
	int place = s->nrings ? places[channel % s->nrings] : 0;
	return place ? place - 1 : channel % s->near;
}

/* The place among the receiver's. */
static int receiver_of(const struct tp_net_links *nets, const struct tp_link_seat *from, const struct tp_net_seats *to, int channel)
{
	int usual = usual_of(to, to->in, channel), count = nets->cross == TP_CROSS_NEVER ? to->count : to->near, best = usual, most = -1;

	for (int i = 0; i < to->count; i++) {
		if (i >= count && i != usual) continue;
		const struct tp_link_seat *seat = &to->list[i];
		bool rail = nets->cross != TP_CROSS_ALWAYS && from->rail >= 0 && seat->rail == from->rail;
		int worth = 4 * (from->network && seat->network == from->network) + 2 * rail + (i == usual);
		if (worth <= most) continue;
		best = i;
		most = worth;
	}
	return best;
}

bool tp_net_links_meet(const struct tp_net_links *nets, int channel, int from, int to, const struct tp_link_seat **sender, const struct tp_link_seat **receiver)
{
	if (!nets->seats) return false;
	const struct tp_net_seats *a = seats_of(nets, from), *b = seats_of(nets, to);
	*sender = &a->list[usual_of(a, a->out, channel)];
	*receiver = &b->list[receiver_of(nets, *sender, b, channel)];
	return true;
}

int tp_net_links_device(const struct tp_net_links *nets, int channel, int from, int to)
{
	const struct tp_link_seat *sender, *receiver;

	if (tp_net_links_meet(nets, channel, from, to, &sender, &receiver)) return from == nets->boot->rank ? sender->dev : receiver->dev;
	return nets->ops->spreads ? (nets->dev + channel) % nets->ndevs : nets->dev;
}

const unsigned char *tp_net_links_handle(const struct tp_net_links *nets, int channel, int to)
{
	const struct tp_link_seat *sender, *receiver;

	if (tp_net_links_meet(nets, channel, nets->boot->rank, to, &sender, &receiver)) return receiver->handle;
	return nets->handles + (size_t)to * TP_NET_HANDLE_BYTES;
}

const char *tp_net_links_via_of(const struct tp_net_links *nets, int from, int to)
{
	const struct tp_link_seat *sender, *receiver;

	return tp_net_links_meet(nets, 0, from, to, &sender, &receiver) ? nets->vias[sender->dev].text : nets->via;
}

/* One listener a device. The one that is there already is the first's that has its device, or nobody's. */
static ncclResult_t listen_at(struct tp_net_links *nets, struct tp_net_seats *own, int i)
{
	struct tp_link_seat *seat = &own->list[i];

	for (int k = 0; k < i; k++)
		if (own->list[k].dev == seat->dev) {
			memcpy(seat->handle, own->list[k].handle, sizeof(seat->handle));
			return ncclSuccess;
		}
	if (seat->dev == nets->dev) {
		memcpy(seat->handle, nets->handles + (size_t)nets->boot->rank * TP_NET_HANDLE_BYTES, sizeof(seat->handle));
		return ncclSuccess;
	}
	TP_TRY(nets->ops->listen(seat->dev, seat->handle, &nets->listeners[nets->nlisteners]));
	nets->nlisteners++;
	return ncclSuccess;
}

static ncclResult_t fill_seat(const struct tp_net_links *nets, int dev, int rail, struct tp_link_seat *out)
{
	struct tp_net_properties p;

	if (dev < 0 || dev >= nets->ndevs) return TP_FAIL(ncclInternalError, "rank %d is to use network device %d of %d", nets->boot->rank, dev, nets->ndevs);
	TP_TRY(nets->ops->properties(dev, &p));
	*out = (struct tp_link_seat){ .dev = dev, .rail = rail, .port = (int32_t)p.port, .gbps = (float)p.speed_mbps / 8000, .latency_us = p.latency_us, .network = p.network };
	snprintf(out->name, sizeof(out->name), "%.31s", p.name);
	snprintf(out->address, sizeof(out->address), "%s", p.address);
	return ncclSuccess;
}

static ncclResult_t fill_own(struct tp_net_links *nets, const struct tp_link_seats *wanted, int room, struct tp_net_seats *own)
{
	own->count = TP_MIN(wanted->count, room);
	own->near = TP_MIN(wanted->near, own->count);
	own->nrings = wanted->nrings;
	for (int c = 0; c < wanted->nrings; c++) {
		own->out[c] = wanted->out[c] <= own->count ? wanted->out[c] : 0;
		own->in[c] = wanted->in[c] <= own->count ? wanted->in[c] : 0;
	}
	if (own->near < 1) return TP_FAIL(ncclInternalError, "rank %d: there is no network device to use", nets->boot->rank);
	for (int i = 0; i < own->count; i++) {
		TP_TRY(fill_seat(nets, wanted->devs[i], wanted->rails[i], &own->list[i]));
		TP_TRY(listen_at(nets, own, i));
	}
	return ncclSuccess;
}

/* What came from a peer is within bounds, and its texts are fit for a log. */
static ncclResult_t check(const struct tp_net_links *nets, int rank, int room)
{
	struct tp_net_seats *s = (struct tp_net_seats *)(uintptr_t)seats_of(nets, rank);

	if (s->near < 1 || s->near > s->count || s->count > room)
		return TP_FAIL(ncclInternalError, "rank %d (%s) says that it uses %d of %d network devices, of which there is room for %d", rank, nets->boot->peers[rank].host_name,
			(int)s->near, (int)s->count, room);
	for (int c = 0; c < s->nrings || s->nrings < 0; c++)
		if (s->nrings < 0 || s->nrings > TP_LINK_RINGS_MAX || s->out[c] > s->count || s->in[c] > s->count)
			return TP_FAIL(ncclInternalError, "rank %d (%s) says that its channel %d goes by a network device that it doesn't name", rank, nets->boot->peers[rank].host_name, c);
	for (int i = 0; i < s->count; i++) {
		if (s->list[i].dev < 0 || s->list[i].dev >= nets->most_devs)
			return TP_FAIL(ncclInternalError, "rank %d (%s) says that it uses network device %d, and no rank has more than %d", rank, nets->boot->peers[rank].host_name,
				(int)s->list[i].dev, nets->most_devs);
		tp_text_clean(s->list[i].name, sizeof(s->list[i].name));
		tp_text_clean(s->list[i].address, sizeof(s->list[i].address));
	}
	return ncclSuccess;
}

/* Said once, of this rank's first pair that can't keep to its rail though it should. */
static void warn_of_rails(const struct tp_net_links *nets)
{
	const struct tp_boot *boot = nets->boot;
	const struct tp_link_seat *sender, *receiver;

	if (nets->cross != TP_CROSS_NEVER) return;
	for (int to = 0; to < boot->nranks; to++) {
		if (boot->peers[to].host == boot->host) continue;
		for (int c = 0; c < nets->nchannels; c++) {
			if (!tp_net_links_meet(nets, c, boot->rank, to, &sender, &receiver) || sender->rail == receiver->rail) continue;
			TP_WARN("NCCL_CROSS_NIC=0, but rank %d (%s) sends by %s, whose rail (%d) none of the devices of rank %d (%s) is on: %s receives. Make all hosts the "
				"same, or name the common set by NCCL_IB_HCA", boot->rank, boot->peers[boot->rank].host_name, sender->name, (int)sender->rail, to, boot->peers[to].host_name,
				receiver->name);
			return;
		}
	}
}

ncclResult_t tp_net_links_seat(struct tp_net_links *nets, const struct tp_link_seats *wanted)
{
	const struct tp_boot *boot = nets->boot;
	int room = TP_MIN(nets->most_devs, nets->cross == TP_CROSS_NEVER ? TP_LINK_SEATS_MAX : TP_MIN(nets->nchannels, TP_LINK_SEATS_MAX));
	size_t stride = sizeof(struct tp_net_seats) + (size_t)room * sizeof(struct tp_link_seat);

	/* Where the user names no interfaces the first is the one that all can reach. */
	const struct tp_link_seats only = { .near = 1, .count = 1, .devs = { nets->dev }, .rails = { nets->dev } };
	if (!nets->may_choose) wanted = &only;
	if (nets->nends) return TP_FAIL(ncclInternalError, "rank %d: network links are in use before their devices are chosen", boot->rank);
	if (!nets->vias) nets->vias = tp_alloc((size_t)nets->most_devs, sizeof(*nets->vias), "the ranks' network devices");
	if (!nets->vias) return ncclSystemError;
	for (int d = 0; d < nets->most_devs; d++) snprintf(nets->vias[d].text, sizeof(nets->vias[d].text), "NET/%s/%d", nets->ops->name, d);
	void *all = tp_alloc((size_t)boot->nranks, stride, "the ranks' network devices");
	if (!all) return ncclSystemError;
	ncclResult_t result = fill_own(nets, wanted, room, (void *)((char *)all + (size_t)boot->rank * stride));
	if (result == ncclSuccess) result = tp_boot_all_gather(nets->boot, all, stride);
	if (result != ncclSuccess) {
		free(all);
		return result;
	}
	free(nets->seats);
	nets->seats = all;
	nets->seats_stride = stride;
	for (int r = 0; r < boot->nranks; r++) TP_TRY(check(nets, r, room));
	nets->dev = seats_of(nets, boot->rank)->list[0].dev;
	snprintf(nets->via, sizeof(nets->via), "NET/%s/%d", nets->ops->name, nets->dev);
	warn_of_rails(nets);
	return ncclSuccess;
}
