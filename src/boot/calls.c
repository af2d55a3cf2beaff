/* What each rank called last: a small ring a rank in the segment, one line a call, read without a lock. Ranks of one host are
 * compared at once. Between hosts a stalled rank's call goes to the hosts at distances 1, 2, 4, …: each compares it with its
 * own and posts the difference as an event; two neighbours differ wherever any two hosts do. */
#include "boot/internal.h"
#include <stdio.h>
#include <string.h>

#define ASK_MS 200

/* In the order of enum tp_coll, which this folder must not know. */
static const char *const coll_names[] = { "AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce", "AlltoAll", "Gather", "Scatter", "Send/Recv" };

static void write_record(struct tp_segment_call *record, const struct tp_call *call)
{
	uint64_t words[TP_CALL_WORDS], version = atomic_load_explicit(&record->version, memory_order_relaxed) | 1;
	memcpy(words, call, sizeof(words));
	atomic_store_explicit(&record->version, version, memory_order_relaxed);
	/* Release stores of the words keep the odd version before them; they pair with the acquires in read_record. */
	for (int i = 0; i < TP_CALL_WORDS; i++) atomic_store_explicit(&record->words[i], words[i], memory_order_release);
	atomic_store_explicit(&record->version, version + 1, memory_order_release);
}

static bool read_record(struct tp_segment_call *record, struct tp_call *out)
{
	uint64_t words[TP_CALL_WORDS];
	for (int attempt = 0; attempt < 100; attempt++) {
		uint64_t before = atomic_load_explicit(&record->version, memory_order_acquire);
		if (before == 0) return false;
		if (before & 1) continue;
		for (int i = 0; i < TP_CALL_WORDS; i++) words[i] = atomic_load_explicit(&record->words[i], memory_order_acquire);
		if (atomic_load_explicit(&record->version, memory_order_relaxed) != before) continue;
		memcpy(out, words, sizeof(*out));
		return true;
	}
	return false;       /* its writer died in the middle */
}

static bool read_local(struct tp_segment *seg, int local, uint64_t seq, struct tp_call *out)
{
	return read_record(&tp_segment_ranks(seg)[local].calls[seq % TP_CALLS_KEPT], out) && out->seq == seq;
}

void tp_boot_post_call(struct tp_boot *boot, const struct tp_call *call)
{
	struct tp_boot_inside *b = (struct tp_boot_inside *)boot;
	struct tp_segment_rank *rank = &tp_segment_ranks(b->site->seg)[boot->local];
	write_record(&rank->calls[call->seq % TP_CALLS_KEPT], call);
	atomic_store_explicit(&rank->newest, (uint32_t)(call->seq % TP_CALLS_KEPT) + 1, memory_order_release);
}

static bool has_op(uint8_t func) { return func == 0 || func == 2 || func == 4; }
static bool has_root(uint8_t func) { return func == 3 || func == 4 || func == 6 || func == 7; }

/* windows: say whether it runs in them. */
static void describe(const struct tp_call *call, bool windows, char text[80])
{
	const char *name = call->func < TP_ARRAY_LEN(coll_names) ? coll_names[call->func] : "an unknown collective";
	int at = snprintf(text, 80, "%s(count %llu, %s", name, (unsigned long long)call->count, tp_type_name((ncclDataType_t)call->type));
	if (has_op(call->func) && at < 80) at += snprintf(text + at, 80 - (size_t)at, ", %s", tp_op_name((ncclRedOp_t)call->op));
	if (has_root(call->func) && at < 80) at += snprintf(text + at, 80 - (size_t)at, ", root %d", call->root);
	if (at < 80) snprintf(text + at, 80 - (size_t)at, ")%s", !windows ? "" : call->windows ? " in windows" : " not in windows");
}

static const char *ending(uint64_t n)
{
	if (n % 100 >= 11 && n % 100 <= 13) return "th";
	return n % 10 == 1 ? "st" : n % 10 == 2 ? "nd" : n % 10 == 3 ? "rd" : "th";
}

static bool same_input(const struct tp_call *a, const struct tp_call *b) { return a->in_window == b->in_window && a->in_offset == b->in_offset; }
static bool same_output(const struct tp_call *a, const struct tp_call *b) { return a->out_window == b->out_window && a->out_offset == b->out_offset; }

/* Both in windows, but elsewhere: the first of the buffers that don't lie where they should. */
static void describe_places(int rank_a, const struct tp_call *a, int rank_b, const struct tp_call *b, struct tp_event *out)
{
	char call[80];
	bool input = !same_input(a, b);
	describe(a, false, call);
	snprintf(out->text, sizeof(out->text), "symmetric windows promise the same place on all ranks, but in the %llu%s call, %s, rank %d's %s lies at %llu of window %d, "
		"rank %d's at %llu of window %d", (unsigned long long)a->seq, ending(a->seq), call, rank_a, input ? "input" : "output",
		(unsigned long long)(input ? a->in_offset : a->out_offset), (input ? a->in_window : a->out_window) - 1, rank_b,
		(unsigned long long)(input ? b->in_offset : b->out_offset), (input ? b->in_window : b->out_window) - 1);
}

static void make_event(int rank_a, const struct tp_call *a, int rank_b, const struct tp_call *b, struct tp_event *out)
{
	char one[80], two[80];
	if (rank_a > rank_b) {
		make_event(rank_b, b, rank_a, a, out);
		return;
	}
	bool windows = a->hash == b->hash;
	*out = (struct tp_event){ .kind = TP_EVENT_MISMATCH, .rank = rank_b, .result = ncclInvalidUsage };
	if (windows && a->windows == b->windows) {
		if (rank_a < rank_b) describe_places(rank_a, a, rank_b, b, out);
		else describe_places(rank_b, b, rank_a, a, out);
		return;
	}
	describe(a, windows, one);
	describe(b, windows, two);
	snprintf(out->text, sizeof(out->text), "mismatched calls: rank %d called %.79s as its %llu%s call, rank %d called %.79s", rank_a, one,
		(unsigned long long)a->seq, ending(a->seq), rank_b, two);
}

static bool is_same(const struct tp_call *a, const struct tp_call *b)
{ return a->hash == b->hash && a->windows == b->windows && same_input(a, b) && same_output(a, b); }

static bool compare_host(struct tp_segment *seg, int rank, const struct tp_call *call, struct tp_event *out)
{
	const int *local_ranks = tp_segment_local_ranks(seg);
	for (int i = 0; i < seg->nlocal; i++) {
		struct tp_call other;
		if (local_ranks[i] == rank || !read_local(seg, i, call->seq, &other) || is_same(&other, call)) continue;
		make_event(rank, call, local_ranks[i], &other, out);
		return true;
	}
	return false;
}

static void tell_other_hosts(struct tp_boot_inside *b, const struct tp_call *call)
{
	struct tp_segment *seg = b->site->seg;
	struct tp_wire_call wire = { .rank = b->boot.rank, .root = call->root, .seq = call->seq, .count = call->count, .hash = call->hash,
		.func = call->func, .type = call->type, .op = call->op };
	uint64_t now = tp_clock_ms();
	if (seg->nhosts < 2 || now - b->asked_ms < ASK_MS) return;
	b->asked_ms = now;
	tp_service_lock();
	for (int distance = 1; distance < seg->nhosts; distance *= 2)
		tp_mesh_send_call(b->site, (seg->host + distance) % seg->nhosts, &wire);
	tp_service_unlock();
}

void tp_call_arrived(struct tp_site *site, const struct tp_wire_call *wire)
{
	struct tp_event event;
	struct tp_call call = { .seq = wire->seq, .count = wire->count, .hash = wire->hash, .func = wire->func, .type = wire->type, .op = wire->op,
		.root = wire->root };
	if (wire->rank < 0 || wire->rank >= site->seg->nranks) return;
	write_record(&tp_segment_remote_calls(site->seg)[wire->rank], &call);
	if (compare_host(site->seg, wire->rank, &call, &event)) tp_event_post(site, &event);
}

bool tp_boot_find_mismatch(struct tp_boot *boot, uint64_t seq, struct tp_event *out)
{
	struct tp_boot_inside *b = (struct tp_boot_inside *)boot;
	struct tp_segment *seg = b->site->seg;
	struct tp_call own;
	if (b->generation != tp_service.generation) return false;
	if (tp_event_get(seg, out)) return out->kind == TP_EVENT_MISMATCH;
	if (!read_local(seg, boot->local, seq, &own)) return false;
	if (compare_host(seg, boot->rank, &own, out)) return true;
	tell_other_hosts(b, &own);
	return false;
}

bool tp_boot_last_call(struct tp_boot *boot, int rank, struct tp_call *out)
{
	struct tp_boot_inside *b = (struct tp_boot_inside *)boot;
	struct tp_segment *seg = b->site->seg;
	if (rank < 0 || rank >= boot->nranks) return false;
	if (boot->peers[rank].host != boot->host) return read_record(&tp_segment_remote_calls(seg)[rank], out);
	struct tp_segment_rank *board = &tp_segment_ranks(seg)[boot->peers[rank].local];
	uint32_t newest = atomic_load_explicit(&board->newest, memory_order_acquire);
	return newest && newest <= TP_CALLS_KEPT && read_record(&board->calls[newest - 1], out);
}

bool tp_boot_has_left(const struct tp_boot *boot, int rank)
{
	const struct tp_boot_inside *b = (const struct tp_boot_inside *)boot;
	if (rank < 0 || rank >= boot->nranks || boot->peers[rank].host != boot->host) return false;
	/* Acquire: pairs with mark_left; the rank's last call is seen after it. */
	return atomic_load_explicit(&tp_segment_ranks(b->site->seg)[boot->peers[rank].local].left, memory_order_acquire);
}
