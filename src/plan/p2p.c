/* Groups of sends and receives. No rank knows the whole group, and none needs to: each send and each receive is a lane of
 * its own, so whatever the other ranks do first, nothing waits for anything but its own peer. The lanes are listed by
 * distance, sends up and receives down, so that in a dense group everyone begins with another peer.
 *
 * The transfers of one (peer, direction) share a link, in the order of the calls at both ends: the later lane starts when
 * the earlier one has done all its rounds. */
#include <stdlib.h>

#include "plan/build.h"

struct ordered { int distance, number; bool is_send; };     /* of a transfer */

static int compare(const void *left, const void *right)
{
	const struct ordered *a = left, *b = right;
	if (a->distance != b->distance) return a->distance < b->distance ? -1 : 1;
	if (a->is_send != b->is_send) return a->is_send ? -1 : 1;
	return a->number < b->number ? -1 : a->number > b->number;
}

static int add_lane(struct tp_builder *b, int transfer, int before)
{
	int lane = tp_build_lane(b);
	tp_build_step(b, lane, 0);
	if (b->failed) return lane;
	b->lanes[lane].transfer = transfer;
	b->lanes[lane].after = (uint32_t)(before + 1);
	return lane;
}

static int add_transfer(struct tp_builder *b, int peer, const struct ordered *t, int before)
{
	int lane = add_lane(b, t->number, before);
	if (t->is_send) {
		tp_build_read(b, TP_INPUT, 0);
		tp_build_give(b, peer, TP_LINK_P2P, true);
	} else {
		tp_build_take(b, peer, TP_LINK_P2P);
		tp_build_write(b, TP_OUTPUT, 0);
	}
	return lane;
}

/* A self-send and its receive: a local link of their own, so that they need no order among others. */
static void add_self(struct tp_builder *b, int send, int receive)
{
	int link = tp_build_local(b, false);
	add_lane(b, send, -1);
	tp_build_read(b, TP_INPUT, 0);
	tp_build_give_local_ref(b, link);
	add_lane(b, receive, -1);
	tp_build_take_local(b, link);
	tp_build_write(b, TP_OUTPUT, 0);
}

static ncclResult_t order_transfers(int rank, int nranks, const struct tp_transfer *transfers, int ntransfers,
	struct ordered *order)
{
	int to_self = 0, from_self = 0;
	for (int i = 0; i < ntransfers; i++) {
		const struct tp_transfer *t = &transfers[i];
		if (t->peer < 0 || t->peer >= nranks)
			return TP_FAIL(ncclInvalidArgument, "Rank %d %s rank %d, but there are %d ranks", rank,
				t->is_send ? "sends to" : "receives from", t->peer, nranks);
		int distance = t->is_send ? t->peer - rank : rank - t->peer;
		order[i] = (struct ordered){ distance < 0 ? distance + nranks : distance, i, t->is_send };
		if (t->peer != rank) continue;
		to_self += t->is_send;
		from_self += !t->is_send;
	}
	if (to_self != from_self)
		return TP_FAIL(ncclInvalidUsage, "Rank %d sends to itself %d times in this group and receives from itself %d times", rank,
			to_self, from_self);
	qsort(order, (size_t)ntransfers, sizeof(*order), compare);
	return ncclSuccess;
}

static void generate(struct tp_builder *b, const struct tp_transfer *transfers, const struct ordered *order, int count)
{
	int last = -1, nself = 0;
	while (nself < count && !order[nself].distance) nself++;
	for (int i = 0; i < nself / 2; i++) add_self(b, order[i].number, order[nself / 2 + i].number);
	for (int i = nself; i < count; i++) {
		bool same = i > nself && order[i].distance == order[i - 1].distance && order[i].is_send == order[i - 1].is_send;
		last = add_transfer(b, transfers[order[i].number].peer, &order[i], same ? last : -1);
	}
}

ncclResult_t tp_plan_p2p(int rank, int nranks, const struct tp_transfer *transfers, int ntransfers, struct tp_plan **out)
{
	struct ordered *order = tp_alloc((size_t)TP_MAX(ntransfers, 1), sizeof(*order), "a group's transfers");
	struct tp_plan *plan = tp_alloc(1, sizeof(*plan), "a plan");
	ncclResult_t result = order && plan ? ncclSuccess : ncclSystemError;
	if (result == ncclSuccess) {
		plan->programs = tp_alloc(1, sizeof(*plan->programs), "a plan's programs");
		if (!plan->programs) result = ncclSystemError;
	}
	if (result == ncclSuccess) result = order_transfers(rank, nranks, transfers, ntransfers, order);
	if (result == ncclSuccess) {
		struct tp_builder b;
		plan->spec = (struct tp_plan_spec){ .coll = TP_SEND_RECV, .algo = TP_ALGO_DIRECT, .root = -1, .nchannels = 1 };
		plan->pieces = plan->input_blocks = plan->output_blocks = 1;
		tp_build_begin(&b, rank, 0);
		generate(&b, transfers, order, ntransfers);
		result = tp_build_end(&b, &plan->programs[0]);
		plan->nprograms = result == ncclSuccess;
	}
	free(order);
	if (result != ncclSuccess) tp_plan_free(plan);
	else *out = plan;
	return result;
}

ncclResult_t tp_plan_pair(int rank, int from, int to, int lane_class, struct tp_plan **out)
{
	struct tp_plan *plan = tp_alloc(1, sizeof(*plan), "a plan");
	if (!plan) return ncclSystemError;
	plan->programs = tp_alloc(1, sizeof(*plan->programs), "a plan's programs");
	ncclResult_t result = plan->programs ? ncclSuccess : ncclSystemError;
	if (result == ncclSuccess) {
		struct tp_builder b;
		plan->spec = (struct tp_plan_spec){ .coll = TP_BROADCAST, .algo = TP_ALGO_DIRECT, .root = from, .nchannels = 1 };
		plan->pieces = plan->input_blocks = plan->output_blocks = 1;
		tp_build_begin(&b, rank, 0);
		tp_build_step(&b, tp_build_lane(&b), 0);
		if (rank == from) {
			tp_build_read(&b, TP_INPUT, 0);
			tp_build_give(&b, to, lane_class, true);
		} else {
			tp_build_take(&b, from, lane_class);
			tp_build_write(&b, TP_OUTPUT, 0);
		}
		result = tp_build_end(&b, &plan->programs[0]);
		plan->nprograms = result == ncclSuccess;
	}
	if (result != ncclSuccess) tp_plan_free(plan);
	else *out = plan;
	return result;
}
