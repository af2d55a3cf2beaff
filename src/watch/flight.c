/* The flight recorder's reader. It runs beside the writer: a record that changes while it is read is left out. */
#include <inttypes.h>
#include <stdlib.h>
#include "watch/internal.h"

enum { P_RECORDS, P_DUMP };
static struct tp_param flight_params[] = {
	[P_RECORDS] = { .name = "TELPHER_FLIGHT_RECORDS", .kind = TP_PARAM_INT, .fallback = "128", .min = 1, .max = 1 << 20,
		.doc = "operations that a communicator remembers, for dumps" },
	[P_DUMP] = { .name = "TELPHER_DUMP_ON_ERROR", .kind = TP_PARAM_INT, .fallback = "8", .min = 0, .max = 1 << 20,
		.doc = "last operations that an error or a stall writes to the log" },
};
TP_PARAM_TABLE("watch", flight_params)

ncclResult_t tp_flight_create(int rank, int nranks, uint64_t comm_hash, const char *(*func_name)(int func), struct tp_flight **out)
{
	uint64_t records = 1;
	while (records < (uint64_t)tp_param_int(&flight_params[P_RECORDS]))
		records *= 2;
	struct tp_flight *flight = tp_alloc(1, sizeof(*flight), "a flight recorder");
	if (!flight)
		return ncclSystemError;
	size_t bytes = records * sizeof(struct tp_flight_record);
	void *memory = NULL;
	if (posix_memalign(&memory, TP_CACHE_LINE, bytes)) {
		free(flight);
		return TP_FAIL(ncclSystemError, "out of memory: a flight recorder of %" PRIu64 " operations needs %zu bytes", records, bytes);
	}
	flight->records = memory;
	for (uint64_t i = 0; i < records; i++) {
		atomic_init(&flight->records[i].seq, 0);
		atomic_init(&flight->records[i].state, TP_FLIGHT_EMPTY);
	}
	flight->mask = records - 1;
	flight->comm_hash = comm_hash;
	flight->rank = rank;
	flight->nranks = nranks;
	flight->func_name = func_name;
	*out = flight;
	return ncclSuccess;
}

void tp_flight_destroy(struct tp_flight *flight)
{
	if (!flight)
		return;
	free(flight->records);
	free(flight);
}

static bool read_record(struct tp_flight_record *r, struct tp_flight_entry *out)
{
	/* Pairs with the release at the end of tp_flight_begin. */
	uint64_t seq = atomic_load_explicit(&r->seq, memory_order_acquire);
	if (seq == 0)
		return false;
	enum tp_flight_state state = (enum tp_flight_state)atomic_load_explicit(&r->state, memory_order_acquire);
	uint64_t end_ns = atomic_load_explicit(&r->end_ns, memory_order_acquire);
	*out = (struct tp_flight_entry){
		.seq = seq, .count = atomic_load_explicit(&r->count, memory_order_acquire),
		.start_ns = atomic_load_explicit(&r->start_ns, memory_order_acquire), .end_ns = state == TP_FLIGHT_DONE ? end_ns : 0,
		.root = atomic_load_explicit(&r->root, memory_order_acquire), .func = atomic_load_explicit(&r->func, memory_order_acquire),
		.type = atomic_load_explicit(&r->type, memory_order_acquire), .op = atomic_load_explicit(&r->op, memory_order_acquire),
		.state = state, .result = (ncclResult_t)atomic_load_explicit(&r->result, memory_order_acquire),
	};
	/* Taken over meanwhile? */
	return atomic_load_explicit(&r->seq, memory_order_relaxed) == seq;
}

static int by_seq(const void *a, const void *b)
{
	const struct tp_flight_entry *x = a, *y = b;
	return x->seq < y->seq ? -1 : x->seq > y->seq;
}

size_t tp_flight_read(const struct tp_flight *flight, struct tp_flight_entry *out, size_t max)
{
	size_t count = 0, records = (size_t)flight->mask + 1;
	struct tp_flight_entry *all = tp_alloc(records, sizeof(*all), "a dump of operations");
	if (!all)
		return 0;
	for (size_t i = 0; i < records; i++)
		count += read_record(&flight->records[i], &all[count]);
	qsort(all, count, sizeof(*all), by_seq);
	size_t kept = TP_MIN(count, max);
	for (size_t i = 0; i < kept; i++)
		out[i] = all[count - kept + i];
	free(all);
	return kept;
}

static void dump_entry(const struct tp_flight *flight, const struct tp_flight_entry *e, uint64_t now_ns)
{
	char root[32] = "", state[96];
	if (e->root >= 0)
		snprintf(root, sizeof(root), " root/peer %d", e->root);
	double ago = (double)(now_ns - TP_MIN(e->start_ns, now_ns)) / 1e9;
	if (e->state == TP_FLIGHT_DONE)
		snprintf(state, sizeof(state), "took %.0f ms, %s", (double)(e->end_ns - TP_MIN(e->start_ns, e->end_ns)) / 1e6, tp_result_name(e->result));
	else
		snprintf(state, sizeof(state), "not finished");
	tp_log_note("comm 0x%" PRIx64 " rank %d #%" PRIu64 " %s: count %" PRIu64 " %s %s%s, begun %.3f s ago, %s", flight->comm_hash, flight->rank, e->seq,
		flight->func_name(e->func), e->count, tp_type_name((ncclDataType_t)e->type), tp_op_name((ncclRedOp_t)e->op), root, ago, state);
}

void tp_flight_dump(const struct tp_flight *flight, size_t max, const char *why)
{
	max = TP_MIN(max, (size_t)flight->mask + 1);
	if (max == 0 || !tp_log_wants(TP_LOG_WARN, ~0u))
		return;
	struct tp_flight_entry *entries = tp_alloc(max, sizeof(*entries), "a dump of operations");
	if (!entries)
		return;
	size_t count = tp_flight_read(flight, entries, max);
	uint64_t now_ns = tp_clock_coarse_ns();
	tp_log_note("comm 0x%" PRIx64 " rank %d of %d: %s; its last %zu operations:", flight->comm_hash, flight->rank, flight->nranks, why, count);
	for (size_t i = 0; i < count; i++)
		dump_entry(flight, &entries[i], now_ns);
	free(entries);
}

void tp_flight_dump_on_error(const struct tp_flight *flight, const char *why)
{
	tp_flight_dump(flight, (size_t)tp_param_int(&flight_params[P_DUMP]), why);
}
